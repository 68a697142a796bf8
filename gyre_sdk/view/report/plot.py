"""Curves over steps, bars of parts and histograms as SVG: axes with round numbers, a value at every point that is hovered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, floor, isfinite, log10
from typing import NamedTuple

from gyre_sdk.view.escape import visible

_WIDTH, _HEIGHT = 560.0, 210.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 10.0, 10.0, 30.0
_LABELLED = 6
"""Dots of a curve that have their labels beside them, at most."""
_LABEL_WIDTH, _LABEL_HEIGHT = 160.0, 13.0
"""Pixels that a label takes about."""
_POINTS = 400
"""Points of a curve that a screen can show: of more, those that stand out stay."""
_HOVERED = 120
"""Points of a curve of which each tells its value."""
_BARS = 120
_HUGE = 1e100

Point = tuple[float, float]


class Curve(NamedTuple):
    """A line of a chart."""

    name: str
    points: Sequence[Point]
    """(step, value); what is no finite number is left out, and breaks no line."""
    colour: int = 1
    """1 to 4, of the page's colours."""
    band: Sequence[tuple[float, float, float]] = ()
    """(step, low, high) around it."""
    dots: bool = False
    """Points alone, each with its name in `labels`."""
    labels: Sequence[str] = ()


class Area(NamedTuple):
    """Where a chart's values are, and the round numbers on its axes."""

    left: float
    right: float
    low: float
    high: float
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]

    def x(self, value: float) -> float:
        """Return a place from the left."""
        return _LEFT + (value - self.left) / (self.right - self.left) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Return a place from the top."""
        return _HEIGHT - _BOTTOM - (value - self.low) / (self.high - self.low) * (_HEIGHT - _TOP - _BOTTOM)


def curves(title: str, drawn: Sequence[Curve], *, unit: str = "", zero: bool = False) -> str:
    """Return a figure with curves over steps; nothing when no value is known.

    Args:
        title: above it.
        drawn: the curves; later ones lie above.
        unit: of the values, said beside the title.
        zero: have the axis begin at 0.
    """
    known = [curve._replace(points=_finite(curve.points), band=_finite_band(curve.band)) for curve in drawn]
    known = [curve for curve in known if curve.points]
    if not known:
        return ""
    steps = [x for curve in known for x, _ in curve.points]
    values = [y for curve in known for _, y in curve.points]
    values += [edge for curve in known for _, low, high in curve.band for edge in (low, high)]
    area = _area(min(steps), max(steps), min([0.0, *values] if zero else values), max(values), whole=True)
    shapes = [*_axes(area), *(_band(curve, area) for curve in known if len(curve.band) > 1)]
    for curve in known:
        shapes += _dots(curve, area) if curve.dots else _line(curve, area)
    return _figure(title, unit, [(curve.name, curve.colour) for curve in known], shapes)


def stacked(title: str, names: Sequence[str], bars: Sequence[tuple[float, Sequence[float]]], *, unit: str) -> str:
    """Return a figure with a bar per step, of parts one above the other; nothing when no part is known.

    Args:
        title: above it.
        names: of the parts.
        bars: (step, parts); a part that is no finite number counts as 0. Of many bars, neighbours are averaged.
        unit: of the parts.
    """
    known = [(step, [part if _drawable(part) else 0.0 for part in parts]) for step, parts in bars]
    if not any(any(parts) for _, parts in known):
        return ""
    each = ceil(len(known) / _BARS)
    shown = [_mean(known[start : start + each]) for start in range(0, len(known), each)]
    half = max(0.5, (shown[1][0] - shown[0][0]) / 2 if len(shown) > 1 else 0.5)
    area = _area(shown[0][0] - half, shown[-1][0] + half, 0.0, max(sum(parts) for _, parts in shown), whole=True)
    shapes = list(_axes(area))
    for step, parts in shown:
        told = ", ".join(f"{name} {figure(part)}" for name, part in zip(names, parts, strict=True))
        width, base, rects = (area.x(step + half) - area.x(step - half)) * 0.8, 0.0, ""
        for number, part in enumerate(parts, 1):
            top, height = area.y(base + part), area.y(base) - area.y(base + part)
            base += part
            if height > 0:
                x = area.x(step) - width / 2
                rects += (
                    f'<rect class="f{number}" x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
                )
        shapes.append(f"<g><title>step {figure(step)}: {escape(told)}</title>{rects}</g>")
    named = [(name, number) for number, name in enumerate(names, 1)]
    return _figure(title, unit if each == 1 else f"{unit}, means of {each} steps", named, shapes)


def histogram(title: str, values: Sequence[float], *, centred: bool = False) -> str:
    """Return a figure with how many of some values are how large; their counts are on the y axis.

    Args:
        title: above it.
        values: of which those that are no finite number are left out.
        centred: have round numbers in the middle of bars, as counts always do; else at their edges.
    """
    known = [value for value in values if _drawable(value)]
    if not known:
        return ""
    low, high = min(0.0, *known), max(0.0, *known)
    ticks = _ticks(low, high, 24)
    step = max(ticks[1] - ticks[0], 1.0 if all(value == int(value) for value in known) else 0.0)
    shift = 0.5 if centred or step == 1 else 0.0
    first = floor(low / step + shift + 1e-9)
    counts = Counter(floor(value / step + shift + 1e-9) - first for value in known)
    bins = [counts[number] for number in range(max(counts) + 1)]
    begin = (first - shift) * step
    area = _area(begin, begin + len(bins) * step, 0.0, float(max(bins)), whole=step == 1)
    area = area._replace(y_ticks=[tick for tick in area.y_ticks if tick == int(tick)])
    shapes = list(_axes(area, ""))
    for number, count in enumerate(bins):
        if count:
            edge = begin + number * step
            x, right, y = area.x(edge), area.x(edge + step), area.y(count)
            told = f"{figure((first + number) * step) if step == 1 else f'{figure(edge)} to {figure(edge + step)}'}: {count}"
            shapes.append(
                f'<rect class="f1" x="{x:.1f}" y="{y:.1f}" width="{max(1.0, right - x - 1):.1f}"'
                f' height="{area.y(0) - y:.1f}"><title>{told}</title></rect>'
            )
    return _figure(title, "runs", [], shapes)


def figure(value: float) -> str:
    """Return a number in few characters: 0.25, 12.3, 1,234, 1.2e-05; a dash where there is none."""
    if not isfinite(value):
        return "–"
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        return f"{value:.2g}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if size >= 100 else f"{value:.3g}"


def _drawable(value: float) -> bool:
    """Tell whether a value has a place: what is infinite, or nearly so, has none."""
    return abs(value) < _HUGE


def _finite(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if _drawable(x) and _drawable(y)]


def _finite_band(band: Sequence[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    return [one for one in band if all(map(_drawable, one))]


def _mean(bars: Sequence[tuple[float, Sequence[float]]]) -> tuple[float, list[float]]:
    parts = zip(*(parts for _, parts in bars), strict=True)
    return sum(step for step, _ in bars) / len(bars), [sum(part) / len(bars) for part in parts]


def _area(left: float, right: float, low: float, high: float, *, whole: bool = False) -> Area:
    """Return an area; `whole`: only whole numbers are ticks of its x axis, where there are some."""
    if right - left <= 0:
        left, right = left - 1, right + 1
    if high - low <= 1e-12 * max(abs(high), abs(low), 1e-300):
        margin = abs(high) / 2 or 1.0
        low, high = low - (margin if low else 0.0), high + margin
    ticks = _ticks(low, high, 5)
    between = [tick for tick in _ticks(left, right, 8) if left <= tick <= right]
    if whole:
        between = [tick for tick in between if tick == int(tick)] or between
    return Area(left, right, ticks[0], ticks[-1], between, ticks)


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers from one that is not above `low` to one that is not below `high`."""
    span = max(high - low, abs(high) * 1e-9, 1e-300)
    power = 10.0 ** floor(log10(span / most))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if span / (factor * power) <= most)
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [
        round(number * step, 12) if abs(step) > 1e-9 else number * step
        for number in range(first, max(last, first + 1) + 1)
    ]


