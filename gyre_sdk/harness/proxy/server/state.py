"""What the proxy knows of its runs: in memory while they are open, read back from the store when it has to be."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects.canonical import Message, ModelRequest
from gyre_sdk.harness.proxy.dialects.history import History
from gyre_sdk.harness.proxy.lanes import Classifier
from gyre_sdk.harness.proxy.lanes.loading import load_classifier
from gyre_sdk.harness.proxy.server.budgets import LIMIT_CODE, Limits, Spent, Usage, out_of_time
from gyre_sdk.harness.proxy.server.hosted import spent_by
from gyre_sdk.harness.proxy.server.lane_budgets import LaneBudgets
from gyre_sdk.harness.proxy.server.lane_states import LaneEvent, read_events, spent_event, write_event
from gyre_sdk.harness.proxy.server.model_call import OPEN, ModelCall
from gyre_sdk.harness.proxy.server.names import fresh_name
from gyre_sdk.harness.proxy.server.protocols import RESPONSES
from gyre_sdk.harness.proxy.server.settings import ProxySettings
from gyre_sdk.harness.proxy.server.shards import shard_of
from gyre_sdk.harness.proxy.server.sorting import Sorter
from gyre_sdk.harness.proxy.server.turns import Turn
from gyre_sdk.journal import Journal, RecordedExchange
from gyre_sdk.records import CallRecord, CallStatus, LaneId, LaneRecord, RunId, RunRecord, RunStatus

_ANSWERED = (CallStatus.COMPLETE, CallStatus.DELIVERED)


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
    request: RequestRecord
    attempts: int
    messages: list[dict[str, Any]]
    answer: dict[str, Any] | None


class Registry:
    """Runs and keys of this process, and of the store."""

    def __init__(self, journal: Journal, settings: ProxySettings) -> None:
        self._journal = journal
        self._settings = settings
        self._keys: dict[str, Lane] = {}
        self._runs: dict[RunId, RunState] = {}
        self._loading = asyncio.Lock()

    @property
    def runs(self) -> list[RunState]:
        """Runs in memory."""
        return list(self._runs.values())

    def calls_in_flight(self) -> int:
        """Return how many calls are in flight."""
        return sum(len(run.live) for run in self._runs.values())

    def open_run(self, state: RunState) -> None:
        """Keep a run that was just opened, or read back from the store."""
        self._runs[state.run] = state
        if state.limits.seconds is not None and state.spent is None:
            left = state.created_at + state.limits.seconds - time.time()
            state.alarm = asyncio.get_running_loop().call_later(max(left, 0.0), self._time_is_up, state)
        self._watch(state)

    def open_lane(self, state: RunState, record: LaneRecord, digest: str) -> Lane:
        """Keep a lane that was just opened."""
        lane = state.lanes[record.lane] = Lane(record, state)
        return self._remember(digest, lane)

    def take(self, state: RunState, event: LaneEvent) -> None:
        """Bring a lane to an event that was just recorded."""
        state.budgets.take(event)
        self._watch(state)

    def _watch(self, state: RunState) -> None:
        state.budgets.watch(lambda lane: self._lane_is_late(state, lane))

    def _lane_is_late(self, state: RunState, lane: LaneId) -> None:
        [account] = [account for name, account in state.budgets.of(lane) if name == lane]
        if account.spent is None:
            spent = replace(out_of_time(account.limits), who=account.who)
            state.spend_lane(lane, spent)
            write_event(self._journal, state.run, spent_event(lane, spent), time.time())

    def _remember(self, digest: str, lane: Lane) -> Lane:
        lane.run.keys.append(digest)
        return self._keys.setdefault(digest, lane)

    def drop(self, run: RunId) -> None:
        """Forget a run that ended."""
        state = self._runs.pop(run, None)
        if state is not None and state.alarm is not None:
            state.alarm.cancel()
        if state is not None:
            state.budgets.close()
        for digest in state.keys if state is not None else ():
            self._keys.pop(digest, None)

    def revoke(self, lane: Lane) -> None:
        """Make a lane's keys open nothing."""
        lane.revoked = True

    async def lane(self, key: str) -> Lane:
        """Return the lane that a key opens.

        Raises:
            ProtocolError: 401 for an unknown key, 403 for one of a run that ended.
        """
        digest = key_digest(key)
        lane = self._keys.get(digest)
        if lane is not None:
            if lane.revoked:
                raise ProtocolError("the API key was revoked", status=401, code="invalid_api_key")
            return lane
        record = await asyncio.to_thread(self._journal.lane_of_key, digest) if key else None
        if record is None:
            raise ProtocolError(
                "the API key is missing or opens no run; take the key that `gyre.session` or `POST /gyre/v1/runs` gave",
                status=401,
                code="invalid_api_key",
            )
        state = await self.run(record.run)
        if state is None:
            raise ProtocolError(
                f"run {record.run} has ended; its key opens nothing any more", status=403, code="run_ended"
            )
        lane = state.lanes.get(record.lane)
        return self.open_lane(state, record, digest) if lane is None else self._remember(digest, lane)

    async def run(self, run: RunId) -> RunState | None:
        """Return an open run, from the store if need be; None when it is unknown or has ended."""
        state = self._runs.get(run)
        if state is None:
            if shard_of(run, self._settings.shards) != self._settings.shard:
                problem = f"run {run} belongs to another worker; ask the service's own address"
                raise ProtocolError(problem, status=421, code="wrong_worker")
            async with self._loading:
                state = self._runs.get(run)
                if state is None:
                    state = await asyncio.to_thread(self._load, run)
                    if state is not None:
                        self.open_run(state)
        return state

    def _time_is_up(self, state: RunState) -> None:
        if state.spent is None:
            spent = out_of_time(state.limits)
            state.spend(spent)
            self._journal.spend_run(state.run, spent.status, spent.what)

    def _load(self, run: RunId) -> RunState | None:
        record = self._journal.run(run)
        if record is None or record.status is not RunStatus.RUNNING:
            return None
        state = RunState(run, record.created_at, limits_of(record), training=record.group is not None)
        name = record.metadata.get("classifier")
        state.classifier = load_classifier(name) if name else None
        for lane in self._journal.lanes(run):
            state.lanes[lane.lane] = Lane(lane, state)
        for event in read_events(self._journal, run):
            state.budgets.take(event)
        exchanges: dict[str, RecordedExchange] = {item.call: item for item in self._journal.exchanges(run)}
        for call in self._journal.calls(run):
            self._load_call(state, call, exchanges[call.call])
        spent = self._journal.spent(run)
        if spent is not None:
            state.closed, state.spent = True, Spent(*spent)
        return state

    def _load_call(self, state: RunState, call: CallRecord, exchange: RecordedExchange) -> None:
        request = msgspec.convert(exchange.request, RequestRecord)
        self._sort_again(state, call, request, exchange)
        answer = msgspec.convert(exchange.answer, Message) if exchange.answer is not None else None
        prompt, sampled, cost = len(call.prompt_ids), len(call.sampled_ids), None
        if request.hosted and answer is not None:
            prompt, sampled, cost = spent_by(answer)
        if call.status not in _ANSWERED:
            sampled = 0
        paid = self._settings.prices.of(prompt, sampled) if cost is None else cost
        state.charge(call.lane, 1, prompt, sampled, paid)
        if call.status in _ANSWERED and answer is not None:
            messages = tuple(msgspec.convert(exchange.messages, list[Message]))
            tools = request.shown_tools
            history = state.hosted_history if request.hosted else state.history
            history.add(
                call.call,
                call.lane,
                tools,
                messages,
                answer,
                call.prompt_ids,
                call.sampled_ids,
                call.parent,
                call.shared,
                prefill=request.prefill,
            )
        if call.status in OPEN or call.status in _ANSWERED:
            attempts = len(self._journal.attempts(call.call))
            state.orphans[(request.key_lane or call.lane, request.digest)].append(
                Orphan(call, request, attempts, exchange.messages, exchange.answer)
            )

    def _sort_again(
        self, state: RunState, call: CallRecord, request: RequestRecord, exchange: RecordedExchange
    ) -> None:
        key = state.lanes.get(request.key_lane or call.lane)
        sorter = state.sorter(key.record) if key is not None else None
        if sorter is None:
            return
        messages = msgspec.convert(exchange.messages, list[Message])
        if not sorter.knows(call.lane):
            sorter.opened(state.lanes[call.lane].record)
        sorter.asked(call.lane, call.call, messages, request.shown_tools)
        if exchange.answer is not None:
            sorter.answered(call.lane, call.call, messages, msgspec.convert(exchange.answer, Message))


def limits_of(record: RunRecord) -> Limits:
    """Return the limits that a run was opened with."""
    return msgspec.convert(record.metadata.get("limits") or {}, Limits)


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
