"""Recycled workspaces: nothing of a run survives, and any doubt ends the container."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from gyre_sdk.errors import WorkspaceUnavailable
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import WorkspacePool, open_workspace
from gyre_sdk.harness.workspace.reaper import owned
from gyre_sdk.harness.workspace.sandboxes import build_sandbox

pytestmark = pytest.mark.docker
TASK = Task(instruction="x", files={"app.txt": "v1", "bin/tool": "#!/bin/sh\necho tool\n"}, memory_mb=128, pids=64)
LOOK = "find / -xdev 2>/dev/null | sort; env | grep -v GYRE_EXEC | sort; umask; ulimit -a; cat /proc/mounts"


@pytest.fixture
def pool(docker_client, base_image):
    with WorkspacePool(recycle=True) as pool:
        yield pool


def again(pool, workspace, task=TASK):
    """Give a workspace back and take the next one."""
    workspace.close()
    return pool.take(task)


def test_the_next_run_gets_the_same_container_clean(pool):
    first = open_workspace(TASK, kind=pool, run_id="r1")
    assert pool.runs == {first.id: "r1"}
    assert first.exec("./bin/tool; cat app.txt").stdout == "tool\nv1"
    before = first.exec(LOOK).stdout
    first.exec(
        "echo evil > app.txt; mkdir -p .hidden/x; touch -- '-rf' '..odd'; ln -s /etc link; mkfifo p; mkdir shut; touch shut/f;"
        "chmod 000 shut; echo t > /tmp/t; mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo x > /tests/test.sh;"
        "chmod 000 . /logs /tests; setsid nohup sleep 31488 >/dev/null 2>&1 &"
    )
    second = again(pool, first)
    assert (second.id, pool.started, pool.discarded) == (first.id, 1, 0)
    ran = second.exec(
        "ls -A .; ls -A /tmp /logs /tests | grep -v :; stat -c %a . /tmp /logs /tests; ps -eo args | grep -c '[s]leep 31488'; cat app.txt"
    )
    assert ran.stdout.split() == ["app.txt", "bin", "755", "1777", "755", "755", "0", "v1"]
    assert second.exec(LOOK).stdout == before
    second.close()


def test_a_hold_ends_when_given_back(pool):
    workspace = pool.take(TASK)
    workspace.close()
    workspace.close()
    with pytest.raises(WorkspaceUnavailable, match="given back"):
        workspace.exec("true")


def test_only_the_emptied_folders_are_writable(pool):
    workspace = pool.take(TASK)
    look = "{ find / -xdev -type d; cut -d' ' -f2 /proc/mounts; } 2>/dev/null | grep -v ^/proc/[0-9]"
    found = workspace.exec(look + " | while read -r d; do touch $d/probe-31 2>/dev/null && echo $d; done; true")
    places = set(found.stdout.split())
    assert places <= {"/workspace", "/tmp", "/logs", "/tests", "/run/gyre", "/dev/mqueue"}
    assert "/workspace" in places
    workspace.close()


@pytest.mark.parametrize(
    "attack",
    [
        "kill -9 -1",
        "bomb() { bomb | bomb & }; bomb; sleep 1",
        "head -c 300000000 /dev/zero > big",
        "head -c 300000000 /dev/zero > /run/gyre/big",
        "for p in /proc/[0-9]*; do renice 19 ${p#/proc/}; done; sleep 1",
        "for p in /proc/[0-9]*; do taskset -p 1 ${p#/proc/}; done; kill -STOP -1",
        "while :; do (setsid sh -c 'while :; do echo x > /workspace/late; done' &); sleep 0.1; done & sleep 0.5",
    ],
)
def test_hostile_runs_leave_nothing(pool, attack):
    """Recycled or replaced: either way the next run works and starts clean."""
    workspace = pool.take(TASK)
    try:
        done = workspace.exec(attack, timeout=5)
        assert done.timed_out or not attack.endswith("kill -STOP -1"), done  # the supervisor is stopped, too
    except WorkspaceUnavailable:
        pass
    following = again(pool, workspace)
    ran = following.exec(
        "ls -A; cat app.txt; cat /proc/$$/stat | cut -d' ' -f19; ls -d /proc/[0-9]* | wc -l; df -P . | tail -1 | awk '{print $3 < 100}'"
    )
    lines = ran.stdout.splitlines()
    assert lines[:2] == ["app.txt", "bin"]
    assert lines[2] == "v10"
    assert int(lines[3]) < 20
    assert lines[4] == "1"
    following.close()


def test_a_dead_container_is_replaced(pool, docker_client):
    workspace = pool.take(TASK)
    docker_client.api.remove_container(workspace.inner.container.id, force=True)
    following = again(pool, workspace)
    assert following.id != workspace.id
    assert following.exec("cat app.txt").stdout == "v1"
    following.close()
    assert pool.discarded == 1


def test_a_container_that_died_while_idle_is_replaced(pool, docker_client):
    workspace = pool.take(TASK)
    container = workspace.inner.container.id
    workspace.close()
    while pool.recycled + pool.discarded == 0:
        time.sleep(0.05)
    docker_client.api.remove_container(container, force=True)
    following = pool.take(TASK)
    assert following.exec("cat app.txt").stdout == "v1"
    following.close()


def test_other_limits_and_root_get_other_containers(pool):
    one = pool.take(TASK)
    one.close()
    other = pool.take(Task(instruction="x", memory_mb=64))
    assert other.id != one.id
    root = pool.take(Task(instruction="x", user="root"))
    root.exec("echo x > /marker")
    root.close()
    again_root = pool.take(Task(instruction="x", user="root"))
    assert again_root.exec("ls /marker").exit_code != 0
    other.close()
    again_root.close()


def test_many_runs_at_once_never_see_each_other(pool):
    def run(number):
        with pool.take(
            Task(instruction="x", files={"mine": str(number)}, memory_mb=128), run_id=str(number)
        ) as workspace:
            seen = workspace.exec(f"cat mine; ls; echo {number} > made-{number}").stdout
            return seen == f"{number}mine\n"

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(run, range(40)))
    assert pool.started <= 8
    assert pool.runs == {}


def test_size_bounds_the_containers(docker_client, base_image):
    with WorkspacePool(recycle=True, size=2) as pool:
        with ThreadPoolExecutor(6) as threads:

            def run(number):
                with pool.take(TASK) as workspace:
                    return workspace.exec("echo ok").stdout

            assert set(threads.map(run, range(12))) == {"ok\n"}
        assert pool.started <= 2


def test_containers_wait_started_for_the_task(docker_client, base_image):
    """Prepared ones are taken first, one run each, and replaced; without recycling too, and for root."""
    for task in (TASK, Task(instruction="x", user="root", files={"app.txt": "v1"}, memory_mb=64)):
        with WorkspacePool() as pool:
            pool.prepare(task, 2)
            first = pool.take(task, run_id="r1")
            second = pool.take(task, run_id="r2")
            assert first.id != second.id
            assert first.exec("cat app.txt; touch /tmp/mine").stdout == "v1"
            assert second.exec("ls /tmp").stdout == ""
            assert pool.runs == {first.id: "r1", second.id: "r2"}
            first.close()
            second.close()
            third = pool.take(task)
            assert third.id not in (first.id, second.id)
            pool.prepare(task, 0)
    assert owned(docker_client) == []


def test_only_like_tasks_share_a_container(docker_client, base_image):
    with WorkspacePool(recycle=True) as pool:
        pool.prepare(TASK, 1)
        others = [
            Task(instruction="x", memory_mb=64),
            replace(TASK, profile="root", user="1000:1000"),
            replace(TASK, read_only=True),
            replace(TASK, user="1001:1001"),
        ]
        taken = [pool.take(task) for task in [*others, TASK]]
        assert len({one.id for one in taken}) == len(taken)
        for one in taken:
            one.close()
        for task in (replace(TASK, files={}, instruction="y", env={"A": "b"}), TASK):
            again = pool.take(task)  # the same one, or the one that was started in its place
            assert again.id not in {one.id for one in taken[:-1]}
            again.close()


def test_what_is_taken_while_containers_start_waits_for_them(docker_client, base_image):
    with WorkspacePool() as pool:
        pool.prepare(TASK, 1)
        with pool.take(TASK) as workspace:
            assert workspace.exec("cat app.txt").stdout == "v1"
        pool.prepare(TASK, 0)


BASH = Task(instruction="x", image="gyre/python", files={"app.txt": "v1"}, memory_mb=256, pids=64)


def test_recycled_containers_of_a_real_distribution(docker_client):
    """Bash and Python inside: what they can do that the small image cannot is undone too."""
    build_sandbox(docker_client, "python")
    attacks = [
        'trap \'\' TERM; python3 -c \'import os; [os.setxattr(p, "user.x", b"1") for p in ("/workspace", "/logs")]\';'
        "setfacl -m u:1234:rwx . 2>/dev/null; echo evil >app.txt; exec -a hidden sleep 300 & disown",
        "python3 -c 'import os,time; os.setsid(); os.fork() or time.sleep(300)' & ulimit -n 64; cd /tmp; echo x >.bashrc;"
        "echo 'echo evil' >/workspace/.bashrc; echo 'echo evil' >/workspace/.profile",
        "for p in /proc/[0-9]*; do prlimit --pid ${p#/proc/} --nofile=64 2>/dev/null; done; renice 19 $PPID $$",
        "kill -9 -1",
    ]
    look = (
        "cat app.txt; echo; ls -A . /tmp /logs | grep -v '^app.txt'; ps -eo args --no-headers | grep -c '[s]leep 300';"
        'python3 -c \'import os; print(os.listxattr("/workspace"), os.listxattr("/logs"), os.nice(0))\'; ulimit -n'
    )
    with WorkspacePool(recycle=True) as pool:
        workspace = pool.take(BASH)
        clean = workspace.exec(look).stdout
        for attack in attacks:
            try:
                workspace.exec(attack, timeout=5)
            except WorkspaceUnavailable:
                pass
            workspace = again(pool, workspace, BASH)
            assert workspace.exec(look).stdout == clean, attack
        workspace.close()
        assert pool.recycled >= 2
