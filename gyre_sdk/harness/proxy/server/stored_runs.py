"""Runs read back from the store: what a process that died, or forgot them, knew of them."""

from __future__ import annotations

import msgspec
import numpy as np

from gyre_sdk.harness.proxy.dialects.canonical import Message
from gyre_sdk.harness.proxy.lanes.loading import load_classifier
from gyre_sdk.harness.proxy.server.budgets import Limits, Prices, Spent
from gyre_sdk.harness.proxy.server.hosted import spent_by
from gyre_sdk.harness.proxy.server.lane_states import RunClosed, read_events
from gyre_sdk.harness.proxy.server.model_call import OPEN
from gyre_sdk.harness.proxy.server.state import Lane, Orphan, RequestRecord, RunState
from gyre_sdk.journal import Journal, RecordedExchange
from gyre_sdk.records import CallRecord, CallStatus, RunId, RunRecord, RunStatus

_ANSWERED = (CallStatus.COMPLETE, CallStatus.DELIVERED)


def load_run(journal: Journal, prices: Prices, run: RunId) -> RunState | None:
    """Return an open run with all that is on record of it; None when it is unknown or has ended.

    Args:
        journal: the store.
        prices: of calls whose cost is not on record.
        run: its id.
    """
    record = journal.run(run)
    if record is None or record.status is not RunStatus.RUNNING:
        return None
    state = RunState(run, record.created_at, limits_of(record), training=record.group is not None)
    name = record.metadata.get("classifier")
    state.classifier = load_classifier(name) if name else None
    for lane in journal.lanes(run):
        state.lanes[lane.lane] = Lane(lane, state)
    for event in read_events(journal, run):
        if isinstance(event, RunClosed):
            state.closed = True
        else:
            state.budgets.take(event)
    exchanges: dict[str, RecordedExchange] = {item.call: item for item in journal.exchanges(run)}
    for call in journal.calls(run, arrays=True):
        _load_call(journal, prices, state, call, exchanges[call.call])
    spent = journal.spent(run)
    if spent is not None:
        state.closed, state.spent = True, Spent(*spent)
    return state


def _load_call(journal: Journal, prices: Prices, state: RunState, call: CallRecord, exchange: RecordedExchange) -> None:
    request = msgspec.convert(exchange.request, RequestRecord)
    _sort_again(state, call, request, exchange)
    answer = msgspec.convert(exchange.answer, Message) if exchange.answer is not None else None
    prompt, sampled, cost = len(call.prompt_ids), len(call.sampled_ids), None
    if request.hosted and answer is not None:
        prompt, sampled, cost = spent_by(answer)
    if call.status not in _ANSWERED:
        sampled = 0
    paid = prices.of(prompt, sampled) if cost is None else cost
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
        orphan = _orphan(call, request, len(journal.attempts(call.call)), exchange)
        state.orphans[(request.key_lane or call.lane, request.digest)].append(orphan)


def _sort_again(state: RunState, call: CallRecord, request: RequestRecord, exchange: RecordedExchange) -> None:
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


def _orphan(call: CallRecord, request: RequestRecord, attempts: int, exchange: RecordedExchange) -> Orphan:
    """Return a call as it is kept for its retries. One that has ended needs no prompt: all of them make up T² tokens."""
    is_open = call.status in OPEN
    prompt: list[int] = np.asarray(call.prompt_ids).tolist() if is_open else []
    logprobs = [None if np.isnan(value) else value for value in np.asarray(call.logprobs).tolist()]
    sampled = np.asarray(call.sampled_ids).tolist()
    record = msgspec.structs.replace(call, prompt_ids=prompt, sampled_ids=sampled, logprobs=logprobs)
    messages = exchange.messages if is_open else []
    return Orphan(record, request, attempts, messages, exchange.answer, len(call.prompt_ids))


def limits_of(record: RunRecord) -> Limits:
    """Return the limits that a run was opened with."""
    return msgspec.convert(record.metadata.get("limits") or {}, Limits)
