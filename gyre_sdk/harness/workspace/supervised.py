"""A workspace whose commands and files go through a supervisor. What differs by place is how one is started."""

from __future__ import annotations

import base64
import io
import itertools
import posixpath
import queue
import re
import shlex
import tarfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from gyre_sdk.errors import CommandFailed, WorkspaceError, WorkspaceUnavailable
from gyre_sdk.harness.workspace.archive import anonymous, tar_of, unpack
from gyre_sdk.harness.workspace.output import clip
from gyre_sdk.harness.workspace.supervisor import Running, Supervisor, SupervisorLost, SupervisorUnfit
from gyre_sdk.records import ExecResult

_INLINE = 32_768
"""Scripts up to this many bytes travel as lines, longer ones as a file."""
_HELD_PIPE = 0.15
"""Seconds that a background child may keep a finished command's output open before it is cut off."""
_LOOK_EVERY = 1.0
"""Seconds without news after which a command's wrapper is looked for: the command may have killed it."""
_DYING = re.compile(r"stopped state|not running|no such (container|process)|is restarting", re.IGNORECASE)
"""What an engine says of a container that is about to be dead."""
_DYING_LOOKS = 50
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_counter = itertools.count(1)


class SupervisedWorkspace:
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

    def _post_mortem(self, detail: str) -> str | None:
        """Return why the workspace is dead, or None when it is alive."""
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
        supervisor = self._supervisor(user or self.user)
        id = f"x{next(_counter)}"
        command = cmd + "\n"  # shells differ in what a backslash at the very end of a file means
        script = command.encode(errors="surrogateescape")
        place = f"{supervisor.folder}/{id}"
        files = {}
        if input is not None:
            files[f"{id}.in"] = input.encode() if isinstance(input, str) else input
        if len(script) > _INLINE or b"\0" in script:
            files[f"{id}.s"] = script
        code = self._prelude(id, cwd, env)
        if f"{id}.s" not in files:
            code += f"printf %s {shlex.quote(command)} >{place}.s || {{ say fail {id} room; exit; }}\n"
        code += f"id={id}\n" + (f"in={place}.in\n" if input is not None else "")
        code += f"launch {supervisor.shell} {place}.s"
        try:
            if files:
                self._place(supervisor, supervisor.folder, tar_of(files, mode=0o600))
            running = supervisor.start(code, id=id)
        except SupervisorLost as lost:
            self._restart(user or self.user, supervisor, str(lost))
            raise WorkspaceError(
                f"workspace {self.id} lost its supervisor before the command started ({lost}); it was restarted:"
                " run the command again"
            ) from lost
        result = self._follow(supervisor, running, user or self.user, cwd, timeout, began)
        if check and result.exit_code != 0:
            raise CommandFailed(cmd, result)
        return result

    def _prelude(self, id: str, cwd: str | None, env: Mapping[str, str] | None) -> str:
        folder = posixpath.join(self.workdir, cwd) if cwd else self.workdir
        code = f"cd -- {shlex.quote(folder)} 2>/dev/null || {{ say fail {id} cwd; exit; }}\n"
        for name, value in {**self._env, **(env or {})}.items():
            if not _ENV_NAME.fullmatch(name) or "\0" in value:
                raise WorkspaceError(f"environment variable {name!r} cannot be set; use letters, digits and _ only")
            code += f"export {name}={shlex.quote(value)}\n"
        return code

    def _follow(
        self, supervisor: Supervisor, running: Running, user: str, cwd: str | None, timeout: float | None, began: float
    ) -> ExecResult:
        """Wait for a command's end, or end it."""
        deadline = None if timeout is None else began + timeout
        status, timed_out, output = None, False, True
        try:
            while True:
                try:
                    left = _LOOK_EVERY if deadline is None else min(max(0.0, deadline - time.monotonic()), _LOOK_EVERY)
                    name, value = running.events.get(timeout=_HELD_PIPE if status is not None else left)
                except queue.Empty:
                    if status is not None:
                        break
                    if deadline is None or time.monotonic() < deadline:
                        if not supervisor.is_attended(running) and running.events.empty():
                            status = 137
                            supervisor.kill(running)
                        continue
                    if timed_out:
                        supervisor = self._kill_everything(supervisor, user)
                        status = 137
                        break
                    timed_out, deadline = True, time.monotonic() + 3.0
                    if not supervisor.kill(running):
                        deadline = time.monotonic()
                    continue
                if name == "exit":
                    status = int(value)
                elif name == "done":
                    output = value == "1"
                    break
                elif name == "fail":
                    self._fail(value, cwd)
                else:
                    raise SupervisorLost(supervisor.heard())
        except SupervisorLost as lost:
            supervisor = self._restart(user, supervisor, str(lost))
            status = 137
        finally:
            supervisor.forget(running)
        try:
            kept = supervisor.collect(running) if output else self._nothing(supervisor, running)
        except SupervisorLost as lost:
            self._restart(user, supervisor, str(lost))
            kept = [(b"", None), (b"", None)]
        out, cut_out = clip(*kept[0], self._output_limit)
        err, cut_err = clip(*kept[1], self._output_limit)
        return ExecResult(
            exit_code=137 if timed_out else (status or 0),
            stdout=out,
            stderr=err,
            timed_out=timed_out,
            truncated=cut_out or cut_err,
            duration_s=time.monotonic() - began,
        )

    def _nothing(self, supervisor: Supervisor, running: Running) -> list[tuple[bytes, int | None]]:
        """Both outputs of a command are empty: only its files have to go."""
        supervisor.forget(supervisor.start(f"rm -f {running.folder}/{running.id}.*", id=f"{running.id}.rm"))
        return [(b"", 0), (b"", 0)]

    def _fail(self, why: str, cwd: str | None) -> NoReturn:
        if why == "cwd":
            folder = posixpath.join(self.workdir, cwd or "")
            raise WorkspaceError(f"{folder!r} is not a folder of workspace {self.id}; create it, or pass another cwd")
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

    def _remove(self) -> None:
        """Remove what the place holds. Idempotent."""
        raise NotImplementedError

    def _ask(self, code: str, *, data: bytes | None = None, timeout: float = 120.0) -> tuple[int, list[bytes]]:
        supervisor = self._supervisor(self.user)
        try:
            return supervisor.ask(code, data=data, timeout=timeout)
        except SupervisorLost as lost:
            self._restart(self.user, supervisor, str(lost))
            raise WorkspaceError(
                f"workspace {self.id} lost its supervisor ({lost}); it was restarted: try again"
            ) from lost

    # -- files ---------------------------------------------------------------------------------------------------

    def read(self, path: str) -> bytes:
        """See `ports.Workspace`."""
        full = shlex.quote(self._path(path))
        status, lines = self._ask(
            f"if [ -f {full} ]; then base64 {full} 2>&1; else [ -e {full} ] && echo kind; false; fi"
        )
        if status != 0:
            self._unreadable(path, lines)
        return base64.b64decode(b"".join(lines))

    def _unreadable(self, path: str, lines: list[bytes]) -> NoReturn:
        why = b" ".join(lines).decode(errors="replace")
        if why == "kind":
            why = "it is not a regular file"
        raise WorkspaceError(f"{self._path(path)!r} cannot be read in workspace {self.id}: {why or 'no such file'}")

    def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """See `ports.Workspace`."""
        full = self._path(path)
        content = data.encode() if isinstance(data, str) else data
        self._place(
            self._supervisor(self.user), posixpath.dirname(full), tar_of({posixpath.basename(full): content}, mode=mode)
        )

    def write_many(self, files: Mapping[str, bytes], folder: str) -> None:
        """Create files (relative path -> bytes) below a folder in one step; those starting with `#!` are executable."""
        self._place(self._supervisor(self.user), self._path(folder), tar_of(files))

    def upload(self, local: Path, path: str) -> None:
        """See `ports.Workspace`."""
        if not local.exists():
            raise WorkspaceError(f"{local} does not exist; nothing to upload to {path!r}")
        full = self._path(path)
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as archive:
            if local.is_dir():
                for entry in sorted(local.iterdir()):
                    archive.add(entry, entry.name, filter=anonymous)
            else:
                archive.add(local, posixpath.basename(full), filter=anonymous)
        folder = full if local.is_dir() else posixpath.dirname(full)
        self._place(self._supervisor(self.user), folder, stream.getvalue())

    def download(self, path: str, local: Path) -> None:
        """See `ports.Workspace`."""
        full = self._path(path)
        parent, name = posixpath.split(full.rstrip("/") or "/")
        code = f"cd -- {shlex.quote(parent)} && [ -e {shlex.quote(name)} ] && tar -cf - -- {shlex.quote(name)} | base64"
        status, lines = self._ask(f"( {code} ) 2>/dev/null", timeout=600.0)
        if status != 0 or not lines:
            raise WorkspaceError(f"{full!r} cannot be downloaded from workspace {self.id}: no such file or folder")
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(b"".join(lines)))) as archive:
            unpack(archive, name, local)

    def _path(self, path: str) -> str:
        if "\0" in path or not path:
            raise WorkspaceError(f"{path!r} is not a path")
        return posixpath.normpath(posixpath.join(self.workdir, path))

    def _place(self, supervisor: Supervisor, folder: str, archive: bytes) -> None:
        where = shlex.quote(folder)
        code = f"{{ [ -d {where} ] || mkdir -p {where}; }} 2>&1 && tar -xf - -o -C {where} 2>&1"
        try:
            status, lines = supervisor.ask(code, data=archive, timeout=600.0)
        except SupervisorLost as lost:
            self._restart(self.user, supervisor, str(lost))
            raise WorkspaceError(
                f"workspace {self.id} lost its supervisor while files were written; try again"
            ) from lost
        if status != 0:
            why = b" ".join(lines).decode(errors="replace")[-300:]
            raise WorkspaceError(f"files cannot be written to {folder!r} in workspace {self.id}: {why}")

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
