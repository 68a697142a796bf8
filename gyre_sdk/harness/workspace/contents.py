"""What an image holds at a path, read without running anything of it."""

from __future__ import annotations

import io
import posixpath
import tarfile
import time

import docker
from docker.errors import NotFound

from gyre_sdk.harness.workspace import owner


def read_path(client: docker.DockerClient, image: str, path: str) -> bytes | None:
    """Return what an image has at `path` as a tar whose first entry is that file or folder, or None when it has nothing there."""
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
