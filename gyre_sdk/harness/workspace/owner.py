"""Who owns a container, so that one whose owner died can be removed by anybody, and no other ever is."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

RUN, OWNER, PID, START = "gyre.run", "gyre.owner", "gyre.owner_pid", "gyre.owner_start"
BOOT, NAMESPACE, DEADLINE = "gyre.boot_id", "gyre.pid_namespace", "gyre.deadline"
NAME = "gyre.name"
"""Label that repeats the container's name: a container that somebody makes from a snapshot inherits labels, but not its name."""
_GRACE = 60.0
"""Seconds past its deadline after which a container is stale, whoever owns it."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, told apart from a later one with the same id."""

    pid: int
    start: str
    """Start time of the process in clock ticks since boot."""
    boot_id: str
    namespace: str
    """Of process ids: `pid` means nothing elsewhere."""


def me() -> Owner:
    """Return this process as an owner (a forked child is another one)."""
    return _owner(os.getpid())


@cache
def _owner(pid: int) -> Owner:
    return Owner(pid, _start_time(pid) or "0", _boot_id(), _namespace())


def container_name() -> str:
    """Return a name for a container that no other has."""
    return f"gyre-{secrets.token_hex(6)}"


def labels(owner: Owner, *, run: str, deadline: float, name: str = "") -> dict[str, str]:
    """Return a container's labels; `deadline` in seconds since the epoch."""
    return {
        NAME: name,
        RUN: run,
        OWNER: f"{owner.pid}:{owner.start}",
        PID: str(owner.pid),
        START: owner.start,
        BOOT: owner.boot_id,
        NAMESPACE: owner.namespace,
        DEADLINE: f"{deadline:.0f}",
    }


def is_stale(found: Mapping[str, str], now: float | None = None) -> bool:
    """Tell whether nobody needs the container with these labels: its owner died, or its deadline has long passed."""
    try:
        if float(found[DEADLINE]) + _GRACE < (time.time() if now is None else now):
            return True
        here = (found[BOOT], found[NAMESPACE]) == (_boot_id(), _namespace())
        return here and _start_time(int(found[PID])) != found[START]
    except (KeyError, ValueError):
        return False


def _start_time(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


@cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return "unknown"
