"""What can happen to a call: the events of `Exchange`."""

from __future__ import annotations

from dataclasses import dataclass

from gyre_sdk.records import VersionSpan


@dataclass(frozen=True, slots=True)
class Routed:
    """A replica was chosen for the next attempt."""

    replica: str
    version: int
    """Weights that the replica served then."""
    request_id: str
    """Fresh for each attempt: engines abort by id."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The engine sampled tokens."""

    ids: list[int]
    logprobs: list[float | None]


@dataclass(frozen=True, slots=True)
class Finished:
    """The engine ended the attempt with a real finish reason."""

    reason: str
    stop_reason: str | int | None = None
    spans: tuple[VersionSpan, ...] = ()
    """Versions in the attempt's own tokens; empty when the engine gave none."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The attempt ended without a finish: connection lost, engine error, a bare end marker, or an abort."""

    message: str
    aborted: bool = False
    """True when the engine said so itself (finish reason `abort`)."""
    spans: tuple[VersionSpan, ...] = ()
    clean: int | None = None
    """Sampled tokens of the call up to which no stop string has begun; None means all."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The engine refused the request for good."""

    status: int
    message: str


@dataclass(frozen=True, slots=True)
class Unserved:
    """No replica was there for `waited` seconds."""

    waited: float


@dataclass(frozen=True, slots=True)
class Stored:
    """The call's tokens are durable up to `upto`."""

    upto: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The terminal record is durable."""


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """The store refused a write: nothing more may be sent to the agent."""

    message: str


@dataclass(frozen=True, slots=True)
class Delivered:
    """The end of the answer reached the agent's connection."""


@dataclass(frozen=True, slots=True)
class AgentGone:
    """A connection of the agent closed before the end of the answer."""


@dataclass(frozen=True, slots=True)
class Cancelled:
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
