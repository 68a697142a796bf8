"""What the lanes of a run have spent of their time: a fold of what is on record. Pure: time is passed in.

A lane's budget covers all lanes that it opened, theirs too. The service enforces all budgets but working time on calls;
working time, and all time on tools, is looked after here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gyre_sdk.errors import LimitExceeded
from gyre_sdk.harness.limits import Limits
from gyre_sdk.harness.service import MeteredCall
from gyre_sdk.records import CallStatus

_ENDED = (CallStatus.COMPLETE, CallStatus.DELIVERED, CallStatus.ABORTED, CallStatus.FAILED)


@dataclass(slots=True)
class Budget:
    """The budget of a lane, or of the run, and what is spent of its time."""

    lane: str
    """The lane whose budget it is; the main lane's is the run's."""
    what: str
    """Whose it is, in words."""
    own: bool
    """False for the run's."""
    limits: Limits
    opened: float
    """Monotonic time."""
    waiting_s: float = 0.0
    """Time in which calls were in flight."""

    def left_s(self, now: float) -> float | None:
        """Return how many seconds a tool may run; None without a limit, 0 or less when there are none."""
        limits, age = self.limits, now - self.opened
        left = [] if limits.wall_s is None else [limits.wall_s - age]
        if limits.working_s is not None:
            left.append(limits.working_s - (age - self.waiting_s))
        return min(left, default=None)

    def out_of_time(self, now: float) -> LimitExceeded | None:
        """Return which limit on time is spent, as the error to raise."""
        limits, age = self.limits, now - self.opened
        if limits.wall_s is not None and age >= limits.wall_s:
            return self.error("wall_s", f"{limits.wall_s:g} s of wall time")
        return self.out_of_work(now)

    def out_of_work(self, now: float) -> LimitExceeded | None:
        """Return the error to raise where working time is spent."""
        limit, age = self.limits.working_s, now - self.opened
        if limit is not None and age - self.waiting_s >= limit:
            return self.error("working_s", f"{limit:g} s of working time")
        return None

    def error(self, limit: str, what: str) -> LimitExceeded:
        """Return the error of a spent limit; `what` says how much it was."""
        message = f"{self.what} has spent its budget of {what}"
        if not self.own:
            message += "; its work so far is scored"
        return LimitExceeded(message, limit=limit, lane=self.lane if self.own else None)


@dataclass(slots=True)
class Accounts:
    """The budgets of a run's lanes."""

    budgets: dict[str, Budget] = field(default_factory=dict)
    """By lane; lanes without a budget of their own are not in it."""
    parents: dict[str, str | None] = field(default_factory=dict)
    cursor: int = 0
    """Every call up to this position of the store has ended."""
    in_flight: dict[str, str] = field(default_factory=dict)
    """Call -> its lane, as the record was when it was last read."""
    _looked: float | None = None

    def chain(self, lane: str) -> Iterator[Budget]:
        """Yield the budgets that a lane's work counts against, its own first."""
        here: str | None = lane
        while here is not None:
            if here in self.budgets:
                yield self.budgets[here]
            here = self.parents.get(here)

    def below(self, lane: str) -> list[str]:
        """Return a lane and all lanes that it opened, and theirs."""
        found = [lane]
        for one in found:
            found += [child for child, parent in self.parents.items() if parent == one]
        return found

    def unknown(self, calls: Iterable[MeteredCall]) -> bool:
        """Tell whether calls are of lanes that were opened elsewhere."""
        return any(call.lane not in self.parents for call in calls)

    def read(self, calls: Iterable[MeteredCall]) -> None:
        """Take in what is on record of calls after the cursor, all of them."""
        cursor, gap = self.cursor, False
        for call in calls:
            if call.status in _ENDED:
                self.in_flight.pop(call.call, None)
            else:
                self.in_flight[call.call] = call.lane
                gap = True
            cursor = cursor if gap else call.seq
        self.cursor = cursor

    def look(self, now: float) -> None:
        """Add the time since the last look to the waiting of every budget with a call in flight."""
        passed = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        waiting = {budget.lane for lane in self.in_flight.values() for budget in self.chain(lane)}
        for lane in waiting:
            budget = self.budgets[lane]
            budget.waiting_s += min(passed, now - budget.opened)

    def adopt(self, parents: Mapping[str, str | None]) -> None:
        """Learn of lanes that were opened elsewhere."""
        for lane, parent in parents.items():
            self.parents.setdefault(lane, parent)
