"""Images of workspaces: found by name, built once from a Dockerfile, or built from `sandboxes/` without any registry."""

from __future__ import annotations

import hashlib
import io
import os
import posixpath
import re
import shutil
import subprocess
import tarfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
from docker.errors import DockerException, ImageNotFound, NotFound

from gyre_sdk.errors import ImageMissing, WorkspaceError
from gyre_sdk.harness.task import Task

DEFAULT_IMAGE = "gyre/base"
SANDBOXES = Path(__file__).parents[3] / "sandboxes"
"""One folder per sandbox image, in a checkout of gyre."""
USER_LABEL = "gyre.user"
SHELL_LABEL = "gyre.supervisor"
"""Label that names a busybox which users can run but not read, for the supervisor."""
_building: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
_FROM = re.compile(r"^\s*FROM\s+(?:--\S+\s+)*(\S+)", re.IGNORECASE | re.MULTILINE)
_workdirs: dict[tuple[str, str], bytes | None] = {}


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

    def workdir_content(self, client: docker.DockerClient, workdir: str) -> bytes | None:
        """Return what the image has at `workdir` as a tar whose first entry is that folder, or None when it has none."""
        key = (self.id, workdir)
        with _building[f"workdir {self.id}"]:
            if key not in _workdirs:
                _workdirs[key] = _read_folder(client, self.id, workdir)
            return _workdirs[key]

    def workdir_for(self, client: docker.DockerClient, workdir: str, uid: int, gid: int) -> bytes | None:
        """Return the tar that makes `workdir` (created when absent) uid:gid's, or None when it is already."""
        found = self.workdir_content(client, workdir)
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
    found = _inspect(client, name)
    if found is None:
        raise image_missing(name)
    return found


def build_sandbox(client: docker.DockerClient, name: str, *, folder: Path = SANDBOXES) -> Image:
    """Build the image `gyre/<name>` from `sandboxes/<name>`, and run its smoke test.

    `base` gets its root file system from the busybox of this machine: no registry is needed.

    Raises:
        WorkspaceError: no such sandbox, busybox is missing, or the build or the smoke test failed.
    """
    place = folder / name
    if not (place / "Dockerfile").is_file():
        known = sorted(path.parent.name for path in folder.glob("*/Dockerfile"))
        raise WorkspaceError(f"{place / 'Dockerfile'} does not exist; sandboxes here: {', '.join(known) or 'none'}")
    extra = {"rootfs.tar": base_rootfs()} if name == "base" else {}
    _build(client, _context(place, extra), f"gyre/{name}", 600.0)
    found = _inspect(client, f"gyre/{name}")
    if found is None:
        raise image_missing(f"gyre/{name}")
    return found


def base_rootfs() -> bytes:
    """Return a root file system, as a tar, made of this machine's static busybox.

    Raises:
        WorkspaceError: there is none.
    """
    busybox = shutil.which("busybox", path=f"{os.environ.get('PATH', '')}:/bin:/usr/bin")
    advice = "install it: apt-get install busybox-static"
    if busybox is None:
        raise WorkspaceError(f"busybox is not installed; {advice}")
    content = Path(busybox).read_bytes()
    if b"ld-linux" in content[:4096] or b"ld-musl" in content[:4096]:
        raise WorkspaceError(f"{busybox} is not static; {advice}")
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:

        def add(path: str, mode: int, *, data: bytes | None = None, link: str = "", uid: int = 0) -> None:
            entry = tarfile.TarInfo(path)
            entry.mode, entry.uid, entry.gid = mode, uid, uid
            if link:
                entry.type, entry.linkname = tarfile.SYMTYPE, link
            elif data is None:
                entry.type = tarfile.DIRTYPE
            else:
                entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data) if data is not None else None)

        for path in ("bin", "dev", "etc", "proc", "run", "sys", "usr", "usr/bin", "var", "logs", "tests"):
            add(path, 0o755)
        add("root", 0o700)
        add("tmp", 0o1777)
        add("workspace", 0o755, uid=1000)
        add("bin/busybox", 0o755, data=content)
        add("bin/busybox-supervisor", 0o711, data=content)
        for applet in applets:
            if applet != "busybox":
                add(f"bin/{applet}", 0o777, link="busybox")
        add("usr/bin/env", 0o777, link="/bin/busybox")
        add("etc/passwd", 0o644, data=b"root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:/workspace:/bin/sh\n")
        add("etc/group", 0o644, data=b"root:x:0:\nagent:x:1000:\n")
    return out.getvalue()


def _inspect(client: docker.DockerClient, name: str) -> Image | None:
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
        found = _inspect(client, tag)
        if found is None:
            _build(client, _context(context, {}), tag, timeout)
            found = _inspect(client, tag)
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
        found = _inspect(client, base) if base != "scratch" and "$" not in base else None
        digest.update(f"{base}={found.id if found else ''}\0".encode())
    return digest.hexdigest()[:24]


def _context(folder: Path, extra: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(folder.rglob("*")):
            archive.add(path, str(path.relative_to(folder)), recursive=False)
        for name, data in extra.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def _build(client: docker.DockerClient, context: bytes, tag: str, timeout: float) -> None:
    """Build with the classic builder, leaving no intermediate container."""
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


def _read_folder(client: docker.DockerClient, image: str, path: str) -> bytes | None:
    container = client.api.create_container(image, command=["true"], labels={"gyre.probe": "workdir"})["Id"]
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
