"""What the runs of a training are like: drawn from a distribution, or taken from a recorded store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from gyre_sdk.errors import JournalError
from gyre_sdk.journal import Journal
from gyre_sdk.trainer.simulate.scenario import Scenario

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Workload:
    """Groups in the order in which they are handed out."""

    lengths: tuple[tuple[float, ...], ...]
    """Per group, its runs' lengths: seconds of work on a full cell."""
    work: tuple[float, ...]
    """Per group, its training work: cell-seconds."""

    @property
    def runs(self) -> int:
        """How many runs there are."""
        return sum(map(len, self.lengths))


@dataclass(frozen=True, slots=True)
class Recorded:
    """The groups of a store that ended."""

    lengths: tuple[tuple[float, ...], ...]
    """Seconds, per run of each group."""
    tokens: tuple[int, ...]
    """Tokens to train, per group."""


def drawn(scenario: Scenario, seed: int) -> Workload:
    """Draw groups: lognormal lengths, correlated in a group, cut at the timeout; work in proportion to length."""
    batch, runs = scenario.batch, scenario.runs
    rng = np.random.default_rng(seed)
    groups = batch.steps * batch.groups
    shared = rng.standard_normal((groups, 1))
    own = rng.standard_normal((groups, batch.runs))
    logs = runs.sigma * (sqrt(runs.correlation) * shared + sqrt(1 - runs.correlation) * own)
    lengths: Floats = np.minimum(runs.median_s * np.exp(logs), runs.timeout_s)
    sums = lengths.sum(axis=1)
    per_group = scenario.training.batch_s * scenario.fleet.cells / batch.groups
    return Workload(tuple(map(tuple, lengths.tolist())), tuple((sums / sums.mean() * per_group).tolist()))


def recorded(journal: Journal) -> Recorded:
    """Read the groups of a store: how long each run took, how many tokens its calls hold to train.

    A run without a group is a group of its own. Tokens are those of the longest call of each lane: its path.

    Raises:
        JournalError: no run in the store has ended.
    """
    tokens: dict[str, int] = defaultdict(int)
    for (run, _), longest in _longest(journal).items():
        tokens[run] += longest
    lengths: dict[str, list[float]] = defaultdict(list)
    sums: dict[str, int] = defaultdict(int)
    for one in journal.runs():
        if one.ended_at is None or one.ended_at <= one.created_at:
            continue
        group = one.group or f"run {one.run}"
        lengths[group].append(one.ended_at - one.created_at)
        sums[group] += tokens[one.run]
    if not lengths:
        raise JournalError(f"no run in {journal.path} has ended; record some, then ask again")
    return Recorded(tuple(map(tuple, lengths.values())), tuple(sums[group] for group in lengths))


def _longest(journal: Journal) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for call in journal.call_summaries():
        key = call.run, call.lane
        found[key] = max(found.get(key, 0), call.prompt_tokens + call.sampled_tokens)
    return found


def resampled(found: Recorded, scenario: Scenario, seed: int) -> Workload:
    """Hand out recorded groups, each as often as the next, in an order that the seed decides."""
    wanted = scenario.batch.steps * scenario.batch.groups
    rng = np.random.default_rng(seed)
    order: Iterable[int] = np.concatenate(
        [rng.permutation(len(found.lengths)) for _ in range(-(-wanted // len(found.lengths)))]
    )[:wanted].tolist()
    rate = scenario.training.tokens_per_cell_s
    pairs = [(found.lengths[index], max(found.tokens[index], 1) / rate) for index in order]
    return Workload(tuple(lengths for lengths, _ in pairs), tuple(work for _, work in pairs))
