"""Workspaces whose process waits for a slow disk: nothing can freeze or kill it before that answers, and it is waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import DockerWorkspace, patience

pytestmark = pytest.mark.docker

WRITE = (
    "(dd if=/dev/zero of=slow bs={size}k count=1 oflag=direct &) >/dev/null 2>&1;"
    " until grep -q 'State:.D' /proc/[0-9]*/status 2>/dev/null; do sleep 0.05; done"
)
RATE = 8192
"""Bytes a second that the container may write to its disk."""


@pytest.fixture
def slow(docker_client, base_image):
    """A workspace that writes slowly: a process that does so waits in the kernel, where nothing can freeze it."""
    with DockerWorkspace(Task(instruction="x"), docker_client) as workspace:
        upper = docker_client.api.inspect_container(workspace.container.id)["GraphDriver"]["Data"]["UpperDir"]
        device = os.stat(upper).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        if not Path(f"/sys/dev/block/{number}").exists():
            pytest.skip(f"the engine keeps {upper} on no disk of this machine that could be slowed down")
        inside = docker_client.api.inspect_container(workspace.container.id)["State"]["Pid"]
        groups = dict(line.split(":", 2)[1:] for line in Path(f"/proc/{inside}/cgroup").read_text().splitlines())
        if "blkio" in groups:
            Path(f"/sys/fs/cgroup/blkio{groups['blkio']}/blkio.throttle.write_bps_device").write_text(
                f"{number} {RATE}"
            )
        else:
            Path(f"/sys/fs/cgroup{groups['']}/io.max").write_text(f"{number} wbps={RATE}")
        yield workspace


def test_a_fork_waits_until_the_disk_answers(slow):
    slow.exec("echo here >kept; " + WRITE.format(size=24))
    with slow.fork() as fork:
        assert fork.exec("cat kept").stdout == "here\n"
    assert slow.exec("echo on").stdout == "on\n"


def test_a_disk_that_does_not_answer_is_told(slow, monkeypatch):
    monkeypatch.setattr(patience, "PATIENCE", 0.5)
    slow.exec(WRITE.format(size=64))
    for use in (slow.snapshot, slow.fork):
        with pytest.raises(WorkspaceError, match=r"could not be halted: one of them may wait for a disk; try again"):
            use()
    assert slow.exec("echo on").stdout == "on\n"


def test_the_end_of_a_run_waits_until_the_disk_answers(slow):
    slow.exec(WRITE.format(size=72))
    slow.kill_all()
    assert slow.exec("echo on").stdout == "on\n"
