"""Units: sealed micro-steps of training work, made from closed groups of recorded runs.

    calls of each run (journal) -> tree -> bounded selection -> weights and advantage -> rows -> units

A unit never changes once it is sealed: its id is a hash of its content, and sealing the same record with the same
settings gives the same id, in any process. Its coefficients do not depend on the batch it ends up in: weights sum to 1
over a run, and the division by the number of runs happens when the batch is closed.

Promise 9 of the design: whatever is recorded and not trained is counted, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from gyre_sdk.credit import Baseline, GroupCredit, Row, group_credit, run_weights, seed_of
from gyre_sdk.journal.reader import Reader
from gyre_sdk.records import CallId, CallRecord, RunId, RunRecord, Sampling
from gyre_sdk.select import select
from gyre_sdk.tree import RunTree, SampledCall

__all__ = ["NOT_REPRODUCIBLE", "Row", "SealedGroup", "Sealer", "Unit", "digest", "reproducible"]

NOT_REPRODUCIBLE = "call_sampling"
"""Counted calls: the trainer cannot compute the distribution they were sampled from."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows that are trained in one go, with frozen coefficients."""

    id: str
    """Hash of the content."""
    group: str
    rows: tuple[Row, ...]
    runs: int
    """Runs whose first row is here: over all units of a batch, each run counts once."""
    tokens: int
    """Targets."""


@dataclass(frozen=True, slots=True)
class SealedGroup:
    """What a closed group gives to training."""

    group: str
    units: tuple[Unit, ...]
    credit: GroupCredit
    dropped: Counter[str] = field(default_factory=Counter)
    """What is recorded and not trained: `group_flat`, `group_too_small`, `run_unscored`, `run_without_targets`
    (runs), `call_<reason>` (calls)."""


@dataclass(frozen=True, slots=True)
class Sealer:
    """Makes units of closed groups."""

    j_max: int | None = 5
    """Most trajectories of a run; None for all."""
    seed: int = 0
    """Of the selection; each run draws from it and its own id."""
    baseline: Baseline = Baseline.SAMPLE_STD
    unit_tokens: int = 0
    """Path tokens after which a unit is full; 0 makes one unit of a group."""

    def seal(self, journal: Reader, group: str, runs: Sequence[str]) -> SealedGroup:
        """Read a group's runs from the store and seal what can be trained.

        Args:
            runs: the runs that make up the group; others of its record (cancelled ones) are left out.
        """
        wanted = set(runs)
        records = [record for record in journal.runs(group=group) if record.run in wanted]
        return self.seal_records(group, records, lambda run: journal.calls(run))

    def seal_records(
        self, group: str, runs: Sequence[RunRecord], calls_of: Callable[[str], Iterable[CallRecord]]
    ) -> SealedGroup:
        """Seal from records."""
        credit = group_credit(runs, baseline=self.baseline)
        dropped: Counter[str] = Counter()
        unscored = len(runs) - credit.scored - credit.placeholders
        if unscored:
            dropped["run_unscored"] = unscored
        if credit.dropped is not None:
            dropped[f"group_{credit.dropped}"] = 1
            return SealedGroup(group, (), credit, dropped)
        rows: list[Row] = []
        for run in sorted(runs, key=lambda record: (record.member, record.run)):
            advantage = credit.advantages.get(run.run)
            if advantage is None:
                continue
            records = list(calls_of(run.run))
            temperatures = {call.call: call.sampling.temperature for call in records}
            tree = RunTree.from_calls(_sampled(call, dropped) for call in records)
            for reason, count in tree.untrained_counts().items():
                if reason != "excluded":  # counted above, by its cause
                    dropped[f"call_{reason}"] += count
            kept = self._rows(run.run, tree, advantage, temperatures)
            dropped["run_without_targets"] += not kept
            rows += kept
        return SealedGroup(group, tuple(self._units(group, rows)), credit, +dropped)

    def _rows(self, run: RunId, tree: RunTree, advantage: float, temperatures: Mapping[CallId, float]) -> list[Row]:
        selection = select(tree, j_max=self.j_max, seed=seed_of(run, self.seed))
        weights = run_weights(selection)
        return [
            Row.of(run, selected, weight, advantage=advantage, temperatures=temperatures)
            for selected, weight in zip(selection, weights, strict=True)
        ]

    def _units(self, group: str, rows: Sequence[Row]) -> list[Unit]:
        units: list[Unit] = []
        seen: set[str] = set()
        start = 0
        size = 0
        for stop, row in enumerate(rows, 1):
            size += len(row.ids)
            if stop == len(rows) or (self.unit_tokens and size >= self.unit_tokens):
                part = tuple(rows[start:stop])
                fresh = {kept.run for kept in part} - seen
                seen |= fresh
                units.append(Unit(digest(part), group, part, len(fresh), sum(len(kept.targets) for kept in part)))
                start, size = stop, 0
        return units


def reproducible(sampling: Sampling) -> bool:
    """Tell whether the trainer can compute the sampled distribution: the model's own, at the recorded temperature."""
    return sampling.irreproducible is None


def digest(rows: Iterable[Row]) -> str:
    """Return the hash of rows: every number that the gradient depends on."""
    found = blake2b(digest_size=16)
    for row in rows:
        names = (*row.call_ids, *row.call_roles)
        for text in (row.run, row.leaf, row.role, repr(row.advantage), str(len(row.call_ids)), *names):
            found.update(text.encode() + b"\0")
        numbers = (row.ids, row.targets, row.weights, row.logprobs, row.versions)
        for array in (*numbers, row.calls, row.advantages, row.temperatures):
            found.update(len(array).to_bytes(8, "little") + array.tobytes())
    return found.hexdigest()


def _sampled(call: CallRecord, dropped: Counter[str]) -> SampledCall:
    exact = not call.prompt_ids or reproducible(call.sampling)  # without ids a hosted model answered: the tree's count
    dropped[NOT_REPRODUCIBLE] += not exact
    return SampledCall.from_record(call, excluded=not exact)
