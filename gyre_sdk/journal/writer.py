"""The one writer of a store in a process: a thread that commits what has queued up, together.

While one commit waits for the disk, the next writes queue; they then share one commit. An operation that fails
is rolled back alone and only its own future gets the error: the batch is then run again with savepoints, which cost
as much as the writes themselves. So an operation may run twice.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from gyre_sdk.errors import GyreError, JournalError

T = TypeVar("T")
_MAX_BATCH = 512
_Batch = list[tuple[Callable[[sqlite3.Connection], Any], Future[Any]]]
_Outcomes = list[tuple[Future[Any], Any, Exception | None]]
_REFUSED = (sqlite3.Error, GyreError, ValueError, TypeError)


class Writer:
    """Runs operations on a connection that it alone uses.

    Args:
        connection: whose only user the writer is.
        name: of the store, for the thread's name.
        undone: called in the writer's thread when operations were rolled back.
    """

    def __init__(self, connection: sqlite3.Connection, name: str, undone: Callable[[], None]) -> None:
        self._connection = connection
        self._undone = undone
        self._queue: queue.SimpleQueue[tuple[Callable[[sqlite3.Connection], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"journal {name}", daemon=True)
        self._thread.start()

    def submit(self, operation: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Queue an operation; its future resolves once it is durable."""
        if self._closed:
            raise JournalError("the store is closed")
        future: Future[T] = Future()
        self._queue.put((operation, future))
        return future

    def close(self) -> None:
        """Commit what is queued, then end the thread and the connection."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()
            self._connection.close()

    def _run(self) -> None:
        open_ = True
        while open_:
            batch = [self._queue.get()]
            while len(batch) < _MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get())
            if batch[-1] is None or None in batch:
                open_ = False
            self._commit([item for item in batch if item is not None and item[1].set_running_or_notify_cancel()])

    def _commit(self, batch: _Batch) -> None:
        if not batch:
            return
        try:
            outcomes = self._run_together(batch)
            if outcomes is None:
                outcomes = self._run_apart(batch)
        except sqlite3.Error as error:
            self._roll_back()
            failure = JournalError(
                f"the store could not be written: {error}; check the disk's free space and permissions"
            )
            outcomes = [(future, None, failure) for _, future in batch]
        for future, value, problem in outcomes:
            if problem is None:
                future.set_result(value)
            else:
                future.set_exception(_as_journal_error(problem))

    def _run_together(self, batch: _Batch) -> _Outcomes | None:
        """Run and commit a batch; None when an operation failed and nothing was done."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            outcomes: _Outcomes = [(future, operation(self._connection), None) for operation, future in batch]
        except _REFUSED:
            self._roll_back()
            return None
        self._connection.execute("COMMIT")
        return outcomes

    def _run_apart(self, batch: _Batch) -> _Outcomes:
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


def _as_journal_error(error: Exception) -> GyreError:
    return error if isinstance(error, GyreError) else JournalError(f"the store refused a write: {error}")
