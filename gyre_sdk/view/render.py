"""Draw a state as a terminal page of a given size. Everything that others wrote goes through `escape.visible`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gyre_sdk.records import RunStatus
from gyre_sdk.view.chart import chart
from gyre_sdk.view.escape import count, counted, duration, reward, shortly, visible
from gyre_sdk.view.fleet import fleet
from gyre_sdk.view.state import RunView, State

_CHART_HEIGHT = 6
_NARROW = 78
"""Below this width the charts stand above each other in one line."""
_SMALL = 60
"""Below this width lanes are not shown."""
_STATUS_STYLE = {
    RunStatus.RUNNING: "cyan",
    RunStatus.COMPLETED: "green",
    RunStatus.TIMED_OUT: "yellow",
    RunStatus.LIMIT: "yellow",
    RunStatus.CANCELLED: "dim",
}


@dataclass(frozen=True, slots=True)
class Page:
    """What the terminal can show."""

    width: int
    height: int


def render(state: State, now: float, page: Page, *, dropped: int = 0) -> RenderableType:
    """Return the page for a state.

    Args:
        state: the fold so far.
        now: seconds since the epoch, for elapsed times and the ETA.
        page: size of the terminal.
        dropped: events that the view did not keep up with.
    """
    parts: list[RenderableType] = [_title(state, now, page)]
    used = 1
    if state.phase is not None and state.phase.total:
        parts.append(_progress(state, now, page))
        used += 1
    if state.steps or (state.phase is not None and state.phase.name == "train") or state.evaluations:
        if page.width >= _NARROW and page.height >= 20:
            parts.append(_training(state, page))
            used += _CHART_HEIGHT + 2
        else:
            parts.append(_training_line(state, page))
            used += 1
    cells = fleet(state, now, page.width, page.height)
    if cells is not None:
        parts.append(cells.part)
        used += cells.lines
    footer = _footer(state, page, dropped)
    used += len(footer)
    parts.append(_runs(state, now, page, rows=max(2, page.height - used - 4)))
    return Group(*parts, *footer)


def _title(state: State, now: float, page: Page) -> RenderableType:
    line = Table.grid(expand=True, padding=(0, 1))
    line.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    line.add_column(justify="right", no_wrap=True)
    left = Text.assemble(("gyre", "bold magenta"))
    if state.phase is not None:
        left.append("  ").append(visible(state.phase.name, 32), style="bold")
    counts = f"{len(state.active)} running, {state.ended.total()} ended, {shortly(state.calls, 'call')}, {shortly(state.sampled_tokens, 'token')} sampled"
    left.append("  ").append(counts, style="dim")
    elapsed = duration(now - state.started_at) if state.started_at is not None else "0:00"
    line.add_row(left, Text(elapsed, style="bold"))
    return line


def _progress(state: State, now: float, page: Page) -> RenderableType:
    phase = state.phase
    assert phase is not None
    line = Table.grid(expand=True, padding=(0, 1))
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(justify="right", no_wrap=True)
    line.add_column(justify="right", no_wrap=True)
    left = phase.eta(now)
    done = f"{phase.done}/{phase.total}"
    line.add_row(
        Text(f"{'step' if phase.name == 'train' else 'run'} {done}"),
        ProgressBar(total=max(1, phase.total), completed=phase.done, complete_style="magenta", finished_style="green"),
        Text(f"{100 * phase.done // max(1, phase.total)}%"),
        Text(
            "done" if phase.done >= phase.total else f"ETA {duration(left)}" if left is not None else "ETA –",
            style="bold",
        ),
    )
    return line


# -- training --------------------------------------------------------------------------------------------------------


def _training(state: State, page: Page) -> RenderableType:
    line = Table.grid(expand=True)
    facts = max(page.width * 2 // 5, min(48, page.width // 2))
    line.add_column(width=page.width - facts)
    line.add_column(width=facts)
    curve_width = page.width - facts - 10
    height = _CHART_HEIGHT + 2
    line.add_row(
        Panel(
            _curve(state, page, curve_width),
            title=_reward_title(state),
            title_align="left",
            height=height,
            box=box.ROUNDED,
            border_style="dim",
        ),
        Panel(_facts(state), title="training", title_align="left", height=height, box=box.ROUNDED, border_style="dim"),
    )
    return line


def _reward_title(state: State) -> Text:
    if not state.steps:
        return Text("reward")
    last = state.steps[-1]
    return Text.assemble(
        "reward ", (f"{last.mean_reward:.2f}", "bold green"), "  full success ", (f"{last.success:.0%}", "bold green")
    )


def _curve(state: State, page: Page, width: int) -> Text:
    if not state.steps:
        return Text("the curve starts with the first step", style="dim")
    values = [step.mean_reward for step in state.steps]
    low, high = _scale(values)
    planned = max(len(values), state.steps[-1].steps)
    wide = min(4, max(1, width // max(1, planned)))
    stretched = [value for value in values for _ in range(wide)]
    lines = chart(stretched, width, _CHART_HEIGHT, low=low, high=high)
    found = Text(no_wrap=True, overflow="crop")
    for row, line in enumerate(lines):
        label = f"{high:5.2f} " if row == 0 else f"{low:5.2f} " if row == len(lines) - 1 else " " * 6
        found.append(label, style="dim").append(line.rstrip(), style="green")
        if row < len(lines) - 1:
            found.append("\n")
    return found


def _scale(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of the reward axis: 0 to 1, or more when rewards need it."""
    finite = [value for value in values if isfinite(value)]
    return min(0.0, *finite, 0.0), max(1.0, *finite, 1.0)


