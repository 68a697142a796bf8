"""A picture of lanes as shapes at places, whatever they are drawn with: a row per cell, curves and an axis below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log10
from typing import NamedTuple

from gyre_sdk.view.escape import visible
from gyre_sdk.view.lanes import COLOURS, CURVES, UNNAMED, Lanes

WIDTH = 1200
"""Of a picture, in units of which a letter has 6."""
INK = "#222222"
_FAINT = "#e6e8eb"
_LEFT = 90
"""Where time 0 is; names and scales stand before it."""
_GRAPH = 90
"""Height of the curves."""
_ROWS = 180
"""Cells that are shown at most."""
_LABEL = 11.0
"""Height that a name needs."""


class Box(NamedTuple):
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    tells: str
    """What it stands for, in words."""


class Line(NamedTuple):
    """A line through points."""

    points: Sequence[tuple[float, float]]
    colour: str


class Words(NamedTuple):
    """A line of text. `y` is what it stands on."""

    x: float
    y: float
    text: str
    colour: str = INK
    anchor: str = "start"
    """Which of its places is at `x`: `start`, `middle` or `end`."""


Shape = Box | Line | Words


class Drawing(NamedTuple):
    """Shapes in the order in which they are drawn, on an area of `WIDTH`."""

    height: float
    shapes: Sequence[Shape]


def draw(drawn: Lanes, longest: float | None = None) -> Drawing:
    """Return one fleet's picture.

    Args:
        drawn: the fleet.
        longest: seconds that the width stands for, where several pictures share an axis; by default its own.
    """
    longest = max(longest or drawn.end, 1e-6)
    scale = (WIDTH - _LEFT) / longest
    every = max(1, -(-len(drawn.cells) // _ROWS))
    shown = list(zip(drawn.names, drawn.cells, strict=True))[::every]
    row = max(2.0, min(18.0, 360 / max(1, len(shown))))
    top = row * len(shown) + 12
    shapes = list(_rows(shown, row, scale, unit(longest)))
    if every > 1:
        shapes.append(Words(WIDTH, top - 2, f"one of {every} cells is shown, of {len(drawn.cells)}", anchor="end"))
        top += 14
    return Drawing(top + _GRAPH + 22, [*shapes, *_axis(longest, scale, top), *_curves(drawn, scale, top)])


def _rows(
    shown: Sequence[tuple[str, Sequence[tuple[float, float, str]]]], row: float, scale: float, units: tuple[str, float]
) -> Iterator[Shape]:
    name_of, of = units
    named = -1e9
    for number, (name, cell) in enumerate(shown):
        y = number * row
        if y - named >= _LABEL:
            yield Words(0.0, y + min(row, _LABEL) - 1 + max(0.0, row - _LABEL) / 2, name)
            named = y
        for start, stop, state in cell:
            tells = f"{visible(state, 40)} {start / of:.2f}-{stop / of:.2f} {name_of}"
            width = max((stop - start) * scale, 0.4)
            yield Box(_LEFT + start * scale, y, width, row - (1 if row > 3 else 0), COLOURS.get(state, UNNAMED), tells)


def _axis(longest: float, scale: float, top: float) -> Iterator[Shape]:
    name, of = unit(longest)
    bottom = top + _GRAPH
    step = _step(longest / of) * of
    for tick in range(int(longest / step + 1e-9) + 1):
        x = _LEFT + tick * step * scale
        yield Line([(x, top), (x, bottom + 4)], _FAINT)
        anchor = "end" if x > WIDTH - 30 else "middle"
        yield Words(x, bottom + 17, f"{tick * step / of:g} {name}" if tick else "0", anchor=anchor)
    yield Line([(_LEFT, bottom), (WIDTH, bottom)], _FAINT)


def _curves(drawn: Lanes, scale: float, top: float) -> Iterator[Shape]:
    """Yield runs as steps, since they change at moments, and ready work as lines, since it is worked off."""
    points = drawn.thinned()
    if not points:
        return
    bottom = top + _GRAPH
    runs = max(1.0, *(max(point.water, point.capacity) for point in points))
    work = max(1.0, *(point.ready_s for point in points))
    ready = [(_LEFT + point.at * scale, bottom - _GRAPH * point.ready_s / work) for point in points]
    yield Line(ready, CURVES["ready work"])
    for name, colour in (("capacity", CURVES["capacity (runs)"]), ("water", CURVES["water (runs)"])):
        heights = [(_LEFT + one.at * scale, bottom - _GRAPH * getattr(one, name) / runs) for one in points]
        yield Line(list(_steps(heights, _LEFT + drawn.end * scale)), colour)
    name, of = unit(work)
    yield Words(0.0, top + 8, f"{_short(runs)} runs", CURVES["water (runs)"])
    yield Words(0.0, top + 20, f"{_short(work / of)} cell-{name}", CURVES["ready work"])
    yield Words(_LEFT - 6, bottom + 3, "0", anchor="end")


def _steps(points: Sequence[tuple[float, float]], end: float) -> Iterator[tuple[float, float]]:
    """Yield a line that holds each value until the next."""
    for (x, y), (after, _) in zip(points, [*points[1:], (max(end, points[-1][0]), 0.0)], strict=True):
        yield x, y
        yield after, y


def _step(longest: float) -> float:
    """Return a round distance of which a length has at most ten."""
    power = 10.0 ** int(log10(longest / 10) // 1)
    return next(power * factor for factor in (1, 2, 5, 10) if longest / (power * factor) <= 10)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def unit(longest: float) -> tuple[str, float]:
    """Return the unit in which a duration is said, and its seconds."""
    return ("h", 3600.0) if longest >= 7200 else ("min", 60.0) if longest >= 120 else ("s", 1.0)
