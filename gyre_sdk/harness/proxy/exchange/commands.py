"""What a call asks its shell to do: the commands of `Exchange`."""

from __future__ import annotations

from dataclasses import dataclass

from gyre_sdk.records import AttemptRecord, CallStatus, VersionSpan

REJECTED = "rejected_by_engine"
"""Code of a failure that is the engine's answer to what was asked."""


@dataclass(frozen=True, slots=True)
class PersistIntent:
    """Record the call, at the latest with its first tokens."""


@dataclass(frozen=True, slots=True)
class FindReplica:
    """Choose a replica; answer with `Routed` or `Unserved`."""

    avoid: str | None = None
    """Replica that just failed: take another one where there is one."""
    delay: float = 0.0
    """Seconds to wait first; grows while attempts end without a token."""


@dataclass(frozen=True, slots=True)
class PersistAttempt:
    """Record an attempt, at the latest with the first tokens that it brings."""

    attempt: AttemptRecord


@dataclass(frozen=True, slots=True)
class Send:
    """Ask the engine to continue the prompt + `sampled`."""

    attempt: AttemptRecord
    version: int
    sampled: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class PersistTokens:
    """Record sampled tokens that came; answer with `Stored`."""

    start: int


@dataclass(frozen=True, slots=True)
class PersistAttemptEnd:
    """Record how an attempt ended, and the tokens that were given up with it: they leave the call's own tokens."""

    attempt: AttemptRecord
    keep: int
    """Tokens that the call keeps."""
    lost_ids: tuple[int, ...] = ()
    lost_logprobs: tuple[float | None, ...] = ()
    lost_spans: tuple[VersionSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class PersistEnd:
    """Record the terminal state; answer with `Ended` when durable."""

    status: CallStatus
    finish: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class AbortAttempt:
    """Tell the engine to stop an attempt that is running."""

    attempt: AttemptRecord


@dataclass(frozen=True, slots=True)
class Release:
    """Tokens up to `upto` may be shown to the agent."""

    upto: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """The answer is complete and durable: give it to the agent."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Give the agent an error."""

    status: int
    code: str
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class PersistDelivered:
    """Record the delivery."""


Command = (
    PersistIntent
    | FindReplica
    | PersistAttempt
    | Send
    | PersistTokens
    | PersistAttemptEnd
    | PersistEnd
    | AbortAttempt
    | Release
    | Deliver
    | Fail
    | PersistDelivered
)
