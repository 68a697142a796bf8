"""What can be asked of a store. Reads see whatever is committed, by any process."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from gyre_sdk.errors import JournalError
from gyre_sdk.journal.schema import connect
from gyre_sdk.journal.values import (
    CallSummary,
    Entry,
    RecordedExchange,
    StoreTotals,
    TokenChunk,
    blob_ids,
    blob_logprobs,
    row_message,
)
from gyre_sdk.records import (
    AttemptRecord,
    CallId,
    CallRecord,
    CallStatus,
    ForkReason,
    LaneId,
    LaneRecord,
    RunId,
    RunRecord,
    RunStatus,
    Sampling,
    VersionSpan,
)

_OPEN = (CallStatus.RECEIVED, CallStatus.DISPATCHED, CallStatus.STREAMING)
_unpack_dict = msgspec.msgpack.Decoder(dict[str, Any]).decode
_unpack_spans = msgspec.msgpack.Decoder(list[VersionSpan]).decode
_unpack_sampling = msgspec.msgpack.Decoder(Sampling).decode
_unpack_digests = msgspec.msgpack.Decoder(list[bytes]).decode


class Reader:
    """A connection that asks. Safe to use from several threads."""

    def __init__(self, path: Path | str, mode: Literal["r", "rw"] = "r") -> None:
        self.path = Path(path)
        self._reader = connect(self.path, mode)
        self._reading = threading.RLock()

    def close(self) -> None:
        """Close the connection."""
        with self._reading:
            self._reader.close()

    def runs(self, *, group: str | None = None, status: RunStatus | None = None) -> list[RunRecord]:
        """Return runs in the order they were opened, optionally of one group or state."""
        return self._runs(*_where(grp=group, status=status))

    def run(self, run: str) -> RunRecord | None:
        """Return one run, or None."""
        return next(iter(self._runs(*_where(run=run))), None)

    def _runs(self, where: str, values: Sequence[Any]) -> list[RunRecord]:
        return [
            RunRecord(
                run=RunId(row[0]),
                task=row[1],
                group=row[2],
                member=row[3],
                dispatch_version=row[4],
                status=RunStatus(row[5]),
                created_at=row[6],
                ended_at=row[7],
                reward=row[8],
                placeholder=bool(row[9]),
                parts=_unpack_dict(row[10]),
                error=row[11],
                owner=row[12],
                metadata=_unpack_dict(row[13]),
            )
            for row in self._rows(
                "SELECT run, task, grp, member, dispatch_version, status, created_at, ended_at, reward, placeholder, parts,"
                f" error, owner, metadata FROM run{where} ORDER BY seq",
                values,
            )
        ]

    def lanes(self, run: str | None = None) -> list[LaneRecord]:
        """Return lanes in the order they were opened."""
        where, values = _where(run=run)
        return [_lane(row) for row in self._rows(f"SELECT {_LANE} FROM lane{where} ORDER BY seq", values)]

    def lane_of_key(self, key_digest: str) -> LaneRecord | None:
        """Return the lane that a capability key opens, or None for an unknown key."""
        rows = self._rows(f"SELECT {_LANE} FROM lane WHERE key_digest=?", (key_digest,))
        return _lane(rows[0]) if rows else None

    def calls(self, run: str | None = None) -> Iterator[CallRecord]:
        """Yield calls in the order they were received, with full prompt ids. Open calls show what is durable so far."""
        where, values = _where(run=run)
        wholes: dict[str, list[int]] = {}
        current: str | None = None
        for row in self._rows(f"SELECT {_CALL} FROM call{where} ORDER BY run, seq", values):
            if row[1] != current:
                wholes, current = {}, row[1]
            sampled = TokenChunk(0, blob_ids(row[9]), blob_logprobs(row[10]), _unpack_spans(row[11]))
            if row[4] in _OPEN:
                sampled = self.durable_tokens(CallId(row[0]))
            prompt = (wholes[row[5]][: row[7]] if row[5] else []) + blob_ids(row[8])
            wholes[row[0]] = prompt + sampled.ids
            yield CallRecord(
                call=CallId(row[0]),
                run=RunId(row[1]),
                lane=LaneId(row[2]),
                role=row[3],
                status=CallStatus(row[4]),
                parent=CallId(row[5]) if row[5] else None,
                fork_reason=ForkReason(row[6]) if row[6] else None,
                shared=row[7],
                prompt_ids=prompt,
                sampled_ids=sampled.ids,
                logprobs=sampled.logprobs,
                versions=sampled.versions,
                sampling=_unpack_sampling(row[12]),
                finish_reason=row[13],
                received_at=row[14],
                ended_at=row[15],
                error=row[16],
            )

    def durable_tokens(self, call: CallId) -> TokenChunk:
        """Return the sampled tokens of an open call that are on disk."""
        ids: list[int] = []
        logprobs: list[float | None] = []
        versions: list[VersionSpan] = []
        for start, chunk_ids, chunk_logprobs, spans in self._rows(
            "SELECT start, ids, logprobs, versions FROM chunk WHERE call=? ORDER BY start", (call,)
        ):
            if start != len(ids):
                raise JournalError(f"call {call}: tokens {len(ids)}..{start} are missing from the store")
            ids += blob_ids(chunk_ids)
            logprobs += blob_logprobs(chunk_logprobs)
            versions += _unpack_spans(spans)
        return TokenChunk(0, ids, logprobs, versions)

    def attempts(self, call: str) -> list[AttemptRecord]:
        """Return the engine requests made for a call."""
        return [
            AttemptRecord(CallId(row[0]), *row[1:])
            for row in self._rows(
                "SELECT call, number, replica, request_id, tokens_from, tokens_to, end FROM attempt WHERE call=? ORDER BY number",
                (call,),
            )
        ]

    def call_summaries(self, after: int = 0) -> list[CallSummary]:
        """Return calls with `seq` above `after`, without tokens; open ones included."""
        return [
            CallSummary(
                seq=row[0],
                call=row[1],
                run=row[2],
                lane=row[3],
                role=row[4],
                status=CallStatus(row[5]),
                prompt_tokens=row[6],
                sampled_tokens=row[7] // 4,
                version=max((span.version for span in _unpack_spans(row[8])), default=-1),
                ended_at=row[9],
            )
            for row in self._rows(
                "SELECT seq, call, run, lane, role, status, prompt_len, length(sampled), versions, ended_at FROM call"
                " WHERE seq>? ORDER BY seq",
                (after,),
            )
        ]

    def run_totals(self, run: str) -> tuple[int, int]:
        """Return how many calls of a run have an answer, and how many tokens they sampled."""
        row = self._rows(
            "SELECT count(*), coalesce(sum(length(sampled)), 0) FROM call WHERE run=? AND status IN (?,?)",
            (run, CallStatus.COMPLETE, CallStatus.DELIVERED),
        )[0]
        return row[0], row[1] // 4

    def totals(self) -> StoreTotals:
        """Return what the store holds: ended runs, answered calls and the tokens they sampled."""
        (runs,) = self._rows(
            "SELECT count(*) FROM run WHERE status NOT IN (?,?)", (RunStatus.RUNNING, RunStatus.CANCELLED)
        )
        (calls,) = self._rows(
            "SELECT count(*), coalesce(sum(length(sampled)), 0) FROM call WHERE status IN (?,?)",
            (CallStatus.COMPLETE, CallStatus.DELIVERED),
        )
        return StoreTotals(runs=runs[0], calls=calls[0], sampled_tokens=calls[1] // 4)

    def exchanges(self, run: str) -> list[RecordedExchange]:
        """Return a run's requests and answers as messages, in the order received."""
        found = self._rows(
            "SELECT call, lane, role, status, request, messages, answer FROM call WHERE run=? ORDER BY seq", (run,)
        )
        digests = {digest for row in found for digest in _unpack_digests(row[5])}
        bodies = {digest: self._rows("SELECT body FROM message WHERE digest=?", (digest,))[0][0] for digest in digests}
        return [
            RecordedExchange(
                call=CallId(row[0]),
                lane=LaneId(row[1]),
                role=row[2],
                status=CallStatus(row[3]),
                request=_unpack_dict(row[4]),
                messages=[row_message(bodies[digest]) for digest in _unpack_digests(row[5])],
                answer=msgspec.json.decode(row[6]) if row[6] is not None else None,
            )
            for row in found
        ]

    def entries(self, stream: str, after: int = 0) -> list[Entry]:
        """Return a stream's items with `seq` above `after`, oldest first; bodies are msgpack."""
        return [
            Entry(*row)
            for row in self._rows(
                "SELECT seq, stream, kind, at, body FROM entry WHERE stream=? AND seq>? ORDER BY seq", (stream, after)
            )
        ]

    def _rows(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            with self._reading:
                return self._reader.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise JournalError(f"store {self.path} cannot be read: {error}") from error


_LANE = "lane, run, role, name, parent, created_at"
_CALL = (
    "call, run, lane, role, status, parent, fork_reason, shared, prompt_delta, sampled, logprobs, versions, sampling,"
    " finish_reason, received_at, ended_at, error"
)


def _lane(row: Sequence[Any]) -> LaneRecord:
    return LaneRecord(
        lane=LaneId(row[0]),
        run=RunId(row[1]),
        role=row[2],
        name=row[3],
        parent=LaneId(row[4]) if row[4] else None,
        created_at=row[5],
    )


def _where(**equals: Any) -> tuple[str, list[Any]]:
    given = {column: value for column, value in equals.items() if value is not None}
    return (" WHERE " + " AND ".join(f"{column}=?" for column in given) if given else ""), list(given.values())
