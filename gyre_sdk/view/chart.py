"""Small charts of block characters."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

_BLOCKS = " ▁▂▃▄▅▆▇█"


def resampled(values: Sequence[float], width: int) -> list[float]:
    """Return at most `width` values: the means of neighbouring stretches, the first and last stretch included."""
    if len(values) <= width:
        return list(values)
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]  # noqa: RUF007


def chart(values: Sequence[float], width: int, height: int, *, low: float, high: float) -> list[str]:
    """Return `height` lines of `width` characters, top first; a value at or below `low`, or none, still shows a trace."""
    steps = len(_BLOCKS) - 1
    span = high - low
    levels = []
    for value in resampled([value if isfinite(value) else low for value in values], width):
        share = (min(max(value, low), high) - low) / span if span > 0 else 0.0
        levels.append(max(1, round(share * steps * height)))
    lines = []
    for row in range(height - 1, -1, -1):
        cells = [_BLOCKS[min(steps, max(0, level - row * steps))] for level in levels]
        lines.append("".join(cells).ljust(width))
    return lines
