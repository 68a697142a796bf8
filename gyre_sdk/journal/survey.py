"""Reads a whole store for `audit.py`, decoding what can be decoded and noting what cannot."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from gyre_sdk.errors import JournalError
from gyre_sdk.journal.audit import (
    Finding,
    Level,
    StoredCall,
    StoredLane,
    StoredRun,
    check_call,
    check_lanes,
    check_runs,
)
from gyre_sdk.journal.blobs import IDS, as_logprobs, blob_ids, blob_logprobs, body_digest
from gyre_sdk.journal.bodies import StoredBodies
from gyre_sdk.journal.chains import Chains, Link
from gyre_sdk.journal.digests import COLUMNS, ItemChains
from gyre_sdk.journal.schema import context_start
from gyre_sdk.records import AttemptRecord, CallId, CallStatus, Sampling, VersionSpan

Rows = Callable[[str, Sequence[Any]], list[Any]]
_DAMAGED = "take the store from a backup; what other calls hold is not affected"
_RECOVER = "take it from a backup, or save what is left with `sqlite3 STORE .recover`"
_MANY = 20
"""Findings of SQLite's own check to show."""
_unpack_spans = msgspec.msgpack.Decoder(list[VersionSpan]).decode
_NO_IDS: IDS = np.empty(0, dtype="<i4")


def survey(rows: Rows) -> Iterator[Finding]:
    """Yield everything that is wrong with a store, and its open calls."""
    try:
        yield from _integrity(rows)
        yield from _contents(rows)
    except JournalError as error:
        yield Finding(Level.ERROR, "store", str(error), _RECOVER)


def _contents(rows: Rows) -> Iterator[Finding]:
    runs = [StoredRun(*row) for row in rows("SELECT run, status, ended_at FROM run ORDER BY seq", ())]
    lanes = [StoredLane(*row) for row in rows("SELECT lane, run, parent, parent_call FROM lane ORDER BY seq", ())]
    calls: dict[str, str] = dict(rows("SELECT call, run FROM call", ()))
    names = {run.run for run in runs}
    yield from check_runs(runs)
    yield from check_lanes(lanes, names, calls)
    yield from _messages(rows)
    for run in dict.fromkeys([*names, *calls.values()]):
        yield from _run(rows, run, names, {lane.lane: lane.run for lane in lanes}, calls)
    for table in ("chunk", "attempt"):
        for (call,) in rows(f"SELECT DISTINCT call FROM {table} WHERE call NOT IN (SELECT call FROM call)", ()):
            yield Finding(Level.ERROR, call, f"has {table}s but is not in the store", _DAMAGED)


def _integrity(rows: Rows) -> Iterator[Finding]:
    for (said,) in rows(f"PRAGMA integrity_check({_MANY})", ()):
        if said != "ok":
            yield Finding(
                Level.ERROR, "store", f"SQLite: {said}", "copy it with `sqlite3 STORE .recover`, or restore it"
            )


def _messages(rows: Rows) -> Iterator[Finding]:
    """Check that every body is there and hashes to what it is stored under."""
    bodies = StoredBodies(rows)
    for digest, pack in rows("SELECT digest, pack FROM message ORDER BY pack, start", ()):
        try:
            intact = body_digest(bodies.body(digest)) == digest
            problem = "" if intact else f"its text in pack {pack} is not what was written"
        except JournalError as error:
            problem = str(error)
        if problem:
            yield Finding(Level.ERROR, f"message {digest.hex()}", problem, _DAMAGED)


def _run(rows: Rows, run: str, runs: set[str], lanes: dict[str, str], calls: dict[str, str]) -> Iterator[Finding]:
    chains: Chains[IDS] = Chains()
    items = ItemChains()
    bodies = StoredBodies(rows)
    seen: dict[str, StoredCall] = {}
    found = rows(
        "SELECT call, run, lane, status, parent, shared, prompt_len, prompt_crc, sampled_len, sampled_crc, versions,"
        f" sampling, finish_reason, ended_at, answer, request, prompt.ids, sampled.ids, sampled.logprobs, {COLUMNS}"
        " FROM call LEFT JOIN prompt USING (seq) LEFT JOIN sampled USING (seq) WHERE run=? ORDER BY seq",
        (run,),
    )
    for row in found:
        items.add(row[0], row[4], row[19:])
        call = _Decoding(rows, row, bodies).call(chains, items)
        seen[call.call] = call
        yield from check_call(call, runs, lanes, calls, seen.get(call.parent or ""))


