"""Quantiles of many numbers in little space, which can be put together from parts in any order.

Buckets grow by a constant factor, so a quantile has a relative error of at most `ERROR`, whatever was added and however
it was split (DDSketch: Masson, Rim and Lee, VLDB 2019). Keeping all differences of a step would be exact, and would send
4 bytes per token to every process; this is 10 KB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

ERROR = 0.01
_GROWTH = math.log((1 + ERROR) / (1 - ERROR))
_SMALLEST = 1e-8
"""Numbers up to here count as 0."""
_BUCKETS = 2 + math.ceil(math.log(1e3 / _SMALLEST) / _GROWTH)
"""The last one takes everything above 1000."""


def _empty() -> NDArray[np.int64]:
    return np.zeros(_BUCKETS, np.int64)


@dataclass(slots=True)
class Sketch:
    """Counts of numbers that are 0 or more."""

    counts: NDArray[np.int64] = field(default_factory=_empty)

    def add(self, values: ArrayLike) -> None:
        """Count finite numbers, 0 or more."""
        scaled = np.log(np.maximum(np.asarray(values, np.float64), _SMALLEST) / _SMALLEST)
        buckets = np.minimum(np.ceil(scaled / _GROWTH).astype(np.int64), _BUCKETS - 1)
        self.counts = self.counts + np.bincount(buckets, minlength=_BUCKETS)

    def merge(self, other: Sketch) -> None:
        """Take in what another one counted."""
        self.counts = self.counts + other.counts

    def quantile(self, share: float) -> float:
        """Return the number that this share of all does not exceed, within `ERROR`; NaN where nothing was added."""
        total = int(self.counts.sum())
        if not total:
            return math.nan
        rank = max(math.ceil(share * total), 1)
        return _value(int(np.searchsorted(np.cumsum(self.counts), rank)))

    def above(self, limit: float) -> int:
        """Return how many numbers exceed a limit, up to those that lie within `ERROR` of it."""
        bucket = math.ceil(math.log(max(limit, _SMALLEST) / _SMALLEST) / _GROWTH)
        return int(self.counts[bucket + 1 :].sum())


def _value(bucket: int) -> float:
    return 0.0 if bucket == 0 else _SMALLEST * math.exp(bucket * _GROWTH) * (1 - ERROR)
