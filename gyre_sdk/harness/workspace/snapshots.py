"""Snapshots: what a workspace holds as an image of the engine. Files only: processes and memory are never kept.

A snapshot is labelled as gyre's, with the run, the owner and a deadline. `sweep` removes it once its owner is dead or its
deadline has passed; one that is *kept* outlives its owner until the deadline, or until the room for kept snapshots is used
up: the oldest go first.
"""

from __future__ import annotations

import io
import posixpath
import secrets
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import IO

import docker
from docker.errors import DockerException
from docker.types import LogConfig

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.workspace import memory, owner, reaper
from gyre_sdk.harness.workspace.contents import folder_tar
from gyre_sdk.harness.workspace.halting import halted
from gyre_sdk.harness.workspace.hardening import CAPABILITIES, SUPERVISOR_FOLDER
from gyre_sdk.harness.workspace.images import MEMORY, SNAPSHOT, USER_LABEL, Image
from gyre_sdk.harness.workspace.overlay import NotHere

REPOSITORY = "gyre/snapshot"
KEEP, CREATED = "gyre.keep", "gyre.created"
BASE = "gyre.base_size"
"""Label with the size of the image that the snapshot adds to, bytes."""
WORKDIR_OWNER = "gyre.workdir_owner"
"""Label with the `uid:gid` that owns all of the working directory, and that folder."""
LIMIT = 8 << 30
"""Bytes that one snapshot may add to its image: a sparse file would be written out in full."""
ROOM = 20 << 30
"""Bytes that kept snapshots may add to their images, all together."""
KEPT_S = 7 * 86400.0
"""Seconds for which a snapshot is kept when nothing else is said."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot that is on the engine."""

    id: str
    """Its name on the engine, `gyre/snapshot:<hex>`."""
    run: str
    keep: bool
    created: float
    """Seconds since the epoch."""
    deadline: float
    """Seconds since the epoch."""
    bytes: int
    """What it adds to the image that it was made from."""
    labels: Mapping[str, str]


def take(
    client: docker.DockerClient,
    container: str,
    image: Image,
    *,
    user: str,
    folders: Iterable[str],
    labels: Mapping[str, str],
    deadline: float,
    keep: bool,
    read_only: bool,
) -> str:
    """Make an image of what a running container holds, its folders in memory included; return its name.

    Args:
        image: what the container was made from.
        user: who owns the folders in memory (for engines on another machine).
        folders: those kept in memory.
        labels: of the run and the workspace.
        deadline: seconds since the epoch.
        read_only: whether all that the container changed is in memory.

    Raises:
        WorkspaceError: it holds too much, or the engine refused.
    """
    name = f"{REPOSITORY}:{secrets.token_hex(6)}"

    def commit(what: str) -> None:
        repository, _, tag = name.partition(":")
        settings = {"Labels": marks, "Cmd": ["sh"], "Entrypoint": [], "User": image.user, "WorkingDir": image.workdir}
        client.api.commit(what, repository=repository, tag=tag, conf=settings)

    with ExitStack() as undone:
        undone.callback(remove, client, name)
        try:
            changed = client.api.containers(all=True, filters={"id": container}, size=True)
            if changed and int(changed[0].get("SizeRw") or 0) > LIMIT:
                raise memory.too_large([f"workspace {container[:12]}"], LIMIT)
            make_room(client)
            marks = owner.labels(owner.me(), run="", deadline=deadline) | {
                **labels,
                SNAPSHOT: name,
                USER_LABEL: image.user,
                KEEP: "1" if keep else "",
                CREATED: f"{time.time():.3f}",
                BASE: str(client.api.inspect_image(image.id)["Size"]),
                MEMORY: "",
            }
            if not read_only:
                client.api.put_archive(
                    container, posixpath.dirname(SUPERVISOR_FOLDER), folder_tar(SUPERVISOR_FOLDER, 0, 0, 0o1777)
                )
                # (memory mounted on a folder that exists takes that folder's mode)
            archive, held = _at_rest(
                client, container, user, sorted(folders), (lambda: None) if read_only else (lambda: commit(container))
            )
            with archive:
                stale = _stale(client, image, archive, sorted(folders))
                if held or stale or read_only:
                    marks[MEMORY] = " ".join(held)
                    _add(client, image.id if read_only else name, archive, stale, marks[owner.RUN], commit)
        except DockerException as error:
            raise WorkspaceError(f"no snapshot of workspace {container[:12]} can be made: {error}") from error
        undone.pop_all()
    return name


