"""Snapshots and forks: every file and nothing else, however the workspace keeps them; swept like containers."""

from __future__ import annotations

import asyncio
import os
import time
import urllib.request
from dataclasses import replace

import pytest

from gyre_sdk.errors import ImageMissing, WorkspaceError, WorkspaceUnavailable
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import (
    DockerWorkspace,
    WorkspacePool,
    memory,
    open_workspace,
    owner,
    snapshots,
    sweep,
)
from gyre_sdk.harness.workspace import copying as copying_module
from gyre_sdk.harness.workspace.overlay import NotHere
from gyre_sdk.harness.workspace.snapshots import Snapshot, is_stale, surplus

pytestmark = pytest.mark.docker

DOCKERFILE = """FROM gyre/base
RUN echo kept >kept && mkdir folder && echo old >folder/old && echo gone >gone
RUN chown -R 1000:1000 /workspace
"""
KINDS = {
    "on disk": {},
    "working directory in memory": {"disk_mb": 32},
    "all in memory": {"read_only": True},
    "as root": {"profile": "root", "user": "0:0"},
}
LOOK = (
    "cd / && { find workspace tmp logs tests -type f -exec stat -c '%n %F %a %u:%g %s %Y %h' {} +;"
    " find workspace tmp logs tests ! -type d ! -type f -exec stat -c '%n %F %a %u:%g %N' {} +;"
    " find workspace tmp logs tests -mindepth 1 -type d -exec stat -c '%n %F %a %u:%g' {} +; } | sort; cat /workspace/kept"
)
CHANGE = r"""
printf new >kept; rm gone; rm -r folder; mkdir folder; echo fresh >folder/new
ln -s kept link; ln kept hard; ln -s /etc/passwd out; mkfifo pipe; echo '#!/bin/sh' >tool; chmod 750 tool
mkdir -p 'a b/ü/…'; echo x >'a b/ü/…/deep'; touch -d '2020-01-01 00:00:00' old; echo s >shut; chmod 000 shut
truncate -s 3000000 sparse; echo t >/tmp/t; mkdir -p /logs/agent /logs/verifier; echo l >/logs/agent/l; echo 1 >/logs/verifier/reward.txt
echo forged >/tests/test.sh
setsid sleep 31533 >/dev/null 2>&1 &
"""


@pytest.fixture(scope="module")
def image(docker_client, base_image, tmp_path_factory):
    """A folder whose image has files of its own in the working directory."""
    folder = tmp_path_factory.mktemp("image")
    (folder / "Dockerfile").write_text(DOCKERFILE)
    return folder


@pytest.fixture
def workspace(kind, docker_client, image):
    task = Task(instruction="x", dockerfile=image, memory_mb=128, **{"files": {"placed": "1"}, **KINDS[kind]})
    with DockerWorkspace(task, docker_client, run_id="r31") as workspace:
        workspace.exec("rm placed", check=True)
        workspace.exec(CHANGE, check=True)
        yield workspace


@pytest.fixture
def through_the_engine(monkeypatch):
    """Take away the short cuts that root on the engine's machine has."""

    def not_here(*_: object) -> None:
        raise NotHere("elsewhere")

    monkeypatch.setattr(copying_module, "upper_folder", lambda *_: None)
    monkeypatch.setattr(memory, "pid_of", not_here)


def mine(client):
    """Names of the snapshots of this process: the engine may have others'."""
    return {one.id for one in snapshots.snapshots(client) if one.labels[owner.OWNER] == labels()[owner.OWNER]}


def labels():
    return owner.labels(owner.me(), run="r", deadline=1000.0)


