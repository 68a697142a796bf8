"""Takes the seal of a workspace at the start of a run, and undoes before the evaluation what `watch` says of the changes."""

from __future__ import annotations

import base64
import binascii
import io
import posixpath
import shlex
import tarfile
from collections.abc import Iterable, Sequence

from gyre_sdk.errors import ScoringError, WorkspaceError
from gyre_sdk.harness.ports import Workspace
from gyre_sdk.harness.scoring.links import leading_links
from gyre_sdk.harness.scoring.watch import (
    CONTENT_LIMIT,
    SECTIONED,
    Change,
    Do,
    Kept,
    Seal,
    Watched,
    changes,
    listing,
    parse,
    with_sections,
)
from gyre_sdk.harness.task import Task
from gyre_sdk.records import ExecResult

_SECONDS = 120.0
_BATCH = 500
"""Paths per command."""

_PLACES = r"""
{ cd "$1" 2>/dev/null && pwd -P; } || printf '%s\n' "$1"
cd /
printf '%s\n' "$HOME"
IFS=:
set -f
for d in $PATH; do
  case $d in /*) ;; *) continue;; esac
  for n in $(ls -A "$d" 2>/dev/null | tr '\n' :); do printf '=%s\n' "$n"; done
  case $d in /bin|/sbin|/usr/bin|/usr/sbin|/usr/local/bin|/usr/local/sbin) continue;; esac
  e=$d
  until [ -e "$e" ]; do e=${e%/*}; [ -n "$e" ] || e=/; done
  [ -w "$e" ] && printf '%s\n' "$d"
done
"""
"""Prints the working directory, the home folder, `=` and each program on PATH, and the folders of PATH that are open to its user."""


def take_seal(task: Task, workspace: Workspace, *, workdir: str) -> Seal | None:
    """List what can steer an evaluation, before the agent begins; None in an image without `find` and `sha256sum`.

    Raises:
        WorkspaceError: the workspace could not be asked.
    """
    places = _done(workspace, f"set -- {shlex.quote(workdir)}\n{_PLACES}", cwd=None).stdout.split("\n")
    work, home, *rest = [*places, "", ""]
    work = work or workdir
    programs = frozenset(line[1:] for line in rest if line.startswith("="))
    path = tuple(dict.fromkeys(line for line in rest if line.startswith("/")))
    seal = Seal(work, (home,) if home.startswith("/") else (), path, programs, {})
    found = _look(task, workspace, seal)
    if found is None:
        return None
    small = [
        path
        for why in (Watched.STEERING, Watched.PROGRAM, Watched.PROTECTED, Watched.SECTION)
        for path, digest in found.get(why, {}).items()
        if digest != "other"
    ]
    contents = _contents(workspace, small)
    return Seal(work, seal.homes, path, programs, found, contents, leading_links(task, workspace))


def undo(task: Task, workspace: Workspace, seal: Seal) -> list[Change]:
    """Undo what a run changed of what steers an evaluation; return all such changes, also those that are only reported.

    Raises:
        ScoringError: the workspace can no longer be looked through, or something could not be taken away.
    """
    try:
        now = _look(task, workspace, seal)
    except WorkspaceError as error:
        raise ScoringError(f"task {task.name!r}: the workspace cannot be looked through: {error}") from error
    if now is None:
        raise ScoringError(
            f"task {task.name!r}: the workspace lost the programs find and sha256sum; the run is unscored"
        )
    kept = [posixpath.normpath(posixpath.join(seal.workdir, artifact.source)) for artifact in task.artifacts]
    found = changes(seal, now, kept=kept)
    done: list[Change] = []
    for change in found:
        if change.do is not Do.SECTION:
            done.append(change)
        elif (altered := _put_back_section(workspace, seal, change)) is not None:
            done.append(altered)
    _remove(task, workspace, [one.path for one in done if one.do in (Do.REMOVE, Do.PUT_BACK)])
    for change in done:
        if change.do is Do.PUT_BACK:
            _put_back(workspace, change.path, seal.contents[change.path])
    unset = [one.path for one in done if one.do is Do.UNSET]
    for part in _batches(unset):
        _done(workspace, f"chmod u-s,g-s -- {part}")
    return done


def drop_caches(workspace: Workspace, workdir: str) -> None:
    """Remove Python's compiled files: one with a forged time stamp would be run in place of its source."""
    work = shlex.quote(workdir)
    _done(workspace, f"find -H {work} -name __pycache__ -type d -prune -exec rm -rf {{}} + 2>/dev/null")


