"""From a parsed request to calls: what it continues, its exact prompt, its resolved sampling, its budget."""

from __future__ import annotations

import asyncio
import secrets
import time

import msgspec

from gyre_sdk.errors import ProtocolError, RenderError
from gyre_sdk.harness.proxy.dialects.canonical import Answer, Message, ModelRequest, ToolChoice
from gyre_sdk.harness.proxy.dialects.history import History, Match, Origin
from gyre_sdk.harness.proxy.exchange import Exchange
from gyre_sdk.harness.proxy.render import Template
from gyre_sdk.harness.proxy.server.conduct import LiveCall, Services
from gyre_sdk.harness.proxy.server.settings import HistoryPolicy
from gyre_sdk.harness.proxy.server.state import OPEN, Lane, Orphan, RequestRecord, RunState
from gyre_sdk.harness.proxy.server.turns import Turn
from gyre_sdk.journal import CallIntent, TokenChunk
from gyre_sdk.records import AttemptRecord, CallId, CallStatus, Sampling

OFF_LOOP = 200_000
"""Bodies larger than this many bytes are parsed and rendered in a thread, so that other streams go on."""


async def prepare(services: Services, lane: Lane, turn: Turn, digest: str, size: int) -> None:
    """Make a turn's calls: one per choice, ready to start.

    Raises:
        ProtocolError: the messages cannot be rendered, do not fit, or the run's budget is spent.
    """
    request, run = turn.request, lane.run
    policy = services.settings.policy(lane.record.role)
    lenient = policy is HistoryPolicy.BRIDGE
    template, place = services.templates[policy], lane.record.lane
    if size > OFF_LOOP:
        match, prompt, origin = await asyncio.to_thread(_continue, run.history, template, place, request, lenient)
    else:
        match, prompt, origin = _continue(run.history, template, place, request, lenient)
    sampling = _resolve(services, request, len(prompt), run, turn.at)
    stored = RequestRecord(request.dialect, policy, digest, turn.name, 0, request.fields)
    for index in range(request.n):
        call = CallId(f"c-{turn.name}" if not index else f"c-{turn.name}{index}")
        intent = CallIntent(
            call=call,
            run=run.run,
            lane=lane.record.lane,
            role=lane.record.role,
            parent=CallId(origin.parent.call) if origin.parent else None,
            fork_reason=origin.fork,
            shared=origin.shared,
            prompt_ids=prompt,
            sampling=sampling,
            request=msgspec.to_builtins(msgspec.structs.replace(stored, index=index)),
            messages=[msgspec.to_builtins(message) for message in match.messages],
            received_at=turn.at,
        )
        turn.calls.append(LiveCall(services, request, intent, Exchange(call, sampling), origin.prompt))
    run.calls += request.n
    run.prompt_tokens += len(prompt) * request.n


def track(run: RunState, call: LiveCall) -> None:
    """Have a call join its run's history when it is complete."""
    messages = tuple(msgspec.convert(call.intent.messages, list[Message]))

    def complete(done: LiveCall) -> None:
        intent = done.intent
        run.sampled_tokens += len(done.exchange.ids)
        run.history.add(
            intent.call,
            intent.lane,
            done.request.tools,
            messages,
            (done.answer or Answer()).message(),
            done.prompt,
            done.exchange.ids,
            intent.parent,
            intent.shared,
        )

    call.on_complete = complete


def revive(services: Services, request: ModelRequest, orphans: list[Orphan]) -> Turn:
    """Return the turn of recorded calls that another process left; those that were open can be resumed."""
    first = orphans[0]
    turn = Turn(request, first.request.turn, first.record.received_at)
    for orphan in sorted(orphans, key=lambda item: item.request.index):
        record = orphan.record
        ended = record.status not in OPEN
        exchange = Exchange(
            record.call,
            record.sampling,
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
            request=msgspec.to_builtins(orphan.request), messages=orphan.messages, received_at=record.received_at,
        )  # fmt: skip
        call = LiveCall(services, request, intent, exchange, record.prompt_ids)
        if ended and orphan.answer is not None:
            said = msgspec.convert(orphan.answer, Message)
            call.restore(Answer(said.content, said.reasoning, said.tool_calls), record.finish_reason or "stop")
        turn.calls.append(call)
    turn.delivered = all(call.exchange.status is CallStatus.DELIVERED for call in turn.calls)
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


def new_turn(request: ModelRequest) -> Turn:
    """Return a fresh turn."""
    return Turn(request, secrets.token_hex(8), time.time())


def _continue(
    history: History, template: Template, lane: str, request: ModelRequest, lenient: bool
) -> tuple[Match, list[int], Origin]:
    match = history.match(lane, request.tools, request.messages, lenient=lenient)
    prompt = _prompt(template, request, match)
    return match, prompt, history.origin(lane, request.tools, request.messages, match, prompt)


def _prompt(template: Template, request: ModelRequest, match: Match) -> list[int]:
    past, new = match.messages[: match.consumed], match.messages[match.consumed :]
    try:
        if match.recorded is not None:
            bridged = template.bridge(match.recorded.whole, match.recorded.prompt_len, new, request.tools, past)
            if bridged is not None:
                ids: list[int] = bridged.tolist()
                return ids
        return template.render(match.messages, request.tools)
    except RenderError as error:
        raise ProtocolError(str(error), code="cannot_render", param="messages") from error


def _resolve(services: Services, request: ModelRequest, prompt: int, run: RunState, at: float) -> Sampling:
    limits, sampling = run.limits, request.sampling
    if limits.turns is not None and run.calls + request.n > limits.turns:
        raise _spent(f"{limits.turns} turns")
    if limits.seconds is not None and at - run.created_at > limits.seconds:
        raise _spent(f"{limits.seconds:g} s of wall time")
    longest = sampling.max_tokens or services.settings.max_tokens
    if limits.tokens is not None:
        left = (limits.tokens - run.prompt_tokens - run.sampled_tokens) // request.n - prompt
        if left < 1:
            raise _spent(f"{limits.tokens} tokens")
        longest = min(longest, left)
    context = services.template.context
    if context is not None:
        if prompt >= context:
            raise ProtocolError(
                f"the prompt has {prompt} tokens; this model's context is {context}. Shorten or compact the messages",
                code="context_length_exceeded",
                param="messages",
            )
        longest = min(longest, context - prompt)
    ignore = sampling.extra.get("ignore_eos")
    stops = tuple(dict.fromkeys((*(() if ignore else services.template.stop_ids), *sampling.stop_token_ids)))
    extra = dict(sampling.extra)
    if request.structured is not None:
        extra["structured_outputs"] = request.structured
    if request.tool_choice in (ToolChoice.REQUIRED, ToolChoice.NAMED):
        raise ProtocolError("tool_choice must be auto or none", code="invalid_value", param="tool_choice")
    return msgspec.structs.replace(sampling, max_tokens=longest, stop_token_ids=stops, extra=extra)


def _spent(what: str) -> ProtocolError:
    return ProtocolError(f"the run has spent its budget of {what}", status=403, code="limit_exceeded")
