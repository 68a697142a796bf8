"""A workspace on this machine, for machines without Docker."""

from __future__ import annotations

import os
import posixpath
import secrets
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.task import Task, await_healthy
from gyre_sdk.harness.workspace import owner, reaper
from gyre_sdk.harness.workspace.channel import FifoChannel, ProcessChannel
from gyre_sdk.harness.workspace.container import lifetime
from gyre_sdk.harness.workspace.isolation import FOLDERS, Isolation, best_isolation, command, works
from gyre_sdk.harness.workspace.output import OUTPUT_LIMIT
from gyre_sdk.harness.workspace.supervised import SupervisedWorkspace
from gyre_sdk.harness.workspace.supervisor import Supervisor, SupervisorLost, SupervisorUnfit, arguments, fresh_name

_PREFIX = "gyre-workspace-"
_OWNER = "owner.json"
WARNINGS = {
    Isolation.BUBBLEWRAP: "no memory, CPU or process limits, and the machine's own programs instead of the task's image",
    Isolation.NAMESPACES: "no memory, CPU or process limits, and the machine's own programs instead of the task's image",
    Isolation.NONE: "NO ISOLATION: commands run with your rights, your network and your files",
}


class LocalWorkspace(SupervisedWorkspace):
    """Runs commands in namespaces of this machine, where it can, with `/workspace`, `/logs` and `/tests` of its own.

    Attributes:
        isolation: how far commands are kept apart: `bubblewrap`, `namespaces` or `none`.
        warning: what this isolation does not do.

    Raises:
        WorkspaceError: the task needs an image of its own, or the isolation asked for does not work here.
    """

    def __init__(
        self,
        task: Task,
        *,
        run_id: str = "",
        isolation: Isolation | None = None,
        output_limit: int = OUTPUT_LIMIT,
    ) -> None:
        if task.dockerfile is not None:
            raise WorkspaceError(
                f"task {task.name!r} builds its environment from {task.dockerfile / 'Dockerfile'}, which a local workspace"
                " cannot; use workspace='docker' (--workspace docker)"
            )
        if task.network in ("allowlist", "full"):
            raise WorkspaceError(
                f"task {task.name!r} has network {task.network!r}, which a local workspace cannot give it; use workspace='docker' (--workspace docker)"
            )
        if task.services:
            raise WorkspaceError(
                f"task {task.name!r} has services ({', '.join(service.name for service in task.services)}), which need a"
                " Docker engine; use workspace='docker' (--workspace docker)"
            )
        self.isolation = isolation or best_isolation()
        if not works(self.isolation):
            raise WorkspaceError(
                f"isolation {self.isolation.value!r} does not work here; install bubblewrap or util-linux"
            )
        if self.isolation is Isolation.NONE and task.tests is not None:
            raise WorkspaceError(
                f"task {task.name!r} has tests, which read and write /tests and /logs: without isolation those are this"
                " machine's own; install bubblewrap, use workspace='docker' (--workspace docker), or evaluate it by a Python scorer"
            )
        sweep_local()
        self.warning = WARNINGS[self.isolation]
        self._root = Path(tempfile.mkdtemp(prefix=_PREFIX))
        for name in FOLDERS:
            (self._root / name).mkdir(mode=0o777)
        (self._root / _OWNER).write_bytes(
            msgspec.json.encode(owner.labels(owner.me(), run=run_id, deadline=time.time() + lifetime(task)))
        )
        reaper.watch(id(self), self._remove)
        workdir = task.workdir or "/workspace"
        self._mapped = self.isolation is Isolation.NONE
        super().__init__(
            f"local-{secrets.token_hex(4)}",
            workdir=str(self._root / "workspace") if self._mapped else workdir,
            user="",
            env=task.env,
            output_limit=output_limit,
        )
        self.run_id = run_id
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._supervisor(self.user)
            for path, data in task.start_files().items():
                self.write(path, data, mode=0o755 if data.startswith(b"#!") else 0o644)
            if task.healthcheck is not None:
                await_healthy(self, task.healthcheck)
        except BaseException:
            self.close()
            raise

    def describe(self) -> str:
        """Say what this workspace is, and what it does not protect from."""
        return f"local workspace, isolation {self.isolation.value} ({self.warning})"

    def _start_supervisor(self, user: str, keep: str) -> Supervisor:
        if user != self.user:
            raise SupervisorLost("a local workspace has one user only")
        if self._process is not None:
            self._process.kill()  # its namespace of processes dies with it
            self._process.wait()
        folder = f"{self._root / 'run' if self._mapped else '/run/gyre'}/{fresh_name()}"
        argv = arguments(
            folder,
            half_cap=self._output_limit // 2,
            how="marked" if self._mapped else "user",
            keep=keep if self._mapped else "first",
            workspace=self.id,
        )
        line, environment = command(
            self.isolation, self._root, self.workdir, argv, {"GYRE_WORKSPACE": f"{self.id}."} if self._mapped else {}
        )
        self._process = subprocess.Popen(
            line,
            env=environment,
            cwd=self._root / "workspace",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            return Supervisor(ProcessChannel(self._process), folder, launcher=self._launcher)
        except SupervisorUnfit as error:
            raise WorkspaceError(f"this machine lacks what a local workspace needs:{error}; install it") from error

    def _attach(self, argv: list[str], user: str) -> FifoChannel:
        supervisor = self._supervisor(user)
        name = fresh_name()
        place = self._root / "run" / posixpath.basename(supervisor.folder)
        try:
            channel = FifoChannel((place / f"{name}.in", place / f"{name}.out", place / f"{name}.err"))
        except OSError as error:
            raise SupervisorLost(str(error)) from error
        words = " ".join(shlex.quote(word) for word in argv)
        streams = f'<"$D/{name}.in" >"$D/{name}.out" 2>"$D/{name}.err" 5>&-'
        supervisor.ask(f"( setsid {words} {streams} & )")
        return channel

    def _path(self, path: str) -> str:
        full = super()._path(path)
        if not self._mapped or full.startswith(str(self._root)):
            return full
        top = full.strip("/").partition("/")[0]
        return posixpath.join(str(self._root), full.lstrip("/")) if top in FOLDERS else full

    def _post_mortem(self, detail: str) -> str | None:
        return None if self._root.is_dir() else "its folder was removed"

    def _remove(self) -> None:
        reaper.unwatch(id(self))
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._mapped:
            _kill_marked(f"GYRE_WORKSPACE={self.id}.".encode())
        _remove_tree(self._root)


def sweep_local() -> list[Path]:
    """Remove the folders of local workspaces whose owner is dead; return them. Their processes died with the owner."""
    removed = []
    for note in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_OWNER}"):
        try:
            stale = owner.is_stale(msgspec.json.decode(note.read_bytes(), type=dict[str, str]))
        except (OSError, msgspec.DecodeError):
            continue
        if stale:
            _remove_tree(note.parent)
            removed.append(note.parent)
    return removed


def _remove_tree(folder: Path) -> None:
    """Remove a folder whatever an agent made of it: folders may be shut, and nested deeper than Python's own way can follow."""
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        subprocess.run(["chmod", "-R", "u+rwX", folder], capture_output=True, check=False)
        subprocess.run(["rm", "-rf", folder], capture_output=True, check=False)


def _kill_marked(marker: bytes) -> None:
    """Kill what a workspace without isolation left running: only processes that carry its marker."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:
            continue