class _Decoding:
    """Decodes one row, piece by piece."""

    def __init__(self, rows: Rows, row: Sequence[Any], bodies: StoredBodies) -> None:
        self._rows, self._row, self._bodies = rows, row, bodies
        self._damage: list[str] = []

    def call(self, chains: Chains[IDS], items: ItemChains) -> StoredCall:
        """Return the call, and add its path to the chains."""
        row = self._row
        name = row[0]
        chunks = self._rows("SELECT start, ids FROM chunk WHERE call=? ORDER BY start", (name,))
        sampled: IDS = self._try("sampled ids", lambda: blob_ids(row[17] or b""), _NO_IDS)
        logprobs = self._try("log-probs", lambda: blob_logprobs(row[18] or b""), as_logprobs([]))
        stretches = [(start, self._try("a chunk", partial(blob_ids, ids), _NO_IDS)) for start, ids in chunks]
        prompt = self._prompt(chains)
        tokens = np.concatenate([part for _, part in stretches]) if stretches and not len(sampled) else sampled
        added = _NO_IDS if prompt is None else prompt[row[5] - context_start(row[5]) :]
        chains.add(name, Link(row[4], row[5], np.concatenate((added, tokens))))
        request = self._try("its request", lambda: self._bodies.request(row[15]), {})
        answer = self._try("its answer", lambda: self._bodies.value(row[14]) if row[14] else None, None)
        listed = self._try("its messages", lambda: items.items(name), None)
        for digest in dict.fromkeys((*listed.messages, *listed.raw) if listed else ()):
            self._try("a message", partial(self._bodies.value, digest), None)
        attempts = self._rows(
            "SELECT call, number, replica, request_id, tokens_from, tokens_to, end FROM attempt WHERE call=? ORDER BY number",
            (name,),
        )
        sampling: Sampling | None = self._try("sampling", lambda: self._bodies.sampling(row[11]), None)
        spans: list[VersionSpan] = self._try("versions", lambda: _unpack_spans(row[10]), [])
        crc = zlib.crc32(logprobs.tobytes(), zlib.crc32(sampled.tobytes()))
        return StoredCall(
            call=name, run=row[1], lane=row[2], status=self._try("its state", lambda: CallStatus(row[3]), CallStatus.FAILED),
            parent=row[4], shared=row[5], prompt_len=row[6],
            rebuilt_len=None if prompt is None else context_start(row[5]) + len(prompt),
            prompt_ok=prompt is not None and zlib.crc32(prompt.tobytes()) == row[7],
            sampled=tuple(sampled.tolist()), logprobs=len(logprobs), sampled_len=row[8], sampled_ok=crc == row[9],
            versions=tuple(spans), chunks=tuple((start, len(part)) for start, part in stretches),
            attempts=tuple(AttemptRecord(CallId(item[0]), *item[1:]) for item in attempts),
            sampling=sampling, finish=row[12], ended_at=row[13],
            answered=isinstance(answer, dict) and bool(answer.get("content") or answer.get("tool_calls")),
            hosted=request.get("hosted") is True, damage=tuple(self._damage),
        )  # fmt: skip

    def _prompt(self, chains: Chains[IDS]) -> IDS | None:
        """Return the prompt from `context_start` on, or None where it cannot be put together."""
        row = self._row
        if row[16] is None:
            self._damage.append("the ids of its prompt are not in the store")
            return None
        try:
            before = chains.parts(row[4], row[5], context_start(row[5]))
        except (KeyError, ValueError):
            return None  # the checks of parent and shared say why
        known = np.concatenate(before) if before else _NO_IDS
        added: IDS | None = self._try("the ids of its prompt", lambda: blob_ids(row[16], known), None)
        return None if added is None else np.concatenate((known, added))

    def _try(self, what: str, decode: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return decode()
        except (JournalError, ValueError, msgspec.MsgspecError) as error:
            self._damage.append(f"{what} cannot be read: {error}")
            return otherwise
