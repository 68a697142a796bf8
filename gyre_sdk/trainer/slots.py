"""Work in order, at most so much of it at a time, without a thread for each piece."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

End = Callable[[], None]
"""Frees the slot of a piece of work. Any thread may call it, once."""
Work = Callable[[End], None]
"""Begins a piece of work, and returns at once; the work calls what it is given when it has ended."""


class Slots:
    """Begins what it is given, in order, as slots become free.

    Args:
        count: pieces of work at a time.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._changed = threading.Condition()
        self._waiting: deque[Work] = deque()
        self._busy = 0
        self._beginning = False
        """A thread is in `_begin` now: it sees what the others bring."""
        self._stopping = False

    def submit(self, work: Work) -> None:
        """Begin a piece of work now, or when its turn comes."""
        with self._changed:
            self._waiting.append(work)
        self._begin()

    def occupy(self, work: Work) -> None:
        """Begin now what is under way already: it has a slot of its own, also where all are taken."""
        with self._changed:
            self._busy += 1
        work(self._end())

    def stop(self, seconds: float) -> bool:
        """Forget what waits; wait for what was begun, for at most `seconds`. True when all of it has ended."""
        give_up = time.monotonic() + seconds
        with self._changed:
            self._stopping = True
            self._waiting.clear()
            while self._busy:
                left = give_up - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def _begin(self) -> None:
        while True:
            with self._changed:
                if self._beginning or self._stopping or not self._waiting or self._busy >= self._count:
                    return
                self._beginning = True
                work = self._waiting.popleft()
                self._busy += 1
            try:
                work(self._end())
            finally:
                with self._changed:
                    self._beginning = False

    def _end(self) -> End:
        ended = threading.Event()

        def end() -> None:
            with self._changed:
                if ended.is_set():
                    return
                ended.set()
                self._busy -= 1
                self._changed.notify_all()
            self._begin()

        return end