def _at_rest(
    client: docker.DockerClient, container: str, user: str, folders: list[str], commit: Callable[[], object]
) -> tuple[IO[bytes], list[str]]:
    """Commit a container and read its folders in memory, both at one moment where that can be; return (tar, its folders)."""
    try:
        with halted(client, container):
            pid = memory.pid_of(client, container)
            held = memory.filled(pid, folders)
            archive = memory.read_as_root(pid, held, LIMIT)
            commit()
    except NotHere:
        archive = memory.read_as_user(client, container, user, folders, LIMIT)
        within = memory.paths(archive)
        held = [one for one in folders if any(path.startswith(one.strip("/") + "/") for path in within)]
        with halted(client, container):  # the engine would halt it itself, but try once only
            commit()
    return archive, held


def _add(
    client: docker.DockerClient,
    base: str,
    archive: IO[bytes],
    stale: list[str],
    run: str,
    commit: Callable[[str], None],
) -> None:
    """Put an archive's folders into an image, in place of the stale paths, by way of a container that only removes files."""
    host = client.api.create_host_config(
        network_mode="none",
        cap_drop=["ALL"],
        cap_add=list(CAPABILITIES["root"]),
        security_opt=["no-new-privileges"],
        log_config=LogConfig(type="none"),
    )
    own = owner.container_name()
    container = client.api.create_container(
        base,
        entrypoint=["rm"],
        command=["-rf", "--", *stale],
        user="0:0",
        working_dir="/",
        host_config=host,
        name=own,
        labels=owner.labels(owner.me(), run=run, deadline=time.time() + 3600, name=own),
    )["Id"]
    try:
        if stale:
            client.api.start(container)
            status = client.api.wait(container)["StatusCode"]
            if status != 0:
                raise WorkspaceError(f"no snapshot can be made: rm ended with status {status} in image {base}")
        client.api.put_archive(container, "/", memory.blocks(archive))
        commit(container)
    finally:
        reaper.remove(client, container)


def _stale(client: docker.DockerClient, image: Image, archive: IO[bytes], folders: Iterable[str]) -> list[str]:
    """Return what lies directly below folders of an image and holds something that the archive of them does not have."""
    now: set[str] | None = None
    top = set()
    for folder in folders:
        before = image.content(client, folder)
        if before is None:
            continue
        now = memory.paths(archive) if now is None else now
        with tarfile.open(fileobj=io.BytesIO(before)) as entries:
            for entry in entries:
                inner = entry.name.partition("/")[2].rstrip("/")
                if inner and posixpath.join(folder, inner).strip("/") not in now:
                    top.add(posixpath.join(folder, inner.partition("/")[0]))
    return sorted(top)


def remove(client: docker.DockerClient, name: str) -> None:
    """Remove a snapshot; one that a container uses, or that cannot be removed now, is left to `sweep`."""
    with suppress(DockerException, OSError):
        client.api.remove_image(name)


def snapshots(client: docker.DockerClient) -> list[Snapshot]:
    """Return the snapshots on an engine, oldest first. Images that merely start from one are not among them."""
    found = []
    for image in client.api.images(filters={"label": SNAPSHOT}):
        labels = image.get("Labels") or {}
        name = labels.get(SNAPSHOT, "")
        if name not in (image.get("RepoTags") or []):
            continue
        found.append(
            Snapshot(
                id=name,
                run=labels.get(owner.RUN, ""),
                keep=bool(labels.get(KEEP)),
                created=_number(labels.get(CREATED)),
                deadline=_number(labels.get(owner.DEADLINE)),
                bytes=max(0, int(image.get("Size") or 0) - int(_number(labels.get(BASE)))),
                labels=labels,
            )
        )
    return sorted(found, key=lambda one: one.created)


def is_stale(snapshot: Snapshot, now: float) -> bool:
    """Tell whether nobody needs a snapshot any more: its deadline has passed or, unless it is kept, its owner died."""
    return snapshot.deadline < now or (not snapshot.keep and owner.is_stale(snapshot.labels, now))


def surplus(there: list[Snapshot], room: int) -> list[Snapshot]:
    """Return the oldest of the kept snapshots, as many as have to go for the kept ones to fit into `room` bytes."""
    kept = [one for one in there if one.keep]
    used = sum(one.bytes for one in kept)
    going = []
    for one in kept:
        if used <= room:
            break
        going.append(one)
        used -= one.bytes
    return going


def make_room(client: docker.DockerClient, room: int = ROOM) -> list[Snapshot]:
    """Remove the snapshots that nobody needs and, beyond `room` bytes, the oldest kept ones; return the removed."""
    there = snapshots(client)
    stale = [one for one in there if is_stale(one, time.time())]
    gone = stale + surplus([one for one in there if one not in stale], room)
    for one in gone:
        remove(client, one.id)
    return gone


def _number(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0
