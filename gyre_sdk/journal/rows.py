"""What each write of a call puts into the tables: made where it is asked for, carried out by the writer.

A call is written when it is received, when it has tokens, when it ends; one that ends before any of that was written is
one row from the start.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from gyre_sdk.errors import JournalError
from gyre_sdk.journal.blobs import as_ids, as_logprobs, ids_blob, logprobs_blob, plain_blob
from gyre_sdk.journal.bodies import Fresh, KnownBodies, Packer, compress_early
from gyre_sdk.journal.digests import ItemCache, Items
from gyre_sdk.journal.schema import context_start
from gyre_sdk.journal.values import CallEnd, CallIntent, TokenChunk
from gyre_sdk.records import AttemptRecord, CallId, CallStatus

Operation = Callable[[sqlite3.Connection], None]
_pack = msgspec.msgpack.Encoder().encode
_EMPTY = (0, 0, b"\x90", None, None, None, None)
"""Columns of an end that has not come."""


class CallRows:
    """Makes the operations that record calls. What a made one brings must reach the store in the order of making."""

    def __init__(self) -> None:
        self._bodies = KnownBodies()
        self._packer = Packer()
        self._items = ItemCache()
        """Used while operations run, never while they are made."""
        self._unchunked: set[CallId] = set()
        """Calls received here of which no tokens were written yet."""

    def known(self, fresh: Fresh) -> None:
        """Keep in mind that bodies are durable."""
        self._bodies.add(fresh)

    def forget(self) -> None:
        """Forget what was derived from writes that were rolled back."""
        self._packer.forget()
        self._items.forget()

    def received(self, intent: CallIntent, attempt: AttemptRecord | None) -> tuple[Operation, Fresh]:
        """Return what records a call without its end, and the bodies that it brings."""
        self._unchunked.add(intent.call)
        return self._insert(intent, CallStatus.RECEIVED if attempt is None else CallStatus.DISPATCHED, attempt, None)

    def recorded(self, intent: CallIntent, end: CallEnd) -> tuple[Operation, Fresh]:
        """Return what records a call with its end, and the bodies that it brings."""
        return self._insert(intent, end.status, end.attempt, end)

    def sampled(self, call: CallId, chunk: TokenChunk) -> Operation:
        """Return what appends tokens to an open call."""
        row = _chunk_row(call, chunk)
        self._unchunked.discard(call)

        def write(db: sqlite3.Connection) -> None:
            db.execute(_INSERT_CHUNK, row)
            _one_call(db.execute("UPDATE call SET status=? WHERE call=?", (CallStatus.STREAMING, call)), call)

        return write

    def cut(self, attempt: AttemptRecord, lost: TokenChunk | None, kept: TokenChunk | None) -> Operation:
        """Return what ends an attempt; `lost` holds the tokens that were given up, `kept` those before them."""
        if kept is not None:
            self._unchunked.discard(attempt.call)

        def write(db: sqlite3.Connection) -> None:
            _end_attempt(db, attempt, lost)
            if lost is not None:
                db.execute("DELETE FROM chunk WHERE call=?", (attempt.call,))
            if kept is not None:
                db.execute(_INSERT_CHUNK, _chunk_row(attempt.call, kept))

        return write

    def ended(self, call: CallId, end: CallEnd) -> tuple[Operation, Fresh]:
        """Return what records the end of a call that is in the store, and the bodies that it brings."""
        fresh: Fresh = {}
        columns, tokens = self._ending(end, fresh)
        early = compress_early(fresh)
        chunked = call not in self._unchunked
        self._unchunked.discard(call)

        def write(db: sqlite3.Connection) -> None:
            base = None
            if fresh:
                run = db.execute("SELECT run FROM call WHERE call=?", (call,)).fetchone()
                base = self._packer.insert(db, run[0] if run else "", fresh, early)
            _one_call(db.execute(_END_CALL, (end.status, *columns, call)), call)
            if end.attempt is not None:
                _end_attempt(db, end.attempt, None)
            db.execute("INSERT OR REPLACE INTO sampled SELECT seq, ?, ? FROM call WHERE call=?", (*tokens, call))
            if chunked:
                db.execute("DELETE FROM chunk WHERE call=?", (call,))
            if base is not None:
                self._packer.keep(run[0] if run else "", base)

        return write, fresh

    def _insert(
        self, intent: CallIntent, status: CallStatus, attempt: AttemptRecord | None, end: CallEnd | None
    ) -> tuple[Operation, Fresh]:
        fresh: Fresh = {}
        shared = intent.shared if intent.parent else 0
        start = context_start(shared)
        ids = as_ids(intent.prompt_ids[start:])
        items = Items(self._bodies.frozen_digests(intent.messages, fresh), self._bodies.digests(intent.raw, fresh))
        values = (
            intent.call,
            intent.run,
            intent.lane,
            intent.role,
            status,
            intent.parent,
            intent.fork_reason,
            shared,
            len(intent.prompt_ids),
            zlib.crc32(ids.tobytes()),
            self._bodies.packed(intent.sampling, fresh),
            self._bodies.request(intent.request, fresh),
            intent.received_at,
        )
        columns, tokens = self._ending(end, fresh) if end is not None else (_EMPTY, None)
        early = compress_early(fresh)
        prompt = ids_blob(ids[shared - start :], ids[: shared - start])

        def write(db: sqlite3.Connection) -> None:
            base = self._packer.insert(db, intent.run, fresh, early) if fresh else None
            delta, known = self._items.delta(lambda *ask: db.execute(*ask).fetchall(), intent.parent, items)
            row = db.execute(_INSERT_CALL, values + columns + delta).lastrowid
            db.execute("INSERT INTO prompt VALUES (?,?)", (row, prompt))
            if attempt is not None:
                insert_attempt(db, attempt)
            if tokens is not None:
                db.execute("INSERT INTO sampled VALUES (?,?,?)", (row, *tokens))
            self._items.keep(intent.call, known)
            self._packer.keep(intent.run, base)

        return write, fresh

    def _ending(self, end: CallEnd, fresh: Fresh) -> tuple[tuple[Any, ...], tuple[bytes, bytes]]:
        """Return the columns of a call's end, and its tokens as blobs."""
        ids, logprobs = as_ids(end.sampled.ids), as_logprobs(end.sampled.logprobs)
        columns = (
            len(ids),
            zlib.crc32(logprobs.tobytes(), zlib.crc32(ids.tobytes())),
            _pack(end.sampled.versions),
            end.finish_reason,
            end.at,
            end.error,
            self._bodies.digest(end.answer, fresh) if end.answer is not None else None,
        )
        return columns, (ids_blob(ids), logprobs_blob(logprobs))