def _facts(state: State) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", no_wrap=True, min_width=7)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    if state.steps:
        last = state.steps[-1]
        grid.add_row("loss", f"{last.loss:.4g}   grad norm {last.grad_norm:.3g}")
        grid.add_row("trained", shortly(state.trained_tokens, "token"))
    if state.version is not None:
        grid.add_row(
            "version",
            Text.assemble((str(state.version.version), "bold"), f"   published in {state.version.seconds:.2g} s"),
        )
    grid.add_row("groups", _groups(state))
    grid.add_row("rewards", _rewards(state))
    for name, found in list(state.evaluations.items())[-2:]:
        grid.add_row(Text(visible(name, 12)), f"success {found.success:.0%}   reward {found.reward:.2f}")
    return grid


def _groups(state: State) -> str:
    shown = [f"{len(state.open_groups)} open"] + [
        f"{number} {name}" for name, number in sorted(state.groups.items(), reverse=True)
    ]
    return ", ".join(shown)


def _rewards(state: State) -> str:
    mean = state.mean_reward
    return f"{state.scored} scored{'' if mean is None else f' (mean {mean:.2f})'}, {state.unscored} unscored"


def _training_line(state: State, page: Page) -> Text:
    found = Text(no_wrap=True, overflow="ellipsis")
    if state.steps:
        last = state.steps[-1]
        values = [step.mean_reward for step in state.steps][-24:]
        low, high = _scale(values)
        (spark,) = chart(values, len(values), 1, low=low, high=high)
        found.append(f"reward {last.mean_reward:.2f} ").append(spark, style="green").append(f"  loss {last.loss:.3g}")
    if state.version is not None:
        found.append(f"  version {state.version.version}")
    return found.append(f"  groups {_groups(state)}")


# -- runs ------------------------------------------------------------------------------------------------------------


