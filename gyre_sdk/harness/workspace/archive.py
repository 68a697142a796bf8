"""Tar archives between this machine and a workspace."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from gyre_sdk.errors import WorkspaceError

_LONGEST = 4096
"""Bytes of a path, its end included, that Linux opens."""


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


def without(archive: bytes, patterns: Sequence[str]) -> bytes:
    """Return an archive without the entries that one of the patterns matches, as `Path.rglob` would, and without what is below."""
    if not patterns:
        return archive
    stream = io.BytesIO()
    left_out: set[str] = set()
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as source,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as target,
    ):
        for entry in source:
            place = PurePosixPath(entry.name)
            if any(one.match(pattern) for one in (place, *place.parents) for pattern in patterns):
                left_out.add(entry.name)
                continue
            if entry.islnk() and entry.linkname in left_out:  # a further name of a file that has lost its first one
                content = source.extractfile(entry)
                assert content is not None
                entry.type, entry.size = tarfile.REGTYPE, len(data := content.read())
                target.addfile(entry, io.BytesIO(data))
                continue
            target.addfile(entry, source.extractfile(entry) if entry.isreg() else None)
    return stream.getvalue()


def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Strip an entry's owner: who extracts it owns it."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def unpack(archive: tarfile.TarFile, name: str, local: Path) -> None:
    """Write an archive of a file, or of a folder as `.`, as `local`.

    Args:
        name: what it is of, for messages.

    Raises:
        WorkspaceError: it holds a link that leads outside, a device or a pipe, or it cannot be written here.
    """
    try:
        local.parent.mkdir(parents=True, exist_ok=True)
        members = archive.getmembers()
        if members and members[0].isreg() and len(members) == 1:
            content = archive.extractfile(members[0])
            assert content is not None
            local.write_bytes(content.read())
            return
        for member in members:
            if len(os.fsencode(member.name)) >= _LONGEST:
                raise WorkspaceError(
                    f"{name!r} holds a path of more than {_LONGEST} bytes, which no file here can have"
                )
        local.mkdir(parents=True, exist_ok=True)
        archive.extractall(local, filter="data")
    except tarfile.FilterError as error:
        raise WorkspaceError(
            f"{name!r} cannot be written as {local}: {error}; remove it there, or name what to download"
        ) from error
    except (OSError, tarfile.TarError, KeyError) as error:
        raise WorkspaceError(f"{name!r} cannot be written as {local}: {error}") from error
