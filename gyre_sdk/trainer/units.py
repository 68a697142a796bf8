"""Units: sealed micro-steps of training work, made from closed groups of recorded runs.

    calls of each run (journal) -> tree -> selection -> weights and advantages -> rows -> units

A unit never changes once it is sealed: its id is a hash of its content, and sealing the same record with the same
settings gives the same id, in any process. Its coefficients do not depend on the batch it ends up in: weights sum to 1
over a run, and the division by the number of runs happens when the batch is closed.

Promise 9 of the design: whatever is recorded and not trained is counted, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre_sdk.credit import (
    Baseline,
    CallFacts,
    CreditHook,
    Filters,
    GroupCredit,
    Lag,
    Mask,
    OwnCredit,
    Row,
    ask,
    group_credit,
    own_credit,
    run_weights,
    scored,
    seed_of,
)
from gyre_sdk.errors import SettingsError
from gyre_sdk.journal.reader import Reader
from gyre_sdk.records import CallId, CallRecord, RunRecord, Sampling
from gyre_sdk.select import J_MAX, ROLES, RULES, Role, Rule, Selected, ordered_roles, select
from gyre_sdk.tree import RunTree, SampledCall, Untrained

__all__ = [
    "NOT_REPRODUCIBLE",
    "Row",
    "RunRows",
    "SealedGroup",
    "Sealer",
    "Unit",
    "digest",
    "reproducible",
    "unique_tokens",
]

NOT_REPRODUCIBLE = f"call_{Mask.SAMPLING}"
"""Counted calls: the trainer cannot compute the distribution they were sampled from."""
UNSELECTED = "call_unselected"
"""Counted calls: fit to be trained, on no path that was taken."""

CallsOf = Callable[[str], Iterable[CallRecord]]
"""Run -> its recorded calls; may be asked more than once."""


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
class RunRows:
    """What a run gives to training."""

    rows: tuple[Row, ...]
    """Depth first: rows that share the longest prefixes lie next to each other."""
    dropped: Counter[str]
    """Calls that are not trained, as `call_<reason>`."""
    dropped_tokens: Counter[str]
    """What these sampled, in tokens."""
    calls: int
    raw_tokens: int
    """Prompt + sampled ids, summed over its calls."""
    unique_tokens: int
    """Tokens of its tree."""


@dataclass(frozen=True, slots=True)
class SealedGroup:
    """What a closed group gives to training."""

    group: str
    units: tuple[Unit, ...]
    credit: GroupCredit
    dropped: Counter[str] = field(default_factory=Counter)
    """What is recorded and not trained: `group_flat`, `group_too_small`, `set_flat`, `set_too_small` (rewards of roles
    or calls), `run_unscored`, `run_without_targets` (runs), `call_<reason>` (calls of the runs that have a reward)."""
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    """Sampled tokens of the calls in `dropped`."""
    own: OwnCredit | None = None
    """What a credit hook made of it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """`Sealer.settings`: with them and the record the units can be made again."""


