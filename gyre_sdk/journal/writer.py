"""The one writer of a store in a process: commits what has queued up, together.

While one commit waits for the disk, the next writes queue; they then share one commit. An operation that fails
is rolled back alone and only its own future gets the error: the batch is then run again with savepoints, which cost
as much as the writes themselves. So an operation may run twice.

A thread does the work. A process that lives in an event loop can have the loop run the operations and leave the thread
only the wait for the disk (`join_loop`; see `wal`): SQLite gives the interpreter's lock away at each statement, and a thread that
has to win it back from a busy loop each time makes both slow. Writes asked for in the loop are futures of the loop.

A commit costs as much processor time as several writes. So the loop commits when it has nothing else to do, and a few milliseconds
after the first write at the latest: what comes meanwhile shares the commit. One that works alone waits for nobody, and on a
quick disk not for the thread either.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from gyre_sdk.errors import GyreError, JournalError
from gyre_sdk.journal.wal import WriteAheadLog

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_MAX_BATCH = 512
_GATHER_SECONDS = 0.01
"""How long a write may wait for others while the loop has other work."""
_REST_SECONDS = 0.00005
"""A turn of the loop that takes less had nothing to do."""
_FEW, _QUICK_SECONDS, _MEMORY = 4, 0.0005, 8
"""The loop itself commits so few writes while commits take less than this, over the last so many: waking the thread and
being woken by it takes as long as a quick disk."""
_IDLE_SECONDS = 0.02
"""How long a write that nobody waits for may wait for others to share a commit with."""
_PATIENCE_MS = 30_000
"""How long another process may hold the store."""
_TURN_SECONDS, _TURNS = 0.001, 100
"""How often the loop asks again for a store that another process holds, and how many times before the thread waits."""
_Future = Future[Any] | asyncio.Future[Any]
_Item = tuple[Callable[[sqlite3.Connection], Any], _Future]
_Outcomes = list[tuple[_Future, Any, Exception | None]]
_REFUSED = (sqlite3.Error, GyreError, ValueError, TypeError, OverflowError)


@dataclass(frozen=True, slots=True)
class _FromLoop:
    """A batch of the loop for the thread to finish."""

    batch: list[_Item]
    outcomes: _Outcomes | None
    """Of operations that are committed and wait for the disk; None: all of it is still to be done."""


_END, _FOLD = _FromLoop([], None), _FromLoop([], None)
"""Ends the thread; folds the log in."""


class Write(Protocol[T_co]):
    """A write under way, durable once it is done. A future of threads, or of the event loop that asked for it."""

    def done(self) -> bool:
        """Return whether it is over."""

    def result(self) -> T_co:
        """Return what the write gives; a future of threads waits for it.

        Raises:
            JournalError: the store refused it.
        """

    def exception(self) -> BaseException | None:
        """Return why the store refused it, or None."""

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """Call `fn` with this write once it is over."""


class Writer:
    """Runs operations on a connection that it alone uses.

    Args:
        connection: whose only user the writer is.
        name: of the store, for the thread's name.
        undone: called in the thread that runs operations when some were rolled back.
    """

    def __init__(self, connection: sqlite3.Connection, name: str, undone: Callable[[], None]) -> None:
        self._connection = connection
        self._log = WriteAheadLog(connection)
        self._broken: OSError | None = None
        """Of the disk: what it holds is unknown, so nothing is called durable any more."""
        self._undone = undone
        self._queue: queue.SimpleQueue[_Item | _FromLoop] = queue.SimpleQueue()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._home = 0
        self._pending: list[_Item] = []
        self._busy = False
        self._sync_seconds = 20 * _QUICK_SECONDS
        """What the disk took lately."""
        self._timer: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._run, name=f"journal {name}", daemon=True)
        self._thread.start()

    def submit(self, operation: Callable[[sqlite3.Connection], T], *, idle: bool = False) -> Write[T]:
        """Queue an operation; its future resolves once it is durable.

        Args:
            operation: what to do.
            idle: nobody waits for it: in a loop it joins the next commit, or has its own after a moment.
        """
        if self._closed:
            raise JournalError("the store is closed")
        loop = self._loop
        if loop is not None and threading.get_ident() == self._home:
            waited: asyncio.Future[T] = loop.create_future()
            self._enqueue((operation, waited), idle)
            return waited
        future: Future[T] = Future()
        if loop is None:
            self._queue.put((operation, future))
        else:
            loop.call_soon_threadsafe(self._enqueue, (operation, future))
        return future

    def join_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run operations in the thread of an event loop, the caller's, until `leave_loop`; futures resolve there."""
        self._connection.execute("PRAGMA busy_timeout=0")
        self._loop, self._home = loop, threading.get_ident()

    def leave_loop(self) -> None:
        """Leave the work to the thread again. Called in the loop's thread, before the loop ends."""
        self._loop = None
        for item in self._pending:
            self._queue.put(item)
        self._pending = []

    def close(self) -> None:
        """Commit what is queued, then end the thread and the connection."""
        if not self._closed:
            self._closed = True
            self._queue.put(_END)
            self._thread.join()
            self._connection.close()
            self._log.close()

    # -- in the loop's thread ----------------------------------------------------------------------------------------

    def _enqueue(self, item: _Item, idle: bool = False) -> None:
        if self._loop is None:
            self._queue.put(item)
            return
        self._pending.append(item)
        if idle:
            if not self._busy and self._timer is None:
                self._timer = self._loop.call_later(_IDLE_SECONDS, self._start)
        else:
            self._start()

    def _start(self) -> None:
        """Have the loop run what is pending, unless a commit is under way: its end does."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._busy and self._pending and self._loop is not None:
            self._busy = True
            self._gather()

    def _pump(self, turns: int = _TURNS) -> None:
        """Commit what has queued up. The thread waits for the disk, and does all of it where the loop cannot."""
        if self._loop is None:
            return
        try:
            if turns:
                self._connection.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
                self._loop.call_later(_TURN_SECONDS, self._pump, turns - 1)
                return
            turns = 0
        batch, self._pending = _wanted(self._pending[:_MAX_BATCH]), self._pending[_MAX_BATCH:]
        outcomes: _Outcomes | None = None
        if turns:
            try:
                outcomes = [(future, operation(self._connection), None) for operation, future in batch]
                self._connection.execute("COMMIT")
            except _REFUSED:
                self._roll_back()
                outcomes = None
        alone = len(batch) <= _FEW and not self._pending
        if alone and outcomes is not None and self._sync_seconds < _QUICK_SECONDS:
            self._finished(self._synced(outcomes))
        else:
            self._queue.put(_FromLoop(batch, outcomes))

    def _finished(self, outcomes: _Outcomes) -> None:
        _resolve(outcomes)
        if self._loop is not None and self._log.due:
            self._queue.put(_FOLD)
        if self._pending and self._loop is not None:
            self._gather()
        else:
            self._busy = False

    def _gather(self) -> None:
        """Commit once the loop has nothing else to do, or soon."""
        if self._loop is not None:
            now = time.perf_counter()
            self._loop.call_soon(self._turned, now, now + _GATHER_SECONDS)

    def _turned(self, before: float, until: float) -> None:
        """See what the turn of the loop since `before` took."""
        now = time.perf_counter()
        if self._loop is not None and now < until and now - before > _REST_SECONDS:
            self._loop.call_soon(self._turned, now, until)
        else:
            self._pump()

    # -- in the writer's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        held: _Item | _FromLoop | None = None
        while True:
            job, held = held or self._queue.get(), None
            if job is _END:
                return
            if job is _FOLD:
                self._log.fold()
                continue
            if isinstance(job, _FromLoop):
                self._finish(job)
                continue
            batch = [job]
            while len(batch) < _MAX_BATCH and not self._queue.empty():
                held = self._queue.get()
                if isinstance(held, _FromLoop):
                    break
                batch.append(held)
                held = None
            _resolve_elsewhere(self._commit(_wanted(batch)))
            if self._log.due:
                self._log.fold()

    def _finish(self, job: _FromLoop) -> None:
        outcomes = self._commit(job.batch) if job.outcomes is None else self._synced(job.outcomes)
        loop = self._loop
        if loop is None or loop.is_closed():
            _resolve_elsewhere(outcomes)
        else:
            loop.call_soon_threadsafe(self._finished, outcomes)

    def _synced(self, outcomes: _Outcomes) -> _Outcomes:
        """Make what was committed durable."""
        began = time.perf_counter()
        try:
            if self._broken is not None:
                raise self._broken
            self._log.sync()
        except OSError as error:
            self._broken = error
            failure = JournalError(f"the store's disk failed: {error}; stop the service and look at the disk")
            return [(future, None, failure) for future, _, _ in outcomes]
        finally:
            self._sync_seconds += (time.perf_counter() - began - self._sync_seconds) / _MEMORY
        return outcomes

    def _commit(self, batch: list[_Item]) -> _Outcomes:
        """Run and commit a batch."""
        if not batch:
            return []
        try:
            if self._home:
                self._connection.execute(f"PRAGMA busy_timeout={_PATIENCE_MS}")
            outcomes = self._run_together(batch)
            if outcomes is None:
                outcomes = self._run_apart(batch)
            if self._home:
                self._connection.execute("PRAGMA busy_timeout=0")
        except sqlite3.Error as error:
            return self._failed(batch, error)
        return self._synced(outcomes)

    def _failed(self, batch: list[_Item], error: sqlite3.Error) -> _Outcomes:
        self._roll_back()
        failure = JournalError(f"the store could not be written: {error}; check the disk's free space and permissions")
        return [(future, None, failure) for _, future in batch]

    def _run_together(self, batch: list[_Item]) -> _Outcomes | None:
        """Run and commit a batch; None when an operation failed and nothing was done."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            outcomes: _Outcomes = [(future, operation(self._connection), None) for operation, future in batch]
        except _REFUSED:
            self._roll_back()
            return None
        self._connection.execute("COMMIT")
        return outcomes

    def _run_apart(self, batch: list[_Item]) -> _Outcomes:
        """Run and commit a batch of which some operations fail."""
        outcomes: _Outcomes = []
        self._connection.execute("BEGIN IMMEDIATE")
        for operation, future in batch:
            self._connection.execute("SAVEPOINT operation")
            try:
                outcomes.append((future, operation(self._connection), None))
            except _REFUSED as error:
                self._connection.execute("ROLLBACK TO operation")
                self._undone()
                outcomes.append((future, None, error))
            self._connection.execute("RELEASE operation")
        self._connection.execute("COMMIT")
        return outcomes

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")
        self._undone()


def _wanted(batch: list[_Item]) -> list[_Item]:
    """Drop what was cancelled before it began. A write of the loop is done whatever becomes of who waits for it."""
    return [item for item in batch if isinstance(item[1], asyncio.Future) or item[1].set_running_or_notify_cancel()]


def _resolve(outcomes: _Outcomes) -> None:
    """Resolve futures in the thread of the loop that the writer has joined."""
    for future, value, problem in outcomes:
        if future.done():
            continue  # whoever waited was cancelled
        if problem is None:
            future.set_result(value)
            continue
        future.set_exception(
            problem if isinstance(problem, GyreError) else JournalError(f"the store refused a write: {problem}")
        )
        future.exception()  # often nobody asks: that is no defect to be logged


def _resolve_elsewhere(outcomes: _Outcomes) -> None:
    """Resolve futures in the writer's thread; those of a loop in that loop, if it still runs."""
    for outcome in outcomes:
        future = outcome[0]
        if not isinstance(future, asyncio.Future):
            _resolve([outcome])
        elif not future.get_loop().is_closed():
            with contextlib.suppress(RuntimeError):  # it may close meanwhile
                future.get_loop().call_soon_threadsafe(_resolve, [outcome])
