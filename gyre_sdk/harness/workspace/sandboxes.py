"""Images built from `sandboxes/` without any image registry: a busybox, and Debian made of packages.

A sandbox is a folder with a Dockerfile and a smoke test; its `packages`, where it has some, names the Debian packages that
become `rootfs.tar` in the build, its `downloads` files of other package registries. An image says what it was built from, so that one that is up to date is not built again.
"""

from __future__ import annotations

import base64
import hashlib
import io
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

import docker
import httpx
from docker.errors import DockerException, ImageNotFound, NotFound

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import debian
from gyre_sdk.harness.workspace.building import alone, build
from gyre_sdk.harness.workspace.contents import read_path
from gyre_sdk.harness.workspace.contexts import context_of, digest_of
from gyre_sdk.harness.workspace.docker import DockerWorkspace
from gyre_sdk.harness.workspace.images import Image, bases_of, find_image, image_missing
from gyre_sdk.harness.workspace.toolbox import static_busybox
from gyre_sdk.records import ExecResult

SANDBOXES = Path(__file__).parents[2] / "sandboxes"
"""One folder per sandbox image; part of the package."""
REPOSITORY = "gyre"
DIGEST = "gyre.sandbox"
"""Label with a digest of what a sandbox was built from."""
_BUILD_S = 1800.0
_DOWNLOAD_S = 120.0
_SMOKE_S = 120.0
BASE = "base"


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A sandbox that can be built, and its image."""

    name: str
    image: str
    built: bool
    current: bool
    """Whether the image was built from what is there now."""
    bytes: int
    """Size of the image, with the images that it starts from; 0 when it is not built."""


def names(folder: Path = SANDBOXES) -> list[str]:
    """Return the names of the sandboxes."""
    return sorted(path.parent.name for path in folder.glob("*/Dockerfile"))


def sandboxes(client: docker.DockerClient, folder: Path = SANDBOXES) -> list[Sandbox]:
    """Return every sandbox with what the engine has of it."""
    found = []
    for name in names(folder):
        image = f"{REPOSITORY}/{name}"
        try:
            there = client.api.inspect_image(image)
        except (ImageNotFound, NotFound):
            found.append(Sandbox(name, image, False, False, 0))
            continue
        except DockerException as error:
            raise WorkspaceError(f"image {image!r} cannot be looked up: {error}; is the Docker engine up?") from error
        labels = (there.get("Config") or {}).get("Labels") or {}
        try:
            current = labels.get(DIGEST) == _digest(client, folder, name)
        except WorkspaceError:  # what it is made of is not here: it stays as it is
            current = True
        found.append(Sandbox(name, image, True, current, int(there.get("Size") or 0)))
    return found


def build_sandbox(client: docker.DockerClient, name: str, *, folder: Path = SANDBOXES, again: bool = False) -> Image:
    """Build the image `gyre/<name>`, and first the sandboxes that it starts from, where they are not up to date.

    `base` gets its file system from the busybox of this machine, the others from its Debian package sources.

    Args:
        again: build it even so, with the packages of today.

    Raises:
        WorkspaceError: no such sandbox, something that it is made of is missing, or the build failed.
    """
    place = folder / name
    if not (place / "Dockerfile").is_file():
        raise WorkspaceError(
            f"{place / 'Dockerfile'} does not exist; sandboxes here: {', '.join(names(folder)) or 'none'}"
        )
    for below in _below(folder, name):
        build_sandbox(client, below, folder=folder)
    tag = f"{REPOSITORY}/{name}"
    digest = _digest(client, folder, name)
    found = find_image(client, tag)
    if found is not None and not again and found.labels.get(DIGEST) == digest:
        return found
    with alone(client, tag):
        found = find_image(client, tag)  # another process may just have built it
        if found is None or again or found.labels.get(DIGEST) != digest:
            build(client, context_of(place, _extra(client, folder, name)), tag, _BUILD_S, {DIGEST: digest})
            found = find_image(client, tag)
    if found is None:
        raise image_missing(tag)
    return found


def smoke_test(client: docker.DockerClient, name: str, *, folder: Path = SANDBOXES) -> ExecResult:
    """Run a sandbox's smoke test in a workspace of its image; it passed when it ended with 0 and printed `ok`.

    Raises:
        ImageMissing: it is not built.
        WorkspaceError: there is no such sandbox, or no workspace.
    """
    smoke = folder / name / "smoke.sh"
    if not smoke.is_file():
        raise WorkspaceError(f"{smoke} does not exist; sandboxes here: {', '.join(names(folder)) or 'none'}")
    with DockerWorkspace(Task(instruction="smoke test", image=f"{REPOSITORY}/{name}"), client) as workspace:
        return workspace.exec(smoke.read_text(), timeout=_SMOKE_S)


def _below(folder: Path, name: str) -> list[str]:
    """Return the sandboxes that one starts from."""
    bases = (base.removeprefix(f"{REPOSITORY}/") for base in bases_of(folder / name / "Dockerfile"))
    return [base for base in bases if (folder / base / "Dockerfile").is_file()]


def _digest(client: docker.DockerClient, folder: Path, name: str) -> str:
    below = [f"{base}={found.id if found else ''}" for base, found in _images_below(client, folder, name).items()]
    if name == BASE:
        below.append(hashlib.sha256(static_busybox().read_bytes()).hexdigest())
    return digest_of(folder / name, below)


def _images_below(client: docker.DockerClient, folder: Path, name: str) -> dict[str, Image | None]:
    return {base: find_image(client, f"{REPOSITORY}/{base}") for base in _below(folder, name)}


def _extra(client: docker.DockerClient, folder: Path, name: str) -> dict[str, bytes]:
    """Return what a sandbox's build needs besides its folder."""
    if name == BASE:
        return {"rootfs.tar": base_rootfs()}
    extra = {}
    for row in _rows(folder / name / "downloads"):
        file, url, digest = row.split()
        extra[file] = _download(url, digest)
    packages = _rows(folder / name / "packages")
    if packages:
        below = _images_below(client, folder, name).values()
        states = [_file_of(client, image, debian.STATUS) for image in below if image]
        extra["rootfs.tar"] = debian.tree(packages, status=b"".join(states))
    return extra


def _rows(file: Path) -> list[str]:
    """Return a file's lines without comments; none when there is no such file."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return [row for line in lines if (row := line.partition("#")[0].strip())]


def _file_of(client: docker.DockerClient, image: Image, path: str) -> bytes:
    content = read_path(client, image.id, f"/{path}")
    if content is None:
        return b""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        file = archive.extractfile(archive.getmembers()[0])
        return file.read() if file else b""


def _download(url: str, digest: str) -> bytes:
    """Fetch a file and check it (`sha512-<base64>`, as package registries give it)."""
    try:
        content = httpx.get(url, timeout=_DOWNLOAD_S, follow_redirects=True).raise_for_status().content
    except httpx.HTTPError as error:
        raise WorkspaceError(f"{url} cannot be fetched: {error}; check that its host can be reached") from error
    kind, _, expected = digest.partition("-")
    found = base64.b64encode(hashlib.new(kind, content).digest()).decode()
    if found != expected:
        raise WorkspaceError(
            f"{url} has the digest {kind}-{found}, not {digest}: it is not what was meant; do not use it"
        )
    return content


def base_rootfs() -> bytes:
    """Return a root file system, as a tar, made of this machine's static busybox.

    Raises:
        WorkspaceError: there is none.
    """
    busybox = static_busybox()
    content = busybox.read_bytes()
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
