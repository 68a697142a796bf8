"""What a workspace was last told to do and what it said, for the message when it turns out to be dead."""

from __future__ import annotations

import threading

from gyre_sdk.records import ExecResult

_COMMAND, _OUTPUT = 120, 300
"""Characters of a command and of an output that a message shows."""


class Last:
    """Remembers the command under way and the output before it. Methods may be called from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[str] = []
        self._output = ""

    def begins(self, cmd: str) -> None:
        """Note a command."""
        with self._lock:
            self._running.append(cmd)

    def ended(self, cmd: str, result: ExecResult | None) -> None:
        """Note its end; None is one that the workspace did not survive, or that could not run."""
        with self._lock:
            if result is not None:
                self._running.remove(cmd)
                self._output = (result.stdout + result.stderr).strip()[-_OUTPUT:] or self._output

    def __str__(self) -> str:
        with self._lock:
            doing = self._running[-1].strip() if self._running else ""
            said = self._output
        if len(doing) > _COMMAND:
            doing = f"{doing[:_COMMAND]}..."
        told = f"while it ran {doing!r}" if doing else ""
        heard = f"last output before: {said!r}" if said else "no output before"
        return "; ".join(part for part in (told, heard) if part)
