"""The agents' process: what comes of runs crosses the wire, and neither side's death loses or doubles any."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from agents_kit import KEY, Client, Place, start_host, wait_for

from gyre_sdk.errors import ServiceError, SettingsError, TrainerError, WorkspaceError
from gyre_sdk.events import RunEnded, RunStarted, ToolRan
from gyre_sdk.harness.task import Task
from gyre_sdk.records import RunStatus
from gyre_sdk.trainer.agents import calling
from gyre_sdk.trainer.agents.client import Agents, members
from gyre_sdk.trainer.agents.outcome import Outcome, OutcomeKind
from gyre_sdk.trainer.agents.sessions import Sessions
from gyre_sdk.trainer.agents.settings import AgentSettings
from gyre_sdk.trainer.agents.wire import Order, dial
from gyre_sdk.trainer.children import agents_spec
from gyre_sdk.trainer.config import load_config
from gyre_sdk.trainer.ledger import Ledger
from gyre_sdk.trainer.processes import Child
from gyre_sdk.trainer.rollouts import Plan, Rollouts, cancel_orphans


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    found = Place(tmp_path_factory.mktemp("agents"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def child(place: Place) -> Iterator[Child]:
    """The process as a trainer supervises it."""
    found = Child(agents_spec(place.config, place.folder), lambda event: None)
    found.begin()
    found.wait()
    yield found
    found.stop()


@pytest.fixture
def connect(place: Place, child: Child) -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def make(**options: int) -> Client:
        made.append(Client(place, lambda: child.url, **options))
        return made[-1]

    place.fresh()
    yield make
    for client in made:
        client.agents.leave()


_groups = iter(range(1_000_000))


@pytest.fixture
def group() -> str:
    """A group that no other test has."""
    return f"group-of-test-{next(_groups)}"


@pytest.mark.parametrize(
    ("task", "kind", "said", "status", "reward"),
    [
        ("end", OutcomeKind.ENDED, "", RunStatus.COMPLETED, 0.5),
        ("limit", OutcomeKind.ENDED, "", RunStatus.LIMIT, 0.0),
        ("inner", OutcomeKind.ENDED, "", RunStatus.COMPLETED, 0.75),
        ("raise", OutcomeKind.RAISED, "ValueError: no idea", RunStatus.AGENT_ERROR, 0.0),
        ("async", OutcomeKind.ENDED, "", RunStatus.COMPLETED, 0.25),
        ("async raise", OutcomeKind.RAISED, "ValueError: not now", RunStatus.AGENT_ERROR, 0.0),
        ("leave", OutcomeKind.RAISED, "SystemExit: 3", RunStatus.CANCELLED, None),
        ("workspace", OutcomeKind.FAILED, "WorkspaceError: the workspace is broken", RunStatus.WORKSPACE_ERROR, None),
    ],
)
def test_what_came_of_a_run_crosses_the_wire(
    place: Place,
    connect: Callable[..., Client],
    group: str,
    task: str,
    kind: OutcomeKind,
    said: str,
    status: RunStatus,
    reward: float | None,
) -> None:
    client = connect()
    client.begin(task, group, 2)
    outcome = client.outcome(group, 2)
    assert (outcome.kind, str(outcome)) == (kind, said)
    (run,) = place.runs(group)
    assert (run.member, run.task, run.status, run.reward) == (2, task, status, reward)
    assert run.owner == client.agents.owner
    if kind is OutcomeKind.ENDED:
        assert outcome.checked().run == run.run and outcome.checked().reward == reward
    told = [event for event in client.events if getattr(event, "run", None) == run.run]
    assert [type(event) for event in told if not isinstance(event, ToolRan)] == [RunStarted, RunEnded]
    assert isinstance(told[0], RunStarted) and isinstance(told[-1], RunEnded)
    assert any(isinstance(event, ToolRan) for event in told) == (task == "end")


def test_a_run_whose_agent_hangs_ends_as_timed_out_and_is_scored(
    place: Place, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its agent does, if that ever ends."""
    monkeypatch.setattr(calling, "OVERTIME", 0.2)
    monkeypatch.syspath_prepend(str(place.folder))
    place.fresh()
    sessions = Sessions(
        replace(place.settings, rollout=msgspec.structs.replace(place.settings.rollout, timeout_s=0.5)),
        lambda event: None,
    )
    sessions.serve(place.url, KEY)
    try:
        outcome = sessions.run(Order("hold", group), "")
        assert outcome.kind is OutcomeKind.ENDED and place.held() == 1
        (run,) = place.runs(group)
        assert (run.status, run.reward) == (RunStatus.TIMED_OUT, 0.0)
    finally:
        place.go()
        sessions.stop()


