"""How long units may take before who computes them is taken for hung: from what units took so far. Pure."""

from __future__ import annotations

from collections import deque

__all__ = ["Deadline"]

_TIMES = 10.0
"""Times as long as the slowest that was measured."""
_RECENT = 64
"""Measurements that count."""


class Deadline:
    """Bounds of work, all cells together: they compute the same with the same.

    Args:
        floor_s: seconds that any work may take. The first units, which load and compile, are measured by nobody.
    """

    def __init__(self, floor_s: float) -> None:
        self._floor_s = floor_s
        self._slowness: deque[float] = deque(maxlen=_RECENT)
        """Seconds per target."""

    def measure(self, tokens: int, seconds: float) -> None:
        """Note what units of so many targets took."""
        if tokens > 0 and seconds > 0:
            self._slowness.append(seconds / tokens)

    def seconds(self, tokens: int) -> float:
        """Return how long units of so many targets may take."""
        return max(self._floor_s, _TIMES * max(self._slowness, default=0.0) * tokens)
