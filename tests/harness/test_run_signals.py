"""Stopping `gyre run`: whatever ends it, every run has its end on record and no container is left.

The batch of `cases/cli/cli-containers-after-signals.json`: six runs, three at a time, beside a container of somebody else.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from proxy_kit import running
from run_kit import Service, lines_of, task_folder

from gyre_sdk.harness.workspace import engine as docker_engine
from gyre_sdk.harness.workspace.owner import PID, RUN
from gyre_sdk.harness.workspace.sandboxes import build_sandbox
from gyre_sdk.records import RunStatus

pytestmark = pytest.mark.docker
AGENT = '[ -z "$FAST" ] || exec touch fast; echo begun; [ $GYRE_MEMBER = 0 ] || sleep 600'
"""The first run's agent ends at once, so that it is being scored; the others work for long."""
TEST = "#!/bin/sh\n[ -f fast ] || sleep 600\nmkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt\n"
BATCH = ("-n", "6", "-j", "3", "--json")


@pytest.fixture(scope="module")
def serving(model: Path, tmp_path_factory: pytest.TempPathFactory, engine: Any, base_image: str) -> Iterator[Service]:
    store = tmp_path_factory.mktemp("store") / "s.db"
    with running(model, store, engine.url) as proxy:
        yield Service(proxy.url, proxy.service_key, store)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task_folder(tmp_path_factory.mktemp("task") / "answer", test=TEST)


@pytest.fixture
def bystander(docker_client: Any, base_image: str) -> Iterator[Any]:
    """A container that is none of gyre's."""
    made = docker_client.containers.run(base_image, ["sleep", "600"], detach=True, network_mode="none")
    yield made
    made.reload()
    assert made.status == "running"
    made.remove(force=True)


class Started:
    """A batch that runs."""

    def __init__(self, process: subprocess.Popen[str], client: Any, group: str) -> None:
        self.process, self.group, self._client = process, group, client

    def containers(self) -> list[Any]:
        """Return the containers that are its process's, and those that lost theirs; stopped ones too."""
        labels = {"label": f"{PID}={self.process.pid}"}
        return self._client.containers.list(all=True, filters=labels, ignore_removed=True)

    def until_at_work(self) -> None:
        """Wait until three runs work, and the first of them is being scored."""
        assert self.process.stderr is not None
        begun = 0
        while begun < 3:
            begun += "begun" in self.process.stderr.readline()
        until(lambda: len(self.containers()) >= 4)  # one more for the evaluation

    def until_starting(self) -> None:
        """Wait until the first container is there; others are being started."""
        until(lambda: bool(self.containers()))

    def ended(self, status: int, seconds: float = 60.0) -> tuple[str, str]:
        """Wait for its end; return both outputs."""
        out, err = self.process.communicate(timeout=seconds)
        assert self.process.returncode == status, out + err
        return out, err


def until(found: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def begin(serving: Service, task: Path, client: Any, group: str) -> Started:
    return Started(serving.start(task, *BATCH, "--group", group, "--", "sh", "-c", AGENT), client, group)


def states(serving: Service, group: str) -> list[RunStatus]:
    return [run.status for run in serving.runs() if run.group == group]


def test_interrupted_once_what_is_scored_gets_a_moment(
    serving: Service, task: Path, docker_client: Any, bystander: Any
) -> None:
    batch = begin(serving, task, docker_client, "g-once")
    batch.until_at_work()
    os.kill(batch.process.pid, signal.SIGINT)
    out, err = batch.ended(130)
    assert batch.containers() == []
    assert "SIGINT: ending 3 runs, 3 not started; once more leaves at once" in err
    assert "SIGINT: all runs are on record, 1 cut off" in err
    assert states(serving, "g-once") == [RunStatus.CANCELLED] * 3
    assert {line["status"] for line in lines_of(out)} == {"cancelled"}


def test_interrupted_twice_it_leaves_at_once(serving: Service, task: Path, docker_client: Any, bystander: Any) -> None:
    batch = begin(serving, task, docker_client, "g-twice")
    batch.until_at_work()
    os.kill(batch.process.pid, signal.SIGINT)
    time.sleep(1.0)
    os.kill(batch.process.pid, signal.SIGINT)
    batch.ended(130)
    assert batch.containers() == []
    assert states(serving, "g-twice") == [RunStatus.CANCELLED] * 3


def test_terminated_while_containers_start(serving: Service, task: Path, docker_client: Any, bystander: Any) -> None:
    batch = begin(serving, task, docker_client, "g-term")
    batch.until_starting()
    os.kill(batch.process.pid, signal.SIGTERM)
    batch.ended(143)
    assert batch.containers() == []
    assert set(states(serving, "g-term")) <= {RunStatus.CANCELLED}


def test_killed_the_next_start_sweeps_and_takes_the_group_up(
    serving: Service, task: Path, docker_client: Any, bystander: Any
) -> None:
    batch = begin(serving, task, docker_client, "g-kill")
    batch.until_at_work()
    os.killpg(batch.process.pid, signal.SIGKILL)
    batch.process.communicate()
    assert RunStatus.RUNNING in states(serving, "g-kill")
    more = ("--group", "g-kill", "--resume", "--env", "FAST=1", "--", "sh", "-c", AGENT)
    again = Started(serving.start(task, *BATCH, *more), docker_client, "g-kill")
    out, err = again.ended(0, 120)
    assert "0 of 6 runs done, 6 left" in err
    assert sorted(line["member"] for line in lines_of(out)) == list(range(6))
    assert sorted(states(serving, "g-kill")) == [RunStatus.CANCELLED] * 3 + [RunStatus.COMPLETED] * 6
    assert batch.containers() == again.containers() == []
    labelled = docker_client.containers.list(all=True, filters={"label": RUN})
    assert not [one for one in labelled if one.labels[PID] in (str(batch.process.pid), str(again.process.pid))]


def test_an_engine_that_goes_away_ends_the_runs(
    serving: Service, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path("/tmp") / f"gyre-e{os.getpid()}"  # a socket's path must be short
    private = docker_engine.start_private_engine(folder)
    try:
        client = docker_engine.shared_client(private.url)
        build_sandbox(client, "base")
        monkeypatch.setenv("DOCKER_HOST", private.url)
        command = ("-n", "2", "--json", "--group", "g-engine", "--", "sh", "-c", "echo begun; sleep 600")
        batch = Started(serving.start(task, *command), client, "g-engine")
        assert batch.process.stderr is not None
        until(lambda: "begun" in batch.process.stderr.readline())  # type: ignore[union-attr]
        until(lambda: "begun" in batch.process.stderr.readline())  # type: ignore[union-attr]
        private.stop()
        out, err = batch.ended(1, 120)
    finally:
        private.stop()
        subprocess.run(["rm", "-rf", str(folder)], check=False)
    assert states(serving, "g-engine") == [RunStatus.WORKSPACE_ERROR] * 2, err
    assert all(re.search("workspace|container|engine", line["error"]) for line in lines_of(out))
