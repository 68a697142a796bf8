"""A run's hold on a workspace of a pool."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from gyre_sdk.errors import WorkspaceError, WorkspaceUnavailable
from gyre_sdk.harness.aio import AsyncWorkspace
from gyre_sdk.harness.workspace.docker import DockerWorkspace
from gyre_sdk.harness.workspace.hardening import Phase
from gyre_sdk.harness.workspace.local import LocalWorkspace
from gyre_sdk.harness.workspace.process import Process
from gyre_sdk.harness.workspace.shell import Shell
from gyre_sdk.records import ExecResult, FileInfo


class PooledWorkspace:
    """A run's hold on a workspace: dead once given back, so that no run can touch another's."""

    def __init__(self, inner: DockerWorkspace | LocalWorkspace, give_back: Callable[[], None]) -> None:
        self.id = inner.id
        self._inner: DockerWorkspace | LocalWorkspace | None = inner
        self._give_back = give_back
        self._lock = threading.Lock()

    @property
    def inner(self) -> DockerWorkspace | LocalWorkspace:
        """The workspace behind; raises `WorkspaceUnavailable` once it was given back."""
        inner = self._inner
        if inner is None:
            raise WorkspaceUnavailable(f"workspace {self.id} was given back to its pool; take another one")
        return inner

    @property
    def workdir(self) -> str:
        """Where commands run."""
        return self.inner.workdir

    def describe(self) -> str:
        """Say what this workspace is."""
        return f"pooled {self.inner.describe()}"

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
        return self.inner.exec(cmd, timeout=timeout, cwd=cwd, env=env, user=user, input=input, check=check)

    def start(
        self,
        cmd: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Process:
        """See `ports.Workspace`."""
        return self.inner.start(cmd, cwd=cwd, env=env, user=user)

    def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None, user: str | None = None) -> Shell:
        """See `ports.Workspace`."""
        return self.inner.shell(cwd=cwd, env=env, user=user)

    @property
    def aio(self) -> AsyncWorkspace:
        """The same workspace for `async` code."""
        return AsyncWorkspace(self)

    def read(self, path: str) -> bytes:
        """See `ports.Workspace`."""
        return self.inner.read(path)

    def ls(self, path: str = ".") -> list[FileInfo]:
        """See `ports.Workspace`."""
        return self.inner.ls(path)

    def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """See `ports.Workspace`."""
        self.inner.write(path, data, mode=mode)

    def upload(self, local: Path | str, path: str) -> None:
        """See `ports.Workspace`."""
        self.inner.upload(local, path)

    def download(self, path: str, local: Path | str) -> None:
        """See `ports.Workspace`."""
        self.inner.download(path, local)

    def write_many(self, files: Mapping[str, bytes], folder: str) -> None:
        """See `SupervisedWorkspace.write_many`."""
        self.inner.write_many(files, folder)

    def kill_all(self) -> None:
        """See `ports.Workspace`."""
        self.inner.kill_all()

    def enter(self, phase: Phase) -> None:
        """See `DockerWorkspace.enter`; a local workspace has one network for all phases."""
        if isinstance(self.inner, DockerWorkspace):
            self.inner.enter(phase)

    def connect_proxy(self, base_url: str, api_key: str) -> str:
        """See `DockerWorkspace.connect_proxy`."""
        inner = self.inner
        if not isinstance(inner, DockerWorkspace):
            raise WorkspaceError(f"{inner.describe()} takes no proxy inside; use a pool with kind='docker'")
        return inner.connect_proxy(base_url, api_key)

    def snapshot(self, *, keep: bool = False, ttl_s: float | None = None) -> str:
        """See `DockerWorkspace.snapshot`."""
        return self._in_docker().snapshot(keep=keep, ttl_s=ttl_s)

    def fork(self) -> DockerWorkspace:
        """See `DockerWorkspace.fork`: what it gives is its own, not the pool's."""
        return self._in_docker().fork()

    def expose(self, port: int) -> tuple[str, int]:
        """See `DockerWorkspace.expose`; it ends when the workspace is given back."""
        return self._in_docker().expose(port)

    def _in_docker(self) -> DockerWorkspace:
        inner = self.inner
        if not isinstance(inner, DockerWorkspace):
            raise WorkspaceError(
                f"{inner.describe()} is not in Docker: it has no snapshots, forks or ports; use a pool with kind='docker'"
            )
        return inner

    def close(self) -> None:
        """Give the workspace back. Idempotent."""
        with self._lock:
            if self._inner is None:
                return
            self._inner = None
        self._give_back()

    def __enter__(self) -> PooledWorkspace:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
