"""The whole loop with real processes: it trains, and takes up where it was killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from training_kit import CONFIG, Forked, alive, finish, leashed, make_training

from gyre_sdk import events
from gyre_sdk.errors import JournalError, SettingsError, TrainerError
from gyre_sdk.journal import Journal
from gyre_sdk.records import RunRecord, RunStatus
from gyre_sdk.trainer.config import load_config
from gyre_sdk.trainer.evaluation import evaluate
from gyre_sdk.trainer.ledger import (
    GroupClosed,
    Resumed,
    State,
    StepCommitted,
    UnitSealed,
    VersionAllocated,
    VersionPublished,
    fold,
    read,
)
from gyre_sdk.trainer.main import main
from gyre_sdk.trainer.stack import Stack
from gyre_sdk.trainer.training import train
from gyre_sdk.trainer.transports import Replica, Unready


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return make_training(tmp_path)


def items(folder: Path) -> list[Any]:
    path = folder / "out" / "store.db"
    try:
        with Journal(path, "r") as journal:
            return read(journal.entries("trainer"))
    except JournalError:  # not there yet, or only just being made
        return []


def check_store(folder: Path, *, steps: int, groups: int = 2, members: int = 3) -> None:
    """What must hold at the end, whatever happened on the way."""
    found = items(folder)
    state = fold(found)
    assert state.committed == steps
    versions = [item.version for item in found if isinstance(item, VersionAllocated)]
    assert len(versions) == len(set(versions))
    units = [unit for step in state.steps.values() for unit in step.units]
    assert len(units) == len(set(units))
    used = [group for step in state.steps.values() for group in step.groups]
    assert len(used) == len(set(used)) == steps * groups
    with Journal(folder / "out" / "store.db", "r") as journal:
        assert journal.runs(status=RunStatus.RUNNING) == []
        published = {0} | {item.version for item in found if isinstance(item, VersionAllocated)}
        for run in journal.runs():
            for call in journal.calls(run.run):
                assert {span.version for span in call.versions} <= published
        for group in used:
            closed = state.groups[group].closed
            assert closed is not None and len(closed.runs) == members
            assert all(reward is not None for reward in closed.rewards)


def runs(folder: Path) -> list[RunRecord]:
    with Journal(folder / "out" / "store.db", "r") as journal:
        return journal.runs()


def eventually(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it did not get that far"
        time.sleep(0.02)


def wait_for(folder: Path, condition: Callable[[list[Any]], bool], seconds: float = 120.0) -> None:
    eventually(lambda: condition(items(folder)), seconds)


def test_it_trains_and_evaluates_on_one_stack(config: Path, tmp_path: Path) -> None:
    """With phi = 0 and mu = 1: every run of a step was sampled by the weights that the step starts from. A run without a score
    is repeated once and never later. Meanwhile a second trainer on the same folder is refused."""
    seen: list[Any] = []
    settings = load_config(config, ["rollout.staleness=0"])
    with Stack(settings, seen.append, base=tmp_path) as stack:
        with pytest.raises(SettingsError, match=r"output\.dir = .* is in use by another trainer"):
            Stack(load_config(config), base=tmp_path).__enter__()
        with pytest.raises(SettingsError, match=r"store\.path = .* is in use by another trainer"):
            Stack(load_config(config, ["output.dir=elsewhere"]), base=tmp_path).__enter__()
        before = evaluate(settings, stack.tasks, name="before", stack=stack)
        report = train(settings, stack=stack)
        after = evaluate(settings, stack.tasks[:4], name="after", temperature=0.0, stack=stack)
        again = evaluate(settings, stack.tasks, name="before", stack=stack)
        runs = stack.journal.runs()
        unscored = evaluate(settings, stack.tasks[:3], name="unscored", temperature=0.75, stack=stack)
        assert (unscored.runs, unscored.scored, unscored.success) == (3, 0, 0.0)
        assert len(stack.journal.runs()) == len(runs) + 6
        assert evaluate(settings, stack.tasks[:3], name="unscored", temperature=0.75, stack=stack) == unscored
        assert len(stack.journal.runs()) == len(runs) + 6
        with pytest.raises(SettingsError, match="cannot be named 'train'"):
            evaluate(settings, stack.tasks, name="train", stack=stack)
    assert (report.steps, report.skipped, report.runs, report.version, report.versions) == (3, 0, 18, 3, 3)
    assert report.trained_tokens > 100 and report.untrained == {}
    assert report.metrics["ratio"] == pytest.approx(1.0, abs=0.05)
    assert (before.runs, after.runs, before.scored) == (6, 4, 6)
    assert again == before
    assert [run.metadata["split"] for run in runs].count("before") == 6
    assert {run.dispatch_version for run in runs if run.metadata["split"] == "after"} == {3}
    kinds = [type(event) for event in seen]
    assert kinds.count(events.StepTaken) == 3 and kinds.count(events.VersionPublished) == 3
    assert kinds.count(events.GroupClosed) == 6 and kinds.count(events.EvaluationMeasured) == 5
    assert kinds.count(events.RunStarted) == kinds.count(events.RunEnded) == 18 + 6 + 4 + 6
    assert kinds.count(events.CallRecorded) == 2 * (18 + 6 + 4)
    check_store(tmp_path, steps=3)
    state = fold(items(tmp_path))
    for step, kept in state.steps.items():
        for group in kept.groups:
            closed = state.groups[group].closed
            assert closed is not None
            assert state.versions[closed.dispatch_version] == (State.PUBLISHED, step - 1)
    assert not any(path.name.startswith("v") for path in (tmp_path / "out").iterdir())


ENDED_AT: list[tuple[signal.Signals, Callable[[list[Any]], bool]]] = [
    (signal.SIGKILL, lambda new: any(isinstance(item, GroupClosed) for item in new)),
    (signal.SIGINT, lambda new: any(isinstance(item, UnitSealed) for item in new)),
    (signal.SIGKILL, lambda new: any(isinstance(item, StepCommitted) for item in new)),
    (signal.SIGKILL, lambda new: sum(isinstance(item, VersionPublished) for item in new) >= 2),
]
"""How a process ends, and when, by what it has made durable."""


def test_a_trainer_killed_with_9_or_interrupted_resumes_again_and_again(config: Path, tmp_path: Path) -> None:
    """Nothing that is durable is lost, and none of it is run twice: groups that had closed are used as they are. Of one that
    was killed nothing is left after a while; of one that was interrupted, at once."""
    options = ("--set", "train.save_every=2", "--steps", "4")
    process = Forked(config, *options, "--set", "output.linger_s=0.1")
    try:
        eventually(lambda: len(leashed(process.pid)) == 3)
        started = leashed(process.pid)
    finally:
        process.kill()
        process.communicate()
    eventually(lambda: not any(map(alive, started)))
    before = items(tmp_path)
    for number, reached in ENDED_AT:
        process, past = Forked(config, *options), len(before)
        try:
            wait_for(tmp_path, lambda found, reached=reached, past=past: reached(found[past:]))
            started = leashed(process.pid)
            process.send_signal(number)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
        if number is signal.SIGINT:
            assert process.returncode == 130 and "run the same command again to resume" in said
            assert "did not end" not in said and not any(map(alive, started))
        assert items(tmp_path)[: len(before)] == before
        before = items(tmp_path)
    assert finish(Forked(config, *options))["steps"] == 4
    assert items(tmp_path)[: len(before)] == before
    after = {item.group: item for item in items(tmp_path) if isinstance(item, GroupClosed)}
    assert all(after[item.group] == item for item in before if isinstance(item, GroupClosed))
    check_store(tmp_path, steps=4)


def test_what_a_killed_trainer_started_goes_on_under_the_next(config: Path, tmp_path: Path) -> None:
    """Killed after a step, with an engine in the middle of a publication: all that it says is checked anew."""
    process = Forked(config)
    try:
        wait_for(tmp_path, lambda found: fold(found).committed > 0)
        started = leashed(process.pid)
    finally:
        process.kill()
        process.communicate()
    went_on = {run.run for run in runs(tmp_path) if run.status is RunStatus.RUNNING}
    places = {path.stem: json.loads(path.read_text())["url"] for path in (tmp_path / "out" / "run").glob("*.json")}
    with Replica(places["engine"], 0) as replica:
        with suppress(Unready):  # one was open
            replica.start()
        replica.post("/pause?mode=keep&clear_cache=true", {})
    allocated = [item.version for item in items(tmp_path) if isinstance(item, VersionAllocated)]
    settings = load_config(config)
    with Stack(settings, base=tmp_path) as stack:
        assert set(stack.pids().values()) == started
        assert stack.service.url == places["proxy"]
        rows = stack.service.status()["replicas"]
        assert [(row["url"], row["version"]) for row in rows] == [(places["engine"], max(allocated) + 1)]
        report = train(settings, stack=stack)
        assert set(stack.pids().values()) == started
    assert report.steps == 3
    check_store(tmp_path, steps=3)
    assert {run.status for run in runs(tmp_path) if run.run in went_on} <= {RunStatus.COMPLETED}
    assert not any(map(alive, started))
    assert list((tmp_path / "out" / "run").iterdir()) == []


def test_processes_killed_with_9_come_back(config: Path, tmp_path: Path) -> None:
    """The engine after the first publication, the proxy after the second."""
    seen: list[Any] = []
    names = {1: "engine", 2: "proxy"}
    settings = load_config(config, ["rollout.staleness=0"])  # a step's runs begin when the one before is published

    def watch(event: Any) -> None:
        seen.append(event)
        if isinstance(event, events.VersionPublished) and event.version in names:
            os.kill(stack.pids()[names[event.version]], signal.SIGKILL)

    with Stack(settings, watch, base=tmp_path) as stack:
        report = train(settings, stack=stack)
    assert report.steps == 3
    restarts = [event for event in seen if isinstance(event, events.ProcessRestarted)]
    assert {(event.process, event.reason) for event in restarts} == {
        (name, "signal SIGKILL") for name in names.values()
    }
    assert len(restarts) == len(names)
    assert fold(items(tmp_path)).committed == 3
    versions = [item.version for item in items(tmp_path) if isinstance(item, VersionAllocated)]
    assert versions == sorted(set(versions))


def test_lora_trains_publishes_every_mu_steps_and_resumes(tmp_path: Path) -> None:
    """Calls of any temperature are trained. Running a training again that has its steps does nothing; with more steps it goes
    on."""
    config = make_training(tmp_path, CONFIG + "[policy.lora]\nr = 4\nalpha = 8\n")
    options = ["rollout.publish_every=2", "agent.options.temperature=0.5", "train.steps=2"]
    first = train(load_config(config, options), base=tmp_path)
    assert first.trained_tokens > 0 and "call_sampling" not in first.untrained
    state = fold(items(tmp_path))
    assert list(state.versions.values()) == [(State.PUBLISHED, 0), (State.PUBLISHED, 2)]
    assert [len(step.groups) for step in state.steps.values()] == [2, 2], "each takes those that close next"
    assert sorted(state.steps[1].groups + state.steps[2].groups) == sorted(state.groups)
    before = len(items(tmp_path))
    report = train(load_config(config, options), base=tmp_path)
    assert (report.steps, report.resumed_from, report.runs) == (2, 2, 12)
    added = items(tmp_path)[before:]
    assert [type(item) for item in added] == [VersionAllocated, VersionPublished]  # its weights are served once more
    longer = finish(Forked(config, *(word for pair in options for word in ("--set", pair)), "--steps", "3"))
    assert (longer["steps"], longer["resumed_from"]) == (3, 2)
    assert fold(items(tmp_path)).versions[longer["version"]] == (State.PUBLISHED, 3)
    assert not any(isinstance(item, Resumed) for item in items(tmp_path))
    check_store(tmp_path, steps=3)


def test_what_is_not_trained_is_skipped_and_counted(config: Path, tmp_path: Path) -> None:
    """Groups without contrast, and calls that the trainer cannot compute again: log-probs at any temperature are those of the
    distribution that was sampled from; of a cut-off one they are not."""
    seen: list[Any] = []
    settings = load_config(config, ["agent.function=loop_agent:untrainable", "proxy.sampling=untrained"])
    report = train(settings, seen.append, base=tmp_path)  # three steps: each of the six tasks once
    assert (report.steps, report.skipped, report.trained_tokens, report.versions) == (3, 3, 0, 0)
    assert report.untrained == {"group_flat": 3, "call_sampling": 18, "run_without_targets": 9}
    skipped = [event for event in seen if isinstance(event, events.StepSkipped)]
    assert [event.step for event in skipped] == [1, 2, 3]
    assert "scored 6 of 6 runs (" in skipped[0].reason


def test_an_agent_that_gives_nothing_to_train_ends_training_and_a_corrected_one_goes_on(
    config: Path, tmp_path: Path
) -> None:
    """The groups that the wrong ones left are skipped, and are no reason to give up again."""
    options = ["rollout.staleness=0", "rollout.groups_per_step=1", "train.steps=5"]

    def trained_by(agent: str) -> tuple[int, int]:
        report = train(load_config(config, [*options, f"agent.function=loop_agent:{agent}"]), base=tmp_path)
        return report.steps, report.skipped

    with pytest.raises(TrainerError, match=r"no run of the last 2 steps has an answer of the policy: .*base_url"):
        trained_by("silent")
    with pytest.raises(TrainerError, match=r"no run of the last 2 steps got a score; .*this agent cannot do anything"):
        trained_by("broken")
    assert trained_by("agent") == (5, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "train.stepz=3"], "train.stepz = 3 in the arguments: there is no such key; did you mean 'steps'?"),
        (["--set", "agent.function=nowhere:agent"], "there is no module 'nowhere'"),
        (["--set", "output.dir=loop_agent.py"], "loop_agent.py' cannot be written to: File exists; give a place"),
        (["--set", "tasks.options.count=0"], "tasks.loader = 'loop_agent:tasks' gives no tasks"),
        (["--set", "engine.kind=vllm", "--set", "engine.transport=lora"], "publishes adapters: set policy.lora"),
        (["--set", "engine.kind=vllm", "--set", "engine.transport=nccl"], "torch sees no GPU here"),
    ],
)
def test_wrong_settings_end_with_status_2(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([str(config), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_config_and_a_wrong_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.toml")]) == 2
    assert "none.toml does not exist" in capsys.readouterr().err
    assert main(["--bogus"]) == 2
