"""What a machine's Docker engine can and cannot do for workspaces, and what to do about it. Decided from facts; one shell asks."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
from docker.errors import DockerException

from gyre_sdk.harness.workspace import owner
from gyre_sdk.harness.workspace.disk import RESERVE, Usage, usage
from gyre_sdk.harness.workspace.overlay import can_copy
from gyre_sdk.harness.workspace.sandboxes import Sandbox, sandboxes
from gyre_sdk.harness.workspace.snapshots import ROOM

OLDEST = (20, 10)
"""Version of the engine that everything is known to work with."""
_PORTS = 4096
_FILES = 4096
_PROCESSES = 32_768
_WATCHES = 256
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    fine: bool
    said: str
    """What there is and, where it is not fine, what to do."""


def check_engine(client: docker.DockerClient) -> list[Finding]:
    """Look at an engine: version, storage, limits, runtimes, images, disk, what was left behind."""
    try:
        info, version = client.info(), client.version()
        found = list(of_engine(info, str(version.get("Version") or "")))
        found.append(of_images(sandboxes(client)))
        found += of_disk(usage(client))
        left = [one for one in client.api.containers(all=True, filters={"label": owner.NAME}) if _stale(one)]
    except (DockerException, OSError) as error:
        return [Finding("engine", False, f"it broke off: {error}; look at its log (journalctl -u docker)")]
    said = f"{len(left)} containers of dead processes; gyre gc removes them" if left else "nothing of dead processes"
    return [*found, Finding("left", not left, said)]


def of_engine(info: Mapping[str, Any], version: str) -> Iterator[Finding]:
    """Judge an engine by what it says of itself (`docker info`)."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    yield Finding(
        "engine",
        numbers >= OLDEST,
        f"{version} on {info.get('Architecture') or '?'}"
        + ("" if numbers >= OLDEST else f"; {'.'.join(map(str, OLDEST))} or newer is needed: upgrade it"),
    )
    driver = info.get("Driver") or "?"
    if driver == "overlay2":
        quick = os.geteuid() == 0 and can_copy()
        yield Finding("storage", True, f"overlay2; forks {'copy files directly' if quick else 'go through images'}")
    else:
        advice = (
            "forks go through images"
            if driver == "overlayfs"
            else "starts and forks copy whole images: use overlay2 (data-root on ext4 or xfs)"
        )
        yield Finding("storage", driver == "overlayfs", f"{driver}; {advice}")
    missing = [
        word
        for key, word in (
            ("MemoryLimit", "memory"),
            ("SwapLimit", "swap"),
            ("PidsLimit", "processes"),
            ("CpuCfsQuota", "CPU"),
        )
        if info.get(key) is False
    ]
    said = f"version {info.get('CgroupVersion') or '1'} by {info.get('CgroupDriver') or '?'}"
    advice = f"; no limits on {', '.join(missing)}: boot with cgroup_enable=memory swapaccount=1, or delegate the controllers"
    yield Finding("cgroups", not missing, said + (advice if missing else ""))
    options = " ".join(info.get("SecurityOptions") or [])
    confined = "seccomp" in options and "unconfined" not in options
    advice = "no default seccomp profile: workspaces may use any system call; start dockerd with one"
    yield Finding("seccomp", confined, "default profile" if confined else advice)
    there = "runsc" in (info.get("Runtimes") or {})
    advice = "not registered (only for tasks with runtime = 'runsc'); install gVisor, then runsc install, and restart dockerd"
    yield Finding("runsc", there, "registered" if there else advice)


def of_images(found: list[Sandbox]) -> Finding:
    """Judge which sandboxes are built."""
    said = ", ".join(
        f"{one.name} {'is not built' if not one.built else f'{one.bytes // _MIB} MiB'}{'' if one.current or not one.built else ' (out of date)'}"
        for one in found
    )
    todo = [one.name for one in found if not one.current and (one.built or one.name == "base")]
    step = "".join(f"; gyre sandbox build {name}" for name in todo)
    return Finding("images", not todo, said + step)


def of_disk(used: Usage, room: int = ROOM) -> Iterator[Finding]:
    """Judge what is used of an engine's disk."""
    if used.free is not None:
        fine = used.free > 2 * RESERVE
        step = "" if fine else "; below 2048 nothing starts: gyre gc --images, docker system prune"
        yield Finding("room", fine, f"{used.free // _MIB} MiB free on the engine's disk{step}")
    kept = sum(one.bytes for one in used.snapshots if one.keep)
    said = (
        f"{used.containers // _MIB} MiB in containers, {sum(one.bytes for one in used.snapshots) // _MIB} MiB in"
        f" {len(used.snapshots)} snapshots ({kept // _MIB} of {room // _MIB} MiB kept),"
        f" {sum(used.images.values()) // _MIB} MiB in {len(used.images)} images of tasks"
    )
    yield Finding("used", kept <= room, said + ("" if kept <= room else "; gyre gc removes the oldest kept snapshots"))


def check_machine() -> list[Finding]:
    """Look at this machine: ports and kernel limits."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return [
        of_ports(*_port_range(), _can_listen()),
        of_limits(
            files=files if files != resource.RLIM_INFINITY else 1 << 30,
            processes=_number("/proc/sys/kernel/pid_max", 1 << 22),
            watches=_number("/proc/sys/fs/inotify/max_user_instances", 1 << 20),
        ),
    ]


def of_ports(first: int, last: int, listens: bool) -> Finding:
    """Judge the ports that the system gives out: all of gyre's are of those, none is fixed."""
    if not listens:
        return Finding(
            "ports", False, "none can be had on 127.0.0.1; bring the loopback interface up (ip link set lo up)"
        )
    count = last - first + 1
    step = f"; too few for many workspaces: sysctl net.ipv4.ip_local_port_range='{32_768} {60_999}'"
    return Finding("ports", count >= _PORTS, f"{count} to choose from on 127.0.0.1" + ("" if count >= _PORTS else step))


def of_limits(*, files: int, processes: int, watches: int) -> Finding:
    """Judge the kernel's limits: open files of this process, processes of the machine, inotify instances per user."""
    low = [
        f"{files} open files: ulimit -n {_FILES}" if files < _FILES else "",
        f"{processes} processes: sysctl kernel.pid_max={_PROCESSES}" if processes < _PROCESSES else "",
        f"{watches} inotify instances, which workspaces of one user share: sysctl fs.inotify.max_user_instances={_WATCHES}"
        if watches < _WATCHES
        else "",
    ]
    said = "; ".join(part for part in low if part)
    return Finding("limits", not said, said or f"{files} open files, {processes} processes")


def _can_listen() -> bool:
    with socket.socket() as trial:
        try:
            trial.bind(("127.0.0.1", 0))
        except OSError:
            return False
    return True


def _port_range() -> tuple[int, int]:
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(first), int(last)
    except (OSError, ValueError):
        return 32_768, 60_999


def _number(file: str, default: int) -> int:
    try:
        return int(Path(file).read_text())
    except (OSError, ValueError):
        return default


def _stale(container: Mapping[str, Any]) -> bool:
    return owner.is_stale(container.get("Labels") or {})
