"""A trajectory with its numbers: what a run's selection becomes, straight from the tree, as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import isfinite, nan

import numpy as np
from numpy.typing import NDArray

from gyre_sdk.credit.weights import run_weights
from gyre_sdk.records import CallId, CallRecord, RunId, TrajectoryRecord
from gyre_sdk.select import J_MAX, ROLES, Role, Rule, Selected, ordered_roles, select
from gyre_sdk.tree import RunTree, SampledCall


def _unset_integers() -> NDArray[np.int32]:
    return np.empty(0, np.int32)


def _unset_numbers() -> NDArray[np.float64]:
    return np.empty(0, np.float64)


@dataclass(frozen=True, slots=True)
class Row:
    """A trajectory with what its targets are worth. K targets.

    What is left out of the last five fields is filled in: one call (the leaf, in the row's role), the run's advantage
    on every target, temperature 1. `dataclasses.replace` keeps the filled-in values: change `advantages` together with
    `advantage`.
    """

    run: str
    leaf: str
    role: str
    ids: NDArray[np.int32]
    """Token ids of the path."""
    targets: NDArray[np.int32]
    """Path positions of the owned tokens, (K,), ascending."""
    weights: NDArray[np.float64]
    """Loss weight per target, (K,); sums to 1 over the rows of a run."""
    logprobs: NDArray[np.float64]
    """Behaviour log-prob (nats) per target, (K,)."""
    versions: NDArray[np.int32]
    """Version that sampled each target, (K,)."""
    advantage: float
    """Advantage of the run, on every row unsplit; NaN where the run has none, and then the row is never sealed."""
    calls: NDArray[np.int32] = field(default_factory=_unset_integers)
    """Index into `call_ids` of the call that sampled each target, (K,)."""
    call_ids: tuple[str, ...] = ()
    """Calls that sampled the targets, in the order of the path."""
    call_roles: tuple[str, ...] = ()
    """Their roles."""
    advantages: NDArray[np.float64] = field(default_factory=_unset_numbers)
    """Advantage per target, (K,): the run's, unless roles or calls have rewards of their own."""
    temperatures: NDArray[np.float64] = field(default_factory=_unset_numbers)
    """Temperature that each target was sampled with, (K,)."""

    def __post_init__(self) -> None:
        """Fill in what was left out."""
        count = len(self.targets)
        if not self.call_ids:
            object.__setattr__(self, "call_ids", (self.leaf,))
            object.__setattr__(self, "call_roles", (self.role,))
        if not len(self.calls):
            object.__setattr__(self, "calls", np.zeros(count, np.int32))
        if not len(self.advantages):
            object.__setattr__(self, "advantages", np.full(count, self.advantage, np.float64))
        if not len(self.temperatures):
            object.__setattr__(self, "temperatures", np.ones(count, np.float64))

    @classmethod
    def of(
        cls,
        run: str,
        selected: Selected,
        weights: NDArray[np.float64],
        *,
        advantage: float,
        advantages: Mapping[CallId, float] | None = None,
        temperatures: Mapping[CallId, float] | None = None,
    ) -> Row:
        """Take a selected path.

        Args:
            weights: loss weight of each target, (K,).
            advantages: of calls that have one of their own; the others get the run's.
            temperatures: of calls; 1 for those that are not there.
        """
        spans, tree = selected.owned_spans, selected.tree
        sizes = [span.stop - span.start for span in spans]
        own, warm = advantages or {}, temperatures or {}
        return cls(
            run=run,
            leaf=selected.leaf,
            role=selected.role,
            ids=selected.ids,
            targets=selected.positions,
            weights=weights,
            logprobs=selected.logprobs,
            versions=selected.versions,
            advantage=advantage,
            calls=selected.calls,
            call_ids=tuple(span.call for span in spans),
            call_roles=tuple(tree.role(span.call) for span in spans),
            advantages=np.repeat([own.get(span.call, advantage) for span in spans], sizes),
            temperatures=np.repeat([warm.get(span.call, 1.0) for span in spans], sizes),
        )

    def record(self) -> TrajectoryRecord:
        """Return the trajectory as a value for the disk: lists per path token."""

        def along(values: NDArray[np.float64] | NDArray[np.int32] | int, rest: float) -> list[float]:
            whole = np.full(len(self.ids), rest, getattr(values, "dtype", np.int8))
            whole[self.targets] = values
            return whole.tolist()  # type: ignore[no-any-return]

        return TrajectoryRecord(
            run=RunId(self.run),
            leaf=CallId(self.leaf),
            role=self.role,
            path_ids=self.ids.tolist(),
            owned=along(1, 0),  # type: ignore[arg-type]
            weights=along(self.weights, 0.0),
            advantage=self.advantage if isfinite(self.advantage) else None,
            logprobs=along(self.logprobs, 0.0),
            versions=along(self.versions, -1),  # type: ignore[arg-type]
            advantages=[value if isfinite(value) else None for value in along(self.advantages, 0.0)],
            temperatures=along(self.temperatures, 1.0),
            calls=[CallId(self.call_ids[place]) if place >= 0 else None for place in map(int, along(self.calls, -1))],
        )

    @classmethod
    def from_record(cls, record: TrajectoryRecord) -> Row:
        """Take a trajectory from the disk. The roles of its calls are not there: each gets the row's."""
        targets = np.flatnonzero(np.asarray(record.owned)).astype(np.int32)
        named = [CallId(str(record.calls[place])) for place in targets] if record.calls else []
        call_ids = tuple(dict.fromkeys(named))
        place_of = {name: place for place, name in enumerate(call_ids)}
        advantage = nan if record.advantage is None else float(record.advantage)

        def picked(values: Sequence[float | None]) -> NDArray[np.float64]:
            return np.array([nan if value is None else value for value in values], np.float64)[targets]

        return cls(
            run=record.run,
            leaf=record.leaf,
            role=record.role,
            ids=np.asarray(record.path_ids, dtype=np.int32),
            targets=targets,
            weights=picked(record.weights),
            logprobs=picked(record.logprobs),
            versions=np.asarray(record.versions, dtype=np.int32)[targets],
            advantage=advantage,
            calls=np.array([place_of[name] for name in named], np.int32),
            call_ids=call_ids,
            call_roles=(record.role,) * len(call_ids),
            advantages=picked(record.advantages) if record.advantages else _unset_numbers(),
            temperatures=picked(record.temperatures) if record.temperatures else _unset_numbers(),
        )


def trajectories(
    run: RunId,
    calls: Iterable[CallRecord | SampledCall],
    *,
    rule: Rule | str = "paper",
    j_max: int | None = J_MAX,
    seed: int = 0,
    roles: Iterable[Role | str] = ROLES,
    advantage: float | None = None,
) -> list[Row]:
    """Build a run's tree, select its trajectories and weigh their targets.

    The same calls, in any order, the same rule and the same seed give the same rows. Runs draw independently under one
    seed. A run without a target gives no rows; `RunTree.untrained_counts` tells why.

    Raises:
        TreeError: the calls contradict each other.
        SettingsError: `j_max`, the rule or a role's weight cannot be.
    """
    known = ordered_roles(roles)
    idle = {role.name for role in known if not role.weight}
    tree = RunTree.from_calls(_taken(call, idle) for call in calls)
    selection = select(tree, rule=rule, j_max=j_max, seed=seed_of(run, seed), roles=known)
    weights = run_weights(selection, role_weights={role.name: role.weight for role in known})
    number = nan if advantage is None else advantage
    return [Row.of(run, row, weight, advantage=number) for row, weight in zip(selection, weights, strict=True)]


def _taken(call: CallRecord | SampledCall, idle: set[str]) -> CallRecord | SampledCall:
    """Return a call, left out as a target when its role has no weight."""
    if call.role not in idle:
        return call
    if isinstance(call, CallRecord):
        return SampledCall.from_record(call, excluded=True)
    return replace(call, excluded=True)


def seed_of(run: RunId, seed: int) -> list[int]:
    """Return the seed of a run's selection under the seed of all: the same in every process."""
    return [seed % 2**64, int.from_bytes(blake2b(run.encode(), digest_size=8).digest(), "little")]


def batch_scale(rows: Iterable[Row]) -> float:
    """Return 1/R: the weight of one run among the runs of a batch that have a target and an advantage.

    Multiply it with each row's `weights`. A batch with nothing to train gives 0.0: skip the step and count it.
    """
    runs = {row.run for row in rows if len(row.targets) and np.isfinite(row.advantages).all()}
    return 1 / len(runs) if runs else 0.0
