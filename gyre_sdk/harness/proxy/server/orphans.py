"""Calls of a process that died: gone on with when the agent asks again, ended when it does not."""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec
import numpy as np

from gyre_sdk.harness.proxy.dialects.canonical import Message, ModelRequest, answer_of
from gyre_sdk.harness.proxy.dialects.history import Origin
from gyre_sdk.harness.proxy.exchange import Exchange
from gyre_sdk.harness.proxy.server.conduct import LiveCall, Services
from gyre_sdk.harness.proxy.server.hosted_turns import revive_hosted
from gyre_sdk.harness.proxy.server.model_call import OPEN
from gyre_sdk.harness.proxy.server.settings import HistoryPolicy
from gyre_sdk.harness.proxy.server.state import Orphan
from gyre_sdk.harness.proxy.server.turns import Turn
from gyre_sdk.journal import CallIntent, TokenChunk
from gyre_sdk.records import AttemptRecord, CallStatus


def revive(services: Services, request: ModelRequest, orphans: list[Orphan]) -> Turn:
    """Return the turn of recorded calls that another process left; those that were open can be resumed."""
    first = orphans[0]
    request = replace(request, prefill=first.request.prefill)  # as recorded: the agent may send it in other pieces
    turn = Turn(request, first.request.turn, first.record.received_at, first.request.retry_key)
    for orphan in sorted(orphans, key=lambda item: item.request.index):
        record = orphan.record
        if orphan.request.hosted:
            turn.calls.append(revive_hosted(services, request, orphan))
            continue
        ended = record.status not in OPEN
        exchange = Exchange(
            record.call,
            record.sampling,
            pause=services.settings.retry_pause,
            status=record.status if ended or record.sampled_ids else CallStatus.DISPATCHED,
            ids=list(record.sampled_ids),
            logprobs=list(record.logprobs),
            spans=list(record.versions),
            released=len(record.sampled_ids) if ended else 0,
            attempts=orphan.attempts,
            resumed=True,
        )
        intent = CallIntent(
            call=record.call, run=record.run, lane=record.lane, role=record.role, parent=record.parent,
            fork_reason=record.fork_reason, shared=record.shared, prompt_ids=record.prompt_ids, sampling=record.sampling,
            request=msgspec.to_builtins(orphan.request), messages=msgspec.convert(orphan.messages, list[Message]),
            received_at=record.received_at,
        )  # fmt: skip
        template = services.templates.of(HistoryPolicy(orphan.request.history))
        origin = Origin(None, 0, None, np.asarray(record.prompt_ids, dtype=np.int32))
        call = LiveCall(services, request, intent, exchange, template, origin)
        call.prompt_tokens = orphan.prompt_tokens
        if ended and orphan.answer is not None:
            said = msgspec.convert(orphan.answer, Message)
            call.restore(answer_of(said, request.prefill), record.finish_reason or "stop")
        turn.calls.append(call)
    turn.delivered = all(call.status is CallStatus.DELIVERED for call in turn.calls)
    turn.ready.set()
    return turn


def close_attempts(services: Services, call: LiveCall) -> None:
    """Record that the attempts of a dead process broke off; tokens that cannot be continued from are given up."""
    exchange = call.exchange
    keep = exchange.continuable or not exchange.ids
    lost = None if keep else TokenChunk(0, list(exchange.ids), list(exchange.logprobs), list(exchange.spans))
    for attempt in services.journal.attempts(exchange.call):
        if attempt.end == "open":
            end = "broken" if keep else "abandoned"
            services.journal.attempt_ended(
                AttemptRecord(
                    attempt.call, attempt.number, attempt.replica, attempt.request_id, attempt.tokens_from,
                    len(exchange.ids), end,
                ),
                lost,
            )  # fmt: skip
    if not keep:
        exchange.ids, exchange.logprobs, exchange.spans, exchange.status = [], [], [], CallStatus.DISPATCHED


def abort_orphan(services: Services, orphan: Orphan) -> None:
    """Record the end of a call that nobody came back for."""
    record = orphan.record
    services.journal.call_ended(
        record.call,
        CallStatus.ABORTED,
        at=time.time(),
        sampled=TokenChunk(0, record.sampled_ids, record.logprobs, record.versions),
        error="its process ended and the agent did not ask again",
    )
