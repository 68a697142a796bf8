"""Ending a blocking call from another thread: how a cancelled `await` reaches the command that it started."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Cancelled(Exception):
    """The call was given up by its caller. Internal: whoever cancels catches it."""


class Cancellation:
    """A wish to end what runs under it; it can come before, during or after."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._acts: list[Callable[[], None]] = []
        self.wished = False

    def cancel(self) -> None:
        """Wish it. Idempotent."""
        with self._lock:
            self.wished = True
            acts, self._acts = self._acts, []
        for act in acts:
            act()

    @contextmanager
    def calls(self, act: Callable[[], None]) -> Iterator[None]:
        """Have `act` called once at a wish that comes during the block, from the wisher's thread.

        Raises:
            Cancelled: it was wished already.
        """
        with self._lock:
            if self.wished:
                raise Cancelled
            self._acts.append(act)
        try:
            yield
        finally:
            with self._lock:
                if act in self._acts:
                    self._acts.remove(act)


current: ContextVar[Cancellation | None] = ContextVar("gyre_cancellation", default=None)
"""What the calls of this context run under: a context variable, so that wrappers between need not pass it on."""
