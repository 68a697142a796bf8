"""The supervisors of a workspace: started when needed, replaced when they end, trusted with nothing at the end of a run."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from typing import ClassVar, NoReturn, Self

from gyre_sdk.errors import WorkspaceError, WorkspaceUnavailable
from gyre_sdk.harness.workspace.channel import Channel
from gyre_sdk.harness.workspace.launcher import launcher
from gyre_sdk.harness.workspace.patience import Patience, passes
from gyre_sdk.harness.workspace.plain import PlainFiles
from gyre_sdk.harness.workspace.supervisor import KILLING_S, Supervisor, SupervisorLost, SupervisorUnfit
from gyre_sdk.harness.workspace.toolbox import Unfit

_DYING = re.compile(r"stopped state|not running|no such (container|process)|is restarting|ended at once", re.IGNORECASE)
"""What an engine says of a container that is about to be dead, and what a supervisor's start there comes to."""
_DYING_LOOKS = 50
_NO_PROGRAM = "exit code 127"
_NO_SHELL = re.compile(r"executable file not found|no such file or directory", re.IGNORECASE)
"""What an engine says of an image without a shell."""


class Supervision:
    """Keeps one supervisor per user that commands run as, and says when the workspace is dead."""

    plain: PlainFiles | None = None
    """How files are reached where supervisors may be bare; None where they may not."""
    with_launcher: ClassVar[bool] = True
    """Whether supervisors get the compiled launcher, where it can be had."""

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
            return only.ask("L=; kill_others && equip", timeout=KILLING_S)[0] == 0
        except SupervisorLost:
            return False

    def _await_death(self, detail: str) -> None:
        """Raise when the workspace is dead, or about to be: the engine may call it running for a moment longer.

        Raises:
            Unfit: it never lived: its image lacks what the first process is.
        """
        try:
            self._check(detail)
            for _ in range(_DYING_LOOKS):
                if not _DYING.search(detail):
                    return
                time.sleep(0.1)
                self._check(detail)
        except WorkspaceUnavailable as gone:
            if self._keep == "first" and _NO_PROGRAM in str(gone):
                raise Unfit(
                    f"the image of workspace {self.id} lacks sleep, its first process; add it to the image"
                ) from gone
            raise

    @property
    def _launcher(self) -> bytes | None:
        return launcher() if self.with_launcher else None

    def _kill_everything(self, supervisor: Supervisor, user: str) -> Supervisor:
        """The last resort at a timeout: every process of the user dies."""
        try:
            supervisor.ask("kill_others", timeout=KILLING_S)
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
        patience = Patience()
        while True:
            try:
                supervisor = self._start_supervisor(user, keep)
                break
            except SupervisorUnfit as unfit:
                raise Unfit(
                    f"the image of workspace {self.id} lacks{unfit}; commands are run with these: add them to the image"
                    " (coreutils, util-linux and tar, or busybox)",
                    has_shell=True,
                ) from unfit
            except SupervisorLost as lost:
                self._await_death(str(lost))
                if passes(lost) and patience.again():
                    continue
                kind = Unfit if _NO_SHELL.search(str(lost)) else WorkspaceError
                raise kind(
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
