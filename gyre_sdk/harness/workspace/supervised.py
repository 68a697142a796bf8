"""A workspace whose commands and files go through a supervisor. What differs by place is how one is started."""

from __future__ import annotations

import posixpath
import queue
import shlex
import time
from collections.abc import Mapping
from typing import NoReturn

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness import cancelling
from gyre_sdk.harness.aio import AsyncWorkspace
from gyre_sdk.harness.cancelling import Cancellation, Cancelled
from gyre_sdk.harness.workspace.archive import tar_of
from gyre_sdk.harness.workspace.commands import (
    Kept,
    checked,
    entry,
    exports,
    launching,
    result_of,
    script_of,
    sent_along,
)
from gyre_sdk.harness.workspace.files import Files
from gyre_sdk.harness.workspace.plain import PlainFiles, run_plainly
from gyre_sdk.harness.workspace.process import RUNNER, NotStarted, Process, running
from gyre_sdk.harness.workspace.shell import Shell
from gyre_sdk.harness.workspace.supervision import Supervision
from gyre_sdk.harness.workspace.supervisor import LATE_S, Running, Supervisor, SupervisorLost
from gyre_sdk.records import ExecResult, FileInfo

_HELD_PIPE = 0.15
"""Seconds that a background child may keep a finished command's output open before it is cut off."""
_LAUNCHER = 5.0
"""Seconds that a launcher may take to do so itself."""
_LOOK_EVERY = 1.0
"""Seconds without news after which a command's wrapper is looked for: the command may have killed it."""
_LOST = 10.0
"""Seconds after which a supervisor that does not answer is given up while there is time."""
_UNKNOWN: tuple[Kept, Kept] = ((b"", None), (b"", None))


