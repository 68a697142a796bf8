"""Workspaces on the engine's bridge: the internet, and nothing of this machine, its neighbours or other workspaces.

The engine runs in a network namespace of its own, with a second one for an internet: whatever it does to routes and
firewalls ends with it.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from network_kit import Box, Server, box, until

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import DockerWorkspace, open_workspace
from gyre_sdk.harness.workspace.engine import answers, can_start_private_engine, connect
from gyre_sdk.harness.workspace.network import Plan, Wire, internal, sweep_networks
from gyre_sdk.harness.workspace.network.addresses import METADATA, PRIVATE
from gyre_sdk.harness.workspace.network.guard import closed, guard, name_servers, own_addresses
from gyre_sdk.harness.workspace.owner import labels, me
from gyre_sdk.harness.workspace.sandboxes import build_sandbox

FULL = Plan(Wire.BRIDGE)
SITE, OWN_PUBLIC, OWN_PRIVATE = "203.0.113.2", "203.0.113.1", "10.77.0.1"
"""A host of the internet, and two addresses of the engine's machine."""
SERVICES = """
import socket, socketserver, sys, threading
class Web(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.recv(1000)
        self.request.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\nREACHED " + sys.argv[1].encode())
class Names(socketserver.BaseRequestHandler):
    def handle(self):
        asked, sock = self.request
        end = asked.index(b"\\0", 12) + 5
        answer = b"\\xc0\\x0c\\0\\1\\0\\1\\0\\0\\0\\x3c\\0\\4" + socket.inet_aton("203.0.113.2")
        count = b"\\0\\1" if asked[end - 4 : end - 2] == b"\\0\\1" else b"\\0\\0"
        sock.sendto(asked[:2] + b"\\x81\\x80\\0\\1" + count + b"\\0\\0\\0\\0" + asked[12:end] + (answer if count[1] else b""), self.client_address)
socketserver.ThreadingTCPServer.allow_reuse_address = True
web = socketserver.ThreadingTCPServer(("0.0.0.0", 80), Web)
names = socketserver.ThreadingUDPServer(("0.0.0.0", 53), Names)
threading.Thread(target=names.serve_forever, daemon=True).start()
print("ready", flush=True)
web.serve_forever()
"""


# -- decisions -------------------------------------------------------------------------------------------------------

FIB = """Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 127.0.0.0/8 2 0 2
        |-- 127.0.0.1
           /32 host LOCAL
     |-- 192.168.7.0
        /24 link UNICAST
     |-- 192.168.7.5
        /32 host LOCAL
     |-- 203.0.113.9
        /32 host LOCAL
     |-- 192.168.7.255
        /32 link BROADCAST
"""


def test_this_machines_addresses():
    assert own_addresses(FIB) == ["192.168.7.5", "203.0.113.9"]


def test_name_servers_stay_reachable_unless_they_are_this_machine_or_keep_credentials():
    text = "search a\nnameserver 10.0.0.2\nnameserver 192.168.7.5\nnameserver 169.254.169.254\nnameserver 8.8.8.8\n"
    text += "nameserver 127.0.0.53\nnameserver fe80::1\nnameserver nonsense\nnameserver  100.100.100.200\n"
    assert name_servers(text, ["192.168.7.5"]) == ["10.0.0.2"]


@given(st.ip_addresses(v=4, network="172.16.0.0/12"), st.integers(16, 30))
def test_every_private_address_is_closed_and_the_subnet_by_halves(address, length):
    subnet = ipaddress.ip_network(f"{address}/{length}", strict=False)
    found = [ipaddress.ip_network(one) for one in closed([str(subnet), "fd00::/64"], ["203.0.113.9"])]
    assert len(found) == len(set(found)) and subnet not in found and set(subnet.subnets()) <= set(found)
    assert ipaddress.ip_network("203.0.113.9/32") in found
    assert {one for one in (*PRIVATE, *METADATA) if one.version == 4} <= set(found)


