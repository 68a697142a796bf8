"""Reading calls: each is stored as what it adds to its parent, and comes back whole."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import numpy as np

from gyre_sdk.errors import JournalError
from gyre_sdk.journal.blobs import IDS, LOGPROBS, as_logprobs, blob_ids, blob_logprobs, listed
from gyre_sdk.journal.bodies import StoredBodies
from gyre_sdk.journal.chains import Chains, Link
from gyre_sdk.journal.digests import COLUMNS, ItemChains, Items, load_items
from gyre_sdk.journal.schema import connect, context_start, store_file
from gyre_sdk.journal.values import RecordedExchange, TokenChunk
from gyre_sdk.records import (
    AttemptRecord,
    CallId,
    CallRecord,
    CallStatus,
    ForkReason,
    LaneId,
    RunId,
    VersionSpan,
)

OPEN = (CallStatus.RECEIVED, CallStatus.DISPATCHED, CallStatus.STREAMING)
unpack_dict = msgspec.msgpack.Decoder(dict[str, Any]).decode
unpack_spans = msgspec.msgpack.Decoder(list[VersionSpan]).decode

_CALL = (
    "call, run, lane, role, status, parent, fork_reason, shared, prompt.ids, coalesce(sampled.ids, x''),"
    " coalesce(sampled.logprobs, x''), versions, sampling, finish_reason, received_at, ended_at, error"
)
_FROM = "call JOIN prompt USING (seq) LEFT JOIN sampled USING (seq)"
_EXCHANGE = f"call, parent, lane, role, status, request, answer, {COLUMNS}"
_CHUNK = "call, start, ids, logprobs, versions"


class CallReader:
    """A connection that asks for calls. Safe to use from several threads.

    Args:
        path: the store's file, or its folder (`store_file`).
    """

    def __init__(self, path: Path | str, mode: Literal["r", "rw"] = "r") -> None:
        self.path = store_file(path)
        self._reader = connect(self.path, mode)
        self._reading = threading.RLock()

    def close(self) -> None:
        """Close the connection."""
        with self._reading:
            self._reader.close()

    def calls(self, run: str | None = None, *, arrays: bool = False) -> Iterator[CallRecord]:
        """Yield calls in the order they were received, with full prompt ids. Open calls show what is durable so far.

        Args:
            arrays: leave ids as int32 arrays and log-probs as a float32 array, NaN for None, in place of lists: a long run
                has more than a hundred million ids in its prompts.

        Raises:
            JournalError: the store is damaged; `gyre fsck` says how.
        """
        where, values = where_equal(run=run)
        with self._snapshot():
            rows = self._rows(f"SELECT {_CALL} FROM {_FROM}{where} ORDER BY run, seq", values)
            chunks = self._open_tokens([row[0] for row in rows if row[4] in OPEN])
        chains: Chains[IDS] = Chains()
        bodies = StoredBodies(self._rows)
        current: str | None = None
        for row in rows:
            if row[1] != current:
                chains, current = Chains(), row[1]
            yield _record(row, chunks.get(row[0]), chains, bodies, arrays=arrays)

    def call(self, call: str) -> CallRecord | None:
        """Return one call with its full prompt ids, or None; of its ancestors only what it shares is read.

        Raises:
            JournalError: the store is damaged; `gyre fsck` says how.
        """
        with self._snapshot():
            rows = self._rows(f"SELECT {_CALL} FROM {_FROM} WHERE call=?", (call,))
            if not rows:
                return None
            above = self._rows(
                "WITH RECURSIVE chain (call, parent, shared, seq) AS ("
                " SELECT call, parent, shared, seq FROM call WHERE call=?"
                " UNION ALL SELECT up.call, up.parent, up.shared, up.seq FROM chain"
                " JOIN call AS up ON up.call=chain.parent AND up.seq<chain.seq WHERE chain.shared>0)"
                " SELECT up.call, up.parent, up.shared, prompt.ids, coalesce(sampled.ids, x''), up.status"
                " FROM chain JOIN call AS up ON up.call=chain.call"
                " JOIN prompt ON prompt.seq=up.seq LEFT JOIN sampled ON sampled.seq=up.seq WHERE up.call!=? ORDER BY up.seq",
                (call, call),
            )
            chunks = self._open_tokens([call, *(row[0] for row in above if row[5] in OPEN)])
        chains: Chains[IDS] = Chains()
        for name, parent, shared, delta, sampled, _ in above:
            tokens = _array(chunks[name].ids) if name in chunks else _ids(name, sampled)
            added = _added(name, delta, chains, parent, shared)
            chains.add(name, Link(parent, shared, np.concatenate((added, tokens))))
        return _record(rows[0], chunks.get(call) if rows[0][4] in OPEN else None, chains, StoredBodies(self._rows))

    def attempts(self, call: str) -> list[AttemptRecord]:
        """Return the engine requests made for a call."""
        return [
            AttemptRecord(CallId(row[0]), *row[1:])
            for row in self._rows(
                "SELECT call, number, replica, request_id, tokens_from, tokens_to, end FROM attempt WHERE call=? ORDER BY number",
                (call,),
            )
        ]

    def exchanges(self, run: str) -> list[RecordedExchange]:
        """Return a run's requests and answers as messages, in the order received.

        Raises:
            JournalError: the store is damaged; `gyre fsck` says how.
        """
        rows = self._rows(f"SELECT {_EXCHANGE} FROM call WHERE run=? ORDER BY seq", (run,))
        chains, bodies = ItemChains(), StoredBodies(self._rows)
        for row in rows:
            chains.add(row[0], row[1], row[7:])
        return [_exchange(row, chains.items(row[0]), bodies) for row in rows]

    def exchange(self, call: str) -> RecordedExchange | None:
        """Return one call's request and answer as messages, or None.

        Raises:
            JournalError: the store is damaged; `gyre fsck` says how.
        """
        rows = self._rows(f"SELECT {_EXCHANGE} FROM call WHERE call=?", (call,))
        return _exchange(rows[0], load_items(self._rows, call), StoredBodies(self._rows)) if rows else None

    def _open_tokens(self, calls: Iterable[str]) -> dict[str, TokenChunk]:
        """Return the durable tokens of calls that have some."""
        found: dict[str, TokenChunk] = {}
        for call in calls:
            for row in self._rows(f"SELECT {_CHUNK} FROM chunk WHERE call=? ORDER BY start", (call,)):
                whole = found.setdefault(call, TokenChunk(0, [], [], []))
                if row[1] != len(whole.ids):
                    raise JournalError(f"call {call}: tokens {len(whole.ids)}..{row[1]} are missing from the store")
                whole.ids.extend(_ids(call, row[2]).tolist())
                whole.logprobs.extend(listed(_logprobs(call, row[3])))
                whole.versions.extend(unpack_spans(row[4]))
        return found

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        """Have several reads see the store at one moment."""
        with self._reading:
            self._rows("BEGIN")
            try:
                yield
            finally:
                self._rows("COMMIT")

    def _rows(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            with self._reading:
                return self._reader.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise JournalError(f"store {self.path} cannot be read: {error}") from error


def where_equal(**equals: Any) -> tuple[str, list[Any]]:
    """Return a condition on the columns whose value is given, and its values."""
    given = {column: value for column, value in equals.items() if value is not None}
    return (" WHERE " + " AND ".join(f"{column}=?" for column in given) if given else ""), list(given.values())


def _record(
    row: Sequence[Any], durable: TokenChunk | None, chains: Chains[IDS], bodies: StoredBodies, *, arrays: bool = False
) -> CallRecord:
    """Return a call, and add its path to the chains. `durable` replaces the tokens of an open call."""
    call = row[0]
    if durable is not None:
        sampled, logprobs, versions = _array(durable.ids), as_logprobs(durable.logprobs), durable.versions
    else:
        sampled, logprobs, versions = _ids(call, row[9]), _logprobs(call, row[10]), unpack_spans(row[11])
    delta = _added(call, row[8], chains, row[5], row[7])
    prompt = np.concatenate([*_shared(call, chains, row[5], row[7]), delta])
    chains.add(call, Link(row[5], row[7], np.concatenate((delta, sampled))))
    return CallRecord(
        call=CallId(call),
        run=RunId(row[1]),
        lane=LaneId(row[2]),
        role=row[3],
        status=CallStatus(row[4]),
        parent=CallId(row[5]) if row[5] else None,
        fork_reason=ForkReason(row[6]) if row[6] else None,
        shared=row[7],
        prompt_ids=cast(list[int], prompt) if arrays else prompt.tolist(),
        sampled_ids=cast(list[int], sampled) if arrays else sampled.tolist(),
        logprobs=cast(list[float | None], logprobs) if arrays else listed(logprobs),
        versions=versions,
        sampling=bodies.sampling(row[12]),
        finish_reason=row[13],
        received_at=row[14],
        ended_at=row[15],
        error=row[16],
    )


def _exchange(row: Sequence[Any], items: Items, bodies: StoredBodies) -> RecordedExchange:
    return RecordedExchange(
        call=CallId(row[0]),
        lane=LaneId(row[2]),
        role=row[3],
        status=CallStatus(row[4]),
        request=bodies.request(row[5]),
        messages=[bodies.value(digest) for digest in items.messages],
        answer=bodies.value(row[6]) if row[6] is not None else None,
        raw=[bodies.value(digest) for digest in items.raw],
    )


def _added(call: str, blob: bytes, chains: Chains[IDS], parent: str | None, shared: int) -> IDS:
    """Return the ids that a call's prompt adds to what it shares with its parent's path."""
    before = _shared(call, chains, parent, shared, context_start(shared))
    return _ids(call, blob, np.concatenate(before) if before else _array([]))


def _shared(call: str, chains: Chains[IDS], parent: str | None, shared: int, start: int = 0) -> list[IDS]:
    """Return what a call shares with its parent's path, from `start` on, in pieces."""
    try:
        return chains.parts(parent, shared, start)
    except (KeyError, ValueError) as error:
        raise JournalError(f"the prompt of call {call} cannot be put together: {error}; run `gyre fsck`") from error


def _array(ids: list[int]) -> IDS:
    return np.asarray(ids, dtype="<i4")


def _ids(call: str, blob: bytes, before: IDS | None = None) -> IDS:
    try:
        return blob_ids(blob) if before is None else blob_ids(blob, before)
    except ValueError as error:
        raise JournalError(f"ids of call {call} are damaged: {error}; run `gyre fsck`") from error


def _logprobs(call: str, blob: bytes) -> LOGPROBS:
    try:
        return blob_logprobs(blob)
    except ValueError as error:
        raise JournalError(f"log-probs of call {call} are damaged: {error}; run `gyre fsck`") from error
