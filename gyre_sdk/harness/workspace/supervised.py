"""A workspace whose commands and files go through a supervisor. What differs by place is how one is started."""

from __future__ import annotations

import posixpath
import queue
import re
import shlex
import threading
import time
from collections.abc import Mapping
from typing import NoReturn

from gyre_sdk.errors import CommandFailed, WorkspaceError, WorkspaceUnavailable
from gyre_sdk.harness.workspace import cancelling
from gyre_sdk.harness.workspace.archive import tar_of
from gyre_sdk.harness.workspace.cancelling import Cancellation, Cancelled
from gyre_sdk.harness.workspace.channel import Channel
from gyre_sdk.harness.workspace.commands import Kept, entry, launching, result_of, script_of
from gyre_sdk.harness.workspace.files import Files
from gyre_sdk.harness.workspace.supervisor import Running, Supervisor, SupervisorLost, SupervisorUnfit
from gyre_sdk.records import ExecResult

_HELD_PIPE = 0.15
"""Seconds that a background child may keep a finished command's output open before it is cut off."""
_LOOK_EVERY = 1.0
"""Seconds without news after which a command's wrapper is looked for: the command may have killed it."""
_DYING = re.compile(r"stopped state|not running|no such (container|process)|is restarting", re.IGNORECASE)
"""What an engine says of a container that is about to be dead."""
_DYING_LOOKS = 50
_NOTHING: tuple[Kept, Kept] = ((b"", 0), (b"", 0))
_UNKNOWN: tuple[Kept, Kept] = ((b"", None), (b"", None))


