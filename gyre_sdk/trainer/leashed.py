"""One process on a leash (`leash.py`), on this machine: started, asked whether it runs, ended with all that it started."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

__all__ = ["STOP_TIMEOUT", "Leashed", "Process"]

STOP_TIMEOUT = 10.0
"""Seconds between the polite signal and the one that ends what is left."""
_PLACE = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "RAY_JOB_ID", "RAY_RAYLET_PID"),
)
"""Variables that tell a process its place among others; not for its children."""

_log = logging.getLogger("gyre.trainer")


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
    ) -> None:
        # `-P`: another environment takes nothing from the folder we are in, such as the metadata of a checkout
        runs = [sys.executable] if python is None else [str(python), "-P"]
        self.process = subprocess.Popen(
            [*runs, "-m", "gyre_sdk.trainer.leash", *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
            env={name: value for name, value in os.environ.items() if name not in _PLACE} | dict(environment or {}),
        )
        self.pid = self.process.pid

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
        """Ask the group to end."""
        if self.process.poll() is None:
            self._signal(signal.SIGTERM)

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

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # the group is gone; a group of zombies answers with the second on some systems