class SupervisedWorkspace(Supervision, Files):
    """Implements `ports.Workspace` over supervisors, one per user that commands run as."""

    # -- commands ------------------------------------------------------------------------------------------------

    def exec(
        self,
        cmd: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        input: bytes | str | None = None,
        check: bool = False,
    ) -> ExecResult:
        """See `ports.Workspace`."""
        began = time.monotonic()
        user = user or self.user
        supervisor = self._supervisor(user)
        content = input.encode() if isinstance(input, str) else input
        if supervisor.bare:
            process = self.start(cmd, cwd=cwd, env=env, user=user)
            return checked(cmd, run_plainly(process, content, timeout, self._output_limit), check)
        running = supervisor.reserve()
        script = script_of(cmd)
        entering = entry(self._folder(cwd), f"say fail {running.id} cwd") + exports({**self._env, **(env or {})})
        code, long = launching(
            running.id,
            running.slot,
            script,
            shell=supervisor.shell,
            entering=entering,
            reads=content is not None,
            mark=running.mark,
        )
        files = {f"{running.slot}.s": script} if long else {}
        if content is not None:
            files[f"{running.slot}.in"] = content
        wish = cancelling.current.get() or Cancellation()
        with wish.calls(lambda: running.events.put(("cancel", ""))):
            try:
                if files:
                    self._unpack(supervisor, supervisor.folder, tar_of(files, mode=0o600))
                supervisor.start(running, code)
            except SupervisorLost as lost:
                self._restart(user, supervisor, str(lost))
                raise WorkspaceError(
                    f"workspace {self.id} lost its supervisor before the command started ({lost}); it was restarted:"
                    " run the command again"
                ) from lost
            result = self._follow(supervisor, running, user, cwd, timeout, began, drop=bool(files))
        return checked(cmd, result, check)

    def start(
        self,
        cmd: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Process:
        """See `ports.Workspace`."""
        user = user or self.user
        supervisor = self._supervisor(user)
        id = supervisor.reserve().id
        code = running(
            script_of(cmd),
            shell=supervisor.shell,
            entering=entry(self._folder(cwd), "say fail cwd"),
            exporting=exports({**self._env, **(env or {})}),
            file=f"{supervisor.folder}/{id}.s",
            marker=f"{id}.{self.id}.",
        )
        try:
            return Process(
                self._attach([supervisor.shell, "-c", RUNNER, "gyre"], user),
                code,
                limit=self._output_limit,
                kill=lambda session: self._kill_session(user, id, session),
                lost=self._check,
            )
        except SupervisorLost as lost:
            self._check(str(lost))
            raise WorkspaceError(f"a process cannot be started in workspace {self.id}: {lost}") from lost
        except NotStarted as failed:
            if str(failed) in ("cwd", "room"):
                self._not_started(str(failed), cwd)
            self._check(str(failed))
            raise WorkspaceError(f"a process did not start in workspace {self.id}: {failed}") from failed

    def _kill_session(self, user: str, id: str, session: str) -> None:
        supervisor = self._supervisor(user)
        try:
            if not supervisor.kill(id, session):
                self._kill_everything(supervisor, user)
        except SupervisorLost as lost:
            self._restart(user, supervisor, str(lost))

    def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None, user: str | None = None) -> Shell:
        """See `ports.Workspace`."""
        supervisor = self._supervisor(user or self.user)
        folder = supervisor.folder if supervisor.bare else posixpath.dirname(supervisor.folder)
        return Shell(self.exec, folder, supervisor.shell, cwd=cwd, env=env, user=user)

    @property
    def aio(self) -> AsyncWorkspace:
        """The same workspace for `async` code."""
        return AsyncWorkspace(self)

    def _folder(self, cwd: str | None) -> str:
        return posixpath.join(self.workdir, cwd) if cwd else self.workdir

    def _follow(
        self,
        supervisor: Supervisor,
        running: Running,
        user: str,
        cwd: str | None,
        timeout: float | None,
        began: float,
        *,
        drop: bool,
    ) -> ExecResult:
        """Wait for a command's end, or end it.

        Args:
            drop: whether it has files that no later command overwrites.
        """
        deadline = None if timeout is None else began + timeout
        ended: str | None = None
        status, kills, timed_out, alone = None, 0, False, False
        done: str | None = None
        try:
            while done is None:
                try:
                    left = _LOOK_EVERY if deadline is None else min(max(0.0, deadline - time.monotonic()), _LOOK_EVERY)
                    name, value = running.events.get(
                        timeout=left if ended is None else _LAUNCHER if running.launched else _HELD_PIPE
                    )
                except queue.Empty:
                    if ended is not None:
                        break
                    if deadline is None or time.monotonic() < deadline:
                        wait = _LOST if deadline is None else min(_LOST, max(LATE_S, deadline - time.monotonic()))
                        before, alone = alone, not supervisor.is_attended(running, wait) and running.events.empty()
                        if before and alone:  # once is not enough: its last words take another way than the answer
                            ended = "its wrapper was killed"
                            supervisor.kill(running.id, running.leader)
                            if running.launched:
                                break
                    elif timed_out:
                        supervisor = self._kill_everything(supervisor, user)
                        break
                    else:
                        timed_out, deadline = True, time.monotonic() + 3.0
                        if not supervisor.kill(running.id, running.leader):
                            deadline = time.monotonic()
                    continue
                if name == "exit":
                    status, kills = (int(number) for number in value.split())
                    ended = value
                elif name == "done":
                    done = value
                elif name == "cancel":
                    raise Cancelled
                elif name == "fail":
                    self._not_started(value, cwd)
                else:
                    raise SupervisorLost(supervisor.heard())
            kept = self._collect(supervisor, running, done, drop)
        except SupervisorLost as lost:
            timed_out |= ended is None and deadline is not None and time.monotonic() >= deadline
            self._restart(user, supervisor, str(lost))
            kept = _UNKNOWN
        except (Cancelled, KeyboardInterrupt):
            self._end(supervisor, running, user)
            raise
        finally:
            supervisor.forget(running)
        return result_of(
            *kept,
            self._output_limit,
            status=status,
            timed_out=timed_out,
            oom_killed=kills > 0,
            duration_s=time.monotonic() - began,
        )

    def _collect(self, supervisor: Supervisor, running: Running, done: str | None, drop: bool) -> tuple[Kept, Kept]:
        """Return both outputs; the files of a command whose outputs ended are another's from here on."""
        kept = sent_along(done)
        if drop or kept is None:
            collected = supervisor.collect(running, drop=drop or done is None)
            kept = kept or (_UNKNOWN if running.launched and done is None else collected)
        if done is not None:
            supervisor.release(running)
        return kept

    def _end(self, supervisor: Supervisor, running: Running, user: str) -> None:
        """Kill what a command started, whatever it takes."""
        try:
            if not supervisor.kill(running.id, running.leader):
                supervisor = self._kill_everything(supervisor, user)
            supervisor.collect(running, drop=True)
        except SupervisorLost as lost:
            self._restart(user, supervisor, str(lost))

    def _not_started(self, why: str, cwd: str | None) -> NoReturn:
        if why == "cwd":
            raise WorkspaceError(
                f"{self._folder(cwd)!r} is not a folder of workspace {self.id}; create it, or pass another cwd"
            )
        raise WorkspaceError(
            f"workspace {self.id} has no room left to run a command ({why}); its disk limit is reached"
        )

    # -- files: how `Files` reaches the workspace ------------------------------------------------------------------

    def _ask(self, code: str, *, timeout: float = 120.0) -> tuple[int, bytes]:
        supervisor = self._supervisor(self.user)
        try:
            return supervisor.ask(code, timeout=timeout)
        except SupervisorLost as lost:
            self._restart(self.user, supervisor, str(lost))
            raise WorkspaceError(
                f"workspace {self.id} lost its supervisor ({lost}); it was restarted: try again"
            ) from lost

    def read(self, path: str) -> bytes:
        """See `ports.Workspace`."""
        plain = self._plain()
        return plain.read(self._path(path)) if plain else super().read(path)

    def ls(self, path: str = ".") -> list[FileInfo]:
        """See `ports.Workspace`."""
        plain = self._plain()
        return plain.ls(self._path(path)) if plain else super().ls(path)

    def packed(self, path: str) -> bytes:
        """See `Files.packed`."""
        plain = self._plain()
        return plain.packed(self._path(path)) if plain else super().packed(path)

    def _plain(self) -> PlainFiles | None:
        return self.plain if self._supervisor(self.user).bare else None

    def _place(self, folder: str, archive: bytes) -> None:
        supervisor = self._supervisor(self.user)
        if supervisor.bare and self.plain is not None:
            for path in self.plain.place(folder, archive):
                if supervisor.ask(f"[ -e {shlex.quote(path)} ]")[0] != 0:
                    self._fail("written to", folder, "it is kept in memory, and the image lacks tar")
            return
        try:
            self._unpack(supervisor, folder, archive)
        except SupervisorLost as lost:
            self._restart(self.user, supervisor, str(lost))
            raise WorkspaceError(
                f"workspace {self.id} lost its supervisor while files were written ({lost}); try again"
            ) from lost

    def _unpack(self, supervisor: Supervisor, folder: str, archive: bytes) -> None:
        where = shlex.quote(folder)
        code = f"{{ [ -d {where} ] || mkdir -p {where}; }} 2>&1 && tar -xf - -o -C {where} 2>&1"
        status, said = supervisor.ask(code, data=archive, timeout=600.0)
        if status != 0:
            self._fail("written to", folder, said.decode(errors="replace").strip()[-300:])
