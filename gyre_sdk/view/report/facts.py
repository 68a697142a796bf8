"""What a report is made of: a store's runs and calls, and the steps of a training where it holds one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gyre_sdk.records import CallStatus, RunRecord
from gyre_sdk.view.timeline import Timeline


class CallFact(NamedTuple):
    """A call, as far as a report needs it."""

    run: str
    status: CallStatus
    sampled: int
    """Tokens."""
    version: int
    """Newest policy version that sampled a token of it; -1 when none is known."""
    ended_at: float | None
    """Seconds since the epoch; None while it is open."""
    fork: str | None
    """Why it does not continue a recorded path."""
    error: str | None


class Spent(NamedTuple):
    """What hosted models took for one call."""

    run: str
    sampled: int
    """Tokens, as the provider counts them."""
    dollars: float | None
    """None where nobody knows."""


@dataclass(frozen=True, slots=True)
class StepFact:
    """An optimizer step of the surviving lineage, or one that was skipped for want of anything to train."""

    number: int
    at: float
    """When it was committed, seconds since the epoch."""
    groups: Sequence[str]
    rewards: Sequence[float]
    """Of its runs that were evaluated."""
    units: int
    """0: it was skipped."""
    tokens: int
    """Targets."""
    metrics: Mapping[str, float]
    publish_s: float | None
    """Seconds from the number of the version that it made to its weights being served; None: it made none."""


@dataclass(frozen=True, slots=True)
class Facts:
    """A store at one moment."""

    name: str
    runs: Sequence[RunRecord]
    calls: Sequence[CallFact]
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Group -> the runs whose rewards are compared; those in which something is going on are left out."""
    spent: Sequence[Spent] = ()
    steps: Sequence[StepFact] = ()
    """In order."""
    versions: Mapping[int, int] = field(default_factory=dict)
    """Published version -> optimizer steps behind it; empty without a training."""
    resumed: int = 0
    """How often the training was taken up again."""
    tampered: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Run -> what its evaluation found that could have steered it; hostile text."""
    cells: Timeline | None = None
    read_at: float | None = None
    """When the store was read, seconds since the epoch."""
