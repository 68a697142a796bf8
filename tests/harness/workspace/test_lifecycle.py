"""Images, engines, owners: built once, found or named as missing, and nothing left behind. Case: cli-containers-after-signals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gyre_sdk.cli import app
from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import (
    DockerWorkspace,
    Isolation,
    LocalWorkspace,
    choose,
    container,
    open_workspace,
    owner,
    sweep,
    sweep_local,
)
from gyre_sdk.harness.workspace.engine import connect
from gyre_sdk.harness.workspace.images import ensure_image
from gyre_sdk.harness.workspace.isolation import best_isolation
from gyre_sdk.harness.workspace.reaper import own_label

pytestmark = pytest.mark.docker

CHILD = """
    import os, sys, threading, time
    from gyre_sdk.harness.scoring import score
    from gyre_sdk.harness.task import Task
    from gyre_sdk.harness.workspace import WorkspacePool, open_workspace
    task = Task(instruction="x", memory_mb=64)
    one = open_workspace(task, run_id="child")
    pool = WorkspacePool(recycle=True)
    pool.take(task).close()
    held = pool.take(task)
    def open_and_close():
        while True:
            open_workspace(task).close()
    for work in {work}:
        threading.Thread(target=work, daemon=True).start()
    print("ready", flush=True)
    {what}