@pytest.mark.parametrize("kind", ["on disk", "working directory in memory", "as root"])
def test_the_same_through_the_engine_alone(workspace, docker_client, through_the_engine):
    workspace.exec("chmod 600 shut")  # read by its owner there
    before = workspace.exec(LOOK).stdout
    with workspace.fork() as fork:
        assert fork.exec(LOOK).stdout == before
        assert mine(docker_client) == {fork._basis}
    assert workspace.exec(LOOK).stdout == before
    assert mine(docker_client) == set()


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_has_every_file_and_a_fork_too(workspace, kind, docker_client):
    before = workspace.exec(LOOK).stdout
    assert before.endswith("new") and "gone" not in before and "folder/old" not in before
    with workspace.fork() as fork:
        assert fork.exec(LOOK).stdout == before
        assert fork.exec("ps -eo args | grep -c '[s]leep 31533'").stdout == "0\n"  # files only
        fork.exec("echo changed >kept; rm hard; echo more >/tmp/more")
    assert workspace.exec(LOOK).stdout == before
    assert workspace.exec("ps -eo args | grep -c '[s]leep 31533'").stdout == "1\n"  # it goes on
    name = workspace.snapshot()
    try:
        assert docker_client.api.inspect_image(name)["Config"]["Labels"][owner.RUN] == "r31"
        with open_workspace(workspace.task, snapshot=name) as copy:
            assert copy.exec(LOOK).stdout == before
            assert copy.exec("ls placed").exit_code != 0
        if kind == "working directory in memory":
            with open_workspace(replace(workspace.task, disk_mb=None), snapshot=name) as copy:
                assert copy.exec(LOOK).stdout == before
        with open_workspace(workspace.task, snapshot=name, phase="verifier") as verifier:
            assert verifier.exec("ls -A /tests /logs/verifier 2>/dev/null | grep -v :").stdout.split() == []
            assert verifier.exec("cat kept").stdout == "new"
    finally:
        snapshots.remove(docker_client, name)
    assert mine(docker_client) == set()
    assert docker_client.api.images(filters={"dangling": True, "label": snapshots.SNAPSHOT}) == []


def test_forks_of_forks_and_snapshots_of_snapshots(docker_client, base_image):
    with DockerWorkspace(Task(instruction="x", files={"a": "1"}, memory_mb=64), docker_client) as first:
        with first.fork() as second:
            second.exec("echo 2 >b")
            with second.fork() as third:
                assert third.exec("cat a b").stdout == "12\n"
                name = third.snapshot()
        with open_workspace(first.task, snapshot=name) as opened:
            opened.exec("echo 3 >c; rm a")
            nested = opened.snapshot()
        with open_workspace(first.task, snapshot=nested) as last:
            assert last.exec("cat b c; ls").stdout == "2\n3\nb\nc\n"
        for one in (name, nested):
            snapshots.remove(docker_client, one)
    assert mine(docker_client) == set()


def test_the_async_face_snapshots_forks_exposes_and_carries_files(docker_client, base_image, tmp_path):
    """And a fork whose caller has gone away is closed."""
    (tmp_path / "up").mkdir()
    (tmp_path / "up" / "index.html").write_text("hello\n")
    wanted = Task(instruction="x", memory_mb=64)

    async def use(workspace):
        aio = workspace.aio
        await aio.upload(tmp_path / "up", "www")
        await aio.exec("httpd -p 127.0.0.1:8000 -h www", check=True)
        host, port = await aio.expose(8000)
        with await asyncio.to_thread(urllib.request.urlopen, f"http://{host}:{port}/", timeout=20) as answer:
            assert answer.read() == b"hello\n"
        async with await aio.fork() as fork:
            assert (await fork.exec("cat www/index.html")).stdout == "hello\n"
            await fork.download("www", tmp_path / "down")
        assert (tmp_path / "down" / "index.html").read_text() == "hello\n"
        name = await aio.snapshot()
        async with open_workspace(wanted, snapshot=name).aio as later:
            assert (await later.exec("cat www/index.html")).stdout == "hello\n"
        await asyncio.to_thread(snapshots.remove, docker_client, name)
        forking = asyncio.create_task(aio.fork())
        await asyncio.sleep(0)
        forking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forking

    with DockerWorkspace(wanted, docker_client) as workspace:
        before = mine_containers(docker_client)
        asyncio.run(use(workspace))
        assert mine_containers(docker_client) == before


def mine_containers(client):
    found = client.api.containers(all=True, filters={"label": f"gyre.owner_pid={os.getpid()}"})
    return {one["Id"] for one in found}


def test_a_pooled_workspace_is_snapshotted_and_forked(docker_client, base_image):
    with WorkspacePool(recycle=True) as pool:
        workspace = pool.take(Task(instruction="x", files={"a": "1"}, memory_mb=64), run_id="r7")
        workspace.exec("echo 2 >b")
        with workspace.fork() as fork:
            assert fork.exec("cat a b").stdout == "12\n"
        workspace.exec("mkdir www; echo hello >www/index.html; httpd -p 127.0.0.1:8000 -h www")
        address = workspace.expose(8000)
        with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/", timeout=20) as answer:
            assert answer.read() == b"hello\n"
        name = workspace.snapshot()
        [found] = [one for one in snapshots.snapshots(docker_client) if one.id == name]
        assert (found.run, found.keep) == ("r7", False)
        workspace.close()
        with pytest.raises(OSError):
            urllib.request.urlopen(f"http://{address[0]}:{address[1]}/", timeout=20)
        with open_workspace(Task(instruction="x", memory_mb=64), kind=pool, snapshot=name) as opened:
            assert opened.exec("cat b").stdout == "2\n"
        snapshots.remove(docker_client, name)


