"""Names of users turned into the numbers that an image gives them, before anything of it runs."""

from __future__ import annotations

import io
import tarfile

import docker

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.workspace.hardening import is_root
from gyre_sdk.harness.workspace.images import Image


def ids_of(client: docker.DockerClient, image: Image, user: str) -> str:
    """Return `uid:gid` of a user (`name` or `uid`, and `:group` or `:gid`), looked up in the image where it is a name.

    Raises:
        WorkspaceError: the image has no such user or group.
    """
    if is_root(user):
        return "0:0"
    name, _, group = user.partition(":")
    uid, gid = name, group or name
    if not name.isdigit():
        entry = _row(client, image, "/etc/passwd", name)
        if entry is None:
            raise WorkspaceError(f"user {name!r} does not exist in image {image.name!r}; add it, or give a number")
        uid, gid = entry[2], group or entry[3]
    if not gid.isdigit():
        entry = _row(client, image, "/etc/group", gid)
        if entry is None:
            raise WorkspaceError(f"group {gid!r} does not exist in image {image.name!r}; add it, or give a number")
        gid = entry[2]
    return f"{uid}:{gid}"


def _row(client: docker.DockerClient, image: Image, file: str, name: str) -> list[str] | None:
    content = image.content(client, file)
    if content is None:
        return None
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        entry = next((one for one in archive if one.isreg()), None)
        found = archive.extractfile(entry) if entry is not None else None
        text = found.read().decode(errors="replace") if found is not None else ""
    rows = (line.split(":") for line in text.splitlines())
    return next((row for row in rows if row[0] == name and len(row) > 3), None)
