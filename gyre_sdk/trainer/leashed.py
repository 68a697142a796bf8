"""One process on a leash (`leash.py`), on this machine: started, asked whether it runs, ended with all that it started."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

__all__ = ["STOP_TIMEOUT", "Inheritance", "Leashed", "Process"]

STOP_TIMEOUT = 10.0
"""Seconds between the polite signal and the one that ends what is left."""
_PLACE = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "RAY_JOB_ID", "RAY_RAYLET_PID"),
)
"""Variables that tell a process its place among others; not for its children."""

_log = logging.getLogger("gyre.trainer")


@dataclass(frozen=True, slots=True)
class Inheritance:
    """How a successor of this process takes over a child (`orphan.py`)."""

    listening: socket.socket
    """Where the successor connects; closed here once the child has it."""
    key: str
    """That the successor shows."""
    seconds: float
    """How long the child waits for it."""
    record: Path
    """File without which nobody would find the child: it ends when that is gone."""


class Process(Protocol):
    """A started process, here or on another machine."""

    pid: int
    """As its machine numbers it."""
    address: str
    """Of its machine."""
    port: int
    """Where it was told to listen; 0 when it chooses."""

    def ended(self) -> str | None:
        """Return what it ended with, or None while it runs. What it said until then is in the log."""

    def end(self) -> None:
        """End it, and what it started: SIGTERM, and SIGKILL for what is left after a while. Idempotent."""


class Leashed:
    """A module that runs as a process in a group of its own, with its output in a file or pipe.

    Start it from a thread that lives as long as it may: when the thread ends, the kernel ends the process.

    Args:
        arguments: the module and its arguments.
        output: takes what it says.
        python: what runs it, with gyre-sdk installed; None: what runs this process.
        environment: added to this process's.
        folder: where it runs; None: here.
        inheritance: how it is taken over when this process was killed; None: it ends with this process.

    Raises:
        OSError: it could not be started.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        output: IO[bytes] | int,
        *,
        python: Path | None = None,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        inheritance: Inheritance | None = None,
    ) -> None:
        # `-P`: another environment takes nothing from the folder we are in, such as the metadata of a checkout
        runs = [sys.executable] if python is None else [str(python), "-P"]
        inherited = () if inheritance is None else (inheritance.listening.fileno(),)
        linger = [word for descriptor in inherited for word in ("--linger", str(descriptor))]
        self.process = subprocess.Popen(
            [*runs, "-m", "gyre_sdk.trainer.leash", *linger, *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=inherited,
            cwd=folder,
            env={name: value for name, value in os.environ.items() if name not in _PLACE} | dict(environment or {}),
        )
        self.pid = self.process.pid
        if inheritance is not None:
            self._bequeath(inheritance)

    def ended(self) -> str | None:
        """Return what the process ended with, `signal SIGKILL` or `exit status 3`, or None while it runs."""
        status = self.process.poll()
        if status is None or status >= 0:
            return None if status is None else f"exit status {status}"
        try:
            return f"signal {signal.Signals(-status).name}"
        except ValueError:
            return f"signal {-status}"

    def terminate(self) -> None:
        """Ask the group to end. What was stopped hears it too."""
        if self.process.poll() is None:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the group. Idempotent."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def end(self) -> None:
        """End the group: SIGTERM, and SIGKILL for what is left after a while. Idempotent."""
        self.terminate()
        try:
            self.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            _log.warning("process %d did not end in %.0f s and is killed", self.pid, STOP_TIMEOUT)
        self.kill()

    def _bequeath(self, inheritance: Inheritance) -> None:
        """Tell the watcher what it waits for."""
        said = {"key": inheritance.key, "seconds": inheritance.seconds, "record": str(inheritance.record.resolve())}
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it ended already
            self.process.stdin.write(json.dumps(said).encode() + b"\n")
            self.process.stdin.flush()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # the group is gone; a group of zombies answers with the second on some systems
