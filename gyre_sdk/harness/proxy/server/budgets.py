"""What a run, or a lane of it, may still spend, and how it ends when that is nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from gyre_sdk.errors import ProtocolError
from gyre_sdk.records import RunStatus

LIMIT_CODE = "limit_exceeded"
"""Error code of a call beyond a budget; SDKs do not send such a call again."""


_NAMES = {"turn": "turns", "token": "tokens", "time": "seconds", "dollar": "cost"}
"""Of budgets, by the last word of what `Spent` says of them, in the singular."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Budgets of a run, or of a lane with all lanes below it; None means none."""

    tokens: int | None = None
    """Prompt + sampled tokens, summed over calls."""
    turns: int | None = None
    """Calls."""
    seconds: float | None = None
    """Wall time since the run, or the lane, was opened."""
    cost: float | None = None
    """US dollars, at the service's prices."""


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """US dollars per million tokens; what a call costs its run's budget."""

    prompt: float = 0.0
    sampled: float = 0.0

    def of(self, prompt: int, sampled: int) -> float:
        """Return the cost of tokens in dollars."""
        return (self.prompt * prompt + self.sampled * sampled) / 1e6


@dataclass(slots=True)
class Usage:
    """What a run has spent."""

    calls: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    cost: float = 0.0
    """US dollars."""

    def add(self, calls: int, prompt: int, sampled: int, cost: float) -> None:
        """Count calls, tokens and dollars."""
        self.calls += calls
        self.prompt_tokens += prompt
        self.sampled_tokens += sampled
        self.cost += cost


@dataclass(frozen=True, slots=True)
class Spent:
    """A budget that has run out."""

    status: RunStatus
    """Terminal state of the run: `timed_out` for wall time, `limit` for the rest."""
    what: str
    """The budget, in words."""
    who: str = "the run"
    """Whose it was."""

    @property
    def limit(self) -> str:
        """The budget's name in `Limits`."""
        return _NAMES[self.what.rpartition(" ")[2].removesuffix("s")]

    def refusal(self) -> ProtocolError:
        """Return what a call beyond the budget is told."""
        return ProtocolError(f"{self.who} has spent its budget of {self.what}", status=403, code=LIMIT_CODE)


def room(limits: Limits, usage: Usage, prices: Prices, *, age: float, calls: int, prompt: int) -> int | Spent | None:
    """Return how many tokens each of a request's calls may sample (None: no bound), or which budget is spent.

    Args:
        limits: of the run.
        usage: so far.
        prices: per million tokens.
        age: seconds since the run was opened.
        calls: calls that the request makes.
        prompt: tokens of each call's prompt.
    """
    if limits.seconds is not None and age >= limits.seconds:
        return out_of_time(limits)
    if limits.turns is not None and usage.calls + calls > limits.turns:
        return Spent(RunStatus.LIMIT, _amount(limits.turns, "turn"))
    most: int | None = None
    if limits.tokens is not None:
        most = (limits.tokens - usage.prompt_tokens - usage.sampled_tokens) // calls - prompt
        if most < 1:
            return Spent(RunStatus.LIMIT, _amount(limits.tokens, "token"))
    if limits.cost is not None:
        left = limits.cost - usage.cost - prices.of(prompt * calls, 0)
        if left <= 0:
            return Spent(RunStatus.LIMIT, _amount(limits.cost, "US dollar"))
        if prices.sampled > 0:
            affordable = int(left * 1e6 / prices.sampled / calls)
            if affordable < 1:
                return Spent(RunStatus.LIMIT, _amount(limits.cost, "US dollar"))
            most = affordable if most is None else min(most, affordable)
    return most


@dataclass(slots=True, eq=False)
class Account:
    """The budget of a lane. Calls of the lanes below it count too; what is over ends these lanes, not the run."""

    who: str
    """The lane, for messages."""
    limits: Limits
    opened_at: float
    """Seconds since the epoch."""
    usage: Usage = field(default_factory=Usage)
    spent: Spent | None = None
    """What ran out; it stays."""

    def room(self, prices: Prices, *, at: float, calls: int, prompt: int) -> int | Spent | None:
        """See `room`."""
        if self.spent is not None:
            return self.spent
        most = room(self.limits, self.usage, prices, age=at - self.opened_at, calls=calls, prompt=prompt)
        return replace(most, who=self.who) if isinstance(most, Spent) else most


def _amount(number: float, noun: str) -> str:
    return f"{number if isinstance(number, int) else f'{number:g}'} {noun}{'' if number == 1 else 's'}"


def out_of_time(limits: Limits) -> Spent:
    """Return the end of a run or a lane whose wall time is over."""
    return Spent(RunStatus.TIMED_OUT, f"{limits.seconds:g} s of wall time")


def final_status(given: RunStatus, spent: Spent | None) -> RunStatus:
    """Return the terminal state of a run that its session ends as `given`.

    A budget that ran out is how the run ended, whatever its agent made of that; trouble of workspaces and scorers,
    and a cancellation, stay what they are.
    """
    own = (RunStatus.COMPLETED, RunStatus.AGENT_ERROR, RunStatus.TIMED_OUT, RunStatus.LIMIT)
    return spent.status if spent is not None and given in own else given
