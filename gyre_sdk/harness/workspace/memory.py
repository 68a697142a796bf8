"""The folders of a container that are kept in memory: an engine's commit and copies do not see them, so they are read apart."""

from __future__ import annotations

import os
import posixpath
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import docker
from docker.errors import DockerException

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.workspace.overlay import NotHere, copy_tree, folder_of, shares_kernel

_IN_MEMORY = 16 << 20
"""Bytes of an archive that stay in this process's memory; more goes to a temporary file."""


def pid_of(client: docker.DockerClient, container: str) -> int:
    """Return the process id of a container's first process, on this machine.

    Raises:
        NotHere: it is dead, or the engine runs on another machine.
    """
    found = client.api.inspect_container(container)
    if not shares_kernel(found):
        raise NotHere("the container has a kernel of its own")
    pid = int(found["State"].get("Pid") or 0)
    try:
        here = container in Path(f"/proc/{pid}/cgroup").read_text() if pid else False
    except OSError:
        here = False
    if not here:
        raise NotHere(f"process {pid} of this machine is none of container {container[:12]}'s")
    return pid


def filled(pid: int, folders: Iterable[str]) -> list[str]:
    """Return those of the folders that hold something.

    Raises:
        NotHere: they cannot be seen from this machine.
    """
    found = []
    for folder in folders:
        with folder_of(pid, folder) as opened:
            if any(os.scandir(opened)):
                found.append(folder)
    return found


def clear_attributes(pid: int, folders: Iterable[str]) -> None:
    """Remove what a folder itself carries besides owner and mode: extended attributes, access control lists.

    Raises:
        NotHere: it cannot be done from this machine.
    """
    for folder in folders:
        with folder_of(pid, folder) as opened:
            for name in os.listxattr(opened):
                os.removexattr(opened, name)


def copy(source: int, target: int, folders: Iterable[str]) -> None:
    """Copy folders from one container (by its process id) to another's, which runs nothing yet.

    Raises:
        NotHere: it cannot be done from this machine.
    """
    for folder in folders:
        with folder_of(source, folder) as here, folder_of(target, folder) as there:
            copy_tree(here, there)


def read_as_root(pid: int, folders: Iterable[str], limit: int) -> IO[bytes]:
    """Return a tar (paths from `/`) of folders of a paused container, whatever their files' modes.

    Raises:
        NotHere: they cannot be read from this machine.
        WorkspaceError: they hold more than `limit` bytes.
    """
    size = 0

    def count(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        nonlocal size
        size += entry.size
        if size > limit:
            raise too_large(folders, limit)
        return entry

    with ExitStack() as made:
        out: IO[bytes] = made.enter_context(tempfile.SpooledTemporaryFile(_IN_MEMORY))
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for folder in folders:
                with folder_of(pid, folder) as opened:
                    try:
                        archive.add(f"/proc/self/fd/{opened}/.", folder.strip("/"), filter=count)
                    except OSError as error:
                        raise NotHere(str(error)) from error
        made.pop_all()
    out.seek(0)
    return out


def read_as_user(
    client: docker.DockerClient, container: str, user: str, folders: Iterable[str], limit: int
) -> IO[bytes]:
    """Return a tar (paths from `/`) of folders of a running container, made by its own `tar` as `user`.

    Raises:
        WorkspaceError: they hold more than `limit` bytes, or a file that its owner may not read, for example.
    """
    names = [folder.strip("/") for folder in folders]
    with ExitStack() as made:
        out: IO[bytes] = made.enter_context(tempfile.SpooledTemporaryFile(_IN_MEMORY))
        said = b""
        try:
            asked = client.api.exec_create(container, ["tar", "-cf", "-", "-C", "/", "--", *names], user=user)["Id"]
            for part, complaint in client.api.exec_start(asked, stream=True, demux=True):
                out.write(part or b"")
                if out.tell() > limit:
                    raise too_large(folders, limit)
                said = (said + (complaint or b""))[-600:]
            status = client.api.exec_inspect(asked)["ExitCode"]
        except (DockerException, OSError) as error:
            raise WorkspaceError(
                f"{', '.join(folders)} of workspace {container[:12]} cannot be read: {error}"
            ) from error
        if status != 0:
            why = said.decode(errors="replace").strip()
            raise WorkspaceError(
                f"{', '.join(folders)} of workspace {container[:12]} cannot be read (tar ended with {status}): {why};"
                " end its processes (kill_all) and make its files readable"
            )
        made.pop_all()
    out.seek(0)
    return out


def too_large(what: Iterable[str], limit: int) -> WorkspaceError:
    """Return the error for files that are too many to keep (a sparse file counts with its length)."""
    return WorkspaceError(
        f"{', '.join(what)}: more than {limit >> 20} MiB of files; remove what need not be kept (a sparse file counts in full)"
    )


def paths(archive: IO[bytes]) -> set[str]:
    """Return the paths in a tar, without the slash that `/` would be; the archive is left at its start."""
    with tarfile.open(fileobj=archive, mode="r|") as stream:
        found = {posixpath.normpath(entry.name) for entry in stream}
    archive.seek(0)
    return found


def blocks(archive: IO[bytes]) -> Iterator[bytes]:
    """Yield an archive's bytes."""
    while part := archive.read(1 << 20):
        yield part
