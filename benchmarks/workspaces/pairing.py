"""Two systems compared in pairs: what a machine does meanwhile meets both, and which of them goes first alternates."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """What pairs of times say."""

    count: int
    ratio: float
    """Median of the pairs' ratios, first to second."""
    low: float
    """Ratio below which a tenth of the pairs are."""
    high: float
    """Ratio above which a tenth of the pairs are."""
    difference_ms: float
    """Median of the pairs' differences, first less second."""

    def __str__(self) -> str:
        return (
            f"ratio {self.ratio:.2f} (80 % of {self.count} pairs from {self.low:.2f} to {self.high:.2f}),"
            f" {self.difference_ms:+.0f} ms"
        )


def summary(pairs: Sequence[tuple[float, float]]) -> Summary:
    """Summarise pairs of milliseconds; there is at least one."""
    ratios = sorted(first / second for first, second in pairs)
    tenth = len(ratios) // 10
    return Summary(
        len(ratios),
        round(statistics.median(ratios), 3),
        round(ratios[tenth], 3),
        round(ratios[-1 - tenth], 3),
        round(statistics.median(first - second for first, second in pairs), 1),
    )


def order(names: Sequence[str], pair: tuple[str, str], turn: int, *, only: bool = False) -> list[str]:
    """Return who is measured in a round, in order: the pair side by side, first one of it first, then the other; and the rest
    turned on by one each time.

    Args:
        only: nobody but the pair.
    """
    mine = [name for name in (pair if turn % 2 == 0 else pair[::-1]) if name in names]
    rest = [name for name in names if name not in pair]
    at = turn % len(rest) if rest else 0
    return mine if only else mine + rest[at:] + rest[:at]
