"""What a run left behind, held still so that it can be evaluated as often as it takes.

`separate`: the agent's processes are dead, the programs of the image are the image's again, and everything is in a snapshot;
each evaluation gets a fresh container from it, where it is another user than the agent. `shared`: the evaluation uses the
workspace itself, as it is after the agent's processes are dead.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import docker

from gyre_sdk.errors import ScoringError, WorkspaceError, WorkspaceUnavailable
from gyre_sdk.harness.ports import Workspace
from gyre_sdk.harness.scoring import system
from gyre_sdk.harness.scoring.seal import drop_caches, undo
from gyre_sdk.harness.scoring.watch import Seal
from gyre_sdk.harness.task import Artifact, Task
from gyre_sdk.harness.workspace import DockerWorkspace, PooledWorkspace
from gyre_sdk.harness.workspace.archive import without
from gyre_sdk.harness.workspace.engine import shared_client
from gyre_sdk.harness.workspace.images import SNAPSHOT
from gyre_sdk.harness.workspace.snapshots import remove

ROOT = "0:0"
NOTES = 50
"""Notes that a score keeps; the rest are counted."""

_LEFT = r"""
for f in /logs/verifier/* /logs/verifier/.[!.]* /tests/* /tests/.[!.]*; do
  { [ -e "$f" ] || [ -L "$f" ]; } && printf 'file %s\n' "$f"
done
[ -L /logs/verifier ] && echo "file /logs/verifier (a link)"
[ -n "$GYRE_WORKSPACE" ] && exit 0
sid() { { IFS= read -r st </proc/$1/stat; } 2>/dev/null || return 1; set -- ${st##*) }; state=$1 session=$4; }
sid 1 && init=$session
sid $$ && own=$session
sid $PPID && parent=$session
for p in /proc/[0-9]*; do
  p=${p#/proc/}
  sid $p || continue
  case $state in Z|X) continue;; esac
  case " $init $own $parent " in *" $session "*) continue;; esac
  c=$(tr '\0\n' '  ' </proc/$p/cmdline 2>/dev/null)
  case $c in *' gyre /run/gyre/'*) continue;; esac
  [ -n "$c" ] && printf 'process %.120s\n' "$c"
done
exit 0
"""
"""Prints what lies where the reward and the tests go, and the processes that outlived the agent's commands."""


@dataclass(slots=True)
class Retained:
    """What is to be evaluated. Internal."""

    task: Task
    seal: Seal | None
    mode: str
    notes: list[str] = field(default_factory=list)
    snapshot: str | None = None
    client: docker.DockerClient | None = None
    """Of the engine that has the snapshot."""
    run: str = ""
    """Goes into the labels of the evaluation's containers."""
    place: Workspace | None = None
    """The workspace itself; None where it is a snapshot."""
    cleaned: bool = False
    """Whether the places of tests and reward were emptied before."""
    _settled: bool = False

    @contextmanager
    def opened(self) -> Iterator[Workspace]:
        """Give a workspace to evaluate in, with what steers evaluations as it was at the start.

        Raises:
            ScoringError, WorkspaceError: there is none.
        """
        if self.place is not None:
            self._undo(self.place, self.seal.workdir if self.seal else None)
            yield self.place
            return
        task = as_verifier(self.task)
        if task.verifier_image is None and task.verifier_dockerfile is None:
            with self._open(task, self.snapshot) as workspace:
                self._undo(workspace, workspace.workdir)
                yield workspace
            return
        with self._open(task, self.snapshot) as left:
            self._undo(left, left.workdir)
            artifacts = _collect(task, left)
        with self._open(replace(task, files={}), None) as workspace:
            for archive, path in artifacts:
                workspace.unpacked(archive, path)
            yield workspace

    def _open(self, task: Task, snapshot: str | None) -> DockerWorkspace:
        assert self.client is not None
        return DockerWorkspace(task, self.client, run_id=self.run, snapshot=snapshot, phase="verifier")

    def _undo(self, workspace: Workspace, workdir: str | None) -> None:
        if self.seal is not None:
            changes = undo(self.task, workspace, self.seal)
            if not self._settled:
                self.notes += [str(change) for change in changes]
        if workdir is not None and self.place is None:
            drop_caches(workspace, workdir)
        self._settled = True

    def close(self, *, keep: bool = False) -> None:
        """Let go; the snapshot is removed unless it is kept. A workspace that is evaluated in is its agent's again."""
        with suppress(WorkspaceError):  # it died
            place = self.place.inner if isinstance(self.place, PooledWorkspace) else self.place
            if isinstance(place, DockerWorkspace):
                place.enter("agent")
        if self.snapshot is not None and self.client is not None and not keep:
            remove(self.client, self.snapshot)


def retain(task: Task, workspace: Workspace, seal: Seal | None, *, keep: bool = False) -> Retained:
    """Kill the agent's processes and hold what it left.

    Args:
        workspace: the agent's.
        seal: of its start; None where there is none.
        keep: the snapshot is to outlive this process.

    Raises:
        WorkspaceUnavailable: the workspace is dead: there is nothing to hold.
        ScoringError, WorkspaceError: it cannot be held.
    """
    place = workspace.inner if isinstance(workspace, PooledWorkspace) else workspace
    if task.verifier_mode == "shared" or not isinstance(place, DockerWorkspace):
        workspace.kill_all()
        if isinstance(place, DockerWorkspace):
            place.enter("verifier")
        return Retained(task, seal, "shared", place=workspace)
    notes = _left(workspace)
    place.kill_all()
    client = place.container.client
    if SNAPSHOT in place.image.labels:
        notes.append("the workspace began as a snapshot: what was changed of the image's programs before is not seen")
    repaired = system.repair(client, place.container.id, place.image.id, seal.programs if seal else ())
    return Retained(
        task,
        seal,
        "separate",
        [*notes, *repaired.notes()],
        snapshot=place.snapshot(keep=keep),
        client=client,
        run=place.run_id,
    )


def from_snapshot(task: Task, snapshot: str, seal: Seal | None, *, engine: str | None = None) -> Retained:
    """Take up what an earlier evaluation held.

    Raises:
        WorkspaceError: no engine answers.
    """
    return Retained(task, seal, "separate", snapshot=snapshot, client=shared_client(engine))


def as_verifier(task: Task) -> Task:
    """Return the task as its evaluation is opened: as root, with the capabilities to read and write whatever the agent left.

    The agent's own user can plant startup files in its home and owns its files; root's home is out of its reach. Tests run
    as `Task.verifier_user` where the task names one, in a place that root prepared.
    """
    return replace(task, verifier_user=ROOT, profile="root", steps=(), healthcheck=None)


def _left(workspace: Workspace) -> list[str]:
    """Note the processes that outlived the agent's commands, and the files where the reward and the tests go."""
    try:
        lines = workspace.exec(_LEFT, timeout=20.0, cwd="/").stdout.splitlines()
    except WorkspaceUnavailable:
        raise
    except WorkspaceError as error:
        return [f"what was left could not be listed: {error}"]
    return note_left(lines)


def note_left(lines: list[str]) -> list[str]:
    """Return notes for the lines that the listing printed."""
    found = []
    for line in lines:
        kind, _, what = line.partition(" ")
        if kind == "file":
            found.append(f"{what}: there before the evaluation; taken away")
        elif kind == "process":
            found.append(f"process alive at the agent's end: {what.strip()}; killed")
    return found


def _collect(task: Task, workspace: DockerWorkspace) -> list[tuple[bytes, str]]:
    """Return a run's artifacts as (what is there, its path). Nothing of it is written on this machine, whatever it links to."""
    found = []
    for artifact in task.artifacts or (Artifact(workspace.workdir),):
        path = posixpath.normpath(posixpath.join(workspace.workdir, artifact.source))
        try:
            found.append((without(workspace.packed(path), artifact.exclude), path))
        except WorkspaceUnavailable:
            raise
        except WorkspaceError:
            if workspace.exec(f"[ -e {shlex.quote(path)} ]", cwd="/").exit_code == 0:
                raise
            continue  # the agent did not make it: what that is worth, the tests say
    if not found and not task.artifacts:
        raise ScoringError(
            f"task {task.name!r}: the working directory {workspace.workdir} cannot be read; the run is unscored"
        )
    return found
