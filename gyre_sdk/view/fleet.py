"""Draw the cells of a state: what each does now, runs against capacity, what going over costs."""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

from rich import box
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gyre_sdk.view.escape import count, duration, visible
from gyre_sdk.view.state import CellView, State
from gyre_sdk.view.timeline import idle_cells

_WIDE, _HIGH = 78, 30
"""Size of a page from which on each cell is shown."""
_ENTRY = 36
"""Characters of a cell's entry."""
_ROWS = 3
"""Lines of cells at most."""
_STYLE = {
    "serving": "blue",
    "training": "red",
    "draining": "yellow",
    "switching": "yellow",
    "loading": "green",
    "failed": "bold red",
}


class Drawn(NamedTuple):
    """Something to draw."""

    part: RenderableType
    lines: int


def fleet(state: State, now: float, width: int, height: int) -> Drawn | None:
    """Return the cells for a page of a size, or None when the training has none.

    Args:
        state: the fold so far.
        now: seconds since the epoch.
        width, height: of the page.
    """
    if not state.cells and state.fleet is None:
        return None
    if width < _WIDE or height < _HIGH or not state.cells:
        return Drawn(Text.assemble(("cells ", "dim"), _counts(state), no_wrap=True, overflow="ellipsis"), 1)
    columns = max(1, (width - 4) // _ENTRY)
    shown = list(state.cells.items())
    rows = min(_ROWS, -(-len(shown) // columns))
    left = len(shown) - rows * columns
    entries = [_entry(name, cell, now) for name, cell in shown[: rows * columns]]
    if left > 0:
        entries[-1] = Text(f"+{left + 1} more", style="dim")
    grid = Table.grid(padding=(0, 1))
    for _ in range(columns):
        grid.add_column(width=_ENTRY - 1, no_wrap=True, overflow="ellipsis")
    for row in range(rows):
        grid.add_row(*entries[row * columns : (row + 1) * columns])
    body = Table.grid(expand=True)
    body.add_column(no_wrap=True, overflow="ellipsis")
    body.add_row(_counts(state))
    body.add_row(grid)
    panel = Panel(body, title="cells", title_align="left", box=box.ROUNDED, border_style="dim", padding=(0, 1))
    return Drawn(panel, rows + 3)


def _counts(state: State) -> Text:
    found = Text(no_wrap=True, overflow="ellipsis")
    seen = state.fleet
    if seen is not None:
        found.append(f"{seen.serving} serving, {seen.training} training, {seen.moving} moving")
        if seen.standalone:
            found.append(f", {seen.standalone} standalone")
        limit = f" ({visible(seen.limit, 8)})" if seen.limit not in ("", "settings") else ""
        found.append(f"   runs {seen.water}/{_number(seen.capacity)}{limit}   ready {_number(seen.ready_s)} cell-s")
        found.append(f"   idle {sum(idle_cells(seen).values()):.2g} cells")
    for to, switch in state.switches.items():
        mean = _number(switch.seconds / switch.count, ".1f")
        found.append(f"   {switch.count} to {visible(to, 12)} ({mean} s)", style="dim")
    return found


def _entry(name: str, cell: CellView, now: float) -> Text:
    return Text.assemble(
        f"{visible(name, 9):9} ",
        (f"{visible(cell.state or '?', 9):9} ", _STYLE.get(cell.state, "")),
        f"{duration(now - cell.since):>7} ",
        (f"{count(cell.units)} u", "dim"),
        no_wrap=True,
    )


def _number(value: float, form: str = ".0f") -> str:
    return format(value, form) if isfinite(value) else "?"
