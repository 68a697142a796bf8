"""The engine's disk: what gyre uses of it, room before something large is written, and a guard against workspaces that fill it.

Docker bounds a container's own layer on few file systems only, and one that fills the engine's disk takes every other run down
with it. So while this process has workspaces on an engine of this machine, a thread looks at the room that is left; when it
goes below a reserve, the workspace that wrote the most is ended, with that as its post-mortem.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import docker
from docker.errors import DockerException

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.workspace import owner, reaper
from gyre_sdk.harness.workspace.images import BUILT
from gyre_sdk.harness.workspace.snapshots import Snapshot, make_room, remove, snapshots

RESERVE = 2 << 30
"""Bytes of the engine's disk that are kept free."""
_LOOK_EVERY = 2.0
_SMALL = 64 << 20
"""A workspace that wrote less is not what fills a disk, bytes."""

_roots: WeakKeyDictionary[docker.DockerClient, Path | None] = WeakKeyDictionary()
_ended: dict[str, str] = {}
_guarding: set[int] = set()
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Usage:
    """What is on an engine's disk, bytes."""

    free: int | None
    """None: the engine runs on another machine."""
    containers: int
    """What gyre's containers wrote outside of memory."""
    snapshots: tuple[Snapshot, ...]
    images: dict[str, int]
    """Images built for tasks -> size; layers that they share count in each."""


def free(client: docker.DockerClient) -> int | None:
    """Return the bytes free where the engine keeps its data, or None when that is not on this machine."""
    if client not in _roots:
        try:
            place = Path(client.info().get("DockerRootDir") or "/nonexistent")
        except (DockerException, OSError):
            return None
        local = client.api.base_url.startswith("http+docker://") and place.is_dir()
        _roots[client] = place if local else None
    root = _roots[client]
    try:
        return None if root is None else shutil.disk_usage(root).free
    except OSError:
        return None


def usage(client: docker.DockerClient) -> Usage:
    """Return what gyre has on an engine. Walks the containers' files: takes seconds with many.

    Raises:
        DockerException: the engine does not answer.
    """
    there = client.api.containers(all=True, filters={"label": owner.NAME}, size=True)
    images = client.api.images(filters={"label": BUILT})
    return Usage(
        free(client),
        sum(int(one.get("SizeRw") or 0) for one in there),
        tuple(snapshots(client)),
        {(one.get("RepoTags") or [one["Id"][7:19]])[0]: int(one.get("Size") or 0) for one in images},
    )


def require_room(client: docker.DockerClient, what: str, reserve: int = RESERVE) -> None:
    """Make sure that the engine's disk has room, removing kept snapshots, oldest first, for want of it.

    Args:
        what: what is to be written, for the message.

    Raises:
        WorkspaceError: there is none.
    """
    left = free(client)
    if left is None or left >= reserve:
        return
    make_room(client)
    for one in [one for one in snapshots(client) if one.keep]:
        if (free(client) or 0) >= reserve:
            return
        remove(client, one.id)
    left = free(client) or 0
    if left < reserve:
        raise WorkspaceError(
            f"no room for {what}: {left >> 20} MiB are free on the engine's disk, {reserve >> 20} MiB are kept free;"
            " gyre gc --images removes what nothing uses, gyre doctor shows what there is"
        )


def guard(client: docker.DockerClient) -> None:
    """Watch the disk of a client's engine from now on, for the life of this process."""
    with _lock:
        if id(client) in _guarding:
            return
        _guarding.add(id(client))
    threading.Thread(target=_watch, args=(client,), name="gyre-disk", daemon=True).start()


def why_ended(container: str) -> str | None:
    """Return why the guard ended a container, or None when it did not."""
    return _ended.get(container)


def end_the_largest(client: docker.DockerClient, reserve: int = RESERVE) -> str | None:
    """Remove the one of this process's containers that wrote the most, when less than `reserve` is free; return its id."""
    left = free(client)
    if left is None or left >= reserve:
        return None
    mine = client.api.containers(all=True, filters={"label": reaper.own_label()}, size=True)
    largest = max(mine, key=lambda one: int(one.get("SizeRw") or 0), default=None)
    if largest is None or int(largest.get("SizeRw") or 0) < _SMALL:
        return None
    container = str(largest["Id"])
    _ended[container] = (
        f"it wrote {int(largest['SizeRw']) >> 20} MiB and {left >> 20} MiB were left on the engine's disk"
        f" ({reserve >> 20} MiB are kept free), so it was ended; give the task a limit (disk_mb) or the engine more room"
    )
    reaper.remove(client, container)
    return container


def _watch(client: docker.DockerClient) -> None:
    pid = os.getpid()
    while os.getpid() == pid:
        time.sleep(_LOOK_EVERY)
        try:
            end_the_largest(client)
        except (DockerException, OSError):
            pass  # an engine that does not answer writes nothing either