# -- an engine with bridges ----------------------------------------------------------------------------------------


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(scope="module")
def bridged() -> Iterator[object]:
    """A client of an engine with bridges and a firewall, between a machine and an internet."""
    missing = can_start_private_engine()
    if missing is not None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no engine with a bridge: {missing}")
    machine, beyond = f"gyre-m{os.getpid()}", f"gyre-i{os.getpid()}"
    folder = Path(tempfile.mkdtemp(prefix="gyre-bridged-"))
    processes: list[subprocess.Popen[str]] = []

    def start(namespace: str, *command: str, ready: bool = True) -> None:
        entered = ["nsenter", f"--net=/run/netns/{namespace}", *command]
        log = subprocess.PIPE if ready else (folder / "log").open("w")
        processes.append(
            subprocess.Popen(entered, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        )
        if ready:
            assert processes[-1].stdout is not None
            assert processes[-1].stdout.readline() == "ready\n"

    try:
        for name in (machine, beyond):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", machine, "link", "add", "out", "type", "veth", "peer", "name", "in", "netns", beyond)
        for address in (f"{OWN_PUBLIC}/24", f"{OWN_PRIVATE}/32", "169.254.169.254/32"):
            run("ip", "-n", machine, "address", "add", address, "dev", "out")
        run("ip", "-n", beyond, "address", "add", f"{SITE}/24", "dev", "in")
        run("ip", "-n", machine, "link", "set", "out", "up")
        run("ip", "-n", beyond, "link", "set", "in", "up")
        run("ip", "-n", machine, "route", "add", "default", "via", SITE)
        start(machine, sys.executable, "-c", SERVICES, "the machine")
        start(beyond, sys.executable, "-c", SERVICES, "the internet")
        url = f"unix://{folder}/s"
        dockerd = str(shutil.which("dockerd", path=f"{os.environ.get('PATH', '')}:/usr/sbin"))
        places = ["--data-root", f"{folder}/d", "--exec-root", f"{folder}/e", "--pidfile", f"{folder}/p", "-H", url]
        (folder / "resolv.conf").write_text(
            "nameserver 127.0.0.1\n"
        )  # the machine's own: engines ask it for containers
        mounted = 'mount --bind "$1" /etc/resolv.conf; shift; exec "$@"'
        apart = ["unshare", "--mount", "sh", "-c", mounted, "sh", f"{folder}/resolv.conf"]
        start(machine, *apart, dockerd, *places, "--bridge=none", ready=False)
        until(lambda: answers(url) or processes[-1].poll() is not None, 60)
        client = connect(url)
        build_sandbox(client, "base")
        yield client
        client.close()
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(30)
        for name in (machine, beyond):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def full(bridged) -> Iterator[Box]:
    with box(bridged, FULL) as made:
        yield made


pytestmark = [pytest.mark.docker]


def reached(inside: Box, *addresses: str) -> dict[str, str]:
    """Return what each address answers, empty where nothing does."""
    tries = "\n".join(f"timeout 3 wget -qO /tmp/r{n} http://{one}/ 2>/dev/null &" for n, one in enumerate(addresses))
    shown = "\n".join(f"cat /tmp/r{n} 2>/dev/null; echo" for n in range(len(addresses)))
    said = inside.sh(f"rm -f /tmp/r*\n{tries}\nwait\n{shown}").split("\n")
    return dict(zip(addresses, said, strict=False))


def gateway(client: object, container: str) -> str:
    (network,) = client.api.inspect_container(container)["NetworkSettings"]["Networks"].values()  # type: ignore[attr-defined]
    return str(network["Gateway"])


def test_the_internet_and_nothing_of_this_machine(bridged, full):
    here = gateway(bridged, full.id)
    found = reached(full, SITE, here, OWN_PRIVATE, "169.254.169.254", "site.example")
    assert found == {
        SITE: "REACHED the internet",
        here: "",
        OWN_PRIVATE: "",
        "169.254.169.254": "",
        "site.example": "REACHED the internet",  # by name, too
    }
    assert SITE in full.sh("nslookup site.example 2>&1")
    assert all(line.split()[-1] == "lo" for line in full.sh("cat /proc/net/if_inet6").splitlines())
    routes = full.sh("ip route")
    mine = own_addresses(Path("/proc/net/fib_trie").read_text())
    assert all(
        f"unreachable {address} " in routes for address in mine
    )  # this process's machine, whatever the engine's is


def test_without_the_guard_this_machine_would_be_reached(bridged, full):
    """What the guard is for: the same bridge, a container that it did not restrict."""
    network = next(iter(bridged.api.inspect_container(full.id)["NetworkSettings"]["Networks"]))
    tried = bridged.api.create_container(
        "gyre/base",
        ["sh", "-c", f"wget -qO- http://{OWN_PRIVATE}/; wget -qO- http://169.254.169.254/"],
        host_config=bridged.api.create_host_config(network_mode=network),
    )["Id"]
    try:
        bridged.api.start(tried)
        bridged.api.wait(tried)
        assert bridged.api.logs(tried).decode().count("REACHED the machine") == 2
    finally:
        bridged.api.remove_container(tried, force=True)


def test_workspaces_do_not_see_each_other(bridged, full):
    with box(bridged, FULL) as other:
        other.sh("nc -lll -p 80 -e echo OTHER >/dev/null 2>&1 &", detach=True)
        assert until(lambda: "OTHER" in other.sh("nc 127.0.0.1 80 </dev/null"))
        (network,) = bridged.api.inspect_container(other.id)["NetworkSettings"]["Networks"].values()
        assert "OTHER" not in full.sh(f"timeout 3 nc {network['IPAddress']} 80 </dev/null 2>&1")


def test_what_runs_inside_cannot_undo_it(full):
    for attempt in ("ip route flush table main", "ip route add default via 1.2.3.4", "ip link set eth0 down"):
        assert "not permitted" in full.sh(f"{attempt} 2>&1")
    assert reached(full, OWN_PRIVATE) == {OWN_PRIVATE: ""}


def test_the_recording_proxy_is_beside_it(full):
    with Server() as upstream:
        base = full.network.connect_proxy(f"{upstream.url}/v1", "k")
        assert "GET /v1/x 0" in full.sh(f"wget -qO- {base}/x")


def test_a_workspace_with_the_full_network(bridged):
    """Per phase: the agent's reaches the internet, its verifier's does not."""
    wanted = Task(instruction="x", memory_mb=64, network="full")
    with DockerWorkspace(wanted, bridged) as workspace:
        assert "REACHED the internet" in workspace.exec(f"wget -qO- http://{SITE}/").stdout
        assert "private ranges and metadata addresses cut off" in workspace.describe()
    with DockerWorkspace(wanted, bridged, phase="verifier") as workspace:
        assert workspace.exec(f"wget -qO- http://{SITE}/").exit_code != 0
        assert "no network" in workspace.describe()


def test_what_cannot_be_cut_off_is_said(bridged):
    with box(bridged, Plan(Wire.BRIDGE, apart=True)) as made:
        assert "NOT cut off under this runtime" in made.network.describe()


def test_a_network_of_its_own_has_no_way_out_and_no_names(bridged):
    """Also where the engine has a firewall, forwards packets and answers for names."""
    with box(bridged, Plan(Wire.INTERNAL, apart=True), enter=False) as made, Server() as upstream:
        base = made.network.connect_proxy(f"{upstream.url}/v1", "k")
        assert "GET /v1/x 0" in made.sh(f"wget -qO- {base}/x")
        here = gateway(bridged, made.id)
        places = [SITE, OWN_PUBLIC, OWN_PRIVATE, "169.254.169.254", *([here] if here else [])]
        assert set(reached(made, *places).values()) == {""}
        assert SITE not in made.sh("timeout 3 nslookup site.example 2>&1")


def test_many_networks_do_not_run_out_of_addresses(bridged):
    """The engine's own choice ends after about thirty."""
    made = [internal.create(bridged, run="many", deadline=2e9) for _ in range(40)]
    try:
        assert len({one.relay for one in made}) == 40
    finally:
        for one in made:
            one.remove(bridged)
    assert not bridged.api.networks(filters={"label": "gyre.run=many"})


def test_networks_of_dead_owners_are_swept_and_no_others(bridged):
    gone = {**labels(me(), run="sweep", deadline=2e9, name="x"), "gyre.owner_start": "1"}
    dead = bridged.api.create_network("dead", labels=gone)["Id"]
    unrelated = bridged.api.create_network("unrelated")["Id"]
    mine = internal.create(bridged, run="sweep", deadline=2e9)
    try:
        assert sweep_networks(bridged) == ["dead"]
        left = {one["Id"] for one in bridged.api.networks()}
        assert dead not in left and {unrelated, mine.id} <= left
    finally:
        mine.remove(bridged)
        bridged.api.remove_network(unrelated)


def test_an_engine_without_what_the_guard_needs_says_so(docker_client, base_image):
    """No route leads out where there is no bridge: nothing is started that is only half restricted."""
    with box(docker_client) as made, pytest.raises(WorkspaceError, match="no default route"):
        guard(docker_client, made.id, run="test", local=True)


def test_a_workspace_on_an_engine_of_the_tests(docker_client, base_image):
    """Where the engine has a bridge and no firewall, the workspace opens all the same, restricted."""
    with open_workspace(Task(instruction="x", memory_mb=64, network="full")) as workspace:
        assert "unreachable 10.0.0.0/8" in workspace.exec("ip route").stdout
    docker_client.api.remove_network("gyre-full")
