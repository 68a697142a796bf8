"""The ledger: its table, and that a crash after any prefix of entries loses nothing and reuses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_sdk.errors import TrainerError
from gyre_sdk.journal import Journal
from gyre_sdk.trainer.ledger import (
    TRANSITIONS,
    CheckpointSaved,
    GroupClosed,
    GroupPlanned,
    GroupTaken,
    Item,
    Ledger,
    LedgerState,
    Resumed,
    State,
    StepCommitted,
    StepStarted,
    UnitSealed,
    VersionAllocated,
    VersionPublished,
    advance,
    apply,
    fold,
)
from gyre_sdk.trainer.recovery import recover

EVENTS = sorted({event for event, _ in TRANSITIONS})


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", list(State))
def test_every_cell_of_the_table(event: str, state: State) -> None:
    if (event, state) in TRANSITIONS:
        assert advance(event, state, "it") is TRANSITIONS[event, state]
    else:
        with pytest.raises(TrainerError, match=f"refuses {event} for it: it is {state}"):
            advance(event, state, "it")


def planned(index: int) -> GroupPlanned:
    return GroupPlanned(f"g{index}", index, f"t{index}", 2)


def closed(index: int) -> GroupClosed:
    return GroupClosed(f"g{index}", [f"r{index}a", f"r{index}b"], [1.0, 0.0], 0)


def sealed(index: int) -> UnitSealed:
    return UnitSealed(f"u{index}", f"g{index}", 2, 10)


ONE_STEP: list[Item] = [planned(0), closed(0), sealed(0), StepStarted(1, ["g0"]), StepCommitted(1, ["u0"])]


@pytest.mark.parametrize(
    ("before", "item"),
    [
        ([], VersionAllocated(0, 0)),
        ([], VersionAllocated(2, 0)),
        ([VersionAllocated(1, 1)], VersionAllocated(1, 1)),
        ([], VersionPublished(1, "d")),
        ([], VersionPublished(0, "d")),
        ([VersionAllocated(1, 1), VersionPublished(1, "d")], VersionPublished(1, "d")),
        ([planned(0)], planned(0)),
        ([], planned(1)),
        ([], closed(0)),
        ([planned(0), closed(0)], closed(0)),
        ([planned(0)], StepStarted(2, ["g0"])),
        ([], StepStarted(1, ["g0"])),
        (ONE_STEP, StepStarted(2, ["g0"])),
        ([planned(0), StepStarted(1)], GroupTaken(1, "g0")),
        ([planned(0), closed(0)], GroupTaken(1, "g0")),
        ([planned(0), closed(0), StepStarted(1)], GroupTaken(1, "g1")),
        ([*ONE_STEP, planned(1), closed(1)], GroupTaken(1, "g1")),
        ([*ONE_STEP, StepStarted(2)], GroupTaken(2, "g0")),
        ([], StepCommitted(1, [])),
        ([planned(0), StepStarted(1, ["g0"])], StepCommitted(1, ["u0"])),
        ([planned(0), planned(1), sealed(1), StepStarted(1, ["g0"])], StepCommitted(1, ["u1"])),
        ([planned(0), sealed(0), StepStarted(1, ["g0"])], StepCommitted(1, ["u0", "u0"])),
        (ONE_STEP, StepCommitted(1, ["u0"])),
        ([planned(0), StepStarted(1, ["g0"])], CheckpointSaved(1, "p", "d")),
    ],
)
def test_illegal_items_are_refused_and_change_nothing(before: list[Item], item: Item) -> None:
    state = fold(before)
    with pytest.raises(TrainerError, match="the ledger refuses"):
        apply(state, item)
    assert state == fold(before)


def test_a_restart_voids_the_steps_after_the_checkpoint() -> None:
    items: list[Item] = [
        *ONE_STEP,
        CheckpointSaved(1, "p1", "d1"),
        planned(1),
        closed(1),
        sealed(1),
        StepStarted(2, ["g1"]),
        StepCommitted(2, ["u1"]),
        planned(2),
    ]
    plan = recover(fold(items))
    assert (plan.step, plan.version, plan.closed, plan.unfinished) == (1, None, ["g1"], ["g2"])
    again = fold([*items, Resumed(1), sealed(1), StepStarted(2, ["g1"]), StepCommitted(2, ["u1"])])
    assert again.committed == 2
    assert recover(fold(items), usable=[]).step == 0
    assert recover(fold(items), usable=[]).closed == ["g0", "g1"]


class Model:
    """A trainer that takes random turns, as entries."""

    def __init__(self, items: list[Item]) -> None:
        self.items = items
        self.state = fold(items)

    def add(self, item: Item) -> None:
        apply(self.state, item)
        self.items.append(item)

    def turn(self, choice: int) -> None:
        state = self.state
        step = len(state.steps)
        open_step = step > 0 and state.steps[step].state is State.STARTED
        free = [group for group in state.unused() if state.groups[group].closed]
        waiting = [group for group, kept in state.groups.items() if not kept.closed]
        if choice == 0:
            self.add(planned(state.next_group))
        elif choice == 1 and waiting:
            self.add(closed(state.groups[waiting[0]].index))
        elif choice == 2 and not open_step and free:
            self.add(StepStarted(step + 1, free[1:2]))
            self.add(GroupTaken(step + 1, free[0]))
        elif choice == 3 and open_step:
            group = state.steps[step].groups[0]
            self.add(sealed(state.groups[group].index))
            self.add(StepCommitted(step, [f"u{state.groups[group].index}"]))
        elif choice == 4 and step and state.steps[step].state is State.COMMITTED:
            self.add(CheckpointSaved(step, f"p{step}", "d"))
        elif choice == 5:
            self.add(VersionAllocated(state.next_version, state.committed))
        elif choice == 6:
            unpublished = [version for version, (kept, _) in state.versions.items() if kept is State.ALLOCATED]
            if unpublished:
                self.add(VersionPublished(unpublished[-1], "d"))


turns = st.lists(st.integers(0, 6), max_size=40)


@settings(max_examples=300, deadline=None)
@given(lives=st.lists(st.tuples(turns, st.integers(0, 60), st.sets(st.integers(1, 9))), min_size=1, max_size=4))
def test_a_crash_after_any_prefix_loses_and_reuses_nothing(lives: list[tuple[list[int], int, set[int]]]) -> None:
    disk: list[Item] = []
    for choices, cut, lost in lives:
        model = Model(list(disk))
        for choice in choices:
            model.turn(choice)
        disk = model.items[: len(disk) + cut]  # what was durable stays; of this life, any prefix
        state = fold(disk)
        whole = {step for step, kept in state.steps.items() if kept.checkpoint} - lost
        plan = recover(state, whole)
        assert plan.step == max(whole, default=0)
        assert (plan.checkpoint is None) == (plan.step == 0)
        kept_groups = {group for step, kept in state.steps.items() if step <= plan.step for group in kept.groups}
        assert set(plan.closed) == {g for g, k in state.groups.items() if k.closed and g not in kept_groups}
        assert set(plan.unfinished) == {g for g, k in state.groups.items() if not k.closed}
        disk = [*disk, Resumed(plan.step)]
        if plan.version is None:
            disk.append(VersionAllocated(fold(disk).next_version, plan.step))
        check_invariants(disk)
    check_invariants(disk)


def check_invariants(items: list[Item]) -> None:
    versions = [item.version for item in items if isinstance(item, VersionAllocated)]
    assert len(set(versions)) == len(versions) and 0 not in versions
    assert versions == sorted(versions)
    state: LedgerState = fold(items)
    units = [unit for step in state.steps.values() for unit in step.units]
    assert len(set(units)) == len(units)
    groups = [group for step in state.steps.values() for group in step.groups]
    assert len(set(groups)) == len(groups)
    assert sorted(state.steps) == list(range(1, len(state.steps) + 1))
    assert all(state.units[unit] is State.COMMITTED for unit in units)
    assert [kept.index for kept in state.groups.values()] == list(range(len(state.groups)))


def test_the_store_gives_back_what_was_added(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with Journal(path) as journal:
        ledger = Ledger(journal)
        for item in ONE_STEP:
            ledger.add(item, at=1.0)
        assert ledger.allocate_version(1, at=2.0) == 1
        with pytest.raises(TrainerError):
            ledger.add(StepCommitted(1, []), at=3.0)
    with Journal(path) as journal:
        again = Ledger(journal)
        assert again.state == ledger.state
        assert again.allocate_version(1, at=2.0) == 2
        assert [entry.kind for entry in journal.entries("trainer")][:2] == ["GroupPlanned", "GroupClosed"]


def test_an_unreadable_entry_is_said(tmp_path: Path) -> None:
    with Journal(tmp_path / "store.db") as journal:
        journal.append("trainer", "Odd", {"type": "Odd"}, at=0.0).result()
        with pytest.raises(TrainerError, match=r"stream 'trainer' is not readable \(Odd\)"):
            Ledger(journal)