def _runs(state: State, now: float, page: Page, rows: int) -> RenderableType:
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim")
    wide = page.width >= 110
    table.add_column("state", no_wrap=True, width=9)
    table.add_column("task", no_wrap=True, overflow="ellipsis", ratio=3, min_width=8)
    if wide:
        table.add_column("group", no_wrap=True, width=12)
    if page.width >= _SMALL:
        table.add_column("lane", no_wrap=True, overflow="ellipsis", width=10)
    table.add_column("turn", justify="right", no_wrap=True, width=4)
    table.add_column("tokens", justify="right", no_wrap=True, width=6)
    if wide:
        table.add_column("context", justify="right", no_wrap=True, width=7)
    table.add_column("time", justify="right", no_wrap=True, width=7)
    table.add_column("reward", justify="right", no_wrap=True, width=11 if wide else 8)
    if page.width >= _NARROW:
        table.add_column("last command", no_wrap=True, overflow="ellipsis", ratio=5)
    active = sorted(state.active.values(), key=lambda run: (run.group or "", run.started_at))
    recent = list(state.finished)[::-1]
    shown = active[: rows if len(active) <= rows else rows - 1]
    for run in [*shown, *recent[: max(0, rows - len(active))]]:
        table.add_row(*_cells(run, state, now, page, wide), style="dim" if run.status is not RunStatus.RUNNING else "")
    if len(shown) < len(active):
        table.add_row("", Text(f"+{len(active) - len(shown)} more", style="dim"))
    if not active and not recent:
        table.add_row("", Text("no run yet", style="dim"))
    return Panel(table, title="runs", title_align="left", box=box.ROUNDED, border_style="dim", padding=(0, 1))


def _cells(run: RunView, state: State, now: float, page: Page, wide: bool) -> Iterable[RenderableType]:
    ended = run.status is not RunStatus.RUNNING
    yield Text(str(run.status).replace("_", " ")[:9], style=_STATUS_STYLE.get(run.status, "red"))
    yield Text(visible(run.task, 60))
    if wide:
        yield _group_cell(run, state)
    if page.width >= _SMALL:
        yield Text(visible(run.lane, 10))
    yield str(run.turn)
    yield count(run.tokens)
    if wide:
        yield count(run.context)
    yield duration(run.seconds if ended else now - run.started_at)
    shown = reward(run.reward, placeholder=run.placeholder) if ended else ""
    yield Text(shown, style="bold" if run.reward else "")
    if page.width >= _NARROW:
        yield _command_cell(run)


def _group_cell(run: RunView, state: State) -> Text:
    if run.group is None:
        return Text("–" if run.split == "train" else visible(run.split, 12), style="dim")
    group = state.open_groups.get(run.group)
    name = visible(run.group[-6:], 6)
    return Text(f"{name} {group.ended}/{group.started}" if group else name)


def _command_cell(run: RunView) -> Text:
    if not run.command:
        return Text("")
    failed = run.exit_code not in (0, None)
    text = Text(f"{run.exit_code} " if failed else "", style="red")
    return text.append(visible(run.command, 200), style="default")


def _footer(state: State, page: Page, dropped: int) -> list[RenderableType]:
    """Return one line of counts of what went wrong, and the latest problems; nothing when all is well."""
    counts = [f"restarts {visible(name, 20)} {number}" for name, number in state.restarts.items()]
    if state.lost and not state.cells:
        counts.append(f"{counted(len(state.lost), 'replica')} without calls")
    if state.skipped:
        counts.append(f"skipped steps {state.skipped.total()}")
    counts += [f"{name} groups {number}" for name, number in state.groups.items() if name != "trained"]
    counts += [
        f"{number} {status.replace('_', ' ')}" for status, number in state.ended.items() if status not in ("completed",)
    ]
    if dropped:
        counts.append(f"{counted(dropped, 'event')} not shown")
    lines: list[RenderableType] = []
    if counts:
        lines.append(Text(", ".join(counts), style="yellow", no_wrap=True, overflow="ellipsis"))
    for at, what in list(state.problems)[-(3 if page.height >= 24 else 1) :]:
        when = duration(at - (at if state.started_at is None else state.started_at))
        lines.append(
            Text.assemble((f"{when} ", "dim"), (visible(what, page.width), "red"), no_wrap=True, overflow="ellipsis")
        )
    return lines
