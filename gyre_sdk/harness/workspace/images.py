"""Images of workspaces: found by name, built once from a Dockerfile, or built from `sandboxes/` without any registry."""

from __future__ import annotations

import hashlib
import io
import posixpath
import re
import tarfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import docker
from docker.errors import DockerException, ImageNotFound, NotFound

from gyre_sdk.errors import ImageMissing, WorkspaceError
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import owner

DEFAULT_IMAGE = "gyre/base"
USER_LABEL = "gyre.user"
SNAPSHOT = "gyre.snapshot"
"""Label with the name of a snapshot."""
MEMORY = "gyre.memory"
"""Label of a snapshot that names the folders whose content was in memory."""
SHELL_LABEL = "gyre.supervisor"
"""Label that names a busybox which users can run but not read, for the supervisor."""
_building: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
_FROM = re.compile(r"^\s*FROM\s+(?:--\S+\s+)*(\S+)", re.IGNORECASE | re.MULTILINE)
_contents: dict[tuple[str, str], bytes | None] = {}


@dataclass(frozen=True, slots=True)
class Image:
    """An image that is present on the engine."""

    name: str
    id: str
    user: str
    """User that commands run as when the task names none."""
    workdir: str
    """Its own working directory, or `/workspace`."""
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def passing(self) -> bool:
        """Whether it is a snapshot, used once or twice: what it holds is not worth remembering."""
        return SNAPSHOT in self.labels

    def content(self, client: docker.DockerClient, folder: str) -> bytes | None:
        """Return what the image has at `folder` as a tar whose first entry is that folder, or None when it has none."""
        if self.passing:
            return read_folder(client, self.id, folder)
        key = (self.id, folder)
        with _building[f"folder {self.id}"]:
            if key not in _contents:
                _contents[key] = read_folder(client, self.id, folder)
            return _contents[key]

    def workdir_for(self, client: docker.DockerClient, workdir: str, uid: int, gid: int) -> bytes | None:
        """Return the tar that makes `workdir` (created when absent) uid:gid's, or None when it is already."""
        found = self.content(client, workdir)
        if found is not None:
            return owned_tar(found, uid, gid)
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            entry = tarfile.TarInfo(posixpath.basename(workdir) or ".")
            entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, 0o755, uid, gid
            archive.addfile(entry)
        return out.getvalue()


def image_missing(name: str) -> ImageMissing:
    """Return the error for an image that is not on the engine."""
    sandbox = name.removeprefix("gyre/").partition(":")[0] if name.startswith("gyre/") else None
    step = f"gyre sandbox build {sandbox}" if sandbox else f"docker pull {name}"
    return ImageMissing(f"image {name!r} is not present; run: {step} (or give the task a Dockerfile)")


def ensure_image(client: docker.DockerClient, task: Task) -> Image:
    """Return the task's image, building it when the task has a Dockerfile whose contents were not built yet.

    Raises:
        ImageMissing: a named image is not present.
        WorkspaceError: the build failed.
    """
    if task.dockerfile is not None:
        return _built(client, task.dockerfile, task.build_timeout_s)
    name = task.image or DEFAULT_IMAGE
    found = find_image(client, name)
    if found is None:
        raise image_missing(name)
    return found


def phase_image(client: docker.DockerClient, task: Task, snapshot: str | None, phase: str) -> Image:
    """Return the image that a workspace starts from: a snapshot, else the verifier's own in its phase, else the task's.

    Raises:
        ImageMissing: it is not present.
        WorkspaceError: a build failed.
    """
    if snapshot is not None:
        found = find_image(client, snapshot)
        if found is None:
            raise ImageMissing(f"snapshot {snapshot!r} is not on the engine: it was removed, or its time was over")
        return found
    if phase == "verifier" and (task.verifier_image or task.verifier_dockerfile):
        task = replace(task, image=task.verifier_image, dockerfile=task.verifier_dockerfile)
    return ensure_image(client, task)


