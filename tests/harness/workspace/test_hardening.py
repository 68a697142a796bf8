"""Each restriction looked at from inside a container, in both profiles, and nothing of the controller's that gets in."""

from __future__ import annotations

import os

import pytest

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import DockerWorkspace, owner
from gyre_sdk.harness.workspace.hardening import CAPABILITIES, host_settings, memory_folders, user_of

pytestmark = pytest.mark.docker
SECRET = "sk-31415-never-inside"


@pytest.fixture(scope="module", params=["default", "root", "read-only"])
def inside(request, docker_client, base_image):
    """A workspace of each profile, opened while the controller's environment holds a secret."""
    more = {"default": {}, "root": {"profile": "root"}, "read-only": {"read_only": True}}[request.param]
    with pytest.MonkeyPatch.context() as environment:
        for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY"):
            environment.setenv(name, SECRET)
        task = Task(instruction="x", memory_mb=96, pids=40, cpus=0.5, env={"GIVEN": "yes"}, **more)
        with DockerWorkspace(task, docker_client) as workspace:
            yield request.param, workspace


def test_only_the_named_capabilities_and_no_way_to_more(inside):
    profile, workspace = inside
    status = dict(
        line.split(":\t", 1) for line in workspace.exec("cat /proc/self/status").stdout.splitlines() if ":\t" in line
    )
    bits = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7}
    mask = sum(1 << bits[name] for name in CAPABILITIES["root" if profile == "root" else "default"])
    assert int(status["CapBnd"], 16) == int(status["CapEff"], 16) == mask
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert status["Uid"].split()[0] == ("0" if profile == "root" else "1000")


def test_the_kernel_refuses(inside):
    """Mounting, devices, raw sockets, other namespaces, the clock, modules, tracing another user, the host name."""
    _, workspace = inside
    refused = [
        "mount -t tmpfs none /mnt",
        "mount --bind /proc /tmp",
        "mknod /tmp/disk b 8 0",
        "unshare -m true",
        "unshare -r true",
        "chroot / true",
        "hostname other",
        "date -s 2020-01-01; [ $(date +%Y) = 2020 ]",
        "ping -c 1 127.0.0.1",
        "echo 1 >/proc/sys/kernel/panic",
        "echo x >/proc/sysrq-trigger",
        "dmesg -c",
        "swapoff -a; losetup /dev/loop0 /bin/sh",
        "ifconfig lo down",
        "ls /proc/kcore && head -c 1 /proc/kcore | grep -q .",
        "renice -n -5 $$",
    ]
    script = "\n".join(f"( {command} ) >/dev/null 2>&1 && echo 'allowed: {command}'" for command in refused)
    assert workspace.exec(f"{script}\ntrue", timeout=30).stdout == ""


def test_limits_hold(inside):
    profile, workspace = inside
    ran = workspace.exec(
        "i=0; while [ $i -lt 80 ]; do sleep 3 & i=$((i+1)); done 2>/dev/null; ls -d /proc/[0-9]* | wc -l", timeout=20
    )
    workspace.kill_all()
    assert ran.exit_code != 0 or int(ran.stdout) <= 41
    big = workspace.exec("head -c 300000000 /dev/zero | tail -c 200000000 >/dev/null", timeout=60)
    assert big.exit_code != 0 or big.oom_killed
    assert workspace.exec("ulimit -n; ulimit -c; ulimit -Hn").stdout.split() == ["8192", "0", "8192"]
    for folder in ("/logs", *(("/workspace", "/tmp") if profile == "read-only" else ())):
        workspace.exec(f"head -c 90000000 /dev/zero >{folder}/big", timeout=60)
        kept = workspace.exec(f"stat -c %s {folder}/big; rm {folder}/big").stdout
        assert int(kept) < 70_000_000, folder
    assert workspace.exec("echo alive").stdout == "alive\n"


def test_nothing_of_the_host_is_inside(inside):
    _, workspace = inside
    assert workspace.exec("ls /var/run/docker.sock /run/docker.sock /run/containerd 2>/dev/null").stdout == ""
    mounts = workspace.exec("cut -d' ' -f1,2 /proc/mounts").stdout
    devices = {line.split()[0] for line in mounts.splitlines() if line.startswith("/dev/")}
    places = {line.split()[1] for line in mounts.splitlines() if line.startswith("/dev/")}
    assert places <= {"/etc/resolv.conf", "/etc/hostname", "/etc/hosts", "/usr/sbin/docker-init", "/sbin/docker-init"}
    assert len(devices) <= 1
    assert int(workspace.exec("ls -d /proc/[0-9]* | wc -l").stdout) < 15  # a process namespace of its own
    assert workspace.exec("ls /sys/class/net").stdout == "lo\n"


