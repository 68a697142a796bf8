"""What the proxy knows of an open run: its lanes, its history, its calls, its budgets."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects.canonical import ModelRequest
from gyre_sdk.harness.proxy.dialects.history import History
from gyre_sdk.harness.proxy.lanes import Classifier
from gyre_sdk.harness.proxy.server.budgets import LIMIT_CODE, Limits, Spent, Usage
from gyre_sdk.harness.proxy.server.lane_budgets import LaneBudgets
from gyre_sdk.harness.proxy.server.model_call import ModelCall
from gyre_sdk.harness.proxy.server.names import fresh_name
from gyre_sdk.harness.proxy.server.protocols import RESPONSES
from gyre_sdk.harness.proxy.server.settings import ProxySettings
from gyre_sdk.harness.proxy.server.shards import shard_of
from gyre_sdk.harness.proxy.server.sorting import Sorter
from gyre_sdk.harness.proxy.server.turns import Turn
from gyre_sdk.records import CallRecord, LaneId, LaneRecord, RunId, RunStatus


class RequestRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is stored of a request beside its messages."""

    dialect: str
    history: str
    """Policy that the prompt was made under."""
    digest: str
    """Protocol and blake2b-128 of the decompressed body, to know retries after a restart."""
    turn: str
    """Shared by the choices of one request."""
    index: int
    """Number of the choice."""
    body: dict[str, Any]
    """Fields as sent."""
    key_lane: str = ""
    """Lane of the key that the request came with, where that is not the call's own."""
    tools: list[dict[str, Any]] | None = None
    """Tools in OpenAI's form, where the body does not hold them so."""
    hosted: bool = False
    """Whether a hosted model answers: there are no token ids then."""
    provider: dict[str, Any] | None = None
    """Of a hosted model: its name and what it is asked beside the messages."""
    prefill: str = ""
    """Text that the answer continues; the recorded answer begins with it."""
    retry_key: str = ""
    """Digest of its `Idempotency-Key`."""

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools as the model's template was given them."""
        return self.tools if self.tools is not None else self.body.get("tools") or []


@dataclass(slots=True, eq=False)
class Lane:
    """A lane whose key is known."""

    record: LaneRecord
    run: RunState
    diverted: list[Lane] = field(default_factory=list)
    """Lanes that calls with this lane's key go to, the last one first."""
    revoked: bool = False

    @property
    def serving(self) -> Lane:
        """The lane that a call with this lane's key belongs to now."""
        return self.diverted[-1].serving if self.diverted else self


