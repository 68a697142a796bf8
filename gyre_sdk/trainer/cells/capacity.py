"""What a cell carries, when the runs under way will end, and what a change of role costs: estimates from measured numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf

__all__ = ["Average", "Costs", "Counters", "Load", "carried", "rollout_left"]

_WEIGHT = 0.3
"""Share of the newest measurement in an average: about the last five count."""


@dataclass(frozen=True, slots=True)
class Counters:
    """What rollouts count."""

    dispatched: int
    """Runs handed out so far."""
    started: int
    """Runs that got a slot so far."""
    finished: int
    """Runs that ended so far."""
    live_ages: list[float]
    """Seconds that each run under way of the open burst has taken so far."""
    durations: list[float]
    """Seconds that ended runs took; the latest are enough."""
    awaited_runs: int
    """Runs of the open burst that have not ended, started or not."""
    mean_tokens_per_run: float
    """Targets that a run gives to training; 0 before the first was sealed."""


@dataclass(frozen=True, slots=True)
class Load:
    """What was measured of one serving cell and of the runs that it carries; None: not known."""

    kv_tokens: float | None = None
    """Tokens whose keys and values its replica holds."""
    context_tokens: float | None = None
    """Tokens of a live run's context, mean; a run that waits for a tool keeps its context."""
    sampled_per_second: float | None = None
    """Tokens that its replica samples per second when it has enough to do."""
    demanded_per_second: float | None = None
    """Tokens per second that a run samples when nothing holds it up, mean over its life, time in tools included."""


def carried(load: Load, bound: float) -> float:
    """Return the runs that one serving cell carries at full speed.

    The least of what is known of

    * memory: `kv_tokens / context_tokens`, beyond which contexts push each other out of the cache;
    * speed: `sampled_per_second / demanded_per_second`, beyond which runs wait for each other;
    * `bound`, the configured limit;

    and one at least: a run always has a place.
    """
    found = bound
    if load.kv_tokens and load.context_tokens:
        found = min(found, load.kv_tokens / load.context_tokens)
    if load.sampled_per_second and load.demanded_per_second:
        found = min(found, load.sampled_per_second / load.demanded_per_second)
    return max(1.0, found)


def rollout_left(ages: Sequence[float], durations: Sequence[float], *, waiting: int = 0, slots: float = 1.0) -> float:
    """Return the estimated seconds until the last of the runs under way ends.

    It is the longest expected residual life among them. For a run of age `a` that is the mean of `d - a` over the ended
    runs that took `d > a`. Where none took longer, ends are taken to come at a constant rate, ended runs over all seconds
    that runs have lived, which is the maximum-likelihood rate: its inverse is expected to be left at any age. Runs that
    wait for a slot add their mean duration, `slots` at a time.

    Args:
        ages: seconds that each run under way has taken.
        durations: seconds that ended runs took.
        waiting: runs without a slot.
        slots: runs that go on at the same time.

    Returns:
        0 when there is nothing to wait for, infinity when nothing has ended yet.
    """
    if not ages and not waiting:
        return 0.0
    if not durations:
        return inf
    ended = sorted(durations)
    sums = [*accumulate(reversed(ended), initial=0.0)][::-1]  # of the durations from a place on
    beyond = (sum(ended) + sum(ages)) / len(ended)
    longest = 0.0
    for age in ages:
        place = bisect_right(ended, age)
        count = len(ended) - place
        longest = max(longest, sums[place] / count - age if count else beyond)
    return longest + waiting * sums[0] / len(ended) / max(1.0, slots)


@dataclass(frozen=True, slots=True)
class Average:
    """Exponentially weighted mean of measurements; the first replaces the prior."""

    value: float
    measured: bool = False

    def after(self, measurement: float) -> Average:
        """Return the mean with one more measurement."""
        if not self.measured:
            return Average(measurement, True)
        return replace(self, value=(1 - _WEIGHT) * self.value + _WEIGHT * measurement)


@dataclass(frozen=True, slots=True)
class Costs:
    """What going over costs, seconds. The priors are of a middling model on GPUs; one switch each way replaces them."""

    to_train: Average = field(default=Average(5.0))
    """From leaving the routing table to the first unit."""
    to_serve: Average = field(default=Average(5.0))
    """From the last unit to the first request."""
    join: Average = field(default=Average(0.0))
    """A satellite's weight pull and gradient push."""
