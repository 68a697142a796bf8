"""The trainer's durable state: a fold over the journal stream `trainer`.

Nothing is decided from memory that is not in the stream, so kill -9 at any point loses nothing. What can
happen to what is in `TRANSITIONS`; anything else raises. `recovery.recover` says, purely, where a restart takes up.

* A *version* number is allocated durably before weights carry it, so a number is never used twice.
* A *group* is planned once, at the next index; it closes once; a step of the surviving lineage uses it at most once.
* A *unit* is committed at most once in the lineage of steps that survives. A restart from a checkpoint voids the
  steps after it (`resumed`): their groups and units are free again, and are trained from the record, not run again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from gyre_sdk.errors import TrainerError
from gyre_sdk.journal import Entry, Journal

STREAM = "trainer"


class VersionAllocated(msgspec.Struct, frozen=True, tag=True):
    """A version number is taken, before anything carries it."""

    version: int
    step: int
    """Optimizer steps behind the weights."""


class VersionPublished(msgspec.Struct, frozen=True, tag=True):
    """Every replica serves the version, checked."""

    version: int
    digest: str


class GroupPlanned(msgspec.Struct, frozen=True, tag=True):
    """A task was chosen for the next group index."""

    group: str
    index: int
    task: str
    members: int


class GroupClosed(msgspec.Struct, frozen=True, tag=True):
    """All runs of a group have ended."""

    group: str
    runs: list[str]
    rewards: list[float | None]
    dispatch_version: int
    """Oldest version that was being served when one of its runs started."""


class UnitSealed(msgspec.Struct, frozen=True, tag=True):
    """A unit's content and coefficients are frozen; it can be made again from the record."""

    unit: str
    """Hash of the content."""
    group: str
    runs: int
    tokens: int
    """Owned tokens."""


class StepStarted(msgspec.Struct, frozen=True, tag=True):
    """A batch of groups was opened."""

    step: int
    """1-based; the number of optimizer steps once it is committed."""
    groups: list[str] = []
    """Those that it begins with; others are taken as they close."""
    settings: dict[str, Any] = {}
    """Of selection and credit (`Sealer.settings`): with them the units can be made again from the record."""


class GroupTaken(msgspec.Struct, frozen=True, tag=True):
    """A closed group became part of the open step."""

    step: int
    group: str


class StepCommitted(msgspec.Struct, frozen=True, tag=True):
    """The optimizer stepped on these units, or skipped for want of any."""

    step: int
    units: list[str]
    metrics: dict[str, float] = {}


class CheckpointSaved(msgspec.Struct, frozen=True, tag=True):
    """A checkpoint is complete on disk."""

    step: int
    path: str
    digest: str


class Resumed(msgspec.Struct, frozen=True, tag=True):
    """A trainer took up at a step; later steps are void."""

    step: int


Item = (
    VersionAllocated
    | VersionPublished
    | GroupPlanned
    | GroupClosed
    | UnitSealed
    | StepStarted
    | GroupTaken
    | StepCommitted
    | CheckpointSaved
    | Resumed
)


class State(StrEnum):
    """States of versions, groups, units and steps."""

    ABSENT = "absent"
    ALLOCATED = "allocated"
    PUBLISHED = "published"
    PLANNED = "planned"
    CLOSED = "closed"
    SEALED = "sealed"
    STARTED = "started"
    COMMITTED = "committed"
    SAVED = "saved"


TRANSITIONS: Mapping[tuple[str, State], State] = {
    ("version_allocated", State.ABSENT): State.ALLOCATED,
    ("version_published", State.ALLOCATED): State.PUBLISHED,
    ("group_planned", State.ABSENT): State.PLANNED,
    ("group_closed", State.PLANNED): State.CLOSED,
    ("unit_sealed", State.ABSENT): State.SEALED,
    ("unit_sealed", State.SEALED): State.SEALED,  # the same content, made again after a restart
    ("unit_committed", State.SEALED): State.COMMITTED,
    ("unit_voided", State.COMMITTED): State.SEALED,
    ("unit_voided", State.SEALED): State.SEALED,
    ("step_started", State.ABSENT): State.STARTED,
    ("group_taken", State.STARTED): State.STARTED,
    ("step_committed", State.STARTED): State.COMMITTED,
    ("checkpoint_saved", State.COMMITTED): State.SAVED,
    ("step_voided", State.STARTED): State.ABSENT,
    ("step_voided", State.COMMITTED): State.ABSENT,
    ("step_voided", State.SAVED): State.ABSENT,
}
"""(what happens, state before) -> state after. Everything that is not here is refused."""