_INSERT_CALL = (
    "INSERT INTO call (call, run, lane, role, status, parent, fork_reason, shared, prompt_len, prompt_crc, sampling, request,"
    " received_at, sampled_len, sampled_crc, versions, finish_reason, ended_at, error, answer,"
    " messages_shared, messages, raw_shared, raw) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"
)
_END_CALL = (
    "UPDATE call SET status=?, sampled_len=?, sampled_crc=?, versions=?, finish_reason=?, ended_at=?, error=?, answer=?"
    " WHERE call=?"
)
_INSERT_ATTEMPT = "INSERT INTO attempt VALUES (?,?,?,?,?,?,?,?)"
_INSERT_CHUNK = "INSERT INTO chunk VALUES (?,?,?,?,?)"


def insert_attempt(db: sqlite3.Connection, attempt: AttemptRecord) -> None:
    """Record an attempt."""
    db.execute(_INSERT_ATTEMPT, (*msgspec.structs.astuple(attempt), b""))


def _one_call(changed: sqlite3.Cursor, call: CallId) -> None:
    if changed.rowcount != 1:
        raise JournalError(f"call {call} is not in the store")


def _chunk_row(call: CallId, chunk: TokenChunk) -> tuple[Any, ...]:
    return (
        call,
        chunk.start,
        plain_blob(as_ids(chunk.ids)),
        plain_blob(as_logprobs(chunk.logprobs)),
        _pack(chunk.versions),
    )


def _end_attempt(db: sqlite3.Connection, attempt: AttemptRecord, lost: TokenChunk | None) -> None:
    db.execute(
        "UPDATE attempt SET tokens_to=?, end=?, lost=? WHERE call=? AND number=?",
        (attempt.tokens_to, attempt.end, _pack(lost) if lost else b"", attempt.call, attempt.number),
    )


__all__ = ["CallRows", "insert_attempt"]