def test_outcomes_raise_what_they_are() -> None:
    with pytest.raises(ServiceError, match="away"):
        Outcome(OutcomeKind.SERVICE, "away", "ServiceError").checked()
    with pytest.raises(WorkspaceError, match="broken"):
        Outcome(OutcomeKind.FAILED, "broken", "WorkspaceError").checked()
    with pytest.raises(TrainerError, match="CommandFailed: exit code 3"):
        Outcome(OutcomeKind.FAILED, "exit code 3", "CommandFailed").checked()
    with pytest.raises(RuntimeError, match="ValueError: no idea"):
        Outcome(OutcomeKind.RAISED, "no idea", "ValueError").checked()
    with pytest.raises(TrainerError, match="died 4 times"):
        Outcome(OutcomeKind.LOST, "the agents' process died 4 times").checked()


def test_a_run_that_the_service_refuses_is_not_recorded(
    place: Place, connect: Callable[..., Client], group: str
) -> None:
    client = connect()
    client.agents.serve(place.url, "another key")
    client.begin("end", group)
    assert client.outcome(group).kind is OutcomeKind.SERVICE
    assert place.runs(group) == []
    client.agents.serve(place.url, KEY)
    client.begin("end", f"{group}-again")
    assert client.outcome(f"{group}-again").kind is OutcomeKind.ENDED


def test_options_reach_the_agent_and_its_output_the_log(
    place: Place, connect: Callable[..., Client], group: str, capfd: pytest.CaptureFixture[str]
) -> None:
    client = connect()
    client.begin("options", group, options=pickle.dumps({"value": 0.125}))
    assert client.outcome(group).checked().reward == 0.125
    found = client.agents.run(place.tasks["print"], Order("print", split="evaluation"))
    assert found.reward == 1.0
    log = place.log.read_text()
    assert "hello from an agent" in log
    assert "HTTP Request" not in log  # a line for every call would fill the disk
    assert "hello" not in "".join(capfd.readouterr())


def test_a_task_that_nobody_can_send_is_named(connect: Callable[..., Client], group: str) -> None:
    client = connect()
    with pytest.raises(SettingsError, match=r"task 'mine' cannot be sent .* a scorer that is a function of a module"):
        client.begin(Task(name="mine", instruction="x", scorer=lambda workspace: 1.0), group)


def test_no_torch_in_the_process(connect: Callable[..., Client], child: Child, group: str) -> None:
    client = connect()
    client.begin("end", group)
    client.outcome(group)
    assert "libtorch" in Path("/proc/self/maps").read_text()
    assert "libtorch" not in Path(f"/proc/{child.pid}/maps").read_text()


def test_settings_that_are_wrong_are_told(place: Place) -> None:
    process, address = start_host(place)
    try:
        config = load_config(place.folder / "train.toml", ["agent.function=doing_agent:nobody"])
        agents = Agents(lambda: address, place.key, AgentSettings.of(config, place.folder), lambda event: None)
        with pytest.raises(SettingsError, match="has no function 'nobody'"):
            agents.connect()
        agents.close()
        with pytest.raises(ConnectionError, match="no agreement on the key"):
            dial(address, b"another key")
        client = Client(place, lambda: address)  # the process is as good as before
        client.agents.close()
    finally:
        process.kill()
        process.wait()


