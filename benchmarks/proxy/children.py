"""Processes under test: started with a line of JSON as their greeting, asked by lines, watched through /proc."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
from collections import deque
from pathlib import Path
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")
_PATIENCE = 120.0
"""Seconds that a child may take for its greeting or an answer."""


class ChildError(Exception):
    """A child did not start, or ended before it answered. The message holds the end of its standard error."""


class Child:
    """A process that says one JSON value per line. Other lines of its output are skipped.

    Args:
        command: program and arguments.
        folder: its working directory.
        environment: added to this process's.
        silent: it greets with something other than JSON; read that with `line`.
    """

    def __init__(
        self, command: list[str], folder: Path, environment: dict[str, str] | None = None, *, silent: bool = False
    ) -> None:
        self._errors: deque[str] = deque(maxlen=20)
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._drain, daemon=True).start()
        self.greeting: Any = None if silent else self._value()

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self.process.pid

    def ask(self, line: str) -> Any:
        """Send a line; return the JSON value that comes back."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._value()

    def line(self) -> str:
        """Return the next line of output.

        Raises:
            ChildError: the child ended.
        """
        assert self.process.stdout is not None
        watchdog = threading.Timer(_PATIENCE, self.kill)
        watchdog.start()
        try:
            text = self.process.stdout.readline()
        finally:
            watchdog.cancel()
        if not text:
            self.process.wait(10)
            raise ChildError(f"ended with status {self.process.returncode}: {' | '.join(self._errors)[-1500:]}")
        return text

    def cpu(self) -> float:
        """Return the CPU seconds that the process and those under it have used, user and system, threads included."""
        return sum(_cpu(pid) for pid in _family(self.pid))

    def peak_bytes(self) -> int:
        """Return the largest resident size that the process ever had."""
        for row in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if row.startswith("VmHWM:"):
                return int(row.split()[1]) * 1024
        raise ChildError(f"process {self.pid} has no VmHWM")

    def kill(self) -> None:
        """SIGKILL it and what it started."""
        if self.process.poll() is None:
            under = [os.pidfd_open(pid) for pid in _family(self.pid)[1:]]
            os.killpg(self.process.pid, signal.SIGKILL)
            for handle in under:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            for handle in under:
                select.select([handle], [], [])
                os.close(handle)
        self.process.wait()

    def stop(self) -> None:
        """SIGTERM it and wait; SIGKILL it when that takes long."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()

    def _value(self) -> Any:
        while True:
            try:
                return json.loads(self.line())
            except ValueError:
                continue

    def _drain(self) -> None:
        assert self.process.stderr is not None
        for text in self.process.stderr:
            self._errors.append(text.rstrip())


def _family(pid: int) -> list[int]:
    """Return a process and all that it started, theirs too."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(member for child in children for member in _family(int(child)))]


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