def test_no_secret_of_the_controller_gets_in(inside, docker_client):
    _, workspace = inside
    assert os.environ["OPENAI_API_KEY"] == SECRET
    seen = workspace.exec(
        "env; for p in /proc/[0-9]*; do tr '\\0' '\\n' <$p/environ; tr '\\0' ' ' <$p/cmdline; done 2>/dev/null"
    )
    assert SECRET not in seen.stdout and "GIVEN=yes" in seen.stdout
    assert SECRET not in str(docker_client.api.inspect_container(workspace.container.id))
    assert workspace.exec("grep -rl sk-[3]1415-never /etc /run /tmp /workspace /logs 2>/dev/null").stdout == ""
    name = workspace.snapshot()
    try:
        assert SECRET not in str(docker_client.api.inspect_image(name))
    finally:
        docker_client.api.remove_image(name)


def test_a_read_only_root_is_one(docker_client, base_image):
    task = Task(instruction="x", read_only=True, profile="root", memory_mb=64, files={"a": "1"})
    with DockerWorkspace(task, docker_client) as workspace:
        ran = workspace.exec("cat a; for f in /bin /etc /var /root /usr/bin /home; do touch $f/x && echo $f; done")
        assert ran.stdout == "1" and ran.stderr.count("Read-only file system") >= 5
        assert workspace.exec("touch /tmp/x /logs/x /tests/x x; ls /dev/shm").stdout == ""


def test_users_by_name_and_number(docker_client, tmp_path, base_image):
    (tmp_path / "Dockerfile").write_text(
        "FROM gyre/base\nRUN echo 'worker:x:1234:77:w:/home/worker:/bin/sh' >>/etc/passwd && echo 'crew:x:88:' >>/etc/group\n"
    )
    for user, ids in (
        ("worker", "1234 77"),
        ("worker:crew", "1234 88"),
        ("1234", "1234"),
        ("77:88", "77 88"),
        ("agent", "1000 1000"),
    ):
        task = Task(instruction="x", dockerfile=tmp_path, user=user, files={"mine": "1"}, memory_mb=64)
        with DockerWorkspace(task, docker_client) as workspace:
            ran = workspace.exec("id -u; id -g; touch /logs/x /tests/x new; stat -c %u . mine new")
            assert ran.stderr == ""
            found = ran.stdout.split()
            assert " ".join(found[: len(ids.split())]) == ids
            assert set(found[2:]) == {ids.split()[0]}
    for wrong, said in (("nobody-here", "user 'nobody-here' does not exist in image"), ("worker:none", "group 'none'")):
        with pytest.raises(WorkspaceError, match=said):
            DockerWorkspace(Task(instruction="x", dockerfile=tmp_path, user=wrong), docker_client)


def test_a_runtime_that_the_engine_does_not_have_is_named(docker_client, base_image):
    if "runsc" in docker_client.info()["Runtimes"]:
        with DockerWorkspace(Task(instruction="x", runtime="runsc", files={"a": "1"}), docker_client) as workspace:
            assert "gVisor" in workspace.exec("dmesg").stdout
            workspace.exec("echo 2 >b; echo 3 >/tmp/c")
            with workspace.fork() as fork:
                assert fork.exec("cat a b /tmp/c").stdout == "12\n3\n"
            with pytest.raises(WorkspaceError, match="gVisor has a network of its own"):
                workspace.expose(80)
        return
    with pytest.raises(WorkspaceError, match=r"no runtime 'runsc'; it has .*runc: install gVisor.*runtime=None"):
        DockerWorkspace(Task(instruction="x", runtime="runsc"), docker_client)
    assert docker_client.api.containers(all=True, filters={"label": f"{owner.OWNER}=x"}) == []


def test_what_is_asked_of_the_engine():
    """No test of ours may be the only thing between an agent and the host: the words themselves."""
    for task in (Task(instruction="x"), Task(instruction="x", profile="root", read_only=True, disk_mb=5)):
        memory = memory_folders(task, uid="1000:1000", workdir="/workspace", read_only=task.read_only)
        asked = host_settings(
            task, network={"network_mode": "none"}, memory=memory, read_only=task.read_only, cpus_there=2
        )
        assert asked["cap_drop"] == ["ALL"] and asked["security_opt"] == ["no-new-privileges"]
        assert not {"binds", "mounts", "volumes_from", "privileged", "devices", "pid_mode", "userns_mode"} & set(asked)
        assert asked["mem_limit"] == asked["memswap_limit"] == "2048m" and asked["pids_limit"] == 256
        assert asked["init"] and asked["auto_remove"] and asked["read_only"] == task.read_only
    assert memory["/workspace"].endswith("size=5m") and "/tmp" in memory


@pytest.mark.parametrize(
    ("fields", "phase", "user"),
    [
        ({}, "agent", "1000:1000"),
        ({"user": None}, "agent", "image"),
        ({"profile": "root"}, "agent", "0:0"),
        ({"profile": "root", "user": "7"}, "agent", "7"),
        ({"verifier_user": "9"}, "agent", "1000:1000"),
        ({"verifier_user": "9"}, "verifier", "9"),
        ({"profile": "root", "verifier_user": "9"}, "verifier", "9"),
    ],
)
def test_who_commands_run_as(fields, phase, user):
    assert user_of(Task(instruction="x", **fields), phase, "image") == user