def test_killed_in_the_middle_its_runs_are_cancelled_and_made_again(
    place: Place, connect: Callable[..., Client], child: Child, group: str
) -> None:
    client = connect(lives=2)
    client.begin("end", group, 0)
    client.outcome(group, 0)
    for member in (1, 2, 3):
        client.begin("hold", group, member)
    wait_for(lambda: place.held() == 3)
    before, pid = client.agents.owner, child.pid
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: place.held() == 6)
    assert child.pid != pid and client.agents.owner != before
    place.go()
    for member in (1, 2, 3):
        assert client.outcome(group, member).checked().reward == 0.25
    runs = Counter((run.member, run.status, run.owner == before) for run in place.runs(group))
    cancelled = {(member, RunStatus.CANCELLED, True): 1 for member in (1, 2, 3)}
    made = {(member, RunStatus.COMPLETED, False): 1 for member in (1, 2, 3)}
    assert runs == {(0, RunStatus.COMPLETED, True): 1} | cancelled | made
    ends = Counter(event.status for event in client.events if isinstance(event, RunEnded))
    assert ends == {RunStatus.COMPLETED: 4, RunStatus.CANCELLED: 3}


def test_a_run_that_kills_the_process_is_given_up(place: Place, connect: Callable[..., Client], group: str) -> None:
    client = connect(lives=1)
    client.begin("die", group)
    outcome = client.outcome(group)
    assert outcome.kind is OutcomeKind.LOST and "died 1 times" in outcome.error
    assert [run.status for run in place.runs(group)] == [RunStatus.CANCELLED]
    client.begin("end", group, 1)
    assert client.outcome(group, 1).kind is OutcomeKind.ENDED


def test_one_that_comes_back_without_its_agent_ends_the_training(place: Place) -> None:
    module = place.folder / "vanishing_agent.py"
    module.write_text("def agent(agent): ...")
    config = load_config(place.folder / "train.toml", ["agent.function=vanishing_agent:agent"])
    process, address = start_host(place)
    agents = Agents(lambda: address, place.key, AgentSettings.of(config, place.folder), lambda event: None)
    try:
        agents.connect()
        agents.check()
        module.unlink()
        process.kill()
        process.wait()
        process, address = start_host(place)
        wait_for(lambda: agents._failure is not None)
        with pytest.raises(TrainerError, match=r"cannot be used any more: .* there is no module 'vanishing_agent'"):
            agents.check()
        agents.close()
    finally:
        process.kill()
        process.wait()


TRAINER = """
import time
from pathlib import Path
from gyre_sdk.journal import Journal
from gyre_sdk.trainer.agents.client import Agents
from gyre_sdk.trainer.agents.settings import AgentSettings
from gyre_sdk.trainer.agents.wire import Order
from gyre_sdk.trainer.config import load_config
from gyre_sdk.trainer.ledger import Ledger
from gyre_sdk.trainer.rollouts import Plan, Rollouts
from gyre_sdk.trainer.tasks import load_tasks
folder = Path({folder!r})
config = load_config(folder / "train.toml")
journal = Journal(config.store.path)
agents = Agents(lambda: {address!r}, {key!r}, AgentSettings.of(config, folder), lambda event: None)
agents.connect()
agents.serve({url!r}, {service_key!r})
task = next(task for task in load_tasks(config.tasks, folder) if task.name == "hold")
rollouts = Rollouts(
    Plan(1, 4, 0, 1, 1), [task],
    lambda task, group, member, done: agents.begin(task, Order(task.name, group, member), done),
    journal=journal, ledger=Ledger(journal), observer=lambda event: None, concurrency=3)
rollouts.start(0)
time.sleep(600)
"""