def _look(task: Task, workspace: Workspace, seal: Seal) -> dict[str, dict[str, str]] | None:
    protected = [posixpath.normpath(posixpath.join(seal.workdir, path)) for path in task.protected]
    names = [name for name in task.test_files() if not name.startswith("/")] if task.tests is not None else []
    tests = [posixpath.join(seal.workdir, folder, name) for name in names for folder in ("", "tests", "test")]
    script = listing(seal.workdir, seal.homes, seal.path, protected, tests)
    done = _done(workspace, script)
    if done.exit_code == 9:
        return None
    return parse(_decoded(done))


def _contents(workspace: Workspace, paths: Sequence[str]) -> dict[str, Kept]:
    """Return path -> file up to the limit, or link."""
    found: dict[str, Kept] = {}
    for start in range(0, len(paths), _BATCH):
        part = paths[start : start + _BATCH]
        words = " ".join(shlex.quote(path) for path in part)
        script = (
            f"set --; for f in {words}; do"
            f' {{ [ -L "$f" ] || [ "$(stat -c %s "$f")" -le {CONTENT_LIMIT} ]; }} 2>/dev/null && set -- "$@" "$f"; done\n'
            '[ $# = 0 ] || tar -cf - -- "$@" 2>/dev/null | base64'
        )
        done = _done(workspace, script)
        if done.truncated:
            continue  # too much to keep: what is changed of these is taken away rather than put back
        data = _decoded(done)
        if not data:
            continue
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for entry in archive:
                path = "/" + entry.name.lstrip("/")
                if entry.issym():
                    found[path] = Kept(0o777, link=entry.linkname)
                elif (stream := archive.extractfile(entry)) is not None:
                    found[path] = Kept(entry.mode & 0o777, stream.read())
    return found


def _put_back(workspace: Workspace, path: str, kept: Kept) -> None:
    if kept.link is None:
        workspace.write(path, kept.data, mode=kept.mode)
    else:
        _done(workspace, f"ln -s -- {shlex.quote(kept.link)} {shlex.quote(path)}")


def _put_back_section(workspace: Workspace, seal: Seal, change: Change) -> Change | None:
    """Put a file's section for pytest back; None when it did not change."""
    name = posixpath.basename(change.path)
    assert name in SECTIONED
    kept = seal.contents.get(change.path, Kept(0o644))
    try:
        current = workspace.read(change.path).decode(errors="surrogateescape")
    except WorkspaceError:  # not a regular file
        return Change(change.path, change.why, change.how, Do.REMOVE)
    made = with_sections(name, current, kept.data.decode(errors="surrogateescape"))
    if made == current:
        return None
    if made is None:
        return Change(change.path, change.why, change.how, Do.PUT_BACK if change.path in seal.contents else Do.REMOVE)
    workspace.write(change.path, made.encode(errors="surrogateescape"), mode=kept.mode)
    return change


def _remove(task: Task, workspace: Workspace, paths: Sequence[str]) -> None:
    for part in _batches(paths):
        done = _done(
            workspace,
            f'rm -rf -- {part}; for f in {part}; do [ -e "$f" ] || [ -L "$f" ] || continue; printf \'%s \' "$f"; done',
        )
        if done.stdout:
            raise ScoringError(f"task {task.name!r}: {done.stdout[:300]} cannot be taken away; the run is unscored")


def _batches(paths: Sequence[str]) -> Iterable[str]:
    for start in range(0, len(paths), _BATCH):
        yield " ".join(shlex.quote(path) for path in paths[start : start + _BATCH])


def _done(workspace: Workspace, script: str, *, cwd: str | None = "/") -> ExecResult:
    done = workspace.exec(script, timeout=_SECONDS, cwd=cwd)
    if done.timed_out:  # what was done by half must not pass for done
        raise WorkspaceError(
            f"its watched files could not be gone through within {_SECONDS:.0f} s: they are too many, or the machine is overloaded"
        )
    return done


def _decoded(done: ExecResult) -> bytes:
    if done.truncated:
        raise WorkspaceError("it has too many files that are watched (conftest.py, .pth, git hooks and their like)")
    try:
        return base64.b64decode("".join(done.stdout.split()), validate=True)
    except binascii.Error as error:
        raise WorkspaceError(f"its listing is broken ({error})") from error
