"""The write-ahead log of a store: made durable outside of the store's lock, and folded into the store before it is long.

SQLite lets one process write at a time. Under `synchronous=FULL` a commit waits for the disk while it holds that lock, so
that processes wait for each other's disk. Here a commit only writes; then the log is synced, and nothing counts as done
before. What another process read in between is later in the log than what it read: a log that is cut is cut at its end.
"""

from __future__ import annotations

import logging
import os
import sqlite3

log = logging.getLogger(__name__)
_COMMITS, _BYTES = 64, 8 << 20
"""Commits, and bytes that its file has grown by, after which the log is folded in."""
_LONG = 4_000
"""Pages from which on writers are held up, so that the log can begin anew."""
_HELD_UP_MS = 5
_KEPT_BYTES = 4 << 20
"""Of the log's file, when it begins anew: blocks that it has already are synced faster than new ones."""


class WriteAheadLog:
    """The log behind a connection that writes, until `close`.

    Args:
        connection: in WAL mode; from now on its commits do not wait for the disk.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.execute(f"PRAGMA journal_size_limit={_KEPT_BYTES}")
        path = connection.execute("PRAGMA database_list").fetchone()[2]
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()  # makes the log's file
        self._file = os.open(f"{path}-wal", os.O_RDONLY | os.O_CLOEXEC)
        self._folding = sqlite3.connect(path, _HELD_UP_MS / 1000, isolation_level=None, check_same_thread=False)
        self._folding.execute("PRAGMA synchronous=NORMAL")
        self._commits = self._bytes = 0
        self._long = _LONG

    def sync(self) -> None:
        """Make every commit so far durable.

        Raises:
            OSError: the disk failed. What it holds of the log's end is unknown from then on.
        """
        (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(self._file)
        self._commits += 1

    @property
    def due(self) -> bool:
        """Whether the log should be folded in."""
        return self._commits >= _COMMITS or os.fstat(self._file).st_size > self._bytes + _BYTES

    def fold(self) -> None:
        """Write the log's pages into the store, beside writers and readers.

        Writers that never rest would never let the log begin anew: a long one is finished while they wait.
        """
        self._commits, self._bytes = 0, os.fstat(self._file).st_size
        try:
            _, pages, _ = self._folding.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if pages < self._long:
                self._long = _LONG
            elif self._folding.execute("PRAGMA wal_checkpoint(FULL)").fetchone()[0]:
                self._long = 2 * pages  # a reader needs it
        except sqlite3.Error as error:
            log.warning("the log of a store could not be folded in and grows: %s", error)

    def close(self) -> None:
        """Let go of the log, after its connection."""
        self._folding.close()
        os.close(self._file)
