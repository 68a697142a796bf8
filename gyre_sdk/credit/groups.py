"""Group-relative advantages: what the rewards of a group say about each of its runs.

Statistics are over *runs*, each once, whatever its number of trajectories or calls. A run without a trustworthy reward
(None, NaN, infinite) is unknown, not bad: it neither trains nor moves the baseline of its siblings. A group without
contrast trains nothing and leaves the denominator; it is counted, never trained with advantage zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import frexp, fsum, isfinite, ldexp, sqrt
from sys import float_info

from gyre_sdk.records import GroupId, RunId, RunRecord, RunStatus

_INFRASTRUCTURE = "infrastructure"
"""How the error of a run begins that the model side ended."""
_ROUNDING_RELATIVE = 1e-9
_ROUNDING_ABSOLUTE = 1e-12
"""Rewards of a group whose range is within these differ by rounding only."""
_EXPONENT = 512
"""Rewards whose binary exponent is above are compared at a smaller scale: their sums, too, are in the range of floats."""


class Baseline(StrEnum):
    """How a reward becomes an advantage."""

    MEAN = "mean"
    """Reward minus the group's mean."""
    POPULATION_STD = "population_std"
    """The same, divided by the standard deviation with denominator n."""
    SAMPLE_STD = "sample_std"
    """The same, divided by the standard deviation with denominator n - 1."""
    LEAVE_ONE_OUT = "leave_one_out"
    """Reward minus the mean of the *other* runs."""


class Dropped(StrEnum):
    """Why a group trains nothing."""

    TOO_SMALL = "too_small"
    """Fewer than two rewards vote."""
    FLAT = "flat"
    """All rewards are equal up to rounding."""


@dataclass(frozen=True, slots=True)
class GroupCredit:
    """What the rewards of a group say."""

    advantages: dict[RunId, float]
    """For the evaluated runs; empty when the group is dropped."""
    dropped: Dropped | None
    mean: float | None
    """Mean of the rewards that vote; None when there are none."""
    std: float | None
    """Their population standard deviation."""
    scored: int
    """Runs with an evaluated reward."""
    placeholders: int
    """Runs that never started and stand with reward 0; they vote unless told otherwise, and have no token to train."""
    started: int
    """All runs of the group."""