"""
BUSY = """[
    open_and_close,
    lambda: held.exec("sleep 600"),
    lambda: score(Task(instruction="x", verifier_mode="shared", tests={"test.sh": "sleep 600"}, memory_mb=64), pool.take(task)),
]"""
WAIT = "one.exec('sleep 600')"


def labelled(client, pid):
    return [found["Id"] for found in client.api.containers(all=True, filters={"label": f"gyre.owner_pid={pid}"})]


def child(url, what=WAIT, work="[]"):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD).format(what=what, work=work)],
        env={**os.environ, "DOCKER_HOST": url},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_remove_the_containers(docker_client, docker_url, base_image, number):
    """Of a process that starts one, runs a tool call, and scores, all at that moment."""
    process = child(docker_url, work=BUSY)
    time.sleep(0.6)
    assert len(labelled(docker_client, process.pid)) >= 3
    process.send_signal(number)
    code = process.wait(60)
    assert code == -number or code == 1
    assert labelled(docker_client, process.pid) == []


def test_a_second_interrupt_does_not_stop_the_cleaning(docker_client, docker_url, base_image):
    process = child(docker_url, work=BUSY)
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    assert labelled(docker_client, process.pid) == []


def test_what_a_killed_owner_left_ends_by_itself(docker_client, docker_url, base_image):
    """Nobody sweeps here: every container is gone once its lifetime is over, the exited ones too."""
    start = """
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import DockerWorkspace
from gyre_sdk.harness.workspace.engine import connect
client = connect()
task = Task(instruction="x", memory_mb=64)
some = [DockerWorkspace(task, client, ttl_s=5) for _ in range(3)]
some[1].exec("setsid sh -c 'while :; do sleep 1; done' >/dev/null 2>&1 &")
print("ready", flush=True)
some[0].exec("sleep 600")
"""
    process = subprocess.Popen(
        [sys.executable, "-c", start], env={**os.environ, "DOCKER_HOST": docker_url}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.kill()
    process.wait()
    assert len(labelled(docker_client, process.pid)) >= 1
    deadline = time.monotonic() + 60
    while labelled(docker_client, process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.parametrize("what", ["raise RuntimeError", "sys.exit(3)", "pass"])
def test_any_end_of_the_program_removes_the_containers(docker_client, docker_url, base_image, what):
    process = child(docker_url, what)
    process.wait(60)
    assert labelled(docker_client, process.pid) == []


def test_what_a_killed_owner_left_is_swept_and_nothing_else(docker_client, docker_url, base_image):
    unrelated = docker_client.api.create_container("gyre/base", ["sleep", "60"], labels={"other": "1"})["Id"]
    mine = DockerWorkspace(Task(instruction="x", memory_mb=64), docker_client)
    alive = child(docker_url)
    process = child(docker_url)
    process.kill()
    process.wait()
    left = labelled(docker_client, process.pid)
    assert len(left) == 2
    assert sorted(sweep(docker_client).containers) == sorted(left)
    assert labelled(docker_client, process.pid) == []
    assert mine.exec("echo alive").stdout == "alive\n"
    assert len(labelled(docker_client, alive.pid)) == 2
    assert docker_client.api.inspect_container(unrelated)["Id"] == unrelated
    docker_client.api.remove_container(unrelated)
    alive.terminate()
    alive.wait(60)
    mine.close()


def test_commands_about_the_engine(docker_client, docker_url, base_image):
    """`gyre gc` takes what a dead process left and nothing without our labels; `gyre sandbox` builds, lists, tries."""

    def gyre(*arguments):
        done = CliRunner().invoke(app, arguments, env={"DOCKER_HOST": docker_url})
        assert done.exit_code == 0, done.output
        return done.stdout

    gone = {**owner.labels(owner.me(), run="gc", deadline=2e9, name="gyre-of-a-dead-one"), "gyre.owner_start": "1"}
    left = docker_client.api.create_container("gyre/base", ["true"], labels=gone, name="gyre-of-a-dead-one")["Id"]
    unrelated = docker_client.api.create_container("gyre/base", ["true"], labels={"other": "1"})["Id"]
    try:
        assert re.match(r"removed [1-9][0-9]* containers?, [0-9]+ networks?, ", gyre("gc"))
        there = {one["Id"] for one in docker_client.api.containers(all=True)}
        assert left not in there and unrelated in there
    finally:
        docker_client.api.remove_container(unrelated)
    assert gyre("sandbox", "build", "base") == "built gyre/base\n"
    assert any(line.split()[:2] == ["base", "built"] for line in gyre("sandbox", "list").splitlines())
    gyre("sandbox", "test", "base")


def test_a_container_ends_itself_after_its_lifetime(docker_client, docker_url, base_image):
    workspace = DockerWorkspace(Task(instruction="x", memory_mb=64), docker_client, ttl_s=1)
    deadline = time.monotonic() + 30
    while docker_client.api.containers(all=True, filters={"id": workspace.container.id}):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    workspace.close()


def test_staleness():
    """Who is judged: same boot and same process namespace only; anybody past the deadline."""
    mine = owner.labels(owner.me(), run="r", deadline=1000.0)
    assert not owner.is_stale(mine, now=900.0)
    assert owner.is_stale(mine, now=2000.0)
    assert owner.is_stale({**mine, owner.START: "1"}, now=900.0)
    assert owner.is_stale({**mine, owner.PID: "4194304"}, now=900.0)
    for elsewhere in ({owner.BOOT: "other"}, {owner.NAMESPACE: "pid:[1]"}):
        assert not owner.is_stale({**mine, owner.PID: "4194304", **elsewhere}, now=900.0)
    assert not owner.is_stale({})
    assert not owner.is_stale({owner.DEADLINE: "soon"})


def test_an_image_is_built_once_per_content(docker_client, base_image, tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM gyre/base\nCOPY a.txt /a.txt\nRUN cat /a.txt\n")
    (tmp_path / "a.txt").write_text("one")
    task = Task(instruction="x", dockerfile=tmp_path)
    first = ensure_image(docker_client, task)
    assert ensure_image(docker_client, task).id == first.id
    (tmp_path / "a.txt").write_text("two")
    assert ensure_image(docker_client, task).id != first.id
    assert docker_client.api.containers(all=True, filters={"ancestor": first.id}) == []


def test_a_failing_build_shows_its_last_lines(docker_client, base_image, tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM gyre/base\nRUN echo look-here && false\n")
    with pytest.raises(WorkspaceError, match="look-here"):
        open_workspace(Task(instruction="x", dockerfile=tmp_path))
    with pytest.raises(WorkspaceError, match="does not exist"):
        open_workspace(Task(instruction="x", dockerfile=tmp_path / "none"))


def test_no_engine_is_said_with_the_next_step(tmp_path):
    nowhere = f"unix://{tmp_path}/no.sock"
    with pytest.raises(
        WorkspaceError,
        match=r"answers at unix://.*no\.sock \(No such file or directory\); .*apt-get install docker\.io.*workspace='local'",
    ):
        open_workspace(Task(instruction="x"), engine=nowhere)
    kind, why = choose("auto", nowhere)
    assert kind == "local"
    assert "no.sock" in why and best_isolation().value in why
    with open_workspace(Task(instruction="x"), kind="auto", engine=nowhere) as workspace:
        assert isinstance(workspace, LocalWorkspace)
        assert best_isolation().value in workspace.describe()
    with pytest.raises(WorkspaceError, match="'podman' is unknown"):
        choose("podman")  # type: ignore[arg-type]


def test_auto_prefers_the_engine(docker_client, docker_url, base_image):
    assert choose("auto", docker_url)[0] == "docker"
    with open_workspace(Task(instruction="x", memory_mb=64), kind="auto", engine=docker_url) as workspace:
        assert isinstance(workspace, DockerWorkspace)


def test_a_local_workspace_leaves_nothing(tmp_path):
    workspace = LocalWorkspace(Task(instruction="x", files={"a": "1"}))
    root = workspace._root
    workspace.exec("setsid sleep 31466 >/dev/null 2>&1 & mkdir shut; touch shut/f; chmod 000 shut")
    workspace.close()
    assert not root.exists()
    assert subprocess.run(["pgrep", "-f", "sleep 3146[6]"], check=False).returncode == 1


def test_what_a_killed_owner_left_of_a_local_workspace_is_swept():
    code = """
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import LocalWorkspace
workspace = LocalWorkspace(Task(instruction="x"))
print(workspace._root, flush=True)
workspace.exec("sleep 31455")
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    root = Path(process.stdout.readline().strip())
    process.kill()
    process.wait()
    with LocalWorkspace(Task(instruction="x")) as mine:
        assert not root.exists()
        assert mine.exec("echo alive").stdout == "alive\n"
        assert root not in sweep_local()


