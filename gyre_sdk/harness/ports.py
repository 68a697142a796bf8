"""What the harness needs from the world, as Protocols. Implementations live elsewhere; tests bring real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from gyre_sdk.events import Event
from gyre_sdk.records import ExecResult


class Clock(Protocol):
    """A source of time, passed in so that tests can turn it."""

    def time(self) -> float:
        """Return seconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        ...


class Workspace(Protocol):
    """Where an agent's tools run. All paths are inside the workspace; all methods block.

    Raises (any method): `WorkspaceUnavailable` once the workspace is dead, `WorkspaceError` for other failures of the
    workspace itself. A command that fails is a result, not an exception, unless the caller asks with `check`.
    """

    @property
    def id(self) -> str:
        """Name of the workspace, for messages and labels."""
        ...

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
        """Run a shell command to its end; at `timeout` seconds kill its whole process tree.

        Args:
            cmd: shell code, run by bash where the workspace has it, else by sh.
            timeout: seconds; None waits for ever.
            cwd: folder, relative to the working directory of the task.
            env: variables besides those of the task.
            user: name or `uid[:gid]`; None is the task's user.
            input: standard input; text is sent as UTF-8. None is an empty one.
            check: raise `CommandFailed` for an exit code other than 0.
        """
        ...

    def read(self, path: str) -> bytes:
        """Return a file's bytes."""
        ...

    def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """Create or replace a file, and the folders above it."""
        ...

    def write_many(self, files: Mapping[str, bytes], folder: str) -> None:
        """Write files (path below `folder` -> content) at once; content that starts with `#!` is executable."""
        ...

    def upload(self, local: Path, path: str) -> None:
        """Copy a local file or folder (its contents) to `path`."""
        ...

    def download(self, path: str, local: Path) -> None:
        """Copy a file or folder of the workspace to a local path."""
        ...

    def kill_all(self) -> None:
        """Kill every process that commands started; the workspace stays usable."""
        ...

    def close(self) -> None:
        """Remove the workspace. Idempotent; never raises for a workspace that is already gone."""
        ...


Observer = Callable[[Event], None]
"""Receives events. Called from any thread; an observer that raises is dropped, never the run."""
