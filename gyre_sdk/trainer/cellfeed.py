"""Records what cells do in the store, beside what they do it for: a run waits for none of it, and none of it fails one."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading

import msgspec

from gyre_sdk.errors import JournalError
from gyre_sdk.events import CellsSeen, Event
from gyre_sdk.harness.hooks import Fanout, unobserved
from gyre_sdk.harness.ports import Observer
from gyre_sdk.journal import Journal, Write
from gyre_sdk.view.cells import RECORDED, STREAM, EventsMissed, RecordingStarted

_PERIOD = 0.5
"""Seconds between two batches."""
_CAPACITY = 20_000
"""Events that may wait for the disk."""
_SAME_SECONDS = 10.0
"""How long looks at the fleet that see the same are one."""
_CLOSE = 5.0
"""Seconds that `stop` waits for the last batch; a disk that takes no more is left behind."""

_log = logging.getLogger("gyre.trainer")


class CellRecorder:
    """An observer that passes every event on and appends those of cells to the stream `cells`, a batch at a time.

    Calling it takes microseconds and never waits. What the disk does not take is dropped, counted, and the count is
    recorded with the next batch.

    Args:
        journal: where to record.
        observer: learns of every event first; one that raises is dropped, as everywhere.
        capacity: events that may wait for the disk.
    """

    def __init__(self, journal: Journal, observer: Observer = unobserved, *, capacity: int = _CAPACITY) -> None:
        self._journal = journal
        self._observer = Fanout(observer)
        self._capacity = capacity
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="cell recorder", daemon=True)
        self._counting = threading.Lock()
        self._unsaid = 0
        """Events missed since the store last learned how many."""
        self._began = False
        self._at = 0.0
        """Time of the last event that was recorded."""
        self._seen: CellsSeen | None = None
        """The last look that was recorded."""
        self._held: CellsSeen | None = None
        """A later one that saw the same."""
        self.missed = 0
        """Events that were not recorded."""

    def __call__(self, event: Event) -> None:
        """Take an event, from any thread."""
        self._observer(event)
        if not isinstance(event, RECORDED):
            return
        if self._queue.qsize() < self._capacity:
            self._queue.put(event)
        else:
            self._miss(1)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Record what is there, then end. Idempotent."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE)

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        try:
            while not self._stopping.wait(_PERIOD):
                self._record([event for event in self._waiting() if self._is_news(event)])
            events = [event for event in self._waiting() if self._is_news(event)]
            self._record([*events, self._held] if self._held is not None else events)
        except Exception:  # boundary: a recorder never fails a training
            _log.warning("what cells do is not recorded any more", exc_info=True)

    def _waiting(self) -> list[Event]:
        """Return what has come in, at most one queue full."""
        found: list[Event] = []
        with contextlib.suppress(queue.Empty):
            while len(found) < self._capacity:
                found.append(self._queue.get_nowait())
        return found

    def _record(self, events: list[Event]) -> None:
        """Append events and wait until they are durable: at most one batch is under way."""
        with self._counting:
            unsaid, self._unsaid = self._unsaid, 0
        if not (events or unsaid):
            return
        at = events[0].at if events else self._at
        self._at = events[-1].at if events else at
        start = None if self._began else self._append(RecordingStarted(at))
        note = self._append(EventsMissed(at, unsaid)) if unsaid else None
        writes = [self._append(event) for event in events]
        self._began = self._began or _durable(start)
        lost = sum(not _durable(write) for write in writes)
        if lost and not self.missed:
            _log.warning("the store did not take %d of %d events of cells", lost, len(events))
        self._miss(lost, unsaid=0 if _durable(note) else unsaid)

    def _append(self, event: Event) -> Write[int] | None:
        try:
            return self._journal.append(STREAM, type(event).__name__, event, at=event.at)
        except (JournalError, TypeError, ValueError, OverflowError):  # closed, or what no store can hold
            return None

    def _is_news(self, event: Event) -> bool:
        """Tell whether an event is to be recorded: of equal looks at the fleet only one in a while is."""
        if not isinstance(event, CellsSeen):
            return True
        before, self._held = self._seen, None
        if before is not None and event.at - before.at < _SAME_SECONDS and _same(before, event):
            self._held = event
            return False
        self._seen = event
        return True

    def _miss(self, number: int, *, unsaid: int = 0) -> None:
        """Count events as missed, with others that are counted already but that the store does not know of."""
        with self._counting:
            self.missed += number
            self._unsaid += number + unsaid


def _durable(write: Write[int] | None) -> bool:
    """Wait for a write, and tell whether it is in the store."""
    return write is not None and write.exception() is None


def _same(one: CellsSeen, other: CellsSeen) -> bool:
    return msgspec.structs.replace(one, at=other.at) == other
