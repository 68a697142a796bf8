"""Small charts of block characters."""

from __future__ import annotations

from collections.abc import Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"


def resampled(values: Sequence[float], width: int) -> list[float]:
    """Return at most `width` values: the means of neighbouring stretches, the first and last stretch included."""
    if len(values) <= width:
        return list(values)
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]  # noqa: RUF007


def chart(values: Sequence[float], width: int, height: int, *, low: float, high: float) -> list[str]:
    """Return `height` lines of `width` characters, top first; a value at or below `low` still shows a trace."""
    steps = len(_BLOCKS) - 1
    span = high - low
    columns = resampled(values, width)
    levels = [
        max(1, round((min(max(value, low), high) - low) / span * steps * height)) if span > 0 else 1
        for value in columns
    ]
    lines = []
    for row in range(height - 1, -1, -1):
        cells = [_BLOCKS[min(steps, max(0, level - row * steps))] for level in levels]
        lines.append("".join(cells).ljust(width))
    return lines
