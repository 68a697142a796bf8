"""Pictures of cells over time, as HTML or PNG: of a simulated fleet, or of what a store recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gyre_sdk.errors import SettingsError
from gyre_sdk.trainer.cells.state import CellState
from gyre_sdk.trainer.simulate.fleet import Fleet, gpu_seconds
from gyre_sdk.view.lanes import Lanes, Point, Span, share
from gyre_sdk.view.page import page
from gyre_sdk.view.raster import png


def lane(name: str, fleet: Fleet) -> Lanes:
    """Return what is drawn of one policy's fleet."""
    cells = fleet.trace.cells
    return Lanes(
        f"{name}: {_spoken(fleet.now)}, {share(_idle_s(fleet), fleet.now * len(cells))} of the cells' time idle",
        ["core", *(f"satellite {number}" for number in range(1, len(cells)))],
        [_spans(history, fleet.now) for history in cells],
        [Point(*look) for look in fleet.trace.water],
        fleet.now,
    )


def _spoken(seconds: float) -> str:
    return f"{seconds / 3600:.2f} h" if seconds >= 7200 else f"{seconds / 60:.2f} min"


def _idle_s(fleet: Fleet) -> float:
    """Return cell-seconds of training cells without work and of serving cells' free slots."""
    spent = gpu_seconds(fleet)
    working = sum(cell.get(state, 0.0) for cell in spent for state in (CellState.SERVING, CellState.TRAINING))
    return max(0.0, working - fleet.slots_used - fleet.train_busy)


def check(path: Path, option: str = "--timeline") -> None:
    """Refuse a file that cannot become a picture, before anything is computed for it.

    Raises:
        SettingsError: the ending is neither `.html` nor `.png`, or there is no such folder; it names the option.
    """
    if path.suffix not in (".html", ".png"):
        raise SettingsError(f"{option} {path}: a timeline is .html or .png")
    if not path.parent.is_dir():
        raise SettingsError(f"{option} {path} cannot be written: there is no folder {path.parent}; name another file")


def write(path: Path, title: str, lanes: Sequence[Lanes], option: str = "--timeline", note: str = "") -> None:
    """Write a picture; its form is the file's ending. `note` is said above it.

    Raises:
        SettingsError: the ending is neither `.html` nor `.png`, or the file cannot be written; it names the option.
    """
    check(path, option)
    try:
        if path.suffix == ".html":
            path.write_text(page(title, lanes, note), "utf-8")
        else:
            path.write_bytes(png(title, lanes, note))
    except OSError as error:
        raise SettingsError(f"{option} {path} cannot be written: {error}; name another file") from error


def _spans(history: Sequence[tuple[float, CellState]], end: float) -> list[Span]:
    """Return a cell's history as stretches up to the end; empty ones are left out."""
    stops = [start for start, _ in history[1:]] + [end]
    found = [Span(start, min(stop, end), state) for (start, state), stop in zip(history, stops, strict=True)]
    return [span for span in found if span.start < span.stop]
