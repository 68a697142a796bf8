"""What the harness needs from the world, as Protocols. Implementations live elsewhere; tests bring real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol

from gyre_sdk.events import Event
from gyre_sdk.records import ExecResult, FileInfo


class Clock(Protocol):
    """A source of time, passed in so that tests can turn it."""

    def time(self) -> float:
        """Return seconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        ...


class Process(Protocol):
    """A command that runs beside its caller. It ends with its workspace, or as a block of it (`with`) does."""

    def read(self, timeout: float | None = None, *, stream: Literal["stdout", "stderr"] = "stdout") -> str:
        """Return what it wrote since the last read, waiting for something; "" once its output has ended.

        A character that has come only in part waits for its rest. Of output that nobody reads, the head and the tail are
        kept, with a mark between.

        Raises:
            TimeoutError: it wrote nothing within `timeout` seconds.
        """
        ...

    def write(self, data: bytes | str) -> None:
        """Send to its standard input; text as UTF-8. Blocks while it does not read.

        Raises:
            WorkspaceError: it does not take input any more.
        """
        ...

    def close_input(self) -> None:
        """End its standard input. Idempotent."""
        ...

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit code; 137 when it was killed.

        Raises:
            TimeoutError: it still runs after `timeout` seconds.
        """
        ...

    def kill(self) -> None:
        """Kill it and all that it started, detached children too. Idempotent."""
        ...

    def __enter__(self) -> Process: ...

    def __exit__(self, *exc: object) -> None: ...


class Shell(Protocol):
    """Commands one after the other that keep the shell's state: working directory, variables, functions, options.

    Each command has the guarantees of `Workspace.exec`: none can break the next one. One that is killed, or that the shell
    cannot parse, leaves the state as it was.
    """

    def run(
        self, cmd: str, timeout: float | None = None, *, input: bytes | str | None = None, check: bool = False
    ) -> ExecResult:
        """Run a command; see `Workspace.exec`. Commands of several threads run one after the other."""
        ...

    def close(self) -> None:
        """Forget the state. What commands left running lives on. Idempotent."""
        ...

    def __enter__(self) -> Shell: ...

    def __exit__(self, *exc: object) -> None: ...


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

    def start(
        self,
        cmd: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Process:
        """Start a shell command and return at once; for the arguments see `exec`."""
        ...

    def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None, user: str | None = None) -> Shell:
        """Open a shell whose state is kept from command to command; the arguments are its state at the start."""
        ...

    def read(self, path: str) -> bytes:
        """Return a file's bytes, up to 100 MiB; `download` takes 1 GiB."""
        ...

    def ls(self, path: str = ".") -> list[FileInfo]:
        """Return what a folder holds, by name, hidden files too; of a file, the file itself."""
        ...

    def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """Create or replace a file, and the folders above it."""
        ...

    def write_many(self, files: Mapping[str, bytes], folder: str) -> None:
        """Write files (path below `folder` -> content) at once; content that starts with `#!` is executable."""
        ...

    def upload(self, local: Path | str, path: str) -> None:
        """Copy a local file or folder (its contents) to `path`."""
        ...

    def download(self, path: str, local: Path | str) -> None:
        """Copy a file or folder of the workspace, of 1 GiB at most, to a local path; a link is followed where it is the path.

        What holds links that lead outside of it, devices or pipes is refused.
        """
        ...

    def kill_all(self) -> None:
        """Kill every process that commands started; the workspace stays usable."""
        ...

    def close(self) -> None:
        """Remove the workspace. Idempotent; never raises for a workspace that is already gone."""
        ...


Observer = Callable[[Event], None]
"""Receives events. Called from any thread; an observer that raises is dropped, never the run."""