def advance(event: str, state: State, what: str) -> State:
    """Return the state after an event.

    Raises:
        TrainerError: the event is illegal in that state.
    """
    try:
        return TRANSITIONS[event, state]
    except KeyError:
        raise TrainerError(
            f"the ledger refuses {event} for {what}: it is {state}; two trainers may be writing to one store,"
            " stop one of them"
        ) from None


@dataclass(slots=True)
class Group:
    """A planned group and, once it is closed, what came of it."""

    index: int
    task: str
    members: int
    closed: GroupClosed | None = None


@dataclass(slots=True)
class Step:
    """A step of the surviving lineage."""

    groups: list[str]
    state: State = State.STARTED
    units: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint: CheckpointSaved | None = None


@dataclass(slots=True)
class LedgerState:
    """Everything the stream says, folded."""

    versions: dict[int, tuple[State, int]] = field(default_factory=lambda: {0: (State.PUBLISHED, 0)})
    """Version -> its state and the optimizer steps behind it. 0, the starting policy, is there from the start."""
    groups: dict[str, Group] = field(default_factory=dict)
    units: dict[str, State] = field(default_factory=dict)
    sealed: dict[str, UnitSealed] = field(default_factory=dict)
    """What is known of each unit."""
    steps: dict[int, Step] = field(default_factory=dict)
    free: dict[str, None] = field(default_factory=dict)
    """Groups that no step of the lineage has taken, in the order planned."""

    @property
    def next_version(self) -> int:
        """The number that the next publication takes."""
        return max(self.versions) + 1

    @property
    def next_group(self) -> int:
        """The index that the next planned group takes."""
        return len(self.groups)

    @property
    def committed(self) -> int:
        """Optimizer steps of the lineage."""
        return max((step for step, kept in self.steps.items() if kept.state is not State.STARTED), default=0)

    def trained_tokens(self) -> int:
        """Return the targets that the steps of the lineage trained."""
        return sum(self.sealed[unit].tokens for step in self.steps.values() for unit in step.units)

    def unused(self) -> list[str]:
        """Return groups that no step of the lineage has taken, in the order planned."""
        return list(self.free)

    def awaited(self, step: int, per_step: int, later: int) -> list[str]:
        """Return the groups that training waits for: those of a step if it is open, and of `later` steps after it.

        All steps of a burst draw from the same groups, each takes the next to close, so which step a group will be of is not
        known before. The open step's own come first, the others in the order planned.

        Args:
            per_step: groups of a step.
        """
        kept = self.steps.get(step)
        if kept is None or kept.state is not State.STARTED:
            return self.unused()[: later * per_step]
        return [*kept.groups, *self.unused()[: (1 + later) * per_step - len(kept.groups)]]

    def release(self, groups: Iterable[str]) -> None:
        """Note that groups were not taken after all."""
        back = {*self.free, *groups}
        self.free = dict.fromkeys(group for group in self.groups if group in back)