@dataclass(slots=True, eq=False)
class RunState:
    """An open run."""

    run: RunId
    created_at: float
    limits: Limits
    history: History = field(default_factory=History)
    """Of the policy's calls."""
    hosted_history: History = field(default_factory=History)
    """Of calls without token ids: apart, for nothing can be bridged from them."""
    lanes: dict[str, Lane] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    """Digests of its lanes' keys that are kept in memory."""
    turns: dict[tuple[str, str], list[Turn]] = field(default_factory=lambda: defaultdict(list))
    """By lane and body digest."""
    keyed: dict[tuple[str, str], Turn] = field(default_factory=dict)
    """By lane and digest of the `Idempotency-Key`."""
    orphans: dict[tuple[str, str], list[Orphan]] = field(default_factory=lambda: defaultdict(list))
    """Calls of a process that died, by lane and body digest."""
    live: set[ModelCall] = field(default_factory=set)
    """Calls in flight."""
    named: dict[str, Turn] = field(default_factory=dict)
    """By name, for protocols that refer to earlier answers."""
    usage: Usage = field(default_factory=Usage)
    closed: bool = False
    alarm: asyncio.TimerHandle | None = None
    """Rings when the wall time is over."""
    spent: Spent | None = None
    """The budget that ended the run."""
    requests: int = 0
    """Requests that are being answered."""
    used_at: float = 0.0
    """Monotonic seconds when it was last asked for."""
    tools: tuple[Any, tuple[dict[str, Any], ...]] = ((), ())
    """Tools of the last large request, as sent and as canonical: nearly always those of the next one too."""
    training: bool = False
    """Whether the run's rewards are compared: what a trainer cannot reproduce is refused."""
    budgets: LaneBudgets = field(init=False)
    """Of lanes that have their own."""
    classifier: Classifier | None = None
    """Tells the lanes of an agent that has one key for everything; None: lanes go by their keys."""
    sorters: dict[LaneId, Sorter] = field(default_factory=dict)
    """With a classifier: what it knows, by lane of the key."""

    def __post_init__(self) -> None:
        self.budgets = LaneBudgets(self.lanes)

    @property
    def at_rest(self) -> bool:
        """Whether nothing goes on in the run, no clock of a budget either: all that is known of it is in the store."""
        clock = self.limits.seconds is not None and self.spent is None
        return not (self.requests or self.live or clock or self.budgets.clocks)

    @contextmanager
    def asked_for(self) -> Iterator[None]:
        """Hold the run in memory while a request is answered."""
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1
            self.used_at = time.monotonic()

    def refusal(self) -> ProtocolError:
        """Return what a call of a closed run is told."""
        if self.spent is not None:
            return self.spent.refusal()
        return ProtocolError("the run is closed: it takes no more calls", status=403, code="run_closed")

    def sorter(self, key: LaneRecord) -> Sorter | None:
        """Return what is known of the lanes under a key; None where lanes go by their keys."""
        if self.classifier is None:
            return None
        found = self.sorters.get(key.lane)
        if found is None:
            found = self.sorters[key.lane] = Sorter(key, self.classifier)
        return found

    def without_conversation(self, request: ModelRequest) -> ModelRequest:
        """Return a request without the messages that its calls' records hold: kept whole, each would hold its history.

        Its tools are those of the request before where they are equal.
        """
        sent, tools = request.fields.get("tools"), request.tools
        if tools and (sent, tools) == self.tools:
            request.fields["tools"], tools = self.tools
        else:
            self.tools = (sent, tools)
        instructions = request.raw[:1] if request.dialect == RESPONSES.name else ()
        return replace(request, messages=(), raw=instructions, tools=tools)

    def charge(self, lane: LaneId, calls: int = 0, prompt: int = 0, sampled: int = 0, cost: float = 0.0) -> None:
        """Count what a lane's calls use against the run's budget and those of lanes."""
        self.usage.add(calls, prompt, sampled, cost)
        for _, account in self.budgets.of(lane):
            account.usage.add(calls, prompt, sampled, cost)

    def spend_lane(self, lane: LaneId, spent: Spent) -> None:
        """Take no more calls of a lane and of those below it: its budget ran out. Of time, it ends what is in flight."""
        self.budgets.spend(lane, spent)
        if spent.status is not RunStatus.TIMED_OUT:
            return
        for call in list(self.live):
            if any(name == lane for name, _ in self.budgets.of(call.intent.lane)):
                call.cancel(str(spent.refusal()), LIMIT_CODE)

    def spend(self, spent: Spent) -> None:
        """Close the run because a budget ran out; its calls in flight end."""
        self.closed, self.spent = True, spent
        for call in list(self.live):
            call.cancel(str(spent.refusal()), LIMIT_CODE)


@dataclass(frozen=True, slots=True)
class Orphan:
    """A recorded call whose process died, and what it was asked."""

    record: CallRecord
    """Of one that has ended, without its prompt."""
    request: RequestRecord
    attempts: int
    messages: list[dict[str, Any]]
    """Of one that is open."""
    answer: dict[str, Any] | None
    prompt_tokens: int


def new_run_id(settings: ProxySettings) -> RunId:
    """Return the id of a fresh run, of this worker's shard."""
    while True:
        run = RunId(f"r-{fresh_name()}")
        if shard_of(run, settings.shards) == settings.shard:
            return run


def new_lane_id() -> LaneId:
    """Return the id of a fresh lane."""
    return LaneId(f"l-{fresh_name()}")


def key_digest(key: str) -> str:
    """Return what is stored of a key."""
    return hashlib.blake2b(key.encode(), digest_size=32).hexdigest()


def body_digest(body: bytes) -> str:
    """Return what is stored of a body."""
    return hashlib.blake2b(body, digest_size=16).hexdigest()
