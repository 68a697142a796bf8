"""The engine's own means, for an image with a shell that lacks tools where no toolbox can be lent: an exec per command, and
archives for files.

Only shell builtins are needed inside. Commands cost what an exec costs, and folders that are kept in memory cannot be written.
"""

from __future__ import annotations

import io
import posixpath
import tarfile
import threading
import time
from collections.abc import Callable

import docker
from docker.errors import DockerException

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.cancelling import Cancelled
from gyre_sdk.harness.workspace.commands import result_of
from gyre_sdk.harness.workspace.process import Process
from gyre_sdk.records import ExecResult, FileInfo, FileKind

_DYING_S = 10.0
"""Seconds for a killed command to be gone."""


def run_plainly(process: Process, input: bytes | None, timeout: float | None, limit: int) -> ExecResult:
    """Wait for a process that was started for one command, or end it at `timeout` seconds."""
    began = time.monotonic()
    threading.Thread(target=_feed, args=(process, input), name="gyre-input", daemon=True).start()
    timed_out = False
    try:
        try:
            status = process.wait(timeout)
        except TimeoutError:
            timed_out = True
            process.kill()
            status = process.wait(_DYING_S)
    except (Cancelled, KeyboardInterrupt):
        process.kill()
        raise
    out, err = process.captured("stdout"), process.captured("stderr")
    return result_of(out, err, limit, status=status, timed_out=timed_out, duration_s=time.monotonic() - began)


def _feed(process: Process, input: bytes | None) -> None:
    try:
        if input:
            process.write(input)
    except WorkspaceError:
        pass  # it ended without reading all
    finally:
        process.close_input()


class PlainFiles:
    """Files of a container by the engine's archives.

    Args:
        container: returns its id.
        owner: returns `uid:gid` of who is to own what is written.
    """

    def __init__(self, client: docker.DockerClient, container: Callable[[], str], owner: Callable[[], str]) -> None:
        self._client, self._container, self._owner = client, container, owner

    def read(self, path: str) -> bytes:
        """Return a regular file's bytes."""
        with self._tar(path) as archive:
            entry = archive.getmembers()[0]
            content = archive.extractfile(entry) if entry.isreg() else None
            if content is None:
                raise WorkspaceError(f"{path!r} cannot be read: it is not a regular file")
            return content.read()

    def ls(self, path: str) -> list[FileInfo]:
        """Return what a folder holds, or the file itself."""
        with self._tar(path) as archive:
            entries = archive.getmembers()
            depth = entries[0].name.strip("/").count("/") + (1 if entries[0].isdir() else 0)
            found = [entry for entry in entries if entry.name.strip("/").count("/") == depth]
            return sorted((_info(entry) for entry in found), key=lambda info: info.name)

    def packed(self, path: str) -> bytes:
        """Return a tar of a file, or of a folder as `.`."""
        out = io.BytesIO()
        with self._tar(path) as source, tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as target:
            entries = source.getmembers()
            top = entries[0].name.strip("/") if entries[0].isdir() else ""
            for entry in entries:
                content = source.extractfile(entry) if entry.isreg() else None
                if top:
                    entry.name = posixpath.relpath(entry.name, top)
                    entry.linkname = posixpath.relpath(entry.linkname, top) if entry.islnk() else entry.linkname
                target.addfile(entry, content)
        return out.getvalue()

    def place(self, folder: str, archive: bytes) -> list[str]:
        """Unpack a tar into a folder, made where it is missing; return the paths that must now be there."""
        uid, gid = (int(number) for number in self._owner().split(":"))
        out = io.BytesIO()
        placed = []
        with tarfile.open(fileobj=io.BytesIO(archive)) as source, tarfile.open(fileobj=out, mode="w") as target:
            for entry in source:
                content = source.extractfile(entry) if entry.isreg() else None
                placed.append(posixpath.join(folder, entry.name))
                entry.name = placed[-1].lstrip("/")
                entry.uid, entry.gid, entry.uname, entry.gname = uid, gid, "", ""
                target.addfile(entry, content)
        try:
            self._client.api.put_archive(self._container(), "/", out.getvalue())
        except (DockerException, OSError) as error:
            raise WorkspaceError(f"files cannot be written to {folder!r}: {error}") from error
        return placed

    def _tar(self, path: str) -> tarfile.TarFile:
        try:
            stream, _ = self._client.api.get_archive(self._container(), path)
            return tarfile.open(fileobj=io.BytesIO(b"".join(stream)))
        except (DockerException, OSError, tarfile.TarError) as error:
            raise WorkspaceError(f"{path!r} cannot be read: {error}") from error


def _info(entry: tarfile.TarInfo) -> FileInfo:
    kind = (
        FileKind.FILE
        if entry.isreg()
        else FileKind.FOLDER
        if entry.isdir()
        else FileKind.LINK
        if entry.issym()
        else FileKind.OTHER
    )
    name = posixpath.basename(entry.name.rstrip("/"))
    return FileInfo(name=name, kind=kind, size=entry.size, mode=entry.mode & 0o7777, modified_at=float(entry.mtime))
