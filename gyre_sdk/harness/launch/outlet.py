"""Where the output of agents goes: as it is for one, with the run's number before each line for many."""

from __future__ import annotations

import threading
from collections.abc import Callable

Write = Callable[[bytes], None]
_LINE_LIMIT = 65_536
"""Bytes after which a line without an end is shown."""


class Outlet:
    """Writes several outputs to one place, whole lines at a time. Thread-safe.

    Args:
        write: gets bytes to show.
        labelled: whether each line begins with whose it is.
    """

    def __init__(self, write: Write, *, labelled: bool) -> None:
        self._write, self._labelled = write, labelled
        self._lock = threading.Lock()

    def of(self, label: str) -> Stream:
        """Return the outlet of one run."""
        return Stream(self._show, f"[{label}] ".encode() if self._labelled else None)

    def _show(self, data: bytes) -> None:
        with self._lock:
            self._write(data)


class Stream:
    """The output of one run on its way to the outlet."""

    def __init__(self, show: Write, prefix: bytes | None) -> None:
        self._show, self._prefix = show, prefix
        self._rest = b""

    def __call__(self, data: bytes) -> None:
        """Show some output."""
        if self._prefix is None:
            self._show(data)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LINE_LIMIT:
            lines, self._rest = [*lines, self._rest], b""
        if lines:
            self._show(b"".join(self._prefix + line + b"\n" for line in lines))

    def close(self) -> None:
        """Show what is left of a last line without an end."""
        if self._rest:
            self(b"\n")
