"""Workspaces for `async` code: the same names, each call in a thread; a cancelled call ends what it runs.

A cancelled `exec` or `run` kills its command's whole process tree before the cancellation goes on; a cancelled `read` or
`wait` of a process leaves that alone.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from gyre_sdk.errors import GyreError, WorkspaceError
from gyre_sdk.harness.cancelling import Cancellation, Cancelled, current
from gyre_sdk.harness.ports import Process, Shell, Workspace
from gyre_sdk.records import ExecResult, FileInfo

P = ParamSpec("P")
R = TypeVar("R")

_MANY = 1024
"""Calls that wait at the same time; threads are made as needed."""
_threads: list[ThreadPoolExecutor] = []
_making = threading.Lock()


async def in_thread(act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a blocking call of a workspace in a thread; when this is cancelled, so is the call, and its end is awaited."""
    wish = Cancellation()
    context = contextvars.copy_context()
    context.run(current.set, wish)
    call = asyncio.get_running_loop().run_in_executor(_pool(), partial(context.run, act, *args, **kwargs))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        wish.cancel()
        call.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # told below, or nobody waits any more
        try:
            _discard(await asyncio.shield(call))
        except (Cancelled, GyreError, TimeoutError):
            pass
        raise


def _pool() -> ThreadPoolExecutor:
    with _making:
        if not _threads:
            _threads.append(ThreadPoolExecutor(_MANY, thread_name_prefix="gyre-aio"))
        return _threads[0]


def _discard(result: object) -> None:
    """End what a call opened before its cancellation reached it."""
    leave = getattr(result, "__exit__", None)
    if leave is not None:
        leave(None, None, None)


class AsyncProcess:
    """See `ports.Process`."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def read(self, timeout: float | None = None, *, stream: Literal["stdout", "stderr"] = "stdout") -> str:
        """See `ports.Process`."""
        return await in_thread(self._process.read, timeout, stream=stream)

    async def write(self, data: bytes | str) -> None:
        """See `ports.Process`."""
        await in_thread(self._process.write, data)

    async def close_input(self) -> None:
        """See `ports.Process`."""
        await in_thread(self._process.close_input)

    async def poll(self) -> int | None:
        """See `ports.Process`."""
        return await in_thread(self._process.poll)

    async def wait(self, timeout: float | None = None) -> int:
        """See `ports.Process`."""
        return await in_thread(self._process.wait, timeout)

    async def kill(self) -> None:
        """See `ports.Process`."""
        await in_thread(self._process.kill)

    async def __aenter__(self) -> AsyncProcess:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await in_thread(self._process.__exit__, None, None, None)


class AsyncShell:
    """See `ports.Shell`."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    async def run(
        self, cmd: str, timeout: float | None = None, *, input: bytes | str | None = None, check: bool = False
    ) -> ExecResult:
        """See `ports.Shell`."""
        return await in_thread(self._shell.run, cmd, timeout, input=input, check=check)

    async def close(self) -> None:
        """See `ports.Shell`."""
        await in_thread(self._shell.close)

    async def __aenter__(self) -> AsyncShell:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class AsyncWorkspace:
    """See `ports.Workspace`. A workspace's `aio` gives this."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    @property
    def id(self) -> str:
        """See `ports.Workspace`."""
        return self._workspace.id

    async def exec(
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
        return await in_thread(
            self._workspace.exec, cmd, timeout=timeout, cwd=cwd, env=env, user=user, input=input, check=check
        )

    async def start(
        self,
        cmd: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> AsyncProcess:
        """See `ports.Workspace`."""
        return AsyncProcess(await in_thread(self._workspace.start, cmd, cwd=cwd, env=env, user=user))

    async def shell(
        self, *, cwd: str | None = None, env: Mapping[str, str] | None = None, user: str | None = None
    ) -> AsyncShell:
        """See `ports.Workspace`."""
        return AsyncShell(await in_thread(self._workspace.shell, cwd=cwd, env=env, user=user))

    async def read(self, path: str) -> bytes:
        """See `ports.Workspace`."""
        return await in_thread(self._workspace.read, path)

    async def ls(self, path: str = ".") -> list[FileInfo]:
        """See `ports.Workspace`."""
        return await in_thread(self._workspace.ls, path)

    async def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """See `ports.Workspace`."""
        await in_thread(self._workspace.write, path, data, mode=mode)

    async def write_many(self, files: Mapping[str, bytes], folder: str) -> None:
        """See `ports.Workspace`."""
        await in_thread(self._workspace.write_many, files, folder)

    async def upload(self, local: Path | str, path: str) -> None:
        """See `ports.Workspace`."""
        await in_thread(self._workspace.upload, local, path)

    async def download(self, path: str, local: Path | str) -> None:
        """See `ports.Workspace`."""
        await in_thread(self._workspace.download, path, local)

    async def snapshot(self, **options: Any) -> str:
        """See `DockerWorkspace.snapshot`."""
        return str(await in_thread(self._docker("snapshot"), **options))

    async def fork(self) -> AsyncWorkspace:
        """See `DockerWorkspace.fork`."""
        return AsyncWorkspace(await in_thread(self._docker("fork")))

    async def expose(self, port: int) -> tuple[str, int]:
        """See `DockerWorkspace.expose`."""
        address: tuple[str, int] = await in_thread(self._docker("expose"), port)
        return address

    async def kill_all(self) -> None:
        """See `ports.Workspace`."""
        await in_thread(self._workspace.kill_all)

    async def close(self) -> None:
        """See `ports.Workspace`."""
        await in_thread(self._workspace.close)

    def _docker(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] | None = getattr(self._workspace, name, None)
        if method is None:
            raise WorkspaceError(f"workspace {self.id} cannot {name}; use a Docker workspace")
        return method

    async def __aenter__(self) -> AsyncWorkspace:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
