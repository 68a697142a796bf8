"""Rollouts: order, how far ahead, what a failing run does (nothing), and taking up again."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from asyncio import CancelledError
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_sdk import events
from gyre_sdk.errors import GyreError, ServiceError, TrainerError, WorkspaceError
from gyre_sdk.harness.task import Task
from gyre_sdk.journal import Journal
from gyre_sdk.records import MAIN, GroupId, LaneId, LaneRecord, RunId, RunRecord, RunStatus
from gyre_sdk.trainer.agents.outcome import Outcome, OutcomeKind
from gyre_sdk.trainer.ledger import GroupPlanned, GroupTaken, Ledger, StepCommitted, StepStarted
from gyre_sdk.trainer.rollouts import Plan, Rollouts, cancel_orphans

TASKS = [Task(name=f"t{n}", instruction="do it") for n in range(4)]
_ids = itertools.count()


def record(
    journal: Journal, group: str, member: int, *, reward: float | None, status: RunStatus | None, owner: str = "gone"
) -> str:
    """Put a run on record; without a status it goes on."""
    run = RunId(f"run-{next(_ids)}")
    journal.open_run(
        RunRecord(run, "t", time.time(), group=GroupId(group), member=member, owner=owner),
        LaneRecord(LaneId(f"{run}-main"), run, MAIN, MAIN, None, 0.0),
        f"key-{run}",
    ).result()
    if status is not None:
        journal.end_run(run, status, at=time.time(), reward=reward).result()
    return run


class World:
    """A store and what the runs do."""

    def __init__(self, path: Path) -> None:
        self.journal = Journal(path)
        self.ledger = Ledger(self.journal)
        self.events: list[Any] = []
        self.ran: list[tuple[str, str, int]] = []
        self.behave: Callable[[str, int], None] = lambda group, member: None
        self.made: list[Rollouts] = []

    def begin(self, task: Task, group: str, member: int, done: Callable[[Outcome], None]) -> None:
        """Make a run in a thread, as the agents' process does."""
        self.ran.append((task.name, group, member))

        def run() -> None:
            try:
                self.behave(group, member)
                record(self.journal, group, member, reward=float(member), status=RunStatus.COMPLETED)
            except ServiceError as error:
                done(Outcome(OutcomeKind.SERVICE, str(error)))
            except GyreError as error:
                done(Outcome(OutcomeKind.FAILED, str(error)))
            except BaseException as error:  # an agent's, which may be any
                done(Outcome(OutcomeKind.RAISED, str(error)))
            else:
                done(Outcome(OutcomeKind.ENDED))

        threading.Thread(target=run).start()

    def rollouts(
        self, *, steps: int = 10, staleness: int = 1, publish_every: int = 1, concurrency: int = 4
    ) -> Rollouts:
        found = Rollouts(
            Plan(2, 3, staleness, publish_every, steps, seed=7),
            TASKS,
            self.begin,
            journal=self.journal,
            ledger=self.ledger,
            observer=self.events.append,
            concurrency=concurrency,
        )
        self.made.append(found)
        return found

    def step(self, number: int, groups: list[str]) -> None:
        self.ledger.add(StepStarted(number, groups), at=0.0)
        self.ledger.add(StepCommitted(number, []), at=0.0)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path / "store.db")
    yield found
    for rollouts in found.made:
        rollouts.stop(5.0)
    found.journal.close()


@given(tasks=st.integers(1, 20), rounds=st.integers(1, 3), seed=st.integers(0, 9))
def test_every_round_has_every_task_once(tasks: int, rounds: int, seed: int) -> None:
    plan = Plan(2, 2, 1, 1, 5, seed=seed)
    order = [plan.task_at(index, tasks) for index in range(tasks * rounds)]
    assert Counter(order) == dict.fromkeys(range(tasks), rounds)
    for start in range(0, len(order), tasks):
        assert sorted(order[start : start + tasks]) == list(range(tasks))
    assert order == [Plan(2, 2, 1, 1, 5, seed=seed).task_at(index, tasks) for index in range(tasks * rounds)]


@pytest.mark.parametrize(
    ("staleness", "publish_every", "step", "used", "limit"),
    [(0, 1, 0, 0, 2), (1, 1, 0, 0, 4), (0, 2, 0, 0, 4), (1, 2, 4, 8, 14), (1, 1, 9, 18, 20), (3, 2, 10, 20, 20)],
)
def test_how_far_ahead(staleness: int, publish_every: int, step: int, used: int, limit: int) -> None:
    """(phi + mu) * B groups beyond what the published steps used, and none that no step will use."""
    assert Plan(2, 3, staleness, publish_every, 10).limit(step, used) == limit


