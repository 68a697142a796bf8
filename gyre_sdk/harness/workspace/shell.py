"""A shell whose state is kept from command to command, while each command has all the guarantees of `exec`."""

from __future__ import annotations

import secrets
import shlex
import threading
from collections.abc import Callable, Mapping
from typing import Any

from gyre_sdk.errors import CommandFailed, WorkspaceError
from gyre_sdk.harness.workspace.carrying import carried, library
from gyre_sdk.records import ExecResult


class Shell:
    """Implements `ports.Shell`; see the module `carrying` for what is kept.

    Args:
        exec: the `exec` of its workspace.
        folder: where its files are kept inside; the shell's user can write there.
        shell: path of the shell inside.
        cwd, env, user: see `ports.Workspace.exec`.
    """

    def __init__(
        self,
        exec: Callable[..., ExecResult],
        folder: str,
        shell: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> None:
        self._exec = exec
        self._shell = shell
        self._state = f"{folder}/shell-{secrets.token_hex(8)}"
        self._user = user
        self._start: dict[str, Any] = {"cwd": cwd, "env": env}
        self._lock = threading.Lock()
        self._closed = False
        self._library = library(shell)
        made = exec(f"umask 077; cat >{shlex.quote(self._state)}.lib", input=self._library, user=user)
        if made.exit_code != 0:
            raise WorkspaceError(f"a shell cannot be started, {folder} cannot be written: {made.stderr.strip()[:300]}")

    def run(
        self, cmd: str, timeout: float | None = None, *, input: bytes | str | None = None, check: bool = False
    ) -> ExecResult:
        """See `ports.Shell`."""
        with self._lock:
            if self._closed:
                raise WorkspaceError("the shell is closed; open another one")
            code = carried(cmd, self._state, self._shell)
            result = self._exec(code, timeout=timeout, user=self._user, input=input, **self._start)
        if check and result.exit_code != 0:
            raise CommandFailed(cmd, result)
        return result

    def close(self) -> None:
        """See `ports.Shell`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            path = shlex.quote(self._state)
            try:
                self._exec(f"rm -f {path} {path}.new {path}.lib {path}.cmd", user=self._user, timeout=30.0)
            except WorkspaceError:  # the workspace is dead, and its files with it
                pass

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
