"""Lanes of cells as a picture: every cell's state over time, and below it water, capacity and ready work. SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import isfinite
from typing import NamedTuple

from gyre_sdk.view.escape import visible
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
WIDTH, GRAPH = 1200, 90
"""Of a picture, and the height of its curves."""
CURVES: Mapping[str, str] = {"water (runs)": "#1d4f91", "capacity (runs)": "#9ec5ee", "ready work": "#b4451f"}
_LEFT = 90
_POINTS = 1200
"""Points of a curve: more than a screen shows."""
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
        """Return the points, or as many of them as a screen shows: first and last included."""
        number = len(self.points)
        if number <= _POINTS:
            return self.points
        return [self.points[place * (number - 1) // (_POINTS - 1)] for place in range(_POINTS)]


def lanes(found: Timeline, title: str) -> Lanes:
    """Return what is drawn of a timeline."""
    start = found.start
    return Lanes(
        title,
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


def page(title: str, drawn: Sequence[Lanes]) -> str:
    """Return a page that needs nothing else; hovering a bar tells state and time."""
    parts = "".join(f"<h2>{_text(one.title)}</h2>{svg(one, max(two.end for two in drawn))}" for one in drawn)
    style = (
        "body{font:14px system-ui,sans-serif;margin:2em;color:#222}h2{font-size:15px;margin:1.2em 0 .3em}"
        "span{margin-right:1em;white-space:nowrap}i{display:inline-block;width:1em;height:.8em;margin-right:.3em}"
        "svg{width:100%;height:auto}"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f"<style>{style}</style></head><body><h1>{_text(title)}</h1><p>{legend(drawn)}</p>{parts}</body></html>\n"
    )


def legend(drawn: Sequence[Lanes]) -> str:
    """Return the colours in HTML."""
    used = {span.state for one in drawn for cell in one.cells for span in cell}
    shown = {state: colour for state, colour in COLOURS.items() if state not in _RARE or state in used}
    shown.update({visible(state, 20): UNNAMED for state in sorted(used - set(COLOURS))})
    entries = [*shown.items(), *CURVES.items()]
    return "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in entries)


def svg(drawn: Lanes, longest: float | None = None) -> str:
    """Return one fleet's picture as an element of HTML.

    Args:
        drawn: the fleet.
        longest: seconds that the width stands for, where several pictures share an axis; by default its own.
    """
    longest = max(longest or drawn.end, 1e-6)
    row = max(2.0, min(18.0, 360 / max(1, len(drawn.cells))))
    scale = (WIDTH - _LEFT) / longest
    top = row * len(drawn.cells) + 12
    height = top + GRAPH + 22
    unit, of = _unit(longest)
    parts = [f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">']
    for number, (name, cell) in enumerate(zip(drawn.names, drawn.cells, strict=True)):
        y = number * row
        if row >= 10:
            parts.append(f'<text x="0" y="{y + row - 4:.1f}" font-size="11">{escape(name)}</text>')
        for span in cell:
            x, width = _LEFT + span.start * scale, max((span.stop - span.start) * scale, 0.4)
            parts.append(
                f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{row - 1:.1f}"'
                f' fill="{COLOURS.get(span.state, UNNAMED)}"><title>{escape(visible(span.state, 40))}'
                f" {span.start / of:.2f}-{span.stop / of:.2f} {unit}</title></rect>"
            )
    parts += _curves(drawn, scale, top)
    for tick in range(9):
        at = longest * tick / 8
        x = _LEFT + at * scale
        anchor = "end" if tick == 8 else "middle"
        parts.append(
            f'<text x="{x:.1f}" y="{height - 4:.0f}" font-size="11" text-anchor="{anchor}">{at / of:.1f} {unit}</text>'
        )
    return "".join([*parts, "</svg>"])


def _text(text: str) -> str:
    return escape(visible(text, 200))


def _curves(drawn: Lanes, scale: float, top: float) -> Iterator[str]:
    points = drawn.thinned()
    if not points:
        return
    runs = max(1.0, *(max(point.water, point.capacity) for point in points))
    work = max(1.0, *(point.ready_s for point in points))
    for name, most in (("capacity", runs), ("water", runs), ("ready_s", work)):
        colour = CURVES["ready work" if name == "ready_s" else f"{name} (runs)"]
        line = " ".join(
            f"{_LEFT + point.at * scale:.1f},{top + GRAPH * (1 - getattr(point, name) / most):.1f}" for point in points
        )
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.2"/>'
    yield f'<text x="0" y="{top + 11:.0f}" font-size="11">{runs:.0f} runs</text>'


def _unit(longest: float) -> tuple[str, float]:
    """Return the unit of an axis and its seconds."""
    return ("h", 3600.0) if longest >= 7200 else ("min", 60.0) if longest >= 120 else ("s", 1.0)