def test_groups_close_and_are_handed_over(world: World) -> None:
    rollouts = world.rollouts()
    rollouts.start(0)
    groups = world.ledger.state.unused()[:2]
    assert groups == ["group-000000", "group-000001"]
    closed = {item.group: item for item in rollouts.closed(groups)}
    assert set(closed) == set(groups)
    assert closed[groups[0]].rewards == [0.0, 1.0, 2.0] and len(closed[groups[0]].runs) == 3
    told = [event for event in world.events if isinstance(event, events.GroupClosed)]
    assert (told[0].scored, told[0].started, told[0].mean_reward, told[0].trainable) == (3, 3, 1.0, True)


def test_a_step_takes_the_groups_of_its_burst_that_close_next(world: World) -> None:
    """A slow group holds up the last step of its burst only, and no group of a later burst takes its place."""
    slow = threading.Event()
    world.behave = lambda group, member: None if group > "group-000000" else assert_(slow.wait(60))
    rollouts = world.rollouts(publish_every=2, concurrency=18)
    rollouts.start(0)
    assert len(list(rollouts.closed(["group-000004", "group-000005"]))) == 2  # of the next burst
    world.ledger.add(StepStarted(1), at=0.0)
    burst = world.ledger.awaited(1, 2, later=1)
    assert burst == ["group-000000", "group-000001", "group-000002", "group-000003"]
    for closed in rollouts.closed(burst, 2):
        world.ledger.add(GroupTaken(1, closed.group), at=0.0)
        assert sorted(world.ledger.awaited(1, 2, later=1)) == burst
    taken = world.ledger.state.steps[1].groups
    assert len(taken) == 2 and "group-000000" not in taken
    world.ledger.add(StepCommitted(1, []), at=0.0)
    assert set(world.ledger.awaited(1, 2, later=1)) == set(burst) - set(taken), "between two steps"
    world.ledger.add(StepStarted(2), at=0.0)
    rest = rollouts.closed(world.ledger.awaited(2, 2, later=0), 2)
    assert next(rest).group in burst[1:]
    slow.set()
    assert next(rest).group == "group-000000"


def assert_(condition: bool) -> None:
    assert condition


def test_dispatch_waits_for_publication(world: World) -> None:
    rollouts = world.rollouts(staleness=1, publish_every=1)
    rollouts.start(0)
    list(rollouts.closed(["group-000003"]))
    assert world.ledger.state.next_group == 4
    world.step(1, world.ledger.state.unused()[:2])
    assert world.ledger.state.next_group == 4  # a step alone allows nothing: its weights are not served yet
    rollouts.advance(1)
    assert world.ledger.state.next_group == 6
    rollouts.advance(0)
    assert world.ledger.state.next_group == 6


def test_nothing_is_planned_that_no_step_will_use(world: World) -> None:
    rollouts = world.rollouts(steps=1, staleness=5)
    rollouts.start(0)
    list(rollouts.closed(world.ledger.state.unused()[:2]))
    assert world.ledger.state.next_group == 2


@pytest.mark.parametrize("error", [RuntimeError("agent"), WorkspaceError("gone"), SystemExit(1), CancelledError()])
def test_a_failing_run_never_stops_the_loop(world: World, error: BaseException) -> None:
    def behave(group: str, member: int) -> None:
        if member == 1:
            record(world.journal, group, member, reward=None, status=RunStatus.AGENT_ERROR)
            raise error

    world.behave = behave
    rollouts = world.rollouts()
    rollouts.start(0)
    for closed in rollouts.closed(world.ledger.state.unused()[:2]):
        assert closed.rewards == [0.0, None, 2.0]


def test_a_service_that_cannot_be_reached_is_tried_again(world: World) -> None:
    failed: list[tuple[str, int]] = []

    def behave(group: str, member: int) -> None:
        if (group, member) not in failed:
            failed.append((group, member))
            raise ServiceError("no answer")

    world.behave = behave
    rollouts = world.rollouts(steps=1, concurrency=6)
    rollouts.start(0)
    closed = list(rollouts.closed(world.ledger.state.unused()[:2]))
    assert all(item.rewards == [0.0, 1.0, 2.0] for item in closed) and len(failed) == 6


def test_a_run_that_is_recorded_is_not_repeated_by_a_service_error(world: World) -> None:
    def behave(group: str, member: int) -> None:
        record(world.journal, group, member, reward=None, status=RunStatus.AGENT_ERROR)
        raise ServiceError("the end could not be told")

    world.behave = behave
    rollouts = world.rollouts(steps=1, concurrency=6)
    rollouts.start(0)
    closed = list(rollouts.closed(world.ledger.state.unused()[:2]))
    assert all(item.rewards == [None, None, None] for item in closed) and len(world.ran) == 6