def apply(state: LedgerState, item: Item) -> None:
    """Fold one item into a state.

    Raises:
        TrainerError: the item is illegal here.
    """
    match item:
        case VersionAllocated(version, step):
            if version != state.next_version:
                raise TrainerError(f"the ledger refuses version {version}: the next one is {state.next_version}")
            state.versions[version] = (advance("version_allocated", State.ABSENT, f"version {version}"), step)
        case VersionPublished(version):
            before, step = state.versions.get(version, (State.ABSENT, 0))
            state.versions[version] = (advance("version_published", before, f"version {version}"), step)
        case GroupPlanned(group, index, task, members):
            before = State.PLANNED if group in state.groups or index != state.next_group else State.ABSENT
            advance("group_planned", before, f"group {group} at index {index}")
            state.groups[group] = Group(index, task, members)
            state.free[group] = None
        case GroupClosed(group):
            planned = state.groups.get(group)
            before = State.ABSENT if planned is None else State.CLOSED if planned.closed else State.PLANNED
            advance("group_closed", before, f"group {group}")
            state.groups[group].closed = item
        case UnitSealed(unit):
            state.units[unit] = advance("unit_sealed", state.units.get(unit, State.ABSENT), f"unit {unit}")
            state.sealed[unit] = item
        case StepStarted(step, groups):
            for group in groups:
                if group not in state.free:
                    raise TrainerError(f"the ledger refuses step {step}: group {group} is used or was never planned")
            before = State.ABSENT if step == len(state.steps) + 1 and step not in state.steps else State.STARTED
            advance("step_started", before, f"step {step}")
            state.steps[step] = Step(list(groups))
            for group in groups:
                state.free.pop(group, None)
        case GroupTaken(step, group):
            kept = state.steps.get(step)
            advance("group_taken", kept.state if kept else State.ABSENT, f"step {step}")
            assert kept is not None
            if group not in state.free or state.groups[group].closed is None:
                raise TrainerError(f"the ledger refuses group {group} in step {step}: it is used or has not closed")
            kept.groups.append(group)
            del state.free[group]
        case StepCommitted(step, units, metrics):
            kept = state.steps.get(step)
            after = advance("step_committed", kept.state if kept else State.ABSENT, f"step {step}")
            assert kept is not None
            committed: dict[str, State] = {}
            for unit in units:
                before = committed.get(unit, state.units.get(unit, State.ABSENT))
                committed[unit] = advance("unit_committed", before, f"unit {unit}")
                if state.sealed[unit].group not in kept.groups:
                    raise TrainerError(f"the ledger refuses unit {unit} in step {step}: its group is not in the batch")
            state.units.update(committed)
            kept.state, kept.units, kept.metrics = after, units, metrics
        case CheckpointSaved(step):
            kept = state.steps.get(step)
            after = advance("checkpoint_saved", kept.state if kept else State.ABSENT, f"step {step}")
            assert kept is not None
            kept.state, kept.checkpoint = after, item
        case Resumed(step):
            for voided in sorted(number for number in state.steps if number > step):
                kept = state.steps.pop(voided)
                advance("step_voided", kept.state, f"step {voided}")
                state.release(kept.groups)
                for unit in kept.units:
                    state.units[unit] = advance("unit_voided", state.units[unit], f"unit {unit}")


def fold(items: Iterable[Item]) -> LedgerState:
    """Return the state after all items."""
    state = LedgerState()
    for item in items:
        apply(state, item)
    return state


_decode = msgspec.msgpack.Decoder(Item).decode  # type: ignore[var-annotated]


def read(entries: Iterable[Entry]) -> list[Item]:
    """Return the items of journal entries.

    Raises:
        TrainerError: an entry is not of this ledger's format.
    """
    items: list[Item] = []
    for entry in entries:
        try:
            items.append(_decode(entry.body))
        except msgspec.DecodeError as error:
            raise TrainerError(
                f"entry {entry.seq} of stream {STREAM!r} is not readable ({entry.kind}): {error}"
            ) from error
    return items


class Ledger:
    """The state with its store. An item is checked, counted and durable when `add` returns; any thread may call it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._adding = threading.RLock()
        self.state = fold(read(journal.entries(STREAM)))

    def add(self, item: Item, *, at: float) -> None:
        """Append an item and wait until it is durable.

        Raises:
            TrainerError: the item is illegal in this state.
            JournalError: the disk refuses it.
        """
        with self._adding:
            apply(self.state, item)
            self._journal.append(STREAM, type(item).__name__, item, at=at).result()

    def awaited(self, step: int, per_step: int, later: int) -> list[str]:
        """Return the groups that training waits for (`LedgerState.awaited`)."""
        with self._adding:
            return self.state.awaited(step, per_step, later)

    def allocate_version(self, step: int, *, at: float) -> int:
        """Take the next version number, durably."""
        with self._adding:
            version = self.state.next_version
            self.add(VersionAllocated(version, step), at=at)
            return version