class SupervisedWorkspace(Files):
    """Implements `ports.Workspace` over supervisors, one per user that commands run as."""

    def __init__(self, id: str, *, workdir: str, user: str, env: Mapping[str, str], output_limit: int) -> None:
        self.id = id
        self.workdir = workdir
        self.user = user
        self._env = dict(env)
        self._output_limit = output_limit
        self._supervisors: dict[str, Supervisor] = {}
        self._keep = "first"
        self._lock = threading.RLock()
        self._closed = False
        self._gone: str | None = None

    # -- what a place provides -----------------------------------------------------------------------------------

    def _start_supervisor(self, user: str, keep: str) -> Supervisor:
        """Start a supervisor as `user`, whose first act is to kill that user's processes unless `keep` is `first`."""
        raise NotImplementedError

    def _attach(self, argv: list[str], user: str) -> Channel:
        """Start a process as `user`, in a session of its own, and return its streams.

        Raises:
            SupervisorLost: it cannot be started.
        """
        raise NotImplementedError

    def _post_mortem(self, detail: str) -> str | None:
        """Return why the workspace is dead, or None when it is alive."""
        raise NotImplementedError

    def _remove(self) -> None:
        """Remove what the place holds. Idempotent."""
        raise NotImplementedError

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
        running = supervisor.reserve()
        script = script_of(cmd)
        entering = entry(self._folder(cwd), {**self._env, **(env or {})}, f"say fail {running.id} cwd")
        code, long = launching(
            running.id, running.slot, script, shell=supervisor.shell, entering=entering, reads=input is not None
        )
        files = {f"{running.slot}.s": script} if long else {}
        if input is not None:
            files[f"{running.slot}.in"] = input.encode() if isinstance(input, str) else input
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
        if check and result.exit_code != 0:
            raise CommandFailed(cmd, result)
        return result

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
        status, kills, timed_out, output = None, 0, False, True
        done = False
        try:
            while not done:
                try:
                    left = _LOOK_EVERY if deadline is None else min(max(0.0, deadline - time.monotonic()), _LOOK_EVERY)
                    name, value = running.events.get(timeout=_HELD_PIPE if ended is not None else left)
                except queue.Empty:
                    if ended is not None:
                        break
                    if deadline is None or time.monotonic() < deadline:
                        if not supervisor.is_attended(running) and running.events.empty():
                            ended = "its wrapper was killed"
                            supervisor.kill(running)
                    elif timed_out:
                        supervisor = self._kill_everything(supervisor, user)
                        break
                    else:
                        timed_out, deadline = True, time.monotonic() + 3.0
                        if not supervisor.kill(running):
                            deadline = time.monotonic()
                    continue
                if name == "exit":
                    status, kills = (int(number) for number in value.split())
                    ended = value
                elif name == "done":
                    done, output = True, value == "1"
                elif name == "cancel":
                    raise Cancelled
                elif name == "fail":
                    self._not_started(value, cwd)
                else:
                    raise SupervisorLost(supervisor.heard())
            kept = self._collect(supervisor, running, done=done, output=output, drop=drop)
        except SupervisorLost as lost:
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

    def _collect(
        self, supervisor: Supervisor, running: Running, *, done: bool, output: bool, drop: bool
    ) -> tuple[Kept, Kept]:
        """Return both outputs; the files of a command whose outputs ended are another's from here on."""
        kept = _NOTHING
        if output or drop or not done:
            kept = supervisor.collect(running, drop=drop or not done)
        if done:
            supervisor.release(running)
        return kept

    def _end(self, supervisor: Supervisor, running: Running, user: str) -> None:
        """Kill what a command started, whatever it takes."""
        try:
            if not supervisor.kill(running):
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

    def kill_all(self) -> None:
        """See `ports.Workspace`. A supervisor that commands could have tampered with is replaced too.

        Raises:
            WorkspaceUnavailable: a process survived; the workspace cannot be trusted any more and was removed.
        """
        with self._lock:
            self._alive()
            if self._kill_from_guarded():
                return
            left: list[str] = []
            users = [*(user for user in self._supervisors if user != self.user), self.user]
            for user in users:
                old = self._supervisors.pop(user, None)
                if old is not None:
                    old.close()
                fresh = self._open(user, self._keep)
                if user == self.user:
                    self._supervisors[user] = fresh
                    left = fresh.left.split()
                else:
                    fresh.close()
            if left:
                self._abandon(f"processes {' '.join(left)} could not be killed")

    def _kill_from_guarded(self) -> bool:
        """Kill from the supervisor that is there, when the kernel kept commands out of it and nobody else runs here."""
        only = self._supervisors.get(self.user)
        if only is None or len(self._supervisors) > 1 or not (only.alive and only.guarded):
            return False
        try:
            return only.ask("kill_others", timeout=5.0)[0] == 0
        except SupervisorLost:
            return False

    def _kill_everything(self, supervisor: Supervisor, user: str) -> Supervisor:
        """The last resort at a timeout: every process of the user dies."""
        try:
            supervisor.ask("kill_others", timeout=5.0)
        except SupervisorLost as lost:
            return self._restart(user, supervisor, str(lost))
        return supervisor

    # -- supervisors ---------------------------------------------------------------------------------------------

    def _alive(self) -> None:
        if self._closed:
            raise WorkspaceUnavailable(f"workspace {self.id} is closed; open another one")
        if self._gone is not None:
            raise WorkspaceUnavailable(self._gone)

    def _supervisor(self, user: str) -> Supervisor:
        with self._lock:
            self._alive()
            current = self._supervisors.get(user)
            if current is None or not current.alive:
                current = self._supervisors[user] = self._open(user, self._keep if user == self.user else "first")
            return current

    def _open(self, user: str, keep: str) -> Supervisor:
        try:
            supervisor = self._start_supervisor(user, keep)
        except SupervisorUnfit as unfit:
            raise WorkspaceError(
                f"the image of workspace {self.id} lacks{unfit}; commands are run with these: add them to the image"
                " (coreutils, util-linux and tar, or busybox)"
            ) from unfit
        except SupervisorLost as lost:
            self._check(str(lost))
            for _ in range(_DYING_LOOKS):  # the engine may call it running for a moment longer
                if not _DYING.search(str(lost)):
                    break
                time.sleep(0.1)
                self._check(str(lost))
            raise WorkspaceError(
                f"no command can run as user {user!r} in workspace {self.id}: {lost}; check that the user exists in the"
                " image and that the image has a POSIX shell"
            ) from lost
        if self._keep == "first" and user == self.user:
            self._keep = supervisor.keep.strip() or "1"
        return supervisor

    def _restart(self, user: str, lost: Supervisor, detail: str) -> Supervisor:
        """Replace a supervisor that ended. Raises `WorkspaceUnavailable` when the workspace ended with it."""
        with self._lock:
            self._alive()
            current = self._supervisors.get(user)
            if current is not None and current is not lost and current.alive:
                return current
            lost.close()
            self._check(detail)
            fresh = self._supervisors[user] = self._open(user, self._keep)
            return fresh

    def _check(self, detail: str) -> None:
        why = self._post_mortem(detail)
        if why is not None:
            self._gone = f"workspace {self.id} is gone: {why}"
            raise WorkspaceUnavailable(self._gone)

    def _abandon(self, why: str) -> NoReturn:
        self._gone = f"workspace {self.id} is gone: {why}, so it was removed"
        self._remove()
        raise WorkspaceUnavailable(self._gone)

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

    def _place(self, folder: str, archive: bytes) -> None:
        supervisor = self._supervisor(self.user)
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

    def close(self) -> None:
        """See `ports.Workspace`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for supervisor in self._supervisors.values():
                supervisor.close()
            self._supervisors.clear()
            self._remove()

    def __enter__(self) -> SupervisedWorkspace:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
