"""Workspaces that end from outside: the message says why, no result does. Ports and disks, which others need too."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request

import pytest

from gyre_sdk.errors import WorkspaceError, WorkspaceUnavailable
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import DockerWorkspace, disk, engine
from gyre_sdk.harness.workspace.checkup import (
    check_engine,
    check_machine,
    of_disk,
    of_engine,
    of_images,
    of_limits,
    of_ports,
)
from gyre_sdk.harness.workspace.disk import Usage, end_the_largest, free, require_room, usage
from gyre_sdk.harness.workspace.expose import Exposure
from gyre_sdk.harness.workspace.sandboxes import Sandbox, build_sandbox
from gyre_sdk.harness.workspace.snapshots import Snapshot

pytestmark = pytest.mark.docker
SMALL = Task(instruction="x", memory_mb=64)


# -- dead workspaces -------------------------------------------------------------------------------------------------


def test_a_post_mortem_tells_state_and_last_words(docker_client, base_image):
    with DockerWorkspace(Task(instruction="x", profile="root", memory_mb=64), docker_client) as workspace:
        workspace.exec("echo compiling; echo 3 warnings >&2")
        said = r"stopped with exit code 137.*while it ran 'kill -9 -1.*last output before: 'compiling\\n3 warnings'"
        for _ in range(2):
            with pytest.raises(WorkspaceUnavailable, match=said):
                workspace.exec("kill -9 -1; sleep 5")


@pytest.mark.parametrize("harm", ["rm -rf /bin", "chmod 000 /bin/busybox"])
def test_a_workspace_without_a_shell_is_dead_and_not_a_failing_command(docker_client, base_image, harm):
    with DockerWorkspace(Task(instruction="x", profile="root", memory_mb=64), docker_client) as workspace:
        workspace.exec(harm)
        for command in ("echo x", "ls", "true"):
            with pytest.raises(WorkspaceUnavailable, match=r"/bin/sh inside, .* is gone or cannot be run any more"):
                workspace.exec(command)


def test_a_command_that_cannot_be_run_is_still_a_result(docker_client, base_image):
    with DockerWorkspace(SMALL, docker_client) as workspace:
        assert workspace.exec("no-such-program").exit_code == 127
        assert workspace.exec("exit 126").exit_code == 126
        assert workspace.exec("/etc/passwd 2>/dev/null").exit_code == 126


def test_an_engine_that_ends_is_told_and_nothing_hangs(tmp_path_factory):
    """The engine stops with a workspace open, comes back, and works again: `container engine restarted meanwhile`."""
    if engine.can_start_private_engine() is not None:
        pytest.fail(str(engine.can_start_private_engine()))
    folder = tmp_path_factory.mktemp("e")
    private = engine.start_private_engine(folder)
    try:
        client = engine.connect(private.url)
        build_sandbox(client, "base")
        workspace = DockerWorkspace(SMALL, client)
        problems: list[BaseException] = []

        def long() -> None:
            try:
                workspace.exec("sleep 600")
            except WorkspaceError as error:
                problems.append(error)

        running = threading.Thread(target=long)
        running.start()
        time.sleep(0.3)
        private.stop()
        running.join(60)
        assert not running.is_alive()
        assert isinstance(problems[0], WorkspaceUnavailable)
        with pytest.raises(WorkspaceUnavailable):
            workspace.exec("echo x")
        workspace.close()
        private = engine.start_private_engine(folder)
        assert client.api.containers(all=True) == []
        with DockerWorkspace(SMALL, client) as another:
            assert another.exec("echo again").stdout == "again\n"
    finally:
        private.stop()


# -- the engine's disk -----------------------------------------------------------------------------------------------


def test_the_workspace_that_fills_the_disk_is_ended_and_no_other(docker_client, base_image, monkeypatch):
    monkeypatch.setattr(disk, "_SMALL", 1 << 20)
    with DockerWorkspace(SMALL, docker_client) as big, DockerWorkspace(SMALL, docker_client) as little:
        big.exec("head -c 8000000 /dev/urandom >/tmp/big")
        little.exec("head -c 1500000 /dev/urandom >/tmp/little")
        left = free(docker_client)
        assert left is not None
        assert end_the_largest(docker_client, reserve=left // 2) is None
        assert end_the_largest(docker_client, reserve=left * 2) == big.container.id
        with pytest.raises(
            WorkspaceUnavailable, match=r"it wrote 7 MiB and .* were left on the engine's disk .*disk_mb"
        ):
            big.exec("echo x")
        assert little.exec("echo alive").stdout == "alive\n"
        with pytest.raises(WorkspaceError, match=r"no room for a test: .* gyre gc --images"):
            require_room(docker_client, "a test", reserve=left * 2)
        used = usage(docker_client)
        assert used.containers >= 1_500_000 and used.free is not None


# -- ports -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(docker_client, base_image):
    """A workspace without a network in which a web server listens."""
    with DockerWorkspace(SMALL, docker_client) as workspace:
        workspace.exec(
            "mkdir www; echo hello >www/index.html; head -c 3000000 /dev/zero >www/big; httpd -p 127.0.0.1:8000 -h www"
        )
        yield workspace


def get(address, path="/"):
    with urllib.request.urlopen(f"http://{address[0]}:{address[1]}{path}", timeout=20) as answer:
        return answer.read()


def test_a_port_inside_is_reached_from_the_loopback(served):
    address = served.expose(8000)
    assert address[0] == "127.0.0.1" and served.expose(8000) == address
    assert get(address) == b"hello\n"
    assert len(get(address, "/big")) == 3_000_000
    threads = [threading.Thread(target=lambda: got.append(get(address))) for _ in range(8)]
    got: list[bytes] = []
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [b"hello\n"] * 8
    assert served.exec("wget -qO- http://127.0.0.1:8000/").stdout == "hello\n"
    assert "unreachable" in served.exec("wget -qO- http://1.1.1.1/").stderr  # it got no network by that


def test_a_port_where_nothing_listens_yet(served):
    address = served.expose(8001)
    with socket.create_connection(address, 5) as early:
        assert early.recv(10) == b""
    served.exec("echo late | nc -l -p 8001 >/tmp/said &")
    deadline = time.monotonic() + 20
    said = b""
    while not said and time.monotonic() < deadline:
        with socket.create_connection(address, 5) as connection:
            connection.sendall(b"from outside\n")
            connection.shutdown(socket.SHUT_WR)
            try:
                said = connection.recv(100)
            except OSError:
                pass
    assert said == b"late\n"
    assert served.exec("sleep 0.1; cat /tmp/said").stdout == "from outside\n"


def test_two_workspaces_expose_the_same_port(served, docker_client):
    with served.fork() as fork:
        fork.exec("echo fork >www/index.html; httpd -p 127.0.0.1:8000 -h www")
        theirs = fork.expose(8000)
        assert theirs != served.expose(8000)
        assert (get(theirs), get(served.expose(8000))) == (b"fork\n", b"hello\n")
    with pytest.raises(OSError):
        get(theirs)
    with pytest.raises(WorkspaceUnavailable):
        fork.expose(8000)


def test_what_cannot_be_exposed_is_said(served):
    with pytest.raises(WorkspaceError, match="port 0 is none"):
        served.expose(0)
    with pytest.raises(WorkspaceError, match=r"cannot be exposed: .*needs root on the engine's own machine"):
        Exposure(1, served.container.id, 8000)  # a process that is not the container's


# -- doctor ----------------------------------------------------------------------------------------------------------


def test_a_checkup_of_the_engine_in_use(docker_client, base_image):
    found = {one.name: one for one in check_engine(docker_client)}
    assert {"engine", "storage", "cgroups", "seccomp", "runsc", "images", "used", "left"} <= found.keys()
    assert found["engine"].fine and found["seccomp"].fine
    assert "base" in found["images"].said
    assert [one.name for one in check_machine()] == ["ports", "limits"]


def judged(**info):
    return {
        one.name: one
        for one in of_engine(
            {"Driver": "overlay2", "SecurityOptions": ["name=seccomp,profile=default"], **info}, info.get("v", "24.0.1")
        )
    }


@pytest.mark.parametrize(
    ("name", "info", "said"),
    [
        ("engine", {"v": "19.03.1"}, "20.10 or newer is needed: upgrade it"),
        ("storage", {"Driver": "vfs"}, "use overlay2"),
        ("cgroups", {"SwapLimit": False, "MemoryLimit": False}, "no limits on memory, swap: boot with"),
        ("seccomp", {"SecurityOptions": []}, "start dockerd with one"),
        ("seccomp", {"SecurityOptions": ["name=seccomp,profile=unconfined"]}, "start dockerd with one"),
        ("runsc", {"Runtimes": {"runc": {}}}, "runsc install"),
    ],
)
def test_what_is_wrong_with_an_engine_comes_with_what_to_do(name, info, said):
    assert said in judged(**info)[name].said and not judged(**info)[name].fine


def test_a_good_engine_is_fine():
    assert all(one.fine for one in judged(Runtimes={"runsc": {}}, CgroupVersion="2").values())


def test_the_rest_of_the_judgements():
    one = Sandbox("base", "gyre/base", False, False, 0)
    assert of_images([one]).said.endswith("gyre sandbox build base") and not of_images([one]).fine
    other = Sandbox("node", "gyre/node", False, False, 0)
    assert of_images([Sandbox("base", "gyre/base", True, True, 5 << 20), other]).fine
    kept = Snapshot("s", "r", True, 0.0, 0.0, 100, {})
    [room, used] = of_disk(Usage(1 << 20, 0, (kept,), {}), room=50)
    assert not room.fine and "docker system prune" in room.said and not used.fine and "gyre gc" in used.said
    assert [each.fine for each in of_disk(Usage(None, 0, (kept,), {}), room=100)] == [True]
    assert of_limits(files=65536, processes=1 << 22, watches=1024).fine
    low = of_limits(files=1024, processes=1000, watches=128)
    assert not low.fine and "ulimit -n" in low.said and "pid_max" in low.said and "inotify" in low.said
    assert of_ports(32768, 60999, True).fine and not of_ports(32768, 33000, True).fine
    assert "ip link set lo up" in of_ports(32768, 60999, False).said
