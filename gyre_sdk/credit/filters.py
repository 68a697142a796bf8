"""Which calls are left out as targets, whatever they sampled: masks per call, each with its reason.

A masked call stays on its path as context where something trained comes after it. It leaves targets, weights and
denominators, and it never makes a path worth selecting: masks come before selection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from gyre_sdk.records import CallId, CallRecord, CallStatus, LaneId, RunId, Sampling, VersionSpan

Lag = Callable[[int], int]
"""Version -> steps by which it is behind the policy in training."""


class Mask(StrEnum):
    """Why a call is context only."""

    SAMPLING = "sampling"
    """The trainer cannot compute the distribution it was sampled from."""
    ROLE = "role"
    """Its role has no weight."""
    TRUNCATED = "truncated"
    """Its length limit cut it off."""
    STALE = "stale"
    """A token of it is older than allowed."""
    NO_CREDIT = "no_credit"
    """Its run, role or set of calls has no advantage: the rewards that would decide it show no contrast."""


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What is known of a call beside its tokens."""

    call: CallId
    run: RunId
    lane: LaneId
    role: str
    status: CallStatus
    parent: CallId | None
    """The call whose path it continues or forks from, as recorded."""
    prompt_tokens: int
    sampled_tokens: int
    versions: tuple[VersionSpan, ...]
    finish_reason: str | None
    """`stop`, `length` or `tool_calls` as the agent saw it."""
    sampling: Sampling
    received_at: float
    ended_at: float | None

    @classmethod
    def of(cls, record: CallRecord) -> Self:
        """Take a recorded call without its tokens."""
        return cls(
            call=record.call,
            run=record.run,
            lane=record.lane,
            role=record.role,
            status=record.status,
            parent=record.parent,
            prompt_tokens=len(record.prompt_ids),
            sampled_tokens=len(record.sampled_ids),
            versions=tuple(record.versions),
            finish_reason=record.finish_reason,
            sampling=record.sampling,
            received_at=record.received_at,
            ended_at=record.ended_at,
        )

    @property
    def hosted(self) -> bool:
        """Whether a hosted model answered: there are no token ids then."""
        return not self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Filters:
    """What masks a call."""

    truncated: bool = False
    """Mask calls that their length limit cut off."""
    max_staleness: int | None = None
    """Mask calls of which a token is more than this many steps old; None masks none."""
    idle_roles: frozenset[str] = frozenset()
    """Roles without weight."""

    def mask(self, call: CallFacts, lag: Lag) -> Mask | None:
        """Return why a call is no target; the first reason counts."""
        if not call.hosted and call.sampling.irreproducible is not None:
            return Mask.SAMPLING
        if call.role in self.idle_roles:
            return Mask.ROLE
        if self.truncated and call.finish_reason == "length":
            return Mask.TRUNCATED
        if self.max_staleness is not None and staleness(call, lag) > self.max_staleness:
            return Mask.STALE
        return None


def staleness(call: CallFacts, lag: Lag) -> int:
    """Return the age in steps of a call's oldest token; 0 for one whose tokens have no version (never a target)."""
    return max((lag(span.version) for span in call.versions if span.end > span.start and span.version >= 0), default=0)
