"""Lanes of cells: what a picture shows of a fleet, every cell's state over time, water, capacity and ready work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import isfinite
from typing import NamedTuple

from gyre_sdk.view.escape import duration, visible
from gyre_sdk.view.timeline import Timeline

COLOURS: Mapping[str, str] = {
    "serving": "#4c9be8",
    "draining": "#c9b458",
    "switching": "#8a8f98",
    "training": "#e8734c",
    "loading": "#6fbf73",
    "failed": "#7a2230",
    "stopped": "#d8dbe0",
}
UNNAMED = "#b9a7c9"
"""Of a state that has no colour of its own."""
CURVES: Mapping[str, str] = {"water (runs)": "#1d4f91", "capacity (runs)": "#9ec5ee", "ready work": "#b4451f"}
_PARTS = 600
"""Stretches of a curve of which a screen shows no more than where they begin and end, their highest and their lowest."""
_RARE = ("failed", "stopped")
"""States that the legend leaves out unless they are drawn."""


class Span(NamedTuple):
    """A stretch of a cell, seconds since the start."""

    start: float
    stop: float
    state: str


class Point(NamedTuple):
    """A look at the fleet."""

    at: float
    """Seconds since the start."""
    water: float
    capacity: float
    ready_s: float
    """Cell-seconds."""


class Lanes(NamedTuple):
    """What is drawn of a fleet."""

    title: str
    names: Sequence[str]
    """Of the cells."""
    cells: Sequence[Sequence[Span]]
    """Their stretches, in the order of time; empty ones are left out."""
    points: Sequence[Point]
    end: float
    """Seconds."""

    def thinned(self) -> Sequence[Point]:
        """Return the points, or of many those that a screen shows: whatever stands out stays."""
        if len(self.points) <= _PARTS:
            return self.points
        kept: set[int] = set()
        for _, part in groupby(
            range(len(self.points)), lambda place: int(self.points[place].at * _PARTS / max(self.end, 1e-6))
        ):
            places = list(part)
            kept.update((places[0], places[-1]))
            for column in range(1, len(Point._fields)):
                values = [self.points[place][column] for place in places]
                kept.update((places[values.index(min(values))], places[values.index(max(values))]))
        return [self.points[place] for place in sorted(kept)]


def lanes(found: Timeline, name: str) -> Lanes:
    """Return what is drawn of a timeline.

    Args:
        found: the timeline.
        name: of what is drawn; the title adds how long it took and how much of the cells' time was idle.
    """
    start = found.start
    spent = sum(cell.span_s for cell in found.cells.values())
    idle = sum(sum(cell.idle.values()) for cell in found.cells.values())
    return Lanes(
        f"{name}: {duration(found.span_s)}, {share(idle, spent)} of the cells' time idle",
        [visible(name, 14) for name in found.cells],
        [
            [Span(one.start - start, one.stop - start, one.state) for one in cell.intervals]
            for cell in found.cells.values()
        ],
        [
            Point(one.at - start, one.water, one.capacity, one.ready_s)
            for one in found.seen
            if isfinite(one.capacity) and isfinite(one.ready_s)
        ],
        found.span_s,
    )


def share(part: float, whole: float) -> str:
    """Return a part of a whole in percent; of nothing it is none."""
    return f"{part / whole if whole > 0 else 0.0:.0%}"


def legend(drawn: Sequence[Lanes]) -> dict[str, str]:
    """Return what the colours of some pictures mean: name -> colour."""
    used = {span.state for one in drawn for cell in one.cells for span in cell}
    shown = {state: colour for state, colour in COLOURS.items() if state not in _RARE or state in used}
    shown.update({visible(state, 20): UNNAMED for state in sorted(used - set(COLOURS))})
    return {**shown, **CURVES}