def test_a_local_workspace_has_no_network_and_no_secrets():
    for kind in ("bubblewrap", "namespaces"):
        with LocalWorkspace(Task(instruction="x"), isolation=Isolation(kind)) as workspace:
            ran = workspace.exec(
                "grep -c . /proc/net/route; ls /root /home /work /var; cat /etc/shadow; touch /usr/x; ls /proc | grep -c '^[0-9]'"
            )
            lines = ran.stdout.split()
            assert lines[0] in ("0", "1")
            assert int(lines[-1]) < 20
            assert ran.stderr.count("No such file") >= 4


@pytest.mark.parametrize("kind", ["bubblewrap", "namespaces", "none"])
def test_a_local_workspace_does_not_reach_the_machines_loopback(kind):
    """Unless nothing keeps it apart, which shows that the question reaches whatever can be reached."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        LocalWorkspace(Task(instruction="x"), isolation=Isolation(kind)) as workspace,
    ):
        asked = workspace.exec(f"bash -c '</dev/tcp/127.0.0.1/{server.getsockname()[1]}'")
        said = [word for word in ("refused", "unreachable") if word in asked.stderr]
        assert (asked.exit_code, len(said)) == ((0, 0) if kind == "none" else (1, 1)), asked


def test_without_an_engine_the_error_is_all_that_is_shown(tmp_path):
    """What to do is the last line of a traceback, and not below those of three libraries."""
    with pytest.raises(WorkspaceError, match="install one") as raised:
        connect(f"unix://{tmp_path}/docker.sock")
    assert "The above exception" not in "".join(traceback.format_exception(raised.value))


def test_a_local_workspace_refuses_an_image_of_its_own(tmp_path):
    with pytest.raises(WorkspaceError, match="workspace='docker'"):
        LocalWorkspace(Task(instruction="x", dockerfile=tmp_path))


def test_only_so_many_containers_start_at_once(
    docker_client: Any, base_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bound of one each has started before the next is made."""
    monkeypatch.setattr(container, "_starts", threading.BoundedSemaphore(1))
    began = int(time.time())
    with ExitStack() as cleanup, ThreadPoolExecutor(4) as threads:
        opened = list(threads.map(lambda n: DockerWorkspace(Task(instruction="x"), docker_client), range(4)))
        for workspace in opened:
            cleanup.callback(workspace.close)
        ours = {workspace.container.id for workspace in opened}
        filters = {"type": "container", "event": ["create", "start"], "label": own_label()}
        told = docker_client.events(since=began, until=int(time.time()) + 1, filters=filters, decode=True)
        order = [(event["Action"], event["Actor"]["ID"]) for event in told if event["Actor"]["ID"] in ours]
    made = [id for action, id in order if action == "create"]
    assert order == [(action, id) for id in made for action in ("create", "start")] and set(made) == ours
