"""A loopback that the runtime makes is the one that the engine makes, and nothing of it stays behind."""

from __future__ import annotations

import os
import threading

import pytest
from docker.errors import NotFound
from network_kit import box

from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import DockerWorkspace, reaper
from gyre_sdk.harness.workspace.network import Network, Plan, Wire, loopback
from gyre_sdk.harness.workspace.overlay import NotHere
from gyre_sdk.harness.workspace.snapshots import remove

docker_engine = pytest.mark.docker
LOOK = """
cat /proc/net/if_inet6 /proc/net/route /proc/net/ipv6_route; ls /sys/class/net
ip addr show | sed 's/^[0-9]*: //'
ls -l /proc/sys/net /proc/sys/net/ipv4 /proc/sys/net/ipv6 | sed 's/ [A-Z][a-z][a-z] .*:[0-9][0-9] / /'
cd /proc/sys/net; for f in $(find . -type f | sort); do echo "$f $(cat $f 2>&1)"; done | grep -v -e stable_secret -e mtu -e hash_entries
stat -c '%a %u %g %F' /etc/hosts; cat /etc/hosts
stat -c '%F' /etc/resolv.conf /etc/hostname; [ "$(cat /etc/hostname)" = "$(hostname)" ] && echo named
httpd -p 127.0.0.1:80 -h /etc && printf 'GET /hosts HTTP/1.0\\r\\n\\r\\n' | nc 127.0.0.1 80 | grep -c localhost
for a in 1.1.1.1 10.0.0.1 172.17.0.1 169.254.169.254; do nc -w 2 $a 80 </dev/null 2>&1; done
ping -c 1 -W 1 127.0.0.1 2>&1 | grep -c '1 packets received'
grep -e Cap -e NoNew -e Seccomp: /proc/self/status
"""
TASK = Task(instruction="x", memory_mb=64)


# -- judgements ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "able"),
    [
        ({}, True),
        ({"Driver": "vfs"}, False),
        ({"Driver": "overlayfs"}, False),
        ({"DefaultRuntime": "runsc"}, False),
        ({"DefaultRuntime": "crun"}, False),
        ({"SecurityOptions": ["name=seccomp,profile=default", "name=userns"]}, False),
        ({"SecurityOptions": ["name=rootless"]}, False),
        ({"SecurityOptions": ["name=selinux"]}, False),
        ({"SecurityOptions": None}, True),
        ({"DockerRootDir": "/nonexistent/of/another/machine"}, False),
        ({"DockerRootDir": None}, False),
    ],
)
def test_which_engines_are_asked_to_leave_it_to_the_runtime(tmp_path, said, able):
    usual = {"Driver": "overlay2", "DefaultRuntime": "runc", "DockerRootDir": str(tmp_path)}
    usual["SecurityOptions"] = ["name=seccomp,profile=default"]
    assert loopback.of_engine({**usual, **said}) is able


def test_only_an_empty_file_of_the_engines_is_written(tmp_path):
    (tmp_path / "target").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "full").write_bytes(b"of somebody")
    (tmp_path / "twice").write_bytes(b"")
    (tmp_path / "again").hardlink_to(tmp_path / "twice")
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch(0o755)
    with loopback.folder(tmp_path) as opened:
        for name in ("link", "full", "twice", "folder", "absent"):
            assert not loopback.fill(opened, name, b"x"), name
        assert loopback.fill(opened, "empty", b"x")
    assert (tmp_path / "target").read_bytes() == (tmp_path / "twice").read_bytes() == b""
    assert (tmp_path / "full").read_bytes() == b"of somebody" and not (tmp_path / "absent").exists()
    assert (tmp_path / "empty").read_bytes() == b"x" and (tmp_path / "empty").stat().st_mode & 0o777 == 0o644


def test_a_forks_layer_hides_no_file_below(tmp_path):
    """Whatever root inside the other made of these two names; nothing else is touched, and no link is followed."""
    loopback.uncover(tmp_path)  # it changed nothing in /etc
    target, layer = tmp_path / "target", tmp_path / "layer" / "etc"
    (layer / "resolv.conf" / "deep").mkdir(parents=True)
    target.write_bytes(b"of somebody")
    (layer / "hosts").symlink_to(target)
    (layer / "resolv.conf" / "link").symlink_to(target)
    (layer / "passwd").write_bytes(b"mine")
    loopback.uncover(layer.parent)
    assert os.listdir(layer) == ["passwd"] and target.read_bytes() == b"of somebody"


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_fork_whose_etc_is_no_folder_takes_the_long_way(tmp_path, kind):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "hosts").write_bytes(b"of this machine")
    if kind == "link":
        (tmp_path / "etc").symlink_to(elsewhere)
    else:
        (tmp_path / "etc").write_bytes(b"")
    with pytest.raises(NotHere, match="/etc"):
        loopback.uncover(tmp_path)
    assert (elsewhere / "hosts").read_bytes() == b"of this machine"


