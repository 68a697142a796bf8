"""What goes into and comes out of the store beside the records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gyre_sdk.journal.blobs import IDS
from gyre_sdk.records import AttemptRecord, CallId, CallStatus, ForkReason, LaneId, RunId, Sampling, VersionSpan


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
    prompt_ids: Sequence[int] | IDS
    sampling: Sampling
    request: dict[str, Any]
    """The request without its messages: canonical fields, unknown ones included. Never a key or a header."""
    messages: Sequence[Any]
    """Canonical messages, in order: anything that is written as a JSON object."""
    received_at: float
    raw: Sequence[Any] = ()
    """The agent's own items (messages, system texts, input items) as sent, in order: any JSON values."""


class TokenChunk(msgspec.Struct, frozen=True):
    """Sampled tokens of an open call, as the engine streamed them."""

    start: int
    """Index of the first token in the call's sampled ids."""
    ids: list[int]
    logprobs: list[float | None]
    """Nats, one per id; None where the engine gave none."""
    versions: list[VersionSpan]
    """Spans in the call's sampled ids; may be empty until the engine tells."""


class CallEnd(msgspec.Struct, frozen=True):
    """How a call ended."""

    status: CallStatus
    at: float
    sampled: TokenChunk
    """Starts at 0 and holds every sampled token."""
    finish_reason: str | None = None
    answer: Any = None
    """The assistant message that the agent is given: anything that is written as a JSON object."""
    error: str | None = None
    attempt: AttemptRecord | None = None
    """How the call's last attempt ended, where that is not recorded yet."""


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
    fork_reason: ForkReason | None = None
    error: str | None = None
    """Of a call that ended without an answer; hostile text."""


class RecordedExchange(msgspec.Struct, frozen=True):
    """A call's request and answer as messages, to match later requests against.

    Exchanges that are read together share the objects of messages that they have in common: do not change them.
    """

    call: CallId
    lane: LaneId
    role: str
    status: CallStatus
    request: dict[str, Any]
    messages: list[dict[str, Any]]
    answer: dict[str, Any] | None
    """The assistant message that the agent was given; None while there is none."""
    raw: list[Any] = []
    """The agent's own items as sent."""

    @property
    def hosted(self) -> bool:
        """Whether a hosted model answered: there are no token ids then."""
        return self.request.get("hosted") is True


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
