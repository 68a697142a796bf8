"""What can happen to a call: the events of `Exchange`."""

from __future__ import annotations

import msgspec

from gyre_sdk.records import VersionSpan


class Routed(msgspec.Struct, frozen=True):
    """A replica was chosen for the next attempt."""

    replica: str
    version: int
    """Weights that the replica served then."""
    request_id: str
    """Fresh for each attempt: engines abort by id."""


class Sampled(msgspec.Struct, frozen=True):
    """The engine sampled tokens."""

    ids: list[int]
    logprobs: list[float | None]


class Finished(msgspec.Struct, frozen=True):
    """The engine ended the attempt with a real finish reason."""

    reason: str
    stop_reason: str | int | None = None
    spans: tuple[VersionSpan, ...] = ()
    """Versions in the attempt's own tokens; empty when the engine gave none."""


class Broken(msgspec.Struct, frozen=True):
    """The attempt ended without a finish: connection lost, engine error, a bare end marker, or an abort."""

    message: str
    aborted: bool = False
    """True when the engine said so itself (finish reason `abort`)."""
    spans: tuple[VersionSpan, ...] = ()
    clean: int | None = None
    """Sampled tokens of the call up to which no stop string has begun; None means all."""


class Rejected(msgspec.Struct, frozen=True):
    """The engine refused the request for good."""

    status: int
    message: str


class Unserved(msgspec.Struct, frozen=True):
    """No replica was there for `waited` seconds."""

    waited: float
    why: str = "none is announced"
    """What keeps each from serving."""


class Stored(msgspec.Struct, frozen=True):
    """The call's tokens are durable up to `upto`."""

    upto: int


class Ended(msgspec.Struct, frozen=True):
    """The terminal record is durable."""


class StoreFailed(msgspec.Struct, frozen=True):
    """The store refused a write: nothing more may be sent to the agent."""

    message: str


class Delivered(msgspec.Struct, frozen=True):
    """The end of the answer reached the agent's connection."""


class AgentGone(msgspec.Struct, frozen=True):
    """A connection of the agent closed before the end of the answer."""


class Cancelled(msgspec.Struct, frozen=True):
    """The run does not want the call any more."""

    message: str
    code: str = "run_closed"
    """What the agent is told: `run_closed`, or `limit_exceeded` when a budget ran out."""


Event = (
    Routed
    | Sampled
    | Finished
    | Broken
    | Rejected
    | Unserved
    | Stored
    | Ended
    | StoreFailed
    | Delivered
    | AgentGone
    | Cancelled
)