def test_runs_of_a_trainer_that_was_killed_go_on_and_the_next_one_takes_them_up(place: Place) -> None:
    """Each member is run once: three were under way, the fourth had not begun."""
    place.fresh()
    process, address = start_host(place)
    code = TRAINER.format(folder=str(place.folder), address=address, key=place.key, url=place.url, service_key=KEY)
    trainer = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_for(lambda: place.held() == 3)
        trainer.kill()
        trainer.wait()
        ledger = Ledger(place.journal)
        (group,) = ledger.state.unused()
        planned = ledger.state.groups[group]
        assert (planned.task, planned.members, planned.closed) == ("hold", 4, None)
        (place.folder / "go").touch()  # one may end before anybody is there to learn of it
        wait_for(lambda: any(run.status is RunStatus.COMPLETED for run in place.runs(group)))
        client = Client(place, lambda: address)
        assert cancel_orphans(place.journal, alive=client.agents.owner) == 0
        rollouts = Rollouts(
            Plan(1, 4, 0, 1, 1),
            [place.tasks["hold"]],
            lambda task, group, member, done: client.agents.begin(task, Order(task.name, group, member), done),
            journal=place.journal,
            ledger=ledger,
            observer=client.events.append,
            concurrency=3,
        )
        rollouts.start(0, [group], members(client.agents.under_way()))
        closed = next(rollouts.closed([group]))
        assert closed.rewards == [0.25] * 4
        runs = place.runs(group)
        assert sorted(run.member for run in runs) == [0, 1, 2, 3]
        assert {run.status for run in runs} == {RunStatus.COMPLETED}
        assert {run.owner for run in runs} == {client.agents.owner}
        started = {event.run for event in client.events if isinstance(event, RunStarted)}
        assert started >= {run.run for run in runs if run.member == 3}
        assert rollouts.stop(10.0)
        client.agents.close()
    finally:
        trainer.kill()
        trainer.wait()
        process.kill()
        process.wait()


def test_runs_under_way_that_are_taken_up_while_they_hold(
    place: Place, connect: Callable[..., Client], group: str
) -> None:
    """A trainer hangs up and another one comes: outcomes of those that it asks for at once, and of others, arrive there."""
    first = connect()
    first.begin("hold", group, 0)
    first.begin("hold", group, 1)
    wait_for(lambda: place.held() == 2)
    first.agents.leave()
    second = connect()
    waiting = second.agents.under_way()
    assert sorted(one.order.member for one in waiting if one.order.group == group) == [0, 1]
    second.begin("hold", group, 1)
    assert [one.order.member for one in second.agents.under_way() if one.order.group == group] == [0]
    place.go()
    assert second.outcome(group, 1).checked().reward == 0.25
    wait_for(lambda: all(run.status is RunStatus.COMPLETED for run in place.runs(group)))
    second.begin("hold", group, 0)  # its outcome has come, or will: the run is not made again
    assert second.outcome(group, 0).checked().reward == 0.25
    assert sorted(run.member for run in place.runs(group)) == [0, 1]
    assert second.threads <= {"agents", threading.current_thread().name} and first.outcomes == {}


def test_at_the_end_runs_under_way_are_recorded_as_cancelled(place: Place, group: str) -> None:
    """And the process ends, whatever its agents wait for."""
    place.fresh()
    process, address = start_host(place)
    try:
        client = Client(place, lambda: address)
        client.begin("hold", group, 0)
        client.begin("async hold", group, 1)
        wait_for(lambda: place.held() == 2)
        client.agents.close()
        client.agents.close()
        found = {(run.member, run.status, run.error) for run in place.runs(group)}
        assert found == {(member, RunStatus.CANCELLED, "the trainer was stopped") for member in (0, 1)}
        ends = [event.status for event in client.events if isinstance(event, RunEnded)]
        assert ends == [RunStatus.CANCELLED] * 2
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
