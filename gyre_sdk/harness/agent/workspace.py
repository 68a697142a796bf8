"""The run's workspace as a lane sees it: bounded by what is left of its time, seen by hooks and observers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gyre_sdk.errors import CommandFailed, HookError, WorkspaceError
from gyre_sdk.events import ToolRan
from gyre_sdk.harness.agent.context import RunContext
from gyre_sdk.harness.aio import AsyncWorkspace
from gyre_sdk.harness.hooks import LaneInfo
from gyre_sdk.harness.ports import Process, Shell, Workspace
from gyre_sdk.harness.tools import ToolOutput, ToolUse
from gyre_sdk.records import ExecResult, FileInfo

_DENIED = 126
"""Exit code of a command that a hook refused: the shell's for one that may not be run."""


_OPTIONS = ("timeout", "cwd", "env", "user", "input")
_ARGUMENTS = {"cmd", *_OPTIONS}


class LaneWorkspace:
    """The workspace of a lane; see `ports.Workspace`.

    Args:
        hooked: whether `PreToolUse` and `PostToolUse` hooks are told of commands. Tools tell them themselves.
    """

    def __init__(self, context: RunContext, info: LaneInfo, *, hooked: bool = True) -> None:
        self._context = context
        self._info = info
        self._hooked = hooked

    @property
    def id(self) -> str:
        """Name of the workspace."""
        return self._context.workspace.id

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
        """See `ports.Workspace`. A command that a hook denies ends with exit code 126 and the reason as its error output.

        Raises:
            LimitExceeded: the run or the lane has no time left.
        """
        asked = {"cmd": cmd, "timeout": timeout, "cwd": cwd, "env": env, "user": user, "input": input}
        return self.run(self._context.workspace.exec, asked, check=check)

    def start(
        self,
        cmd: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Process:
        """See `ports.Workspace`.

        Raises:
            CommandFailed: a hook denied it; the reason is its error output.
        """
        started: list[Process] = []

        def begin(cmd: str, *, timeout: float | None, **given: Any) -> ExecResult:
            started.append(self._context.workspace.start(cmd, **given))
            return ExecResult(exit_code=0, stdout="", stderr="")

        self.run(begin, {"cmd": cmd, "cwd": cwd, "env": env, "user": user}, tool="start", check=True)
        return started[0]

    def shell(
        self, *, cwd: str | None = None, env: Mapping[str, str] | None = None, user: str | None = None
    ) -> LaneShell:
        """See `ports.Workspace`."""
        return LaneShell(self, self._context.workspace.shell(cwd=cwd, env=env, user=user))

    @property
    def aio(self) -> AsyncWorkspace:
        """The same workspace for `async` code."""
        return AsyncWorkspace(self)

    def read(self, path: str) -> bytes:
        """See `ports.Workspace`."""
        return self._context.workspace.read(path)

    def ls(self, path: str = ".") -> list[FileInfo]:
        """See `ports.Workspace`."""
        return self._context.workspace.ls(path)

    def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """See `ports.Workspace`."""
        self._context.workspace.write(path, data, mode=mode)

    def write_many(self, files: Mapping[str, bytes], folder: str) -> None:
        """See `ports.Workspace`."""
        self._context.workspace.write_many(files, folder)

    def upload(self, local: Path | str, path: str) -> None:
        """See `ports.Workspace`."""
        self._context.workspace.upload(local, path)

    def download(self, path: str, local: Path | str) -> None:
        """See `ports.Workspace`."""
        self._context.workspace.download(path, local)

    def snapshot(self, *, keep: bool = False) -> str:
        """See `DockerWorkspace.snapshot`."""
        made: str = self._in_docker("snapshot")(keep=keep)
        return made

    def fork(self) -> Workspace:
        """See `DockerWorkspace.fork`; the caller closes what it gives."""
        forked: Workspace = self._in_docker("fork")()
        return forked

    def expose(self, port: int) -> tuple[str, int]:
        """See `DockerWorkspace.expose`."""
        address: tuple[str, int] = self._in_docker("expose")(port)
        return address

    def kill_all(self) -> None:
        """See `ports.Workspace`."""
        self._context.workspace.kill_all()

    def close(self) -> None:
        """Do nothing: the session closes the workspace."""

    # -- inside ------------------------------------------------------------------------------------------------------

    def run(
        self, work: Callable[..., ExecResult], asked: Mapping[str, Any], *, tool: str = "exec", check: bool = False
    ) -> ExecResult:
        """Run a command by `work`, within the time that is left, seen by hooks under the name `tool`."""
        asked = {name: value for name, value in asked.items() if value is not None}
        result = self._with_hooks(work, tool, asked) if self._hooked else self._bounded(work, **asked)
        if check and result.exit_code != 0:
            raise CommandFailed(asked["cmd"], result)
        return result

    def _in_docker(self, name: str) -> Any:
        """Return a method that only containers have."""
        method = getattr(self._context.workspace, name, None)
        if method is None:
            raise WorkspaceError(f"workspace {self.id} has no {name}(); open the session with workspace='docker'")
        return method

    def _bounded(
        self, work: Callable[..., ExecResult], cmd: str, *, timeout: float | None = None, **given: Any
    ) -> ExecResult:
        context, lane = self._context, self._info.lane
        left = context.meter.left_s(lane)
        limit = timeout if left is None else min(left, timeout if timeout is not None else left)
        result = work(cmd, timeout=limit, **given)
        context.observer(ToolRan(context.clock.time(), context.run, cmd, result.exit_code, result.duration_s))
        context.meter.check(lane)
        return result

    def _with_hooks(self, work: Callable[..., ExecResult], tool: str, asked: Mapping[str, Any]) -> ExecResult:
        def use(given: Mapping[str, Any]) -> ToolOutput:
            if given is not asked and not (set(given) <= _ARGUMENTS and isinstance(given.get("cmd"), str)):
                raise HookError(
                    f"a PreToolUse hook edited the input of {tool} to {given!r}; it takes cmd and {', '.join(_OPTIONS)}"
                )
            done = self._bounded(work, **given)
            return ToolOutput(done.stdout, done.exit_code != 0, done)

        output = ToolUse(self._context.hooks, self._context.clock, self._info, tool).run(asked, use)
        if output.result is None:
            return ExecResult(exit_code=_DENIED, stdout="", stderr=output.text)
        return msgspec.structs.replace(output.result, stdout=output.text)


class LaneShell:
    """A shell of a lane; see `ports.Shell`. Hooks see its commands as those of `exec`."""

    def __init__(self, workspace: LaneWorkspace, shell: Shell) -> None:
        self._workspace = workspace
        self._shell = shell

    def run(
        self, cmd: str, timeout: float | None = None, *, input: bytes | str | None = None, check: bool = False
    ) -> ExecResult:
        """See `ports.Shell`; what hooks and limits do to it is as for `LaneWorkspace.exec`."""
        asked = {"cmd": cmd, "timeout": timeout, "input": input}
        return self._workspace.run(self._shell.run, asked, check=check)

    def close(self) -> None:
        """See `ports.Shell`."""
        self._shell.close()

    def __enter__(self) -> LaneShell:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
