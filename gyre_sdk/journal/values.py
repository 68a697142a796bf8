"""What goes into and comes out of the store beside the records, and how ids become bytes."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from gyre_sdk.records import CallId, CallStatus, ForkReason, LaneId, RunId, Sampling, VersionSpan


class CallIntent(msgspec.Struct, frozen=True):
    """What is known of a call before it is dispatched."""

    call: CallId
    run: RunId
    lane: LaneId
    role: str
    parent: CallId | None
    fork_reason: ForkReason | None
    shared: int
    """Tokens shared with the parent's prompt + sampled ids."""
    prompt_ids: list[int]
    sampling: Sampling
    request: dict[str, Any]
    """The request without its messages: canonical fields, unknown ones included. Never a key or a header."""
    messages: list[dict[str, Any]]
    """Canonical messages, in order."""
    received_at: float


class TokenChunk(msgspec.Struct, frozen=True):
    """Sampled tokens of an open call, as the engine streamed them."""

    start: int
    """Index of the first token in the call's sampled ids."""
    ids: list[int]
    logprobs: list[float | None]
    """Nats, one per id; None where the engine gave none."""
    versions: list[VersionSpan]
    """Spans in the call's sampled ids; may be empty until the engine tells."""


class CallSummary(msgspec.Struct, frozen=True):
    """A call without its tokens, for views."""

    seq: int
    call: str
    run: str
    lane: str
    role: str
    status: CallStatus
    prompt_tokens: int
    sampled_tokens: int
    version: int
    """Newest version that sampled a token of the call; -1 when none is known."""
    ended_at: float | None


class RecordedExchange(msgspec.Struct, frozen=True):
    """A call's request and answer as messages, to match later requests against."""

    call: CallId
    lane: LaneId
    role: str
    status: CallStatus
    request: dict[str, Any]
    messages: list[dict[str, Any]]
    answer: dict[str, Any] | None
    """The assistant message that the agent was given; None while there is none."""


class StoreTotals(msgspec.Struct, frozen=True):
    """Counts over a whole store."""

    runs: int
    """Runs that ended and were not cancelled."""
    calls: int
    """Calls with an answer."""
    sampled_tokens: int


class Entry(msgspec.Struct, frozen=True):
    """One item of another component's append-only stream."""

    seq: int
    stream: str
    kind: str
    at: float
    body: bytes


def ids_blob(ids: Sequence[int]) -> bytes:
    """Return ids as little-endian int32 bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def blob_ids(blob: bytes) -> list[int]:
    """Return the ids of a blob."""
    ids: list[int] = np.frombuffer(blob, dtype="<i4").tolist()
    return ids


def logprobs_blob(logprobs: Sequence[float | None]) -> bytes:
    """Return log-probs as float32 bytes, NaN for None."""
    return np.asarray([math.nan if value is None else value for value in logprobs], dtype="<f4").tobytes()


def blob_logprobs(blob: bytes) -> list[float | None]:
    """Return the log-probs of a blob, None for NaN."""
    return [None if math.isnan(value) else value for value in np.frombuffer(blob, dtype="<f4").tolist()]


def message_body(message: dict[str, Any]) -> tuple[bytes, bytes]:
    """Return the digest and the body of a message."""
    body = msgspec.json.encode(message, order="sorted")
    return hashlib.blake2b(body, digest_size=16).digest(), body


def row_message(body: bytes) -> dict[str, Any]:
    """Return the message of a row."""
    message: dict[str, Any] = msgspec.json.decode(zlib.decompress(body))
    return message