@dataclass(frozen=True)
class Sealer:
    """Makes units of closed groups. Two equal ones make equal units of the same record, in any process."""

    j_max: int | None = J_MAX
    """Most trajectories of a run; None for all."""
    seed: int = 0
    """Of the selection; each run draws from it and its own id."""
    baseline: Baseline = Baseline.SAMPLE_STD
    unit_tokens: int = 0
    """Tokens of a unit's rows at most, shared prefixes counted once; a longer row is a unit of its own. 0 makes one unit
    of a group."""
    rule: str | Rule = "paper"
    """Selects trajectories: a name in `select.RULES`, or `module:function`."""
    roles: tuple[Role, ...] = ROLES
    """In order of priority."""
    max_staleness: int | None = None
    """Calls with a token more than this many steps old become context; None trains all."""
    mask_truncated: bool = False
    """Calls that were cut off by their length limit become context."""
    credit_hook: str | CreditHook | None = None
    """Gives rewards per role or call: `module:function`."""
    base: Path = field(default_factory=Path)
    """Folder whose modules may be named."""

    def __post_init__(self) -> None:
        """Check the roles."""
        object.__setattr__(self, "roles", ordered_roles(self.roles))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What the units depend on beside the record, as JSON values."""
        return {
            "rule": _name(self.rule),
            "j_max": self.j_max,
            "seed": self.seed,
            "roles": [{"name": role.name, "weight": role.weight, "j_max": role.j_max} for role in self.roles],
            "baseline": str(self.baseline),
            "credit_hook": None if self.credit_hook is None else _name(self.credit_hook),
            "max_staleness": self.max_staleness,
            "mask_truncated": self.mask_truncated,
            "unit_tokens": self.unit_tokens,
        }

    def seal(self, journal: Reader, group: str, runs: Sequence[str], *, lag: Lag | None = None) -> SealedGroup:
        """Read a group's runs from the store and seal what can be trained.

        Args:
            runs: the runs that make up the group; others of its record (cancelled ones) are left out.
            lag: version -> steps by which it is behind the policy in training; needed with `max_staleness`.
        """
        wanted = set(runs)
        records = [record for record in journal.runs(group=group) if record.run in wanted]
        return self.seal_records(group, records, lambda run: journal.calls(run, arrays=True), lag=lag)

    def seal_records(
        self, group: str, runs: Sequence[RunRecord], calls_of: CallsOf, *, lag: Lag | None = None
    ) -> SealedGroup:
        """Seal from records.

        Raises:
            HookError: the credit hook is at fault.
            SettingsError: a setting cannot be.
            TreeError: the calls of a run contradict each other.
        """
        credit, own, dropped = self.credit(runs, calls_of)
        tokens: Counter[str] = Counter()
        rows: list[Row] = []
        for run in sorted(runs, key=lambda record: (record.member, record.run)):
            if not scored(run) or (credit.dropped is not None and own is None):
                continue
            found = self.run_rows(run, calls_of, credit.advantages.get(run.run), own, lag=lag)
            dropped.update(found.dropped)
            tokens.update(found.dropped_tokens)
            dropped["run_without_targets"] += not found.rows
            rows += found.rows
        units = tuple(_units(group, rows, self.unit_tokens))
        return SealedGroup(group, units, credit, +dropped, +tokens, own, self.settings)

    def credit(
        self, runs: Sequence[RunRecord], calls_of: CallsOf
    ) -> tuple[GroupCredit, OwnCredit | None, Counter[str]]:
        """Compare the runs of a group; return also what a credit hook adds, and what is counted of both.

        Raises:
            HookError: the credit hook is at fault.
        """
        credit, own = group_credit(runs, baseline=self.baseline), None
        dropped: Counter[str] = Counter()
        dropped["run_unscored"] = len(runs) - credit.scored - credit.placeholders
        if credit.dropped is not None:
            dropped[f"group_{credit.dropped}"] = 1
        if self.credit_hook is not None:
            name, hook = _name(self.credit_hook), self._hook
            judged = []
            for run in sorted((run for run in runs if scored(run)), key=lambda record: (record.member, record.run)):
                facts = [CallFacts.of(call) for call in calls_of(run.run)]
                judged.append((run, facts, ask(hook, name, run, facts)))
            own = own_credit(judged, name=name, baseline=self.baseline)
            dropped.update(f"set_{found.dropped}" for found in own.sets.values() if found.dropped is not None)
        return credit, own, +dropped

    def run_rows(
        self,
        run: RunRecord,
        calls_of: CallsOf,
        advantage: float | None,
        own: OwnCredit | None = None,
        *,
        lag: Lag | None = None,
        uncredited: bool = False,
    ) -> RunRows:
        """Select a run's trajectories.

        Args:
            advantage: of the run; None when it has none.
            own: advantages of calls that have one of their own.
            lag: see `seal`.
            uncredited: make rows of calls without an advantage too, with NaN in its place; they are never trained.
        """
        if self.max_staleness is not None and lag is None:
            raise SettingsError(
                f"max_staleness is {self.max_staleness}, and nobody told how far versions lag behind: seal with `lag`"
            )
        filters = Filters(
            self.mask_truncated, self.max_staleness, frozenset(role.name for role in self.roles if not role.weight)
        )
        credited = own.advantages.get(run.run, {}) if own is not None else {}
        masks: dict[CallId, Mask] = {}
        temperatures: dict[CallId, float] = {}

        def sampled() -> Iterable[SampledCall]:
            for call in calls_of(run.run):
                facts = CallFacts.of(call)
                mask = filters.mask(facts, lag or _current)
                if mask is None and credited.get(call.call, advantage) is None and not uncredited:
                    mask = Mask.NO_CREDIT
                if mask is not None:
                    masks[call.call] = mask
                temperatures[call.call] = call.sampling.temperature
                yield SampledCall.from_record(call, excluded=mask is not None)

        tree = RunTree.from_calls(sampled())
        selection = select(tree, rule=self._rule, j_max=self.j_max, seed=seed_of(run.run, self.seed), roles=self.roles)
        weights = run_weights(selection, role_weights={role.name: role.weight for role in self.roles})
        rows = [
            Row.of(
                run.run,
                selected,
                weight,
                advantage=_number(advantage, uncredited),
                advantages={call: _number(value, uncredited) for call, value in credited.items()},
                temperatures=temperatures,
            )
            for selected, weight in zip(selection, weights, strict=True)
        ]
        dropped, tokens = _untrained(tree, masks, selection)
        rows.sort(key=_depth_first)
        return RunRows(tuple(rows), dropped, tokens, len(tree), tree.raw_tokens, tree.unique_tokens)

    @cached_property
    def _rule(self) -> Rule | str:
        if not isinstance(self.rule, str) or self.rule in RULES or ":" not in self.rule:
            return self.rule
        return self._named(self.rule, "selection")

    @cached_property
    def _hook(self) -> CreditHook:
        hook = self.credit_hook
        assert hook is not None
        return self._named(hook, "credit_hook") if isinstance(hook, str) else hook

    def _named(self, reference: str, key: str) -> Callable[..., Any]:
        from gyre_sdk.trainer.tasks import resolve  # the harness, for those who name code of their own

        return resolve(reference, key, self.base.absolute())


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
            found.update(len(array).to_bytes(8, "little"))
            found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def unique_tokens(rows: Sequence[Row]) -> int:
    """Return how many tokens rows have when what each shares with the one before it counts once."""
    return sum(_new(rows[place - 1] if place else None, row) for place, row in enumerate(rows))


def _units(group: str, rows: Sequence[Row], budget: int) -> Iterable[Unit]:
    """Cut rows, in their order, into units of at most `budget` tokens, shared prefixes counted once."""
    seen: set[str] = set()
    start, size = 0, 0
    for stop in range(1, len(rows) + 1):
        size += _new(rows[stop - 2] if stop - 1 > start else None, rows[stop - 1])
        if stop < len(rows) and not (budget and size + _new(rows[stop - 1], rows[stop]) > budget):
            continue
        part = tuple(rows[start:stop])
        fresh = {row.run for row in part} - seen
        seen |= fresh
        yield Unit(digest(part), group, part, len(fresh), sum(len(row.targets) for row in part))
        start, size = stop, 0


def _new(before: Row | None, row: Row) -> int:
    """Return how many tokens of a row are not the beginning of the row before it."""
    return len(row.ids) - (0 if before is None else _shared(before.ids, row.ids))


def _shared(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size


def _depth_first(row: Row) -> tuple[bytes, str]:
    """Return what sorts rows as a walk through their tree meets them: big-endian ids compare like the ids."""
    return row.ids.astype(">i4").tobytes(), row.leaf


def _untrained(
    tree: RunTree, masks: Mapping[CallId, Mask], selection: Sequence[Selected]
) -> tuple[Counter[str], Counter[str]]:
    """Count the calls that sampled tokens and own no target, and these tokens, by reason."""
    owned = {span.call for row in selection for span in row.owned_spans}
    calls: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for call in tree.calls():
        reason = tree.untrained(call)
        if reason is None and (call in owned or not tree.sampled_tokens(call)):
            continue
        cause = masks[call] if reason is Untrained.EXCLUDED else reason
        name = UNSELECTED if cause is None else f"call_{cause}"
        calls[name] += 1
        tokens[name] += tree.sampled_tokens(call)
    return calls, tokens


def _number(advantage: float | None, uncredited: bool) -> float:
    """Return an advantage as a number: where there is none, 0 for a row that others train on, else NaN."""
    return advantage if advantage is not None else float("nan") if uncredited else 0.0


def _current(version: int) -> int:
    return 0


def _name(named: object) -> str:
    return (
        named
        if isinstance(named, str)
        else f"{getattr(named, '__module__', '')}:{getattr(named, '__qualname__', type(named).__name__)}"
    )
