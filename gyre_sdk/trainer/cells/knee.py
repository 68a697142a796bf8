"""How many requests a replica serves before a further one only slows the others: a pure estimate from measured rates.

Tokens per second grow with the requests that a replica has, in proportion at first, then less, then not at all. What was
seen is kept as means at levels of requests, each a fifth above the one before. Through them goes the closest curve that
never falls, each level with the weight of what was seen there. The knee is where that curve reaches nine tenths of its
top. It counts only when the replica was seen well beyond it and was clearly slower there than in proportion; else nothing
is known, and whoever asks goes by other bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor, log

__all__ = ["Level", "Rates"]

_STEP = log(1.2)
"""Between two levels, of the logarithm of requests."""
_REMEMBERED = 200
"""Looks that a level's mean is made of: older ones fade, as contexts grow and policies change."""
_LOOKS = 5
"""Looks from which on a level counts."""
_REACHED = 0.9
"""Share of the top that the knee has reached."""
_BEYOND = (1.3, 10)
"""A replica was seen well beyond the knee with this many times its requests, in so many looks."""
_SURE = 3.0
"""Standard errors by which it was slower there than it would be without a knee."""
_HOLD = 1.15
"""A knee that was found stays until another one is away from it by this factor."""


@dataclass(frozen=True, slots=True)
class Level:
    """What was seen at about the same number of requests."""

    calls: float
    """Requests that the replica had, mean."""
    rate: float
    """Tokens that it sampled per second, mean."""
    variance: float = 0.0
    """Of `rate` between looks."""
    looks: int = 1

    def after(self, calls: float, rate: float) -> Level:
        """Return the level with one more look."""
        share = 1 / (min(self.looks, _REMEMBERED) + 1)
        off = rate - self.rate
        return Level(
            self.calls + share * (calls - self.calls),
            self.rate + share * off,
            (1 - share) * (self.variance + share * off**2),
            self.looks + 1,
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """What was seen of replicas, all alike, and the knee that follows from it."""

    levels: tuple[tuple[int, Level], ...] = ()
    """By place on the scale of requests, ascending."""
    knee: float | None = None
    """Requests beyond which a further one only slows the others; None: not known."""

    def after(self, calls: float, rate: float) -> Rates:
        """Return what is known with one more look.

        Args:
            calls: requests that a replica had, above 0.
            rate: tokens that it sampled per second meanwhile.
        """
        number, levels = floor(log(calls) / _STEP), dict(self.levels)
        before = levels.get(number)
        levels[number] = Level(calls, rate) if before is None else before.after(calls, rate)
        found = replace(self, levels=tuple(sorted(levels.items())))
        return replace(found, knee=_held(self.knee, [level for _, level in found.levels]))


def _held(before: float | None, levels: Sequence[Level]) -> float | None:
    """Return the knee, the same as before where little has changed."""
    seen = [level for level in levels if level.looks >= _LOOKS]
    if not seen:
        return before
    reached, top = _reached(seen)
    if not _flat(seen, reached, top):
        # seen to be faster still beyond the old one: there is none up to here
        return None if before is not None and reached > before * _HOLD else before
    if before is not None and before / _HOLD <= reached <= before * _HOLD:
        return before
    return reached


def _reached(seen: Sequence[Level]) -> tuple[float, float]:
    """Return at how many requests the curve reaches its share of the top, and the top."""
    fit = _rising(seen)
    top = fit[-1]
    place = next(place for place, rate in enumerate(fit) if rate >= _REACHED * top)
    if not place or top <= 0:
        return seen[place].calls, top
    low, high = seen[place - 1].calls, seen[place].calls
    share = (_REACHED * top - fit[place - 1]) / (fit[place] - fit[place - 1])
    return low + share * (high - low), top


def _rising(seen: Sequence[Level]) -> list[float]:
    """Return the least-squares fit that never falls, by pooling neighbours that do."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, levels
    for level in seen:
        mean, weight, size = level.rate, float(min(level.looks, _REMEMBERED)), 1
        while blocks and blocks[-1][0] >= mean:
            other, more, wide = blocks.pop()
            mean, weight, size = (mean * weight + other * more) / (weight + more), weight + more, size + wide
        blocks.append((mean, weight, size))
    return [mean for mean, _, size in blocks for _ in range(size)]


def _flat(seen: Sequence[Level], reached: float, top: float) -> bool:
    """Tell whether the rate was clearly below proportion where there were many more requests than `reached`."""
    factor, looks = _BEYOND
    beyond = [level for level in seen if level.calls >= factor * reached]
    total = sum(level.looks for level in beyond)
    if total < looks:
        return False
    calls = sum(level.calls * level.looks for level in beyond) / total
    rate = sum(level.rate * level.looks for level in beyond) / total
    error = (sum(level.variance * level.looks**2 / min(level.looks, _REMEMBERED) for level in beyond)) ** 0.5 / total
    there = _REACHED * top
    return rate + _SURE * error < there * (1 + calls / reached) / 2
