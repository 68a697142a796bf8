"""The programs of the image are the image's: what a run replaced of them is put back, from outside the workspace.

The engine says what differs from the image, so nothing that was replaced is asked. Looked at are the folders of programs and
libraries and the few files that every program or shell reads at its start; what packages add there, and what lies elsewhere, is the
agent's work. Of Python's site-packages only test runners and what Python loads by itself are looked at.
"""

from __future__ import annotations

import io
import posixpath
import re
import tarfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import docker
from docker.errors import APIError, DockerException, NotFound

from gyre_sdk.errors import ScoringError
from gyre_sdk.harness.workspace.contents import unstarted

MODIFIED, ADDED, DELETED = 0, 1, 2
"""Kinds of the engine's diff."""
_SYSTEM = re.compile(r"/(usr/|usr/local/)?(s?bin|lib(32|64|x32|exec)?)/.+")
_PROGRAM = re.compile(r"/(usr/|usr/local/)?s?bin/([^/]+)")
_PACKAGES = re.compile(r".*?/(site|dist)-packages/(.+)|.*/node_modules/.+")
_STARTUP = re.compile(
    r"/etc/(ld\.so\.(preload|cache|conf)|ld\.so\.conf\.d/.+|profile|profile\.d/.+|bash\.bashrc|bashrc|environment|inputrc|gitconfig"
    r"|pip\.conf|python[^/]*/.+|zsh/.+|zshenv|zprofile)"
)
_PYTHON_START = re.compile(r"(site|user)customize(\.[^/]+|/.*)?|[^/]+\.pth")
_RUNNER = re.compile(r"(_?pytest|pluggy|iniconfig|nose2?|xdist|pytest_[^/]*)(\.[^/]+|/.*)?")
_DIRECTORY = 1 << 31
"""Bit of the engine's file mode."""
MOST = 1000
"""Paths that are put back at most."""


@dataclass(frozen=True, slots=True)
class Repair:
    """What is done about what a run changed of its image."""

    put_back: tuple[str, ...]
    """From the image."""
    emptied: tuple[str, ...]
    """Not in the image: made empty files that nothing runs or reads."""

    def notes(self) -> list[str]:
        """Say it, one line per path."""
        return [f"image file {path}: changed; put back" for path in self.put_back] + [
            f"image file {path}: planted; emptied" for path in self.emptied
        ]


def plan(changes: Iterable[tuple[str, int]], programs: Collection[str]) -> Repair:
    """Decide what to do about (path, kind) pairs of the engine's diff. Pure.

    Args:
        programs: names of the programs that were on PATH at the start; a new one of such a name stands in its place.
    """
    found = dict(changes)
    above = {parent for path in found for parent in _parents(path)}
    put_back, emptied = [], []
    for path, kind in sorted(found.items()):
        folder = path in above and kind == MODIFIED and not _PROGRAM.fullmatch(path)
        if folder or "/__pycache__/" in path:
            continue
        if kind == ADDED:
            if path not in above and _steers(path, programs):
                emptied.append(path)
        elif _STARTUP.fullmatch(path) or _watched(path):
            put_back.append(path)
    return Repair(tuple(put_back), tuple(emptied))


def _parents(path: str) -> Iterable[str]:
    while (path := posixpath.dirname(path)) != "/":
        yield path


def _watched(path: str) -> bool:
    packages = _PACKAGES.fullmatch(path)
    if packages is None:
        return _SYSTEM.fullmatch(path) is not None
    inner = packages[2] or ""
    return bool(_PYTHON_START.fullmatch(inner) or _RUNNER.fullmatch(inner))


def _steers(path: str, programs: Collection[str]) -> bool:
    """Tell whether a file that the image does not have would be run or read in place of, or before, its own."""
    program = _PROGRAM.fullmatch(path)
    if program is not None:
        return program[2] in programs
    packages = _PACKAGES.fullmatch(path)
    inner = packages[2] or "" if packages else posixpath.basename(path)
    return _STARTUP.fullmatch(path) is not None or bool(_SYSTEM.fullmatch(path) and _PYTHON_START.fullmatch(inner))


def repair(client: docker.DockerClient, container: str, image: str, programs: Collection[str]) -> Repair:
    """Put back what a container's processes changed of its image's programs.

    Args:
        image: id of the image that the container was made from.

    Raises:
        ScoringError: too much was changed, or the engine refused.
    """
    try:
        changed = [(one["Path"], one["Kind"]) for one in client.api.diff(container) or []]
        planned = plan(changed, programs)
        count = len(planned.put_back) + len(planned.emptied)
        if count > MOST:
            raise ScoringError(
                f"the run changed {count} programs and libraries of its image, more than {MOST}; the run is unscored: score"
                ' such tasks with verifier_mode = "shared", or with a verifier image of their own'
            )
        if planned.put_back:
            _put_back(client, container, image, planned.put_back)
        for path in planned.emptied:
            client.api.put_archive(container, posixpath.dirname(path), _empty(posixpath.basename(path)))
    except (DockerException, OSError) as error:
        raise ScoringError(f"the files of the image cannot be put back: {error}; the run is unscored") from error
    return planned


def _put_back(client: docker.DockerClient, container: str, image: str, paths: Sequence[str]) -> None:
    with unstarted(client, image) as source:
        for path in paths:
            try:
                stream, stat = client.api.get_archive(source, path)
            except NotFound:
                continue  # below a folder that the image has as something else, which is put back itself
            data = b"".join(stream)
            _place(client, container, path, data, folder=bool(int(stat["mode"]) & _DIRECTORY))


def _place(client: docker.DockerClient, container: str, path: str, data: bytes, *, folder: bool) -> None:
    parent = posixpath.dirname(path)
    try:
        client.api.put_archive(container, parent, data)
    except NotFound:
        return  # its folder is gone, and put back as a whole
    except APIError as error:
        if not folder:  # a folder may stand in a file's place
            raise ScoringError(f"{path} of the image cannot be put back: {error}; the run is unscored") from error
        raise


def _empty(name: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        entry = tarfile.TarInfo(name)
        entry.mode = 0o644
        archive.addfile(entry, io.BytesIO())
    return out.getvalue()
