"""Tar archives between this machine and a workspace."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path

from gyre_sdk.errors import WorkspaceError


def tar_of(files: Mapping[str, bytes], *, mode: int | None = None) -> bytes:
    """Return a tar of files (relative path -> content); without a `mode`, what starts with `#!` is executable."""
    stream = io.BytesIO()
    now = int(time.time())
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(content), now
            entry.mode = mode if mode is not None else (0o755 if content.startswith(b"#!") else 0o644)
            archive.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Strip an entry's owner: who extracts it owns it."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def unpack(archive: tarfile.TarFile, name: str, local: Path) -> None:
    """Write an archive's entry `name` as `local`; links and devices that lead outside are refused."""
    local.parent.mkdir(parents=True, exist_ok=True)
    members = archive.getmembers()
    if members and members[0].isreg() and len(members) == 1:
        content = archive.extractfile(members[0])
        assert content is not None
        local.write_bytes(content.read())
        return
    for member in members:
        member.name = os.path.relpath(member.name, name)
    local.mkdir(parents=True, exist_ok=True)
    try:
        archive.extractall(local, filter="data")
    except tarfile.FilterError as error:
        raise WorkspaceError(f"{name!r} holds an entry that leads outside of {local}: {error}") from error
