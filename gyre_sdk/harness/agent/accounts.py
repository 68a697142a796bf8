"""What the lanes of a run have spent of their own budgets: a fold of what is on record. Pure: time is passed in.

A lane's budget covers all lanes that it opened, theirs too. The service enforces the run's budgets of turns, tokens, cost
and wall time itself; what it does not know of is kept here.
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
    """The budget of a lane, or of the run, and what is spent of it."""

    lane: str
    """The lane whose budget it is; the main lane's is the run's."""
    what: str
    """Whose it is, in words."""
    own: bool
    """False for the run's: its turns and tokens are the service's business."""
    limits: Limits
    opened: float
    """Monotonic time."""
    admitted: int = 0
    """Calls that this process let through."""
    turns: int = 0
    """Calls on record."""
    tokens: int = 0
    waiting_s: float = 0.0
    """Time in which calls were in flight."""

    def left_s(self, now: float) -> float | None:
        """Return how many seconds a tool may run; None without a limit, 0 or less when there are none."""
        limits, age = self.limits, now - self.opened
        left = [] if limits.wall_s is None else [limits.wall_s - age]
        if limits.working_s is not None:
            left.append(limits.working_s - (age - self.waiting_s))
        return min(left, default=None)

    @property
    def counts_calls(self) -> bool:
        """Whether turns or tokens are limited here."""
        return self.own and (self.limits.turns is not None or self.limits.tokens is not None)

    def out_of_time(self, now: float) -> LimitExceeded | None:
        """Return which limit on time is spent, as the error to raise."""
        limits, age = self.limits, now - self.opened
        if limits.wall_s is not None and age >= limits.wall_s:
            return self._error("wall_s", f"{limits.wall_s:g} s of wall time")
        if limits.working_s is not None and age - self.waiting_s >= limits.working_s:
            return self._error("working_s", f"{limits.working_s:g} s of working time")
        return None

    def out_of_calls(self) -> LimitExceeded | None:
        """Return which limit allows no further call, as the error to raise. Tools may still run."""
        if not self.own:
            return None
        limits = self.limits
        if limits.turns is not None and max(self.admitted, self.turns) >= limits.turns:
            return self._error("turns", f"{limits.turns} turns")
        if limits.tokens is not None and self.tokens >= limits.tokens:
            return self._error("tokens", f"{limits.tokens} tokens")
        return None

    def _error(self, limit: str, what: str) -> LimitExceeded:
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
    """Every call up to this position of the store has ended and is counted."""
    _counted: dict[str, tuple[int, str | None]] = field(default_factory=dict)
    """Call -> tokens counted of it, and its lane while it is in flight."""
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

    def count(self, calls: Iterable[MeteredCall]) -> None:
        """Take in what is on record of calls after the cursor, all of them."""
        cursor, gap = self.cursor, False
        for call in calls:
            known, _ = self._counted.get(call.call, (0, None))
            ended = call.status in _ENDED
            tokens = call.prompt_tokens + (call.sampled_tokens if ended else 0)
            for budget in self.chain(call.lane):
                budget.turns += call.call not in self._counted
                budget.tokens += tokens - known
            gap = gap or not ended
            if gap:
                self._counted[call.call] = (tokens, None if ended else call.lane)
            else:
                self._counted.pop(call.call, None)
                cursor = call.seq
        self.cursor = cursor

    def look(self, now: float) -> None:
        """Add the time since the last look to the waiting of every budget with a call in flight."""
        passed = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        waiting = {budget.lane for _, lane in self._counted.values() if lane for budget in self.chain(lane)}
        for lane in waiting:
            budget = self.budgets[lane]
            budget.waiting_s += min(passed, now - budget.opened)

    def adopt(self, parents: Mapping[str, str | None]) -> None:
        """Learn of lanes that were opened elsewhere."""
        for lane, parent in parents.items():
            self.parents.setdefault(lane, parent)
