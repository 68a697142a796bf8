"""The store itself: one method per thing that is appended.

Writes return a future that resolves when the write is durable: `result()` waits in a thread, `recorder.durable` in a loop
that the store has joined.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

from gyre_sdk.errors import JournalError
from gyre_sdk.journal.bodies import Fresh
from gyre_sdk.journal.reader import Reader
from gyre_sdk.journal.rows import CallRows, insert_attempt
from gyre_sdk.journal.schema import connect
from gyre_sdk.journal.values import CallEnd, CallIntent, TokenChunk
from gyre_sdk.journal.writer import Write, Writer
from gyre_sdk.records import AttemptRecord, CallId, CallStatus, LaneId, LaneRecord, RunId, RunRecord, RunStatus

_pack = msgspec.msgpack.Encoder().encode
_SPENT = (RunStatus.TIMED_OUT, RunStatus.LIMIT)


class Journal(Reader):
    """A store on disk, open for reading (`r`) or for both (`rw`).

    Raises:
        JournalError: on opening, when the file is missing or is not a gyre store; from a write's future, when the
            write contradicts what is stored or the disk refuses it.
    """

    def __init__(self, path: Path | str, mode: Literal["r", "rw"] = "rw") -> None:
        super().__init__(path, mode)
        self._calls = CallRows()
        self._delivered: tuple[list[tuple[CallId]], Write[None]] | None = None
        """Deliveries that wait for the next commit, in a loop that the store has joined."""
        self._delivering = threading.Lock()
        self._joined = False
        self._writer = Writer(connect(self.path, "rw"), self.path.name, self._calls.forget) if mode == "rw" else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def join_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have writes made in an event loop's thread, the caller's; futures resolve there. See `writer`."""
        if self._writer is not None:
            self._writer.join_loop(loop)
            self._joined = True

    def leave_loop(self) -> None:
        """End `join_loop`, in the loop's thread and before the loop ends."""
        if self._writer is not None:
            self._joined, self._delivered = False, None
            self._writer.leave_loop()

    def close(self) -> None:
        """Finish queued writes and close the file."""
        if self._writer is not None:
            self._writer.close()
        super().close()

    # -- runs and lanes ------------------------------------------------------------------------------------------

    def open_run(self, run: RunRecord, lane: LaneRecord, key_digest: str) -> Write[None]:
        """Record a run and its first lane, before its first call."""

        def write(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT INTO run (run, task, grp, member, dispatch_version, status, created_at, ended_at, reward, placeholder,"
                " parts, error, owner, metadata) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                (
                    run.run,
                    run.task,
                    run.group,
                    run.member,
                    run.dispatch_version,
                    run.status,
                    run.created_at,
                    run.ended_at,
                    run.reward,
                    run.placeholder,
                    _pack(run.parts),
                    run.error,
                    run.owner,
                    _pack(run.metadata),
                ),
            )
            _insert_lane(db, lane, key_digest)

        return self._submit(write)

    def open_lane(self, lane: LaneRecord, key_digest: str) -> Write[None]:
        """Record a further lane of a run."""
        return self._submit(lambda db: _insert_lane(db, lane, key_digest))

    def revoke_lane(self, lane: LaneId) -> Write[None]:
        """Make the key of a lane open nothing, for good. Its digest stays on record, marked."""

        def write(db: sqlite3.Connection) -> None:
            found = db.execute(
                "UPDATE lane SET key_digest=CASE WHEN key_digest LIKE 'revoked %' THEN key_digest"
                " ELSE 'revoked ' || key_digest END WHERE lane=?",
                (lane,),
            )
            if not found.rowcount:
                raise JournalError(f"lane {lane} is not in the store")

        return self._submit(write)

    def end_run(
        self,
        run: RunId,
        status: RunStatus,
        *,
        at: float,
        reward: float | None = None,
        parts: dict[str, float] | None = None,
        error: str | None = None,
        placeholder: bool = False,
    ) -> Write[None]:
        """Record the terminal state of a run. The same state again changes nothing; another one is refused."""

        def write(db: sqlite3.Connection) -> None:
            row = db.execute("SELECT status FROM run WHERE run=?", (run,)).fetchone()
            if row is None:
                raise JournalError(f"run {run} is not in the store")
            if row[0] != RunStatus.RUNNING:
                if row[0] == status:
                    return
                raise JournalError(f"run {run} already ended as {row[0]}; it cannot end as {status} too")
            db.execute(
                "UPDATE run SET status=?, ended_at=?, reward=?, parts=?, error=?, placeholder=? WHERE run=?",
                (status, at, reward, _pack(parts or {}), error, placeholder, run),
            )

        if status is RunStatus.RUNNING:
            raise JournalError(f"run {run}: running is not a terminal state")
        return self._submit(write)

    def spend_run(self, run: RunId, status: RunStatus, reason: str) -> Write[None]:
        """Record that a budget of an open run ran out, and which; the first one stays.

        Args:
            run: whose budget it was.
            status: what the run will end as: `timed_out` or `limit`.
            reason: which budget, with its figure.
        """

        def write(db: sqlite3.Connection) -> None:
            found = db.execute("UPDATE run SET spent=coalesce(spent, ?) WHERE run=?", (f"{status} {reason}", run))
            if not found.rowcount:
                raise JournalError(f"run {run} is not in the store")

        if status not in _SPENT:
            raise JournalError(f"run {run}: a budget that ran out ends a run as timed_out or limit, not as {status}")
        return self._submit(write)

    # -- calls ---------------------------------------------------------------------------------------------------

    def call_received(self, intent: CallIntent, attempt: AttemptRecord | None = None) -> Write[None]:
        """Record a call before it has tokens; `attempt` is its first one where that is known already."""
        return self._submit_bodies(*self._calls.received(intent, attempt))

    def call_recorded(self, intent: CallIntent, end: CallEnd) -> Write[None]:
        """Record a call that nothing was recorded of, and its end: for less than the two apart."""
        return self._submit_bodies(*self._calls.recorded(intent, end))

    def call_dispatched(self, attempt: AttemptRecord) -> Write[None]:
        """Record that an engine request for a call is about to be made."""

        def write(db: sqlite3.Connection) -> None:
            insert_attempt(db, attempt)
            db.execute("UPDATE call SET status=? WHERE call=?", (CallStatus.DISPATCHED, attempt.call))

        return self._submit(write)

    def tokens_sampled(self, call: CallId, chunk: TokenChunk) -> Write[None]:
        """Append sampled tokens of an open call."""
        return self._submit(self._calls.sampled(call, chunk))

    def attempt_ended(
        self, attempt: AttemptRecord, lost: TokenChunk | None = None, kept: TokenChunk | None = None
    ) -> Write[None]:
        """Record how an engine request ended; `lost` holds the tokens that were given up, `kept` those before them."""
        return self._submit(self._calls.cut(attempt, lost, kept))

    def call_ended(
        self,
        call: CallId,
        status: CallStatus,
        *,
        at: float,
        sampled: TokenChunk,
        finish_reason: str | None = None,
        answer: Any = None,
        error: str | None = None,
        attempt: AttemptRecord | None = None,
    ) -> Write[None]:
        """Record the whole answer of a call: `sampled` starts at 0 and holds every sampled token.

        `attempt` is how the call's last attempt ended, where that is not recorded yet.
        """
        end = CallEnd(status, at, sampled, finish_reason, answer, error, attempt)
        return self._submit_bodies(*self._calls.ended(call, end))

    def call_delivered(self, call: CallId) -> Write[None]:
        """Record that the end of a call's answer reached the agent's connection. Nobody waits for it."""
        with self._delivering:
            if self._delivered is not None:
                calls, write = self._delivered
                calls.append((call,))
                return write

        def mark(db: sqlite3.Connection) -> None:
            with self._delivering:
                if self._delivered is not None and self._delivered[0] is calls:
                    self._delivered = None  # later ones get a write of their own
            db.executemany(_MARK_DELIVERED, calls)

        calls = [(call,)]
        write = self._submit(mark, idle=True)
        if self._joined:
            self._delivered = (calls, write)
        return write

    # -- streams of other components -----------------------------------------------------------------------------

    def append(self, stream: str, kind: str, body: Any, *, at: float) -> Write[int]:
        """Append an item to a component's stream; the future gives its sequence number."""
        blob = _pack(body)

        def write(db: sqlite3.Connection) -> int:
            cursor = db.execute("INSERT INTO entry (stream, kind, at, body) VALUES (?,?,?,?)", (stream, kind, at, blob))
            return int(cursor.lastrowid or 0)

        return self._submit(write)

    # -- inside --------------------------------------------------------------------------------------------------

    def _submit(self, operation: Any, *, idle: bool = False) -> Write[Any]:
        if self._writer is None:
            raise JournalError(f"store {self.path} is open for reading only")
        return self._writer.submit(operation, idle=idle)

    def _submit_bodies(self, operation: Any, fresh: Fresh) -> Write[Any]:
        """Submit a write that brings bodies; they are known once it is durable."""
        future = self._submit(operation)
        if fresh:
            future.add_done_callback(lambda done: self._calls.known(fresh) if done.exception() is None else None)
        return future


_MARK_DELIVERED = f"UPDATE call SET status='{CallStatus.DELIVERED}' WHERE call=?"


def _insert_lane(db: sqlite3.Connection, lane: LaneRecord, key_digest: str) -> None:
    db.execute(
        "INSERT INTO lane (lane, run, role, name, parent, key_digest, created_at, parent_call) VALUES (?,?,?,?,?,?,?,?)",
        (lane.lane, lane.run, lane.role, lane.name, lane.parent, key_digest, lane.created_at, lane.parent_call),
    )


__all__ = ["Journal"]
