"""What a cell carries, when the runs under way will end, and what a change of role costs: estimates from measured numbers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf

__all__ = ["Average", "Capacity", "Costs", "Counters", "Limit", "Load", "carried", "rollout_left"]

_MORE = 0.05
"""Of the mean duration: what is left of a run that has taken longer than any that ended."""
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
    longest: float = 0.0
    """Seconds that the longest of all runs that ended took, also where it is none of the latest."""
    closed_runs: int = 0
    """Runs of the open burst whose groups have closed and are not sealed: their step is the next, or is about to seal them."""


@dataclass(frozen=True, slots=True)
class Load:
    """What was measured of one serving cell and of the runs that it carries; None: not known."""

    kv_tokens: float | None = None
    """Tokens whose keys and values its replica holds."""
    context_tokens: float | None = None
    """Tokens of a live run's context, mean; a run that waits for a tool keeps its context."""
    useful_calls: float | None = None
    """Requests of its replica beyond which a further one only slows the others."""
    calls_per_run: float | None = None
    """Requests that a live run has at a replica, mean over time: the rest of the time it is in tools."""


class Limit(StrEnum):
    """What bounds the runs of a cell."""

    SETTINGS = "settings"
    """The configured bound; nothing that was measured is below it."""
    CACHE = "cache"
    """Keys and values of more runs do not fit."""
    SPEED = "speed"
    """The replica samples no more tokens per second for more runs."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one serving cell carries."""

    runs: float
    """At full speed; one at least."""
    limit: Limit = Limit.SETTINGS


def carried(load: Load, bound: float) -> Capacity:
    """Return the runs that one serving cell carries at full speed.

    The least of what is known of

    * memory: `kv_tokens / context_tokens`, beyond which contexts push each other out of the cache;
    * speed: `useful_calls / calls_per_run`, beyond which runs wait for each other;
    * `bound`, the configured limit;

    and one at least: a run always has a place.
    """
    found = Capacity(bound)
    if load.kv_tokens and load.context_tokens and load.kv_tokens / load.context_tokens < found.runs:
        found = Capacity(load.kv_tokens / load.context_tokens, Limit.CACHE)
    if load.useful_calls and load.calls_per_run and load.useful_calls / load.calls_per_run < found.runs:
        found = Capacity(load.useful_calls / load.calls_per_run, Limit.SPEED)
    return replace(found, runs=max(1.0, found.runs))


def rollout_left(
    youngest: float | None,
    longest: float | None,
    mean: float,
    *,
    waiting: int = 0,
    slots: float = 1.0,
    rate: float = 1.0,
) -> float:
    """Return the estimated seconds until the last of the runs under way ends.

    The youngest is taken to be as long as the longest that has ended: of many runs some young one is. A run that waits for a
    slot is younger than all; those that wait add their mean duration, `slots` at a time. Longer than the longest so far
    is expected to go on for a twentieth of the mean.

    Args:
        youngest: seconds since the youngest run under way began; None: none is under way.
        longest: seconds that the longest run to end took; None: none has ended.
        mean: seconds that ended runs took.
        waiting: runs without a slot.
        slots: runs that can go on at the same time.
        rate: at what multiple of the ended runs' speed those under way go on; 0 where none is under way.

    Returns:
        0 when there is nothing to wait for, infinity when nothing has ended yet, or nothing can go on.
    """
    if youngest is None and not waiting:
        return 0.0
    if longest is None or slots <= 0:
        return inf
    age = 0.0 if waiting or youngest is None else youngest
    return max(longest - age, _MORE * mean) / (rate or 1.0) + waiting * mean / slots


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
    """From leaving the routing table until the replica has made room; a satellite's pull comes on top."""
    to_serve: Average = field(default=Average(5.0))
    """From the last unit to the first request."""
    join: Average = field(default=Average(0.0))
    """A satellite's weight pull and gradient push, once for each batch that it joins."""
