"""Cuts a container on the engine's bridge off from what is not the internet: this machine, its neighbours, other containers.

The rules are routes of the container's own network namespace, placed once by a container that shares it and may administer
it; what runs in the workspace may not. They need no right on the machine, and hold whatever its firewall does.
"""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

import docker
from docker.errors import APIError, DockerException

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.workspace import reaper
from gyre_sdk.harness.workspace.network.addresses import METADATA, PRIVATE, Range
from gyre_sdk.harness.workspace.network.helper import Stream, start_helper

SHARED = "gyre-full"
"""The engine's network that workspaces with network `full` share; the engine lets no two of them talk."""
IPV4_ONLY = {"net.ipv6.conf.all.disable_ipv6": "1", "net.ipv6.conf.default.disable_ipv6": "1"}
_WAIT_S = 60.0
_RESOLVERS = ("/etc/resolv.conf", "/run/systemd/resolve/resolv.conf")
_SCRIPT = r"""
gateway=$(ip route | sed -n 's/^default via \([0-9.]*\) .*/\1/p')
[ -n "$gateway" ] || { echo "no default route"; exit 1; }
for one in $2; do ip route replace $one via $gateway || exit 1; done
for one in $1 $gateway; do ip route replace unreachable $one || exit 1; done
echo guarded
"""
_LOCAL = re.compile(r"\|-- ([0-9.]+)\n\s+/32 host LOCAL")


def shared_network(client: docker.DockerClient) -> str:
    """Return the name of the network of workspaces with network `full`, made when absent.

    Raises:
        WorkspaceError: the engine cannot make bridges.
    """
    if client.api.networks(names=[f"^{SHARED}$"]):
        return SHARED
    options = {"com.docker.network.bridge.enable_icc": "false"}
    try:
        client.api.create_network(SHARED, driver="bridge", options=options, check_duplicate=True)
    except APIError as error:
        if error.status_code == 409:  # another process made it meanwhile
            return SHARED
        raise WorkspaceError(
            f"the engine cannot make a bridge for network 'full' ({error.explanation}); use 'allowlist' or 'none'"
        ) from error
    return SHARED


def guard(client: docker.DockerClient, container: str, *, run: str, local: bool) -> None:
    """Place the routes in a running container.

    Args:
        local: whether the engine runs on this machine: then this machine's addresses are known, and its name servers.

    Raises:
        WorkspaceError: they cannot be placed; the container must not be used.
    """
    own = own_addresses(_read(["/proc/net/fib_trie"])) if local else []
    servers = name_servers(_read(_RESOLVERS), own) if local else []
    subnets = [
        pool["Subnet"]
        for found in client.api.inspect_container(container)["NetworkSettings"]["Networks"]
        for pool in client.api.inspect_network(found)["IPAM"]["Config"]
    ]
    said = _run(client, container, [" ".join(closed(subnets, own)), " ".join(servers)], run)
    if "guarded" not in said:
        raise WorkspaceError(
            f"the network of container {container[:12]} cannot be restricted: {said.strip() or 'silence'}"
        )


def closed(subnets: Iterable[str], own: Iterable[str]) -> list[str]:
    """Return the ranges to make unreachable: private and metadata ones, this machine, and the container's own subnets.

    A subnet is named by its halves: the engine's route to the whole of it stays, for the gateway's sake.
    """
    ranges: list[Range] = [one for one in (*PRIVATE, *METADATA) if one.version == 4]
    for text in subnets:
        subnet = ipaddress.ip_network(text)
        if subnet.version == 4:
            ranges += subnet.subnets()
    ranges += [ipaddress.ip_network(address) for address in own]
    return [str(one) for one in dict.fromkeys(ranges)]


def own_addresses(fib_trie: str) -> list[str]:
    """Return this machine's IPv4 addresses besides loopback, from /proc/net/fib_trie."""
    found = dict.fromkeys(_LOCAL.findall(fib_trie))
    return [address for address in found if not ipaddress.ip_address(address).is_loopback]


def name_servers(resolv_conf: str, own: Sequence[str]) -> list[str]:
    """Return the private name servers of a resolv.conf, which stay reachable: not this machine, and no metadata address."""
    kept = []
    for line in resolv_conf.splitlines():
        word, _, value = line.strip().partition(" ")
        if word != "nameserver":
            continue
        try:
            address = ipaddress.ip_address(value.strip())
        except ValueError:
            continue
        private = any(address in one for one in PRIVATE if one.version == address.version)
        metadata = any(address in one for one in METADATA if one.version == address.version)
        if private and not metadata and str(address) not in own:
            kept.append(str(address))
    return kept


def _read(paths: Iterable[str]) -> str:
    return "\n".join(path.read_text() for text in paths if (path := Path(text)).is_file())


def _run(client: docker.DockerClient, container: str, arguments: list[str], run: str) -> str:
    """Run the script beside a container and return what it says."""
    key = object()
    pieces: SimpleQueue[bytes | None] = SimpleQueue()
    helper, stream = "", None
    try:
        helper = start_helper(
            client,
            ["sh", "-c", f"exec 2>&1\n{_SCRIPT}", "guard", *arguments],
            {"network_mode": f"container:{container}", "cap_add": ["NET_ADMIN"]},
            user="0:0",
            run=run,
            deadline=time.time() + 2 * _WAIT_S,
            close=lambda: reaper.remove(client, helper),
            key=id(key),
        )
        stream = Stream(client.api.attach_socket(helper, params={"stdout": 1, "stream": 1}))
        stream.open(lambda kind, data: pieces.put(data if kind else None))
        client.api.start(helper)
        said = b""
        while (piece := pieces.get(timeout=_WAIT_S)) is not None:
            said += piece
        return said.decode(errors="replace")
    except (DockerException, OSError, Empty) as error:
        raise WorkspaceError(f"a container that restricts the network cannot run: {error or 'no answer'}") from error
    finally:
        reaper.unwatch(id(key))
        if stream is not None:
            stream.close()
        if helper:
            reaper.remove(client, helper)