def test_a_run_that_is_under_way_is_waited_for_and_not_run_again(world: World) -> None:
    """Whatever the concurrency: it goes on already."""
    group = "group-000000"
    world.ledger.add(GroupPlanned(group, 0, "t2", 3), at=0.0)
    leave = threading.Event()

    def behave(group: str, member: int) -> None:
        leave.wait(20)

    world.behave = behave
    rollouts = world.rollouts(steps=1, concurrency=1)
    rollouts.start(0, [group], {(group, 1): 60.0, (group, 2): 30.0, ("group-000007", 0): 5.0})
    flow = rollouts.flow()
    assert (flow.dispatched, flow.started, flow.finished) == (6, 3, 0)
    assert flow.ages[group, 1] >= 60.0 and 30.0 <= flow.ages[group, 2] < flow.ages[group, 1]
    assert sorted(member for _, name, member in world.ran if name == group) == [0, 1, 2]
    leave.set()
    assert next(rollouts.closed([group])).rewards == [0.0, 1.0, 2.0]
    assert rollouts.flow().longest == max(rollouts.flow().durations) >= 60.0


def test_taking_up_runs_only_what_is_missing(world: World) -> None:
    """A group keeps the runs that ended; what was cancelled with the process is run again under a new id."""
    group = "group-000000"
    world.ledger.add(GroupPlanned(group, 0, "t2", 3), at=0.0)
    kept = record(world.journal, group, 0, reward=0.25, status=RunStatus.COMPLETED)
    lost = record(world.journal, group, 1, reward=None, status=None)
    other = record(world.journal, "group-000009", 0, reward=None, status=None, owner="here")
    assert cancel_orphans(world.journal, alive="here") == 1 and cancel_orphans(world.journal, alive="here") == 0
    assert [run.run for run in world.journal.runs(status=RunStatus.RUNNING)] == [other]
    rollouts = world.rollouts(steps=1)
    rollouts.start(0, [group])
    closed = next(item for item in rollouts.closed([group]))
    assert closed.runs[0] == kept and lost not in closed.runs and closed.rewards == [0.25, 1.0, 2.0]
    assert [(task, member) for task, name, member in world.ran if name == group] == [("t2", 1), ("t2", 2)]


def test_a_group_whose_runs_all_ended_closes_at_once(world: World) -> None:
    group = "group-000000"
    world.ledger.add(GroupPlanned(group, 0, "t0", 2), at=0.0)
    for member in range(2):
        record(world.journal, group, member, reward=1.0, status=RunStatus.COMPLETED)
    rollouts = world.rollouts(steps=1)
    rollouts.start(0, [group])
    assert next(rollouts.closed([group])).rewards == [1.0, 1.0]
    assert all(name != group for _, name, _ in world.ran)


def test_a_task_that_is_gone_is_named(world: World) -> None:
    world.ledger.add(GroupPlanned("group-000000", 0, "old-task", 2), at=0.0)
    with pytest.raises(TrainerError, match=r"task 'old-task', which is not among the tasks any more"):
        world.rollouts().start(0, ["group-000000"])


def test_stopping_is_orderly(world: World) -> None:
    """Runs in flight end, nothing new starts, those who wait are told."""
    entered, leave = threading.Event(), threading.Event()

    def behave(group: str, member: int) -> None:
        entered.set()
        leave.wait(10)

    world.behave = behave
    rollouts = world.rollouts(concurrency=1)
    rollouts.start(0)
    waiting: list[str] = []

    def wait() -> None:
        with pytest.raises(TrainerError, match="stopped"):
            list(rollouts.closed(["group-000001"]))
        waiting.append("told")

    thread = threading.Thread(target=wait)
    thread.start()
    entered.wait(10)
    assert rollouts.stop(0.1) is False
    leave.set()
    assert rollouts.stop(10.0) is True
    thread.join()
    assert waiting == ["told"] and len(world.ran) == 1


def test_those_who_wait_learn_that_a_process_was_given_up(world: World) -> None:
    def check() -> None:
        raise TrainerError("the engine died 5 times")

    world.behave = lambda group, member: time.sleep(0.1)
    rollouts = Rollouts(
        Plan(2, 3, 1, 1, 5),
        TASKS,
        world.begin,
        journal=world.journal,
        ledger=world.ledger,
        observer=world.events.append,
        concurrency=1,
        check=check,
    )
    world.made.append(rollouts)
    rollouts.start(0)
    with pytest.raises(TrainerError, match="died 5 times"):
        list(rollouts.closed(world.ledger.state.unused()[:2]))


def test_those_who_wait_learn_that_a_group_cannot_close(world: World) -> None:
    """The store takes nothing more: no group would ever close."""
    started = threading.Event()

    def behave(group: str, member: int) -> None:
        started.wait(20)
        world.journal.close()

    world.behave = behave
    rollouts = world.rollouts(concurrency=1)
    rollouts.start(0)
    started.set()
    with pytest.raises(TrainerError, match="a run could not be counted: JournalError"):
        list(rollouts.closed(world.ledger.state.unused()[:2]))


def test_rollouts_never_load_torch() -> None:
    code = "import sys, gyre_sdk.trainer.rollouts, gyre_sdk.trainer.stack; print([m for m in ('torch', 'trl', 'transformers') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