def find_image(client: docker.DockerClient, name: str) -> Image | None:
    """Return an image by name or id, or None when the engine does not have it.

    Raises:
        WorkspaceError: the engine does not answer.
    """
    try:
        found: dict[str, Any] = client.api.inspect_image(name)
    except (ImageNotFound, NotFound):
        return None
    except DockerException as error:
        raise WorkspaceError(f"image {name!r} cannot be looked up: {error}; is the Docker engine up?") from error
    config = found.get("Config") or {}
    labels = config.get("Labels") or {}
    user = labels.get(USER_LABEL) or config.get("User") or "0:0"
    return Image(name, found["Id"], user, config.get("WorkingDir") or "/workspace", labels)


def _built(client: docker.DockerClient, context: Path, timeout: float) -> Image:
    dockerfile = context / "Dockerfile"
    if not dockerfile.is_file():
        raise WorkspaceError(f"{dockerfile} does not exist; write it, or name an image")
    tag = f"gyre/task:{_digest(client, context)}"
    with _building[tag]:
        found = find_image(client, tag)
        if found is None:
            build(client, context_of(context, {}), tag, timeout)
            found = find_image(client, tag)
        if found is None:
            raise image_missing(tag)
        return found


def _digest(client: docker.DockerClient, context: Path) -> str:
    """Digest a build context and the images that it starts from."""
    digest = hashlib.sha256()
    for path in sorted(context.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(context)}\0{path.stat().st_mode & 0o111}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    for base in _FROM.findall((context / "Dockerfile").read_text(errors="replace")):
        found = find_image(client, base) if base != "scratch" and "$" not in base else None
        digest.update(f"{base}={found.id if found else ''}\0".encode())
    return digest.hexdigest()[:24]


def context_of(folder: Path, extra: Mapping[str, bytes]) -> bytes:
    """Return a folder and further files (path -> content) as a build context."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(folder.rglob("*")):
            archive.add(path, str(path.relative_to(folder)), recursive=False)
        for name, data in extra.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def build(client: docker.DockerClient, context: bytes, tag: str, timeout: float) -> None:
    """Build a context (a tar) with the classic builder, leaving no intermediate container.

    Raises:
        WorkspaceError: it failed, or took more than `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    lines: list[str] = []
    try:
        for event in client.api.build(
            fileobj=io.BytesIO(context),
            custom_context=True,
            tag=tag,
            rm=True,
            forcerm=True,
            decode=True,
            timeout=int(timeout) + 1,
        ):
            lines += str(event.get("stream") or event.get("error") or "").splitlines()
            if "error" in event:
                raise WorkspaceError(f"image {tag!r} cannot be built; its last lines:\n" + "\n".join(lines[-15:]))
            if time.monotonic() > deadline:
                raise WorkspaceError(
                    f"image {tag!r} was not built within {timeout:g} s; raise build_timeout_s. Last lines:\n"
                    + "\n".join(lines[-15:])
                )
    except DockerException as error:
        raise WorkspaceError(f"image {tag!r} cannot be built: {error}") from error


def read_folder(client: docker.DockerClient, image: str, path: str) -> bytes | None:
    """Return what an image has at `path` as a tar whose first entry is that folder, or None when it has nothing there."""
    name = owner.container_name()
    labels = owner.labels(owner.me(), run="", deadline=time.time() + 600, name=name)
    container = client.api.create_container(image, command=["true"], name=name, labels=labels)["Id"]
    try:
        stream, _ = client.api.get_archive(container, path)
        return b"".join(stream)
    except NotFound:
        return None
    finally:
        client.api.remove_container(container, force=True)


def owned_tar(stream: bytes, uid: int, gid: int) -> bytes | None:
    """Return a tar with every entry owned by uid:gid, or None when it is already so."""
    changed = False
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(stream)) as source, tarfile.open(fileobj=out, mode="w") as target:
        for entry in source:
            changed |= (entry.uid, entry.gid) != (uid, gid)
            entry.uid, entry.gid, entry.uname, entry.gname = uid, gid, "", ""
            target.addfile(entry, source.extractfile(entry) if entry.isreg() else None)
    return out.getvalue() if changed else None
