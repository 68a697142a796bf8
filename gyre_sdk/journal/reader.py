"""What can be asked of a store. Reads see whatever is committed, by any process."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from gyre_sdk.journal.audit import Finding
from gyre_sdk.journal.bodies import StoredBodies
from gyre_sdk.journal.calls import CallReader, unpack_dict, unpack_spans, where_equal
from gyre_sdk.journal.survey import survey
from gyre_sdk.journal.values import CallSummary, Entry, StoreTotals
from gyre_sdk.records import CallId, CallStatus, ForkReason, LaneId, LaneRecord, RunId, RunRecord, RunStatus


class Reader(CallReader):
    """A connection that asks. Safe to use from several threads."""

    def runs(self, *, group: str | None = None, status: RunStatus | None = None) -> list[RunRecord]:
        """Return runs in the order they were opened, optionally of one group or state."""
        return self._runs(*where_equal(grp=group, status=status))

    def run(self, run: str) -> RunRecord | None:
        """Return one run, or None."""
        return next(iter(self._runs(*where_equal(run=run))), None)

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
                parts=unpack_dict(row[10]),
                error=row[11],
                owner=row[12],
                metadata=unpack_dict(row[13]),
            )
            for row in self._rows(
                "SELECT run, task, grp, member, dispatch_version, status, created_at, ended_at, reward, placeholder, parts,"
                f" error, owner, metadata FROM run{where} ORDER BY seq",
                values,
            )
        ]

    def spent(self, run: str) -> tuple[RunStatus, str] | None:
        """Return what a run's budget ends it as and which budget ran out; None while none has."""
        rows = self._rows("SELECT spent FROM run WHERE run=?", (run,))
        if not rows or rows[0][0] is None:
            return None
        status, _, reason = rows[0][0].partition(" ")
        return RunStatus(status), reason

    def lanes(self, run: str | None = None) -> list[LaneRecord]:
        """Return lanes in the order they were opened."""
        where, values = where_equal(run=run)
        return [_lane(row) for row in self._rows(f"SELECT {_LANE} FROM lane{where} ORDER BY seq", values)]

    def lane_of_key(self, key_digest: str) -> LaneRecord | None:
        """Return the lane that a capability key opens, or None for an unknown key."""
        rows = self._rows(f"SELECT {_LANE} FROM lane WHERE key_digest=?", (key_digest,))
        return _lane(rows[0]) if rows else None

    def call_summaries(
        self, after: int = 0, run: str | None = None, *, also: Collection[int] = ()
    ) -> list[CallSummary]:
        """Return calls without tokens in the order they were received; open ones included.

        Args:
            after: those with a `seq` above it.
            run: of those, the ones of one run; else all.
            also: up to `after`, these by their `seq`: calls that were open when they were last asked for.
        """
        where, values = ("", (after,)) if run is None else (" AND run=?", (after, run))
        chosen = ",".join(map(str, also))  # one query for both would read the whole table
        rows = self._rows(f"SELECT {_SUMMARY} FROM call WHERE seq IN ({chosen}) ORDER BY seq") if also else []
        rows += self._rows(f"SELECT {_SUMMARY} FROM call WHERE seq>?{where} ORDER BY seq", values)
        return [
            CallSummary(
                seq=row[0],
                call=row[1],
                run=row[2],
                lane=row[3],
                role=row[4],
                status=CallStatus(row[5]),
                prompt_tokens=row[6],
                sampled_tokens=row[7],
                version=max((span.version for span in unpack_spans(row[8])), default=-1),
                ended_at=row[9],
                fork_reason=ForkReason(row[10]) if row[10] else None,
                error=row[11],
            )
            for row in rows
        ]

    def answers_without_tokens(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (run, answer) of each call that was answered but has no token ids: those of hosted models."""
        bodies = StoredBodies(self._rows)
        for run, digest in self._rows(
            "SELECT run, answer FROM call WHERE sampled_len=0 AND answer IS NOT NULL ORDER BY seq", ()
        ):
            yield run, bodies.value(digest)

    def run_totals(self, run: str) -> tuple[int, int]:
        """Return how many calls of a run have an answer, and how many tokens they sampled."""
        row = self._rows(
            "SELECT count(*), coalesce(sum(sampled_len), 0) FROM call WHERE run=? AND status IN (?,?)",
            (run, CallStatus.COMPLETE, CallStatus.DELIVERED),
        )[0]
        return row[0], row[1]

    def totals(self) -> StoreTotals:
        """Return what the store holds: ended runs, answered calls and the tokens they sampled."""
        (runs,) = self._rows(
            "SELECT count(*) FROM run WHERE status NOT IN (?,?)", (RunStatus.RUNNING, RunStatus.CANCELLED)
        )
        (calls,) = self._rows(
            "SELECT count(*), coalesce(sum(sampled_len), 0) FROM call WHERE status IN (?,?)",
            (CallStatus.COMPLETE, CallStatus.DELIVERED),
        )
        return StoreTotals(runs=runs[0], calls=calls[0], sampled_tokens=calls[1])

    def audit(self) -> Iterator[Finding]:
        """Yield what is wrong with the store, and its open calls: `gyre fsck`."""
        return survey(self._rows)

    def entries(self, stream: str, after: int = 0) -> list[Entry]:
        """Return a stream's items with `seq` above `after`, oldest first; bodies are msgpack."""
        return [
            Entry(*row)
            for row in self._rows(
                "SELECT seq, stream, kind, at, body FROM entry WHERE stream=? AND seq>? ORDER BY seq", (stream, after)
            )
        ]


_SUMMARY = "seq, call, run, lane, role, status, prompt_len, sampled_len, versions, ended_at, fork_reason, error"
_LANE = "lane, run, role, name, parent, created_at, parent_call"


def _lane(row: Sequence[Any]) -> LaneRecord:
    return LaneRecord(
        lane=LaneId(row[0]),
        run=RunId(row[1]),
        role=row[2],
        name=row[3],
        parent=LaneId(row[4]) if row[4] else None,
        created_at=row[5],
        parent_call=CallId(row[6]) if row[6] else None,
    )
