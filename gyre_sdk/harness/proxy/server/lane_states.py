"""What lanes have beside their records, in a stream of the store: budgets of their own, keys that they take over, and
whether their run is closed.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from gyre_sdk.harness.proxy.server.budgets import Limits, Spent
from gyre_sdk.journal import Journal, Write
from gyre_sdk.records import LaneId, RunId, RunStatus


class LaneOpened(msgspec.Struct, frozen=True, tag="opened", omit_defaults=True):
    """A lane was opened with more than a record."""

    lane: LaneId
    limits: Limits = Limits()
    takes_over: bool = False
    """Whether calls with the parent's key go to it."""


class LaneReleased(msgspec.Struct, frozen=True, tag="released"):
    """A lane gave its parent's key back."""

    lane: LaneId


class LaneSpent(msgspec.Struct, frozen=True, tag="spent"):
    """A lane's budget ran out."""

    lane: LaneId
    status: RunStatus
    what: str
    who: str

    @property
    def spent(self) -> Spent:
        """As the proxy knows it."""
        return Spent(self.status, self.what, self.who)


class RunClosed(msgspec.Struct, frozen=True, tag="closed"):
    """The run takes no more calls; how it ends is not known yet."""


LaneEvent = LaneOpened | LaneReleased | LaneSpent
_decode = msgspec.msgpack.Decoder(LaneEvent | RunClosed).decode


def write_event(journal: Journal, run: RunId, event: LaneEvent | RunClosed, at: float) -> Write[int]:
    """Record an event of a run's lane, or of all of them; `at` in seconds since the epoch."""
    return journal.append(_stream(run), "lane", event, at=at)


def read_events(journal: Journal, run: RunId) -> Iterator[LaneEvent | RunClosed]:
    """Yield the events of a run's lanes, oldest first."""
    for entry in journal.entries(_stream(run)):
        yield _decode(entry.body)


def spent_event(lane: LaneId, spent: Spent) -> LaneSpent:
    """Return the event of a budget that ran out."""
    return LaneSpent(lane, spent.status, spent.what, spent.who)


def _stream(run: RunId) -> str:
    return f"lanes/{run}"


__all__ = [
    "LaneEvent",
    "LaneOpened",
    "LaneReleased",
    "LaneSpent",
    "RunClosed",
    "read_events",
    "spent_event",
    "write_event",
]
