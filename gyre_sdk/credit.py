"""Who gets how much credit: group-relative advantages, and loss weights under which every run weighs the same.

Statistics are over *runs*, each once, whatever its number of trajectories. A run without a trustworthy reward (None,
NaN, infinite) is unknown, not bad: it neither trains nor moves the baseline of its siblings. A group without contrast
trains nothing and leaves the denominator; it is counted, never trained with advantage zero.

The loss is a two-level mean (arXiv:2609.33848): over the owned tokens inside a run, then over runs,
`L = 1/R * sum_run sum_t w_t l_t` with `sum_t w_t = 1` in each run. Here are the inner weights; `batch_scale` gives 1/R.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from math import fsum, isfinite, sqrt

import numpy as np
from numpy.typing import NDArray

from gyre_sdk.errors import SettingsError
from gyre_sdk.records import CallId, CallRecord, GroupId, RunId, RunRecord, RunStatus, TrajectoryRecord
from gyre_sdk.select import J_MAX, Selected, select
from gyre_sdk.tree import RunTree, SampledCall

__all__ = [
    "Baseline",
    "Dropped",
    "GroupCredit",
    "Tally",
    "advantages",
    "batch_scale",
    "group_credit",
    "run_weights",
    "seed_of",
    "tally",
    "trajectories",
]

_INFRASTRUCTURE = "infrastructure"
"""How the error of a run begins that the model side ended."""
_ROUNDING_RELATIVE = 1e-9
_ROUNDING_ABSOLUTE = 1e-12
"""Rewards of a group whose range is within these differ by rounding only."""


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
    evaluated = {run.run: run.reward for run in members if _scored(run) and run.reward is not None}
    placeholders = sum(run.placeholder for run in members)
    votes = list(evaluated.values()) + [0.0] * (placeholders if placeholders_vote else 0)
    count = len(votes)
    mean = fsum(votes) / count if count else None
    spread = max(votes) - min(votes) if votes else 0.0
    # Squares of fractions of the spread: neither tiny nor huge rewards leave the range of floats.
    squares = fsum(((vote - mean) / spread) ** 2 for vote in votes) if mean is not None and spread else 0.0
    dropped = _dropped(votes)
    found: dict[RunId, float] = {}
    if dropped is None and mean is not None:
        scale = {
            Baseline.MEAN: 1.0,
            Baseline.POPULATION_STD: 1 / (spread * sqrt(squares / count)),
            Baseline.SAMPLE_STD: 1 / (spread * sqrt(squares / (count - 1))),
            Baseline.LEAVE_ONE_OUT: count / (count - 1),
        }[baseline]
        found = {run: (reward - mean) * scale for run, reward in sorted(evaluated.items())}
    return GroupCredit(
        advantages=found,
        dropped=dropped,
        mean=mean,
        std=spread * sqrt(squares / count) if count else None,
        scored=len(evaluated),
        placeholders=placeholders,
        started=len(members),
    )


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
        return f"scored {self.scored} of {self.started}, {self.placeholders} placeholder, {self.unscored} unscored" + (
            f" ({causes})" if causes else ""
        )


def tally(runs: Iterable[RunRecord]) -> Tally:
    """Count ended runs by outcome; runs that are still going are left out."""
    ended = [run for run in runs if run.status is not RunStatus.RUNNING]
    unscored = [run for run in ended if not run.placeholder and not _scored(run)]
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


def run_weights(
    tree: RunTree, selection: Sequence[Selected], *, role_weights: Mapping[str, float] | None = None
) -> list[NDArray[np.float64]]:
    """Return the loss weight per path token of each trajectory of a run; they sum to 1 over the run.

    Every owned token weighs the same, or as the role of the call that sampled it says (default 1).

    Raises:
        SettingsError: a role weight is not a positive finite number.
    """
    factors = role_weights or {}
    for role, factor in factors.items():
        if not (isfinite(factor) and factor > 0):
            raise SettingsError(f"role weight of {role!r} is {factor}; give a positive number")

    def factor_of(call: CallId) -> float:
        return factors.get(tree.role(call), 1.0)

    total = fsum(factor_of(span.call) * (span.stop - span.start) for row in selection for span in row.owned_spans)
    found = []
    for row in selection:
        weights = np.zeros(len(row.path.ids), np.float64)
        for span in row.owned_spans:
            weights[span.start : span.stop] = factor_of(span.call) / total
        found.append(weights)
    return found


def batch_scale(rows: Iterable[TrajectoryRecord]) -> float:
    """Return 1/R: the weight of one run among the runs of a batch that have a target and an advantage.

    Multiply it with each row's `weights`. A batch with nothing to train gives 0.0: skip the step and count it.
    """
    runs = {row.run for row in rows if row.advantage is not None and any(row.owned)}
    return 1 / len(runs) if runs else 0.0


def trajectories(
    run: RunId,
    calls: Iterable[CallRecord | SampledCall],
    *,
    j_max: int | None = J_MAX,
    seed: int = 0,
    advantage: float | None = None,
    role_weights: Mapping[str, float] | None = None,
) -> list[TrajectoryRecord]:
    """Build a run's tree, select its trajectories and weigh their tokens.

    The same calls, in any order, and the same seed give the same rows. Runs draw independently under one seed. A run
    without a target gives no rows; `RunTree.untrained_counts` tells why.

    Raises:
        TreeError: the calls contradict each other.
        SettingsError: `j_max` or a role weight is out of range.
    """
    tree = RunTree.from_calls(calls)
    selection = select(tree, j_max=j_max, seed=seed_of(run, seed))
    weights = run_weights(tree, selection, role_weights=role_weights)
    return [
        TrajectoryRecord(
            run=run,
            leaf=row.leaf,
            role=row.role,
            path_ids=row.path.ids.tolist(),
            owned=row.owned.astype(np.int8).tolist(),
            weights=weight.tolist(),
            advantage=advantage,
            logprobs=row.logprobs.tolist(),
            versions=row.versions.tolist(),
        )
        for row, weight in zip(selection, weights, strict=True)
    ]


def seed_of(run: RunId, seed: int) -> list[int]:
    """Return the seed of a run's selection under the seed of all: the same in every process."""
    return [seed % 2**64, int.from_bytes(blake2b(run.encode(), digest_size=8).digest(), "little")]


def _scored(run: RunRecord) -> bool:
    """Tell whether a run has an evaluated reward: a finite number, and no placeholder."""
    return run.reward is not None and isfinite(run.reward) and not run.placeholder


def _dropped(votes: list[float]) -> Dropped | None:
    if len(votes) < 2:
        return Dropped.TOO_SMALL
    size = max(abs(vote) for vote in votes)
    flat = max(votes) - min(votes) <= max(_ROUNDING_ABSOLUTE, _ROUNDING_RELATIVE * size)
    return Dropped.FLAT if flat else None
