"""What a store would train under given settings, group by group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gyre_sdk.credit import GroupCredit, Lag, OwnCredit, Row, scored
from gyre_sdk.errors import SettingsError
from gyre_sdk.harness.scoring.policy import stands
from gyre_sdk.journal.reader import Reader
from gyre_sdk.records import CallRecord, RunRecord
from gyre_sdk.trainer import ledger
from gyre_sdk.trainer.units import Sealer, unique_tokens


@dataclass(frozen=True, slots=True)
class GroupSamples:
    """What a group of runs, or a run outside any group, would give to training."""

    group: str | None
    runs: tuple[RunRecord, ...]
    """The runs that are compared, by member."""
    credit: GroupCredit | None
    """None outside groups."""
    own: OwnCredit | None
    """Of a credit hook."""
    rows: tuple[Row, ...]
    """Of all runs that were asked for; those that would not be trained have NaN for an advantage."""
    dropped: Counter[str]
    """As `SealedGroup.dropped`."""
    dropped_tokens: Counter[str]
    """As `SealedGroup.dropped_tokens`."""
    calls: int
    raw_tokens: int
    """Prompt + sampled ids, summed over calls."""
    unique_tokens: int
    """Tokens of the runs' trees."""

    @property
    def trained(self) -> tuple[Row, ...]:
        """Rows that would be trained."""
        return tuple(row for row in self.rows if is_trained(row))

    @property
    def row_tokens(self) -> tuple[int, int]:
        """Tokens of the trained rows: all of them, and with shared prefixes counted once."""
        trained = self.trained
        return sum(len(row.ids) for row in trained), unique_tokens(trained)


def is_trained(row: Row) -> bool:
    """Tell whether every target has an advantage."""
    return bool(np.isfinite(row.advantages).all())


def materialise(journal: Reader, sealer: Sealer, *, only: Collection[str] | None = None) -> Iterator[GroupSamples]:
    """Yield the groups of a store, in the order in which they were opened, then each run outside groups.

    The runs of a group are those that a training closed it with; where no training did, all that ended and stand.

    Args:
        only: make rows of these runs alone; the others of their groups are still compared with.

    Raises:
        HookError: the credit hook is at fault.
        JournalError: the store cannot be read.
        SettingsError: a setting cannot be.
        TreeError: the calls of a run contradict each other.
    """
    state = ledger.fold(ledger.read(journal.entries(ledger.STREAM)))
    if sealer.max_staleness is not None and not state.steps:
        raise SettingsError(
            f"no training is on record in {journal.path}: nobody can tell how old a version is in steps; leave the limit"
            " of staleness away"
        )
    grouped: dict[str, list[RunRecord]] = {}
    alone: list[RunRecord] = []
    for run in journal.runs():
        if run.group is None:
            alone.append(run)
        else:
            grouped.setdefault(run.group, []).append(run)
    newest = max((step for _, step in state.versions.values()), default=0)
    used_by = {group: number for number, step in state.steps.items() for group in step.groups}
    for group, runs in grouped.items():
        closed = state.groups[group].closed if group in state.groups else None
        wanted = None if closed is None else set(closed.runs)
        members = [run for run in runs if (run.run in wanted if wanted is not None else stands(run.status))]
        if only is None or any(run.run in only for run in members):
            lag = _lag(state, used_by[group] - 1 if group in used_by else newest)
            yield _group(journal, sealer, group, members, only, lag)
    for run in alone:
        if only is None or run.run in only:
            yield _group(journal, sealer, None, [run], None, _lag(state, newest))


def _group(
    journal: Reader,
    sealer: Sealer,
    group: str | None,
    members: Sequence[RunRecord],
    only: Collection[str] | None,
    lag: Lag,
) -> GroupSamples:
    runs = tuple(sorted(members, key=lambda run: (run.member, run.run)))

    def calls_of(run: str) -> Iterator[CallRecord]:
        return journal.calls(run, arrays=True)

    credit, own, dropped = sealer.credit(runs, calls_of) if group is not None else (None, None, Counter[str]())
    tokens: Counter[str] = Counter()
    rows: list[Row] = []
    calls = raw = unique = 0
    for run in runs:
        if only is not None and run.run not in only:
            continue
        trains = credit is not None and scored(run) and (credit.dropped is None or own is not None)
        advantage = credit.advantages.get(run.run) if credit is not None else None
        found = sealer.run_rows(run, calls_of, advantage, own, lag=lag, uncredited=not trains)
        rows += found.rows
        calls, raw, unique = calls + found.calls, raw + found.raw_tokens, unique + found.unique_tokens
        if trains or group is None:
            dropped.update(found.dropped)
            tokens.update(found.dropped_tokens)
            dropped["run_without_targets"] += not found.rows
    return GroupSamples(group, runs, credit, own, tuple(rows), +dropped, +tokens, calls, raw, unique)


def _lag(state: ledger.LedgerState, step: int) -> Lag:
    """Return how far versions lag behind a policy with so many steps."""
    return lambda version: step - (state.versions[version][1] if version in state.versions else 0)