def _axes(area: Area, x_name: str = "step") -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for tick in area.y_ticks:
        y = area.y(tick)
        yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{figure(tick)}</text>'
    for tick in area.x_ticks:
        x = area.x(tick)
        yield f'<path class="axis" d="M{x:.1f} {bottom}v4"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{figure(tick)}</text>'
    yield f'<path class="axis" d="M{_LEFT} {bottom}H{right}"/>'
    if x_name:
        yield f'<text x="{_LEFT - 10}" y="{bottom + 17}" text-anchor="end">{x_name}</text>'


def _band(curve: Curve, area: Area) -> str:
    kept = _thin([(x, high - low) for x, low, high in curve.band])
    chosen = [curve.band[place] for place in kept]
    above = [f"{area.x(x):.1f},{area.y(high):.1f}" for x, _, high in chosen]
    below = [f"{area.x(x):.1f},{area.y(low):.1f}" for x, low, _ in reversed(chosen)]
    return f'<polygon class="b{curve.colour}" points="{" ".join(above + below)}"/>'


def _line(curve: Curve, area: Area) -> Iterator[str]:
    shown = [curve.points[place] for place in _thin(curve.points)]
    places = [(area.x(x), area.y(y)) for x, y in shown]
    yield f'<polyline class="l{curve.colour}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>'
    if len(shown) == 1 or len(shown) <= 40:
        yield from (f'<circle class="f{curve.colour}" cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in places)
    if len(shown) <= _HOVERED:
        for (x, y), (step, value) in zip(places, shown, strict=True):
            told = f"step {figure(step)}: {curve.name} {figure(value)}"
            yield f'<circle class="h" cx="{x:.1f}" cy="{y:.1f}" r="6"><title>{escape(told)}</title></circle>'


def _dots(curve: Curve, area: Area) -> Iterator[str]:
    beside_dots = _labels_at([(area.x(step), area.y(value)) for step, value in curve.points[:_LABELLED]])
    for place, (step, value) in enumerate(curve.points[:_POINTS]):
        label = visible(curve.labels[place], 24) if place < len(curve.labels) else curve.name
        x, y = area.x(step), area.y(value)
        near_end = x > _WIDTH - 80
        anchor, beside = ("end", -7.0) if near_end else ("start", 7.0)
        told = escape(f"{label}: {figure(value)}, step {figure(step)}")
        yield f'<circle class="f{curve.colour}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"><title>{told}</title></circle>'
        if len(curve.points) <= _LABELLED:
            yield f'<text class="label" x="{x + beside:.1f}" y="{beside_dots[place]:.1f}" text-anchor="{anchor}">{escape(label)} {figure(value)}</text>'


def _labels_at(dots: Sequence[Point]) -> list[float]:
    """Return the heights of dots' labels: each above its dot, lower where another would be in its way; pixels, downwards."""
    found = [0.0] * len(dots)
    placed: list[Point] = []
    for number in sorted(range(len(dots)), key=lambda one: dots[one][1]):
        x, y = dots[number]
        height = max(y - 6, _TOP + 10)
        for other, above in placed:
            if abs(other - x) < _LABEL_WIDTH and height < above + _LABEL_HEIGHT:
                height = above + _LABEL_HEIGHT
        placed.append((x, height))
        found[number] = height
    return found


def _thin(points: Sequence[Point]) -> list[int]:
    """Return the places of points that a screen can tell apart: of each stretch its first, its last, lowest and highest."""
    if len(points) <= _POINTS:
        return list(range(len(points)))
    each = ceil(4 * len(points) / _POINTS)
    kept: set[int] = set()
    for start in range(0, len(points), each):
        part = range(start, min(start + each, len(points)))
        kept |= {part[0], part[-1]}
        kept |= {min(part, key=lambda place: points[place][1]), max(part, key=lambda place: points[place][1])}
    return sorted(kept)


def _figure(title: str, unit: str, names: Sequence[tuple[str, int]], shapes: Sequence[str]) -> str:
    said = f' <span class="dim">{escape(unit)}</span>' if unit else ""
    legend = "".join(f'<span class="key"><i class="k{colour}"></i>{escape(name)}</span>' for name, colour in names)
    return (
        f"<figure><figcaption><b>{escape(title)}</b>{said}{legend}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" aria-label="{escape(title)}">{"".join(shapes)}</svg></figure>'
    )


__all__ = ["Curve", "curves", "figure", "histogram", "stacked"]
