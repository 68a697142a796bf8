"""Commands that eat, fork, and kill: workspace-resource-exhaustion. Run only inside limited containers."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from gyre_sdk.errors import WorkspaceUnavailable
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import DockerWorkspace

pytestmark = pytest.mark.docker
LIMITS = {"memory_mb": 256, "pids": 128, "disk_mb": 64}


@pytest.fixture
def open_docker(docker_client, base_image):
    opened = []

    def start(**options):
        task = Task(instruction="x", **{**LIMITS, **options.pop("task", {})})
        opened.append(DockerWorkspace(task, docker_client, **options))
        return opened[-1]

    yield start
    for workspace in opened:
        workspace.close()


def test_hostile_commands_one_after_the_other(open_docker):
    workspace = open_docker()
    bomb = workspace.exec("bomb() { bomb | bomb & }; bomb; while :; do sleep 1; done", timeout=3)
    assert bomb.timed_out or bomb.exit_code != 0
    assert workspace.exec("echo alive", timeout=20).stdout == "alive\n"
    memory = workspace.exec("head -c 400000000 /dev/zero | tail -c 399999999 | tail -n 1 | wc -c", timeout=60)
    assert memory.stdout.strip() != "399999999"
    assert memory.oom_killed and not bomb.oom_killed
    assert not workspace.exec("true").oom_killed
    assert workspace.exec("echo alive", timeout=20).stdout == "alive\n"
    disk = workspace.exec(
        "head -c 100000000 /dev/zero | cat > big; echo rc=$?; rm -f big; echo freed > f && cat f", timeout=60
    )
    assert "freed" in disk.stdout
    assert "No space left" in disk.stderr
    assert workspace.exec("kill -9 1; echo rc=$?", timeout=20).exit_code == 0
    assert workspace.exec("echo alive", timeout=20).stdout == "alive\n"
    assert workspace.exec("kill -9 -1", timeout=20).exit_code == 137
    assert workspace.exec("echo alive", timeout=20).stdout == "alive\n"


def test_a_bomb_that_never_ends_is_ended(open_docker):
    workspace = open_docker()
    ran = workspace.exec("f() { while :; do f & sleep 0.01; done; }; f", timeout=3)
    assert ran.timed_out or ran.exit_code != 0
    workspace.kill_all()
    left = workspace.exec("ps -eo args | grep -c '[w]hile :; do f'; ls -d /proc/[0-9]* | wc -l", timeout=30)
    assert int(left.stdout.split()[-1]) < 20


def test_root_killing_everything_loses_the_workspace_and_says_why(open_docker):
    """As root the container's own first process dies: lost, told once as an error, never as tool output."""
    workspace = open_docker(task={"user": "root"})
    with pytest.raises(WorkspaceUnavailable, match="container stopped with exit code"):
        workspace.exec("kill -9 -1", timeout=20)
    for _ in range(2):
        with pytest.raises(WorkspaceUnavailable):
            workspace.exec("echo alive", timeout=20)
    with pytest.raises(WorkspaceUnavailable):
        workspace.read("/etc/passwd")
    workspace.close()


def test_a_lifetime_that_is_over_is_told_apart(open_docker):
    workspace = open_docker(ttl_s=4)
    with pytest.raises(WorkspaceUnavailable, match="lifetime of 4 s is over"):
        workspace.exec("sleep 30", timeout=60)
    with pytest.raises(WorkspaceUnavailable, match="lifetime"):
        workspace.exec("echo alive")


def test_removed_from_outside(open_docker, docker_client):
    workspace = open_docker()
    docker_client.api.remove_container(workspace.container.id, force=True)
    with pytest.raises(WorkspaceUnavailable):
        workspace.exec("echo alive")


def test_hardening(open_docker, docker_client):
    """What the kernel says inside, not only what the engine was asked for."""
    workspace = open_docker()
    status = workspace.exec("cat /proc/self/status; ls /sys/class/net; id -u").stdout
    for line in (
        "CapEff:\t0000000000000000",
        "CapPrm:\t0000000000000000",
        "CapBnd:\t0000000000000000",
        "NoNewPrivs:\t1",
        "Seccomp:\t2",
    ):
        assert line in status
    assert status.endswith("lo\n1000\n")
    found = docker_client.api.inspect_container(workspace.container.id)
    host = found["HostConfig"]
    assert host["NetworkMode"] == "none" and host["CapDrop"] == ["ALL"] and not host["CapAdd"] and not host["Binds"]
    assert host["Memory"] == host["MemorySwap"] == 256 << 20
    assert (
        host["PidsLimit"] == 128 and host["NanoCpus"] == 10**9 and host["LogConfig"]["Type"] == "none" and host["Init"]
    )
    labels = found["Config"]["Labels"]
    assert {"gyre.run", "gyre.owner", "gyre.owner_pid", "gyre.boot_id", "gyre.deadline"} <= set(labels)
    assert float(labels["gyre.deadline"]) > time.time()


def test_the_supervisor_is_out_of_its_users_reach(open_docker):
    """Same user id, but not its memory, descriptors or environment: else a command could run on while its run is scored."""
    workspace = open_docker()
    probe = """
    for p in /proc/[0-9]*; do
      tr '\\0' ' ' < $p/cmdline | grep -q '^/bin/busybox-supervisor sh' || continue
      echo found; cat $p/environ; ls $p/fd; echo x > $p/fd/0; dd if=$p/mem count=1; echo x > $p/oom_score_adj
    done
    """
    ran = workspace.exec(probe)
    assert "found" in ran.stdout.split()
    assert set(ran.stdout.split()) == {"found"}
    assert ran.stderr.count("Permission denied") >= 5


def test_files_of_a_task_and_an_image_folder_belong_to_the_user(docker_client, base_image, tmp_path):
    context = tmp_path / "environment"
    context.mkdir()
    (context / "seed.txt").write_text("seed\n")
    (context / "Dockerfile").write_text("FROM gyre/base\nWORKDIR /app\nCOPY seed.txt sub/\n")
    for disk in (None, 16):
        task = Task(instruction="x", dockerfile=context, workdir=None, files={"mine.txt": "m"}, disk_mb=disk)
        with DockerWorkspace(task, docker_client) as workspace:
            ran = workspace.exec(
                "pwd; cat sub/seed.txt mine.txt; echo more >> sub/seed.txt; touch new; stat -c %u . sub sub/seed.txt"
            )
            assert (ran.exit_code, ran.stderr) == (0, "")
            assert ran.stdout == "/app\nseed\nm1000\n1000\n1000\n"


def test_a_task_that_runs_as_root_has_no_capability(docker_client, base_image):
    with DockerWorkspace(Task(instruction="x", user="root"), docker_client) as workspace:
        ran = workspace.exec("id -u; echo hi > /root/hello; cat /root/hello; grep CapEff /proc/self/status")
        assert ran.stdout.splitlines() == ["0", "hi", "CapEff:\t0000000000000000"]
        workspace.exec("setsid sleep 31499 >/dev/null 2>&1 &")
        workspace.kill_all()
        assert workspace.exec("ps -eo args | grep -c '[s]leep 31499'").stdout == "0\n"
        assert workspace.exec("echo alive").stdout == "alive\n"


def test_the_case_files_are_all_here():
    """Every workspace case of the shared folder is cited by a test of this folder."""
    cases = Path(__file__).parents[4] / "shared" / "cases" / "workspace"
    if not cases.is_dir():
        pytest.skip(f"{cases} is missing: the shared cases are not part of the repository")
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for case in cases.glob("*.json"):
        assert json.loads(case.read_text())["id"] in tests
