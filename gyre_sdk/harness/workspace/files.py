"""Files of a workspace, read and written through its supervisor: that works for every mount and as the right user."""

from __future__ import annotations

import io
import posixpath
import re
import shlex
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.workspace.archive import anonymous, tar_of, unpack
from gyre_sdk.records import FileInfo, FileKind

READ_LIMIT = 100 << 20
"""Bytes that `read` returns at most: it holds them in memory."""
DOWNLOAD_LIMIT = 1 << 30
"""Bytes of an archive that comes out of a workspace: it is held in memory, and what an agent leaves can be of any size."""
_BLOCK = 65_536
_LIST = r"""
show() { [ $# -eq 0 ] || stat -c '%f %s %Y %n/' "$@" 2>/dev/null; }
if [ -d "$1" ]; then
  cd -- "$1" 2>/dev/null || { echo "its folder cannot be entered"; exit 1; }
  set --
  for x in ./* ./.[!.]* ./..?*; do
    { [ -e "$x" ] || [ -L "$x" ]; } || continue
    set -- "$@" "$x"
    [ $# -lt 500 ] || { show "$@"; set --; }
  done
elif ! [ -e "$1" ] && ! [ -L "$1" ]; then
  echo "no such file or folder"
  exit 1
fi
show "$@"
exit 0
"""
_ROW = re.compile(rb"([0-9a-f]+) (\d+) (-?\d+) (?:[^\0]*?/)?([^/\0]+)/\n")
_KINDS = {0o100000: FileKind.FILE, 0o040000: FileKind.FOLDER, 0o120000: FileKind.LINK}


class Files:
    """The file methods of `ports.Workspace`, over two of its class: run code, and unpack an archive."""

    id: str
    workdir: str

    def _ask(self, code: str, *, timeout: float = 120.0) -> tuple[int, bytes]:
        """Run shell code as the workspace's user and return (status, output)."""
        raise NotImplementedError

    def _place(self, folder: str, archive: bytes) -> None:
        """Unpack a tar into a folder, made where it is missing, as the workspace's user."""
        raise NotImplementedError

    def _path(self, path: str) -> str:
        if "\0" in path or not path:
            raise WorkspaceError(f"{path!r} is not a path")
        return posixpath.normpath(posixpath.join(self.workdir, path))

    def read(self, path: str) -> bytes:
        """See `ports.Workspace`."""
        full = self._path(path)
        name = shlex.quote(full)
        blocks = READ_LIMIT // _BLOCK + 1
        status, content = self._ask(
            f"if [ -f {name} ]; then dd if={name} bs={_BLOCK} count={blocks} 2>/dev/null || {{ ( : <{name} ) 2>&1; false; }};"
            f" elif [ -e {name} ]; then echo 'it is not a regular file'; false; else false; fi"
        )
        if status != 0:
            self._fail("read", full, content.decode(errors="replace").strip() or "no such file")
        if len(content) > READ_LIMIT:
            self._fail("read", full, f"it is longer than {READ_LIMIT >> 20} MiB; use download")
        return content

    def ls(self, path: str = ".") -> list[FileInfo]:
        """See `ports.Workspace`."""
        full = self._path(path)
        status, content = self._ask(f"( set -- {shlex.quote(full)}\n{_LIST}\n)")
        if status != 0:
            self._fail("listed", full, content.decode(errors="replace").strip())
        found = [_info(row) for row in _ROW.finditer(content)]
        return sorted(found, key=lambda info: info.name)

    def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """See `ports.Workspace`."""
        full = self._path(path)
        content = data.encode() if isinstance(data, str) else data
        self._place(posixpath.dirname(full), tar_of({posixpath.basename(full): content}, mode=mode))

    def write_many(self, files: Mapping[str, bytes], folder: str) -> None:
        """See `ports.Workspace`."""
        self._place(self._path(folder), tar_of(files))

    def upload(self, local: Path | str, path: str) -> None:
        """See `ports.Workspace`."""
        local = Path(local)
        if not local.exists():
            raise WorkspaceError(f"{local} does not exist; nothing to upload to {path!r}")
        full = self._path(path)
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as archive:
            if local.is_dir():
                for entry in sorted(local.iterdir()):
                    archive.add(entry, entry.name, filter=anonymous)
            else:
                archive.add(local.resolve(), posixpath.basename(full), filter=anonymous)
        self._place(full if local.is_dir() else posixpath.dirname(full), stream.getvalue())

    def download(self, path: str, local: Path | str) -> None:
        """See `ports.Workspace`."""
        full = self._path(path)
        with tarfile.open(fileobj=io.BytesIO(self.packed(full))) as archive:
            unpack(archive, full, Path(local))

    def packed(self, path: str) -> bytes:
        """Return a tar of a file, or of a folder as `.`. A link is followed where it is the path itself, and is kept below.

        Raises:
            WorkspaceError: it is not there, cannot be read, or has more than 1 GiB.
        """
        full = self._path(path)
        whole, parent, name = (shlex.quote(part) for part in (full, *posixpath.split(full)))
        # The last line tells how it went; where there is none, `dd` was at its end before.
        status, content = self._ask(
            f"( if [ -d {whole} ]; then cd -- {whole} && set -- .; else [ -e {whole} ] && cd -- {parent} && set -- -h -- {name}; fi"
            f' && {{ tar -cf - "$@"; echo $?; }} | dd bs={_BLOCK} count={DOWNLOAD_LIMIT // _BLOCK} iflag=fullblock ) 2>/dev/null',
            timeout=600.0,
        )
        if len(content) >= DOWNLOAD_LIMIT:
            self._fail("downloaded", full, f"it has more than {DOWNLOAD_LIMIT >> 20} MiB; name a part of it")
        if status != 0 or not content.endswith(b"\x000\n"):
            self._fail("downloaded", full, "no such file or folder, or some of it is not readable")
        return content[:-2]

    def unpacked(self, archive: bytes, path: str) -> None:
        """Put what `packed` gave of a path where it was, links and all; it becomes its user's.

        Raises:
            WorkspaceError: it cannot be written.
        """
        full = self._path(path)
        with tarfile.open(fileobj=io.BytesIO(archive)) as entries:
            first = entries.next()
        folder = first is not None and posixpath.normpath(first.name) == "."
        self._place(full if folder else posixpath.dirname(full), archive)

    def _fail(self, what: str, path: str, why: str) -> NoReturn:
        raise WorkspaceError(f"{path!r} cannot be {what} in workspace {self.id}: {why}")


def _info(row: re.Match[bytes]) -> FileInfo:
    mode = int(row[1], 16)
    return FileInfo(
        name=row[4].decode(errors="surrogateescape"),
        kind=_KINDS.get(mode & 0o170000, FileKind.OTHER),
        size=int(row[2]),
        mode=mode & 0o7777,
        modified_at=float(row[3]),
    )
