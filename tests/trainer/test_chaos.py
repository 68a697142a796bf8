"""A training of ten steps on cells, of which every part is killed with -9, one after the other in random order."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docker.errors import APIError
from test_training import items
from test_training_cells import CELLS, sound
from training_kit import CONFIG, finish, make_training, start

from gyre_sdk.harness.workspace.reaper import OWNER
from gyre_sdk.journal import Journal
from gyre_sdk.records import RunStatus
from gyre_sdk.trainer.ledger import StepCommitted, VersionAllocated, fold

STEPS = 10
AGENT = """
from loop_agent import agent as talk, tasks

def agent(agent):
    agent.workspace.exec("sleep 0.2; echo one > said", check=True)
    talk(agent)
    agent.workspace.exec("cat said", check=True)
"""
PROCESSES = {
    "trainer": "gyre_sdk.trainer.main",
    "agents": "gyre_sdk.trainer.agents.host",
    "proxy": "gyre_sdk.cli serve",
    "a replica": "gyre_sdk.trainer.engines.embedded",
    "another replica": "gyre_sdk.trainer.engines.embedded",
    "satellite": "gyre_sdk.trainer.sharing.worker",
}
"""Part -> what its command line has."""
CONTAINER = "container"


def processes(folder: Path) -> dict[int, str]:
    """Process ids of a training's own processes, helpers of them left out, with their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            leads = os.getpgid(int(entry.name)) == int(entry.name)
        except (OSError, ValueError):
            continue  # not a process, or not any more
        if str(folder) in line and (leads or PROCESSES["trainer"] in line):
            found[int(entry.name)] = line
    return found


def running(folder: Path, part: str) -> list[int]:
    """Return the process ids of a part."""
    return sorted(pid for pid, line in processes(folder).items() if PROCESSES[part] in line)


def wait(condition: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 400.0) -> Any:
    """Wait for something true while a trainer runs; return it."""
    give_up = time.monotonic() + seconds
    while not (found := condition()):
        if process.poll() is not None:
            raise AssertionError(f"the trainer ended with {process.returncode}: {process.communicate()}")
        assert time.monotonic() < give_up, "it did not get that far"
        time.sleep(0.05)
    return found


def containers(client: Any) -> set[str]:
    return {one["Id"] for one in client.api.containers(all=True, filters={"label": OWNER})}


def kill_container(client: Any, ours: set[str]) -> bool:
    """Kill one that runs and is not among `ours`."""
    for one in client.api.containers(filters={"label": OWNER}):
        if one["Id"] not in ours:
            try:
                client.api.kill(one["Id"], signal="SIGKILL")
            except APIError:
                continue  # it has just ended
            return True
    return False


def test_every_part_is_killed(tmp_path: Path, docker_client: Any, base_image: str) -> None:
    """It finishes; no version is used again, no unit lost or doubled, nothing is left."""
    text = CONFIG.replace("[train]\n", "[train]\nunit_tokens = 24\n").replace('"local"', '"docker"')
    text = text.replace("loop_agent:agent", "worker_agent:agent").replace("runs_per_group = 3", "runs_per_group = 2")
    config = make_training(tmp_path, text + CELLS.format(count=2, more="standing = 1"))
    (tmp_path / "worker_agent.py").write_text(AGENT)
    before = containers(docker_client)
    parts = [*PROCESSES, CONTAINER]
    draw = random.Random(6)
    draw.shuffle(parts)
    arguments = ("--steps", str(STEPS), "--set", "output.linger_s=60.0")
    process = start(config, *arguments)
    seen = 0

    def further() -> bool:
        return sum(isinstance(item, StepCommitted) for item in items(tmp_path)) > seen

    for part in parts:
        wait(further, process)
        seen = sum(isinstance(item, StepCommitted) for item in items(tmp_path))
        if part == CONTAINER:
            wait(lambda: kill_container(docker_client, before), process)
            continue
        os.kill(draw.choice(wait(lambda part=part: running(tmp_path, part), process)), signal.SIGKILL)
        if part == "trainer":
            process.communicate()
            process = start(config, *arguments)
    report = finish(process, 600.0)
    assert report["steps"] == STEPS
    found = items(tmp_path)
    state = fold(found)
    versions = [item.version for item in found if isinstance(item, VersionAllocated)]
    assert len(versions) == len(set(versions))
    units = [unit for step in state.steps.values() for unit in step.units]
    assert len(units) == len(set(units)) > 0
    used = [group for step in state.steps.values() for group in step.groups]
    assert len(used) == len(set(used)) == 2 * STEPS
    for group in used:
        closed = state.groups[group].closed
        assert closed is not None and len(closed.runs) == 2
    with Journal(tmp_path / "out" / "store.db", "r") as journal:
        assert journal.runs(status=RunStatus.RUNNING) == []
    sound(tmp_path)
    assert processes(tmp_path) == {}
    assert containers(docker_client) <= before
