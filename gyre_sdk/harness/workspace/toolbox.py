"""A busybox for images that lack a shell, or the tools that a supervisor needs: added to an image of its own, built once.

Commands still run by the image's shell and find its programs alone; only where there is no shell at all, they are run by the
busybox, whose tools then come last in their PATH.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec

import docker

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.workspace.building import alone, build
from gyre_sdk.harness.workspace.images import BUILT, SHELL_LABEL, Image, find_image
from gyre_sdk.harness.workspace.plain import PlainFiles

P = ParamSpec("P")
TOOLS_LABEL = "gyre.tools"
"""Label that names the folder of the tools."""
_FOLDER = "/.gyre"
_IMAGES = "gyre/tools"
_BUILD_S = 300.0
_unfit: set[str] = set()
"""Ids of images that were found to lack something."""


class Unfit(WorkspaceError):
    """An image lacks a shell or tools. Internal: the workspace is opened again with a toolbox.

    Attributes:
        has_shell: whether commands could be run at least plainly.
    """

    def __init__(self, message: str, *, has_shell: bool = False) -> None:
        super().__init__(message)
        self.has_shell = has_shell


def static_busybox() -> Path:
    """Return this machine's static busybox.

    Raises:
        WorkspaceError: there is none.
    """
    found = shutil.which("busybox", path=f"{os.environ.get('PATH', '')}:/bin:/usr/bin")
    advice = "install it: apt-get install busybox-static"
    if found is None:
        raise WorkspaceError(f"busybox is not installed; {advice}")
    with Path(found).open("rb") as start:
        head = start.read(4096)
    if b"ld-linux" in head or b"ld-musl" in head:
        raise WorkspaceError(f"{found} is not static; {advice}")
    return Path(found)


def fitted(client: docker.DockerClient, image: Image) -> Image:
    """Return an image as it is, or with a toolbox where it is known to lack something.

    Raises:
        WorkspaceError: see `with_tools`.
    """
    return with_tools(client, image) if image.id in _unfit else image


def lending(opens: Callable[P, None]) -> Callable[P, None]:
    """Decorate a constructor of workspaces: where it fails for want of a shell or tools, it is called again, for its image with
    a toolbox, or for plain means where none can be had."""

    @wraps(opens)
    def opens_twice(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            opens(*args, **kwargs)
        except Unfit as unfit:
            workspace, client = args[0], args[2]
            try:
                with_tools(client, workspace.image)  # type: ignore[arg-type, attr-defined]
            except WorkspaceError as error:
                if not unfit.has_shell:
                    raise WorkspaceError(f"{unfit}. This machine could lend a busybox, but: {error}") from unfit
                workspace.plain = PlainFiles(client, lambda: workspace.container.id, lambda: workspace.layout.ids)  # type: ignore[attr-defined, arg-type]
            opens(*args, **kwargs)

    return opens_twice


def shell_of(image: Image, *, own_kernel: bool) -> tuple[tuple[str, ...], str]:
    """Return (the words that start a shell for the supervisor, the folder of its tools or "").

    Args:
        own_kernel: whether it runs under gVisor, which runs only what it can read.
    """
    tools = image.labels.get(TOOLS_LABEL, "")
    guarded = None if own_kernel else image.labels.get(SHELL_LABEL)
    if guarded:
        return (guarded, "sh"), tools
    return (f"{tools}/sh" if tools else "sh",), tools


def with_tools(client: docker.DockerClient, image: Image) -> Image:
    """Return an image with a busybox in it besides all that it has.

    Raises:
        WorkspaceError: this machine has no static busybox, or the build failed.
    """
    busybox = static_busybox().read_bytes()
    tag = f"{_IMAGES}:{hashlib.sha256(image.id.encode() + busybox).hexdigest()[:24]}"
    with alone(client, tag):
        found = find_image(client, tag)
        if found is None:
            labels = {
                BUILT: image.name,
                TOOLS_LABEL: f"{_FOLDER}/bin",
                SHELL_LABEL: image.labels.get(SHELL_LABEL) or f"{_FOLDER}/busybox-supervisor",
            }
            build(client, _context(image.id, busybox), tag, _BUILD_S, labels)
            found = find_image(client, tag)
    if found is None:
        raise WorkspaceError(f"image {tag!r} was removed while it was used; open the workspace again")
    _unfit.add(image.id)
    return found


def _context(image: str, busybox: bytes) -> bytes:
    """Return the build context: no step runs anything inside, so that an image of any kind will do."""
    applets = subprocess.run([static_busybox(), "--list"], capture_output=True, text=True, check=True).stdout.split()
    tools = io.BytesIO()
    with tarfile.open(fileobj=tools, mode="w", format=tarfile.GNU_FORMAT) as archive:
        inside = _FOLDER.strip("/")
        for folder in (inside, f"{inside}/bin"):
            _add(archive, folder, 0o755)
        _add(archive, f"{inside}/bin/busybox", 0o755, data=busybox)
        # Users run this one, but cannot look into its process.
        _add(archive, f"{inside}/busybox-supervisor", 0o711, data=busybox)
        for applet in applets:
            if applet != "busybox":
                _add(archive, f"{inside}/bin/{applet}", 0o777, link="busybox")
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w", format=tarfile.GNU_FORMAT) as archive:
        _add(archive, "Dockerfile", 0o644, data=f"FROM {image}\nADD tools.tar /\n".encode())
        _add(archive, "tools.tar", 0o644, data=tools.getvalue())
    return context.getvalue()


def _add(archive: tarfile.TarFile, path: str, mode: int, *, data: bytes | None = None, link: str = "") -> None:
    entry = tarfile.TarInfo(path)
    entry.mode = mode
    if link:
        entry.type, entry.linkname = tarfile.SYMTYPE, link
    elif data is None:
        entry.type = tarfile.DIRTYPE
    else:
        entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data) if data is not None else None)
