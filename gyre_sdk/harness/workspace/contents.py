"""What an image holds at a path, read without running anything of it."""

from __future__ import annotations

import io
import posixpath
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import docker
from docker.errors import DockerException, NotFound

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.workspace import owner, reaper


def read_path(client: docker.DockerClient, image: str, path: str) -> bytes | None:
    """Return what an image has at `path` as a tar whose first entry is that file or folder, or None when it has nothing there.

    Raises:
        WorkspaceError: the engine cannot read it.
    """
    with unstarted(client, image) as container:
        try:
            stream, _ = client.api.get_archive(container, path)
            return b"".join(stream)
        except NotFound:
            return None
        except (DockerException, OSError) as error:
            raise WorkspaceError(f"{path} of image {image[:19]} cannot be read: {error}") from error


@contextmanager
def unstarted(client: docker.DockerClient, image: str) -> Iterator[str]:
    """Give the id of a container of an image that is there to be read, and never starts."""
    name = owner.container_name()
    labels = owner.labels(owner.me(), run="", deadline=time.time() + 600, name=name)
    try:
        yield client.api.create_container(image, command=["true"], name=name, labels=labels)["Id"]
    finally:
        reaper.remove(client, name)


def folder_tar(path: str, uid: int, gid: int, mode: int = 0o755) -> bytes:
    """Return a tar with one empty folder, named like the last part of `path`."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        entry = tarfile.TarInfo(posixpath.basename(path) or ".")
        entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, mode, uid, gid
        archive.addfile(entry)
    return out.getvalue()


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
