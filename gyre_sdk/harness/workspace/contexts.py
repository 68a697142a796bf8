"""Build contexts: which files of a folder a build sees, their digest, and the tar that is sent. Reads files, nothing else."""

from __future__ import annotations

import hashlib
import io
import re
import stat
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from docker.utils.build import exclude_paths

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.workspace.archive import anonymous

_COPY_TO_HERE = re.compile(
    rb"^[ \t]*(?:COPY|ADD)[ \t]+(?:--\S+[ \t]+)*((?:[^\s\[\]\\]+[ \t]+)+)\.(?=[ \t]*$)", re.M | re.I
)


def entries(folder: Path) -> list[str]:
    """Return the paths below a folder that a build sees, sorted: what `.dockerignore` names is left out.

    Raises:
        WorkspaceError: the folder cannot be read.
    """
    try:
        ignore = folder / ".dockerignore"
        rows = ignore.read_text(errors="replace").splitlines() if ignore.is_file() else []
        patterns = [row.strip() for row in rows if row.strip() and not row.lstrip().startswith("#")]
        return sorted(exclude_paths(str(folder), patterns, dockerfile="Dockerfile"))
    except OSError as error:
        raise WorkspaceError(f"{folder} cannot be read: {error}; make its files readable") from error


def digest_of(folder: Path, bases: Iterable[str] = ()) -> str:
    """Return a digest of what a build sees (names, kinds, modes, contents, link targets) and of the `bases` that it starts from."""
    digest = hashlib.sha256()
    for name in entries(folder):
        path = folder / name
        mode = path.lstat().st_mode
        digest.update(f"{name}\0{stat.S_IFMT(mode)}\0{stat.S_IMODE(mode)}\0".encode(errors="surrogateescape"))
        if stat.S_ISLNK(mode):
            digest.update(f"{path.readlink()}\0".encode(errors="surrogateescape"))
        elif stat.S_ISREG(mode):
            with path.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
    for base in bases:
        digest.update(f"{base}\0".encode())
    return digest.hexdigest()[:24]


def context_of(folder: Path, extra: Mapping[str, bytes] | None = None) -> bytes:
    """Return a folder, and further files (path -> content), as a build context."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in entries(folder):
            if name != "Dockerfile":
                archive.add(folder / name, name, recursive=False, filter=anonymous)
        rewritten = (
            {"Dockerfile": for_classic(_text(folder / "Dockerfile"))} if (folder / "Dockerfile").is_file() else {}
        )
        for name, data in {**rewritten, **(extra or {})}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def for_classic(dockerfile: bytes) -> bytes:
    """Return a Dockerfile with what only newer builders take spelled as every builder does.

    That is `COPY a b .`: with several sources, the classic builder wants the folder to end with a slash.
    """
    return _COPY_TO_HERE.sub(lambda match: match[0] + b"/" if len(match[1].split()) > 1 else match[0], dockerfile)


def _text(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise WorkspaceError(f"{file} cannot be read: {error}; make it readable") from error