def group_credit(
    runs: Iterable[RunRecord], *, baseline: Baseline = Baseline.MEAN, placeholders_vote: bool = True
) -> GroupCredit:
    """Compare the rewards of one group's runs.

    The result is the same to the last bit for any order of the runs.
    """
    members = list(runs)
    evaluated = {run.run: [run.reward] for run in members if scored(run) and run.reward is not None}
    placeholders = sum(run.placeholder for run in members)
    found = compare(evaluated, baseline=baseline, further=[0.0] * (placeholders if placeholders_vote else 0))
    return GroupCredit(
        advantages={run: values[0] for run, values in found.advantages.items()},
        dropped=found.dropped,
        mean=found.mean,
        std=found.std,
        scored=len(evaluated),
        placeholders=placeholders,
        started=len(members),
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a set of rewards says, one or several for each run."""

    advantages: dict[RunId, list[float]]
    """In the order in which the rewards were given; empty when the set is dropped."""
    dropped: Dropped | None
    mean: float | None
    """Mean over runs of the mean reward of each."""
    std: float | None
    """Population standard deviation around it, every run weighing the same."""


def compare(
    rewards: Mapping[RunId, Sequence[float]], *, baseline: Baseline, further: Sequence[float] = ()
) -> Comparison:
    """Return the advantage of every reward of a set against the whole set.

    A run counts once: its rewards share its vote in the mean and in the variance, and `leave_one_out` takes the mean of
    the *other* runs. With one reward per run these are the usual statistics.

    An advantage that is beyond the range of floats, as only the difference of rewards can be, is the largest float.

    Args:
        rewards: at least one finite reward for each run.
        further: votes of runs that get no advantage.
    """
    given = [*rewards.values(), *([vote] for vote in further)]
    count, flat = len(given), [vote for values in given for vote in values]
    dropped = _dropped(count, flat)
    if not count:
        return Comparison({}, dropped, None, None)
    shift = max(0, frexp(max(abs(vote) for vote in flat))[1] - _EXPONENT)
    votes, size = [[ldexp(vote, -shift) for vote in values] for values in given], 2.0**shift
    means = [fsum(values) / len(values) for values in votes]
    mean = fsum(means) / count
    spread = max(map(max, votes)) - min(map(min, votes))
    # Squares of fractions of the spread: they do not leave the range of floats either.
    squares = fsum(fsum(((vote - mean) / spread) ** 2 for vote in v) / len(v) for v in votes) if spread else 0.0
    found: dict[RunId, list[float]] = {}
    if dropped is None:
        scale = {
            Baseline.MEAN: size,
            Baseline.POPULATION_STD: 1 / (spread * sqrt(squares / count)),
            Baseline.SAMPLE_STD: 1 / (spread * sqrt(squares / (count - 1))),
            Baseline.LEAVE_ONE_OUT: size,
        }[baseline]
        for run, values, own in sorted(zip(rewards, votes, means, strict=False)):
            # The mean of the other runs is (count * mean - own) / (count - 1).
            leaving_own = (own - mean) / (count - 1) if baseline is Baseline.LEAVE_ONE_OUT else 0.0
            found[run] = [_finite((vote - mean + leaving_own) * scale) for vote in values]
    return Comparison(found, dropped, mean * size, spread * sqrt(squares / count) * size)


def _finite(advantage: float) -> float:
    return min(max(advantage, -float_info.max), float_info.max)


def advantages(
    runs: Iterable[RunRecord], *, baseline: Baseline = Baseline.MEAN, placeholders_vote: bool = True
) -> dict[RunId, float]:
    """Return the advantage of every run that has one; groups do not touch each other."""
    groups: dict[GroupId, list[RunRecord]] = {}
    for run in runs:
        if run.group is not None:
            groups.setdefault(run.group, []).append(run)
    found: dict[RunId, float] = {}
    for members in groups.values():
        found |= group_credit(members, baseline=baseline, placeholders_vote=placeholders_vote).advantages
    return found


@dataclass(frozen=True, slots=True)
class Tally:
    """How many runs have a reward, and what happened to the others."""

    started: int
    scored: int
    """With an evaluated reward."""
    placeholders: int
    unscored: int
    causes: dict[str, int]
    """Unscored runs by terminal state; those that the model side ended, as `infrastructure`."""

    def __str__(self) -> str:
        causes = ", ".join(f"{count} {cause}" for cause, count in sorted(self.causes.items()))
        return (
            f"scored {self.scored:,} of {self.started:,}, {self.placeholders:,} placeholder, {self.unscored:,} unscored"
            + (f" ({causes})" if causes else "")
        )


def tally(runs: Iterable[RunRecord]) -> Tally:
    """Count ended runs by outcome; runs that are still going are left out."""
    ended = [run for run in runs if run.status is not RunStatus.RUNNING]
    unscored = [run for run in ended if not run.placeholder and not scored(run)]
    placeholders = sum(run.placeholder for run in ended)
    return Tally(
        started=len(ended),
        scored=len(ended) - placeholders - len(unscored),
        placeholders=placeholders,
        unscored=len(unscored),
        causes=dict(Counter(_cause(run) for run in unscored)),
    )


def _cause(run: RunRecord) -> str:
    failed = run.status is RunStatus.AGENT_ERROR and (run.error or "").startswith(_INFRASTRUCTURE)
    return _INFRASTRUCTURE if failed else str(run.status)


def scored(run: RunRecord) -> bool:
    """Tell whether a run has an evaluated reward: a finite number, and no placeholder."""
    return run.reward is not None and isfinite(run.reward) and not run.placeholder


def _dropped(runs: int, votes: list[float]) -> Dropped | None:
    if runs < 2:
        return Dropped.TOO_SMALL
    size = max(abs(vote) for vote in votes)
    flat = max(votes) - min(votes) <= max(_ROUNDING_ABSOLUTE, _ROUNDING_RELATIVE * size)
    return Dropped.FLAT if flat else None
