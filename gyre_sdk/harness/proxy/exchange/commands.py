"""What a call asks its shell to do: the commands of `Exchange`."""

from __future__ import annotations

import msgspec

from gyre_sdk.records import AttemptRecord, CallStatus, VersionSpan

REJECTED = "rejected_by_engine"
"""Code of a failure that is the engine's answer to what was asked."""


class PersistIntent(msgspec.Struct, frozen=True):
    """Record the call, at the latest with its first tokens."""


class FindReplica(msgspec.Struct, frozen=True):
    """Choose a replica; answer with `Routed` or `Unserved`."""

    avoid: str | None = None
    """Replica that just failed: take another one where there is one."""
    delay: float = 0.0
    """Seconds to wait first; grows while attempts end without a token."""


class PersistAttempt(msgspec.Struct, frozen=True):
    """Record an attempt, at the latest with the first tokens that it brings."""

    attempt: AttemptRecord


class Send(msgspec.Struct, frozen=True):
    """Ask the engine to continue the prompt + `sampled`."""

    attempt: AttemptRecord
    version: int
    sampled: tuple[int, ...]
    max_tokens: int


class PersistTokens(msgspec.Struct, frozen=True):
    """Record sampled tokens that came; answer with `Stored`."""

    start: int


class PersistAttemptEnd(msgspec.Struct, frozen=True):
    """Record how an attempt ended, and the tokens that were given up with it: they leave the call's own tokens."""

    attempt: AttemptRecord
    keep: int
    """Tokens that the call keeps."""
    lost_ids: tuple[int, ...] = ()
    lost_logprobs: tuple[float | None, ...] = ()
    lost_spans: tuple[VersionSpan, ...] = ()


class PersistEnd(msgspec.Struct, frozen=True):
    """Record the terminal state; answer with `Ended` when durable."""

    status: CallStatus
    finish: str | None = None
    error: str | None = None


class AbortAttempt(msgspec.Struct, frozen=True):
    """Tell the engine to stop an attempt that is running."""

    attempt: AttemptRecord


class Release(msgspec.Struct, frozen=True):
    """Tokens up to `upto` may be shown to the agent."""

    upto: int


class Deliver(msgspec.Struct, frozen=True):
    """The answer is complete and durable: give it to the agent."""


class Fail(msgspec.Struct, frozen=True):
    """Give the agent an error."""

    status: int
    code: str
    message: str
    retryable: bool


class PersistDelivered(msgspec.Struct, frozen=True):
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