def test_what_cannot_be_snapshotted_says_so(docker_client, base_image, monkeypatch):
    with DockerWorkspace(Task(instruction="x", memory_mb=64), docker_client) as workspace:
        with monkeypatch.context() as little:
            little.setattr(snapshots, "LIMIT", 1 << 20)
            workspace.exec("truncate -s 5G sparse")
            with pytest.raises(WorkspaceError, match=r"more than 1 MiB of files; .*a sparse file counts in full"):
                workspace.snapshot()
            workspace.exec("rm sparse; truncate -s 50M /logs/sparse")
            with pytest.raises(WorkspaceError, match="/logs: more than 1 MiB"):
                workspace.snapshot()
        assert mine(docker_client) == set()
        assert workspace.exec("echo alive").stdout == "alive\n"
        docker_client.api.remove_container(workspace.container.id, force=True)
        for use in (workspace.snapshot, workspace.fork):
            with pytest.raises(WorkspaceUnavailable):
                use()
    with pytest.raises(WorkspaceUnavailable):
        workspace.fork()
    with pytest.raises(ImageMissing, match="'gyre/snapshot:none' is not on the engine"):
        open_workspace(Task(instruction="x"), snapshot="gyre/snapshot:none")
    with pytest.raises(WorkspaceError, match="needs a Docker engine"):
        open_workspace(Task(instruction="x"), kind="local", snapshot="gyre/snapshot:none")


def test_snapshots_are_swept_by_owner_and_deadline(docker_client, base_image):
    """A container that a person starts from one inherits its labels, and is nobody's to sweep."""
    with DockerWorkspace(Task(instruction="x", memory_mb=64), docker_client) as workspace:
        workspace.exec("head -c 3000000 /dev/urandom >big")
        one, kept = workspace.snapshot(), workspace.snapshot(keep=True)
        past = workspace.snapshot(ttl_s=0.01)
    by_hand = docker_client.api.create_container(kept, ["sleep", "60"])["Id"]
    try:
        time.sleep(1.1)
        assert past in [gone.id for gone in sweep(docker_client).snapshots]
        assert mine(docker_client) == {one, kept}
        found = {each.id: each for each in snapshots.snapshots(docker_client)}
        assert all(2_900_000 < found[name].bytes < 4_000_000 for name in (one, kept))
        assert (found[one].keep, found[kept].keep) == (False, True)
        assert found[kept].deadline - time.time() == pytest.approx(snapshots.KEPT_S, abs=60)
        docker_client.api.tag(one, "gyre-test/mine", "1")
        assert mine(docker_client) == {one, kept}
        assert docker_client.api.inspect_container(by_hand)["State"]["Status"] == "created"
    finally:
        docker_client.api.remove_container(by_hand)
        for name in (one, kept):
            snapshots.remove(docker_client, name)
    assert mine(docker_client) == set()
    docker_client.api.remove_image("gyre-test/mine:1")  # a name that somebody gave it keeps it


def made(number: int, *, keep: bool, alive: bool = True, deadline: float = 1000.0, size: int = 10) -> Snapshot:
    of = labels() if alive else {**labels(), owner.PID: "4194304"}
    return Snapshot(f"s{number}", "r", keep, float(number), deadline, size, of)


def test_who_needs_a_snapshot():
    assert not is_stale(made(1, keep=False), 900.0)
    assert is_stale(made(1, keep=False, alive=False), 900.0)
    assert not is_stale(made(1, keep=True, alive=False), 900.0)
    assert is_stale(made(1, keep=True), 1001.0)


def test_the_oldest_kept_go_first():
    there = [made(1, keep=True), made(2, keep=False), made(3, keep=True), made(4, keep=True)]
    assert [one.id for one in surplus(there, 30)] == []
    assert [one.id for one in surplus(there, 29)] == ["s1"]
    assert [one.id for one in surplus(there, 10)] == ["s1", "s3"]
    assert [one.id for one in surplus(there, 0)] == ["s1", "s3", "s4"]
