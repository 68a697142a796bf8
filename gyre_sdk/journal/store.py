"""The store itself: one method per thing that is appended.

Writes return a future that resolves when the write is durable; `Future.result()` or `asyncio.wrap_future` wait.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

from gyre_sdk.errors import JournalError
from gyre_sdk.journal.reader import Reader
from gyre_sdk.journal.schema import connect
from gyre_sdk.journal.values import CallIntent, TokenChunk, ids_blob, logprobs_blob, message_body
from gyre_sdk.journal.writer import Writer
from gyre_sdk.records import AttemptRecord, CallId, CallStatus, LaneRecord, RunId, RunRecord, RunStatus

_pack = msgspec.msgpack.encode
_KNOWN = 100_000
"""Digests of messages to keep in mind."""


class Journal(Reader):
    """A store on disk, open for reading (`r`) or for both (`rw`).

    Raises:
        JournalError: on opening, when the file is missing or is not a gyre store; from a write's future, when the
            write contradicts what is stored or the disk refuses it.
    """

    def __init__(self, path: Path | str, mode: Literal["r", "rw"] = "rw") -> None:
        super().__init__(path, mode)
        self._writer = Writer(connect(self.path, "rw"), self.path.name) if mode == "rw" else None
        self._known: dict[bytes, None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Finish queued writes and close the file."""
        if self._writer is not None:
            self._writer.close()
        super().close()

    # -- runs and lanes ------------------------------------------------------------------------------------------

    def open_run(self, run: RunRecord, lane: LaneRecord, key_digest: str) -> Future[None]:
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

    def open_lane(self, lane: LaneRecord, key_digest: str) -> Future[None]:
        """Record a further lane of a run."""
        return self._submit(lambda db: _insert_lane(db, lane, key_digest))

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
    ) -> Future[None]:
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

    # -- calls ---------------------------------------------------------------------------------------------------

    def call_received(self, intent: CallIntent) -> Future[None]:
        """Record a call before it is dispatched."""
        delta = ids_blob(intent.prompt_ids[intent.shared :] if intent.parent else intent.prompt_ids)
        messages = [message_body(message) for message in intent.messages]
        fresh = {digest: zlib.compress(body, 1) for digest, body in messages if digest not in self._known}
        values = (
            intent.call,
            intent.run,
            intent.lane,
            intent.role,
            CallStatus.RECEIVED,
            intent.parent,
            intent.fork_reason,
            intent.shared if intent.parent else 0,
            delta,
            len(intent.prompt_ids),
            b"",
            b"",
            _pack([]),
            _pack(intent.sampling),
            _pack(intent.request),
            _pack([digest for digest, _ in messages]),
            intent.received_at,
        )

        def write(db: sqlite3.Connection) -> None:
            if fresh:
                db.executemany("INSERT OR IGNORE INTO message VALUES (?,?)", fresh.items())
            db.execute(
                "INSERT INTO call (call, run, lane, role, status, parent, fork_reason, shared, prompt_delta, prompt_len, sampled,"
                " logprobs, versions, sampling, request, messages, received_at) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                values,
            )

        future = self._submit(write)
        future.add_done_callback(lambda done: self._remember(fresh) if done.exception() is None else None)
        return future

    def call_dispatched(self, attempt: AttemptRecord) -> Future[None]:
        """Record that an engine request for a call is about to be made."""

        def write(db: sqlite3.Connection) -> None:
            db.execute("INSERT INTO attempt VALUES (?,?,?,?,?,?,?,?)", (*msgspec.structs.astuple(attempt), b""))
            db.execute("UPDATE call SET status=? WHERE call=?", (CallStatus.DISPATCHED, attempt.call))

        return self._submit(write)

    def tokens_sampled(self, call: CallId, chunk: TokenChunk) -> Future[None]:
        """Append sampled tokens of an open call."""

        def write(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT INTO chunk VALUES (?,?,?,?,?)",
                (call, chunk.start, ids_blob(chunk.ids), logprobs_blob(chunk.logprobs), _pack(chunk.versions)),
            )
            db.execute("UPDATE call SET status=? WHERE call=?", (CallStatus.STREAMING, call))

        return self._submit(write)

    def attempt_ended(
        self, attempt: AttemptRecord, lost: TokenChunk | None = None, kept: TokenChunk | None = None
    ) -> Future[None]:
        """Record how an engine request ended; `lost` holds the tokens that were given up, `kept` those before them."""

        def write(db: sqlite3.Connection) -> None:
            db.execute(
                "UPDATE attempt SET tokens_to=?, end=?, lost=? WHERE call=? AND number=?",
                (attempt.tokens_to, attempt.end, _pack(lost) if lost else b"", attempt.call, attempt.number),
            )
            if lost is not None:
                db.execute("DELETE FROM chunk WHERE call=?", (attempt.call,))
            if kept is not None:
                db.execute(
                    "INSERT INTO chunk VALUES (?,?,?,?,?)",
                    (attempt.call, kept.start, ids_blob(kept.ids), logprobs_blob(kept.logprobs), _pack(kept.versions)),
                )

        return self._submit(write)

    def call_ended(
        self,
        call: CallId,
        status: CallStatus,
        *,
        at: float,
        sampled: TokenChunk,
        finish_reason: str | None = None,
        answer: dict[str, Any] | None = None,
        error: str | None = None,
    ) -> Future[None]:
        """Record the whole answer of a call: `sampled` starts at 0 and holds every sampled token."""
        values = (
            status,
            ids_blob(sampled.ids),
            logprobs_blob(sampled.logprobs),
            _pack(sampled.versions),
            finish_reason,
            at,
            error,
            msgspec.json.encode(answer) if answer is not None else None,
            call,
        )

        def write(db: sqlite3.Connection) -> None:
            db.execute(
                "UPDATE call SET status=?, sampled=?, logprobs=?, versions=?, finish_reason=?, ended_at=?, error=?, answer=?"
                " WHERE call=?",
                values,
            )
            db.execute("DELETE FROM chunk WHERE call=?", (call,))

        return self._submit(write)

    def call_delivered(self, call: CallId) -> Future[None]:
        """Record that the end of a call's answer reached the agent's connection."""
        return self._submit(lambda db: _set_status(db, call, CallStatus.DELIVERED))

    # -- streams of other components -----------------------------------------------------------------------------

    def append(self, stream: str, kind: str, body: Any, *, at: float) -> Future[int]:
        """Append an item to a component's stream; the future gives its sequence number."""
        blob = _pack(body)

        def write(db: sqlite3.Connection) -> int:
            cursor = db.execute("INSERT INTO entry (stream, kind, at, body) VALUES (?,?,?,?)", (stream, kind, at, blob))
            return int(cursor.lastrowid or 0)

        return self._submit(write)

    def _remember(self, digests: Iterable[bytes]) -> None:
        """Keep in mind which messages are durable, so that a history is not compressed again for each call."""
        if len(self._known) > _KNOWN:
            self._known = {}
        self._known.update(dict.fromkeys(digests))

    # -- inside --------------------------------------------------------------------------------------------------

    def _submit(self, operation: Any) -> Future[Any]:
        if self._writer is None:
            raise JournalError(f"store {self.path} is open for reading only")
        return self._writer.submit(operation)


def _insert_lane(db: sqlite3.Connection, lane: LaneRecord, key_digest: str) -> None:
    db.execute(
        "INSERT INTO lane (lane, run, role, name, parent, key_digest, created_at) VALUES (?,?,?,?,?,?,?)",
        (lane.lane, lane.run, lane.role, lane.name, lane.parent, key_digest, lane.created_at),
    )


def _set_status(db: sqlite3.Connection, call: CallId, status: CallStatus) -> None:
    db.execute("UPDATE call SET status=? WHERE call=?", (status, call))


__all__ = ["Journal"]