@docker_engine
@pytest.mark.parametrize("attribute", ["opaque", "redirect"])
def test_a_fork_whose_etc_hides_the_one_below_takes_the_long_way(tmp_path, attribute):
    """As a layer says it of a folder that was removed and made again, or renamed; only root may write that."""
    (tmp_path / "etc").mkdir()
    loopback.uncover(tmp_path)
    os.setxattr(tmp_path / "etc", f"trusted.overlay.{attribute}", b"y")
    with pytest.raises(NotHere, match="made anew"):
        loopback.uncover(tmp_path)


# -- containers ------------------------------------------------------------------------------------------------------


@docker_engine
def test_inside_nothing_differs_from_network_none(docker_client, base_image):
    """Interfaces, addresses, routes, every setting of the kernel's network, the files, what is reached and what is not."""
    with box(docker_client) as runtimes, box(docker_client, enter=False) as engines:
        assert runtimes.network.disabled and not engines.network.disabled
        assert not Network(docker_client, Plan(Wire.NOTHING), shared=True).disabled
        seen = runtimes.sh(LOOK)
        assert seen == engines.sh(LOOK)
        assert seen.count("Network is unreachable") == 4
        assert {"2", "named", "644 0 0 regular file"} <= set(seen.splitlines())


@docker_engine
def test_where_the_engines_layer_is_not_found_the_files_go_through_the_engine(docker_client, base_image):
    made = docker_client.api.create_container(
        base_image,
        ["cat", "/etc/hosts", "/etc/resolv.conf"],
        network_disabled=True,
        host_config=docker_client.api.create_host_config(network_mode="none"),
    )["Id"]
    try:
        loopback.write_above(docker_client, made)
        docker_client.api.start(made)
        docker_client.api.wait(made, timeout=60)
        assert docker_client.api.logs(made) == b"".join(loopback.FILES.values())
    finally:
        reaper.remove(docker_client, made)


@docker_engine
def test_no_layer_snapshot_or_fork_holds_what_was_written(docker_client, base_image):
    """Nor what root inside makes of these files, which a verifier must not meet."""
    root = Task(instruction="x", memory_mb=64, profile="root")
    mine = loopback.FILES["hosts"].decode()
    with DockerWorkspace(root, docker_client) as workspace:
        assert docker_client.api.inspect_container(workspace.container.id)["Config"]["NetworkDisabled"]
        assert not {"/etc/hosts", "/etc/resolv.conf"} & changed(docker_client, workspace)
        assert workspace.exec("cat /etc/hosts; echo 127.0.0.1 other >/etc/hosts").stdout == mine
        with workspace.fork() as fork:
            assert fork.exec("cat /etc/hosts").stdout == mine
        name = workspace.snapshot()
        try:
            with DockerWorkspace(root, docker_client, snapshot=name) as later:
                assert later.exec("cat /etc/hosts").stdout == mine
        finally:
            remove(docker_client, name)


@docker_engine
def test_a_forks_loopback_is_the_runtimes_too(docker_client, base_image):
    """Its layer is copied from one in which root changed what lies over the engine's files."""
    root = Task(instruction="x", memory_mb=64, profile="root")
    with DockerWorkspace(root, docker_client) as workspace:
        workspace.exec("rm /etc/hosts && mkdir /etc/hosts && rm /etc/resolv.conf && echo kept >/etc/mine", check=True)
        with workspace.fork() as fork:
            assert docker_client.api.inspect_container(fork.container.id)["Config"]["NetworkDisabled"]
            assert fork._basis is None
            for name, content in loopback.FILES.items():
                assert fork.exec(f"cat /etc/{name}").stdout == content.decode()
            assert fork.exec("cat /etc/mine").stdout == "kept\n"
            assert fork.exec("ls /sys/class/net").stdout == "lo\n"


def changed(client, workspace):
    return {one["Path"] for one in client.api.diff(workspace.container.id) or ()}


@docker_engine
def test_a_removal_that_another_began_is_over_when_it_returns(docker_client, base_image):
    for _ in range(3):
        with box(docker_client) as opened:
            together = threading.Barrier(3)
            found: list[bool] = []

            def removing(container=opened.id, together=together, found=found):
                together.wait()
                reaper.remove(docker_client, container)
                try:
                    docker_client.api.inspect_container(container)
                    found.append(True)
                except NotFound:
                    found.append(False)

            threads = [threading.Thread(target=removing) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert found == [False] * 3
