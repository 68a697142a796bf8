"""From a parsed request to calls: what it continues, its exact prompt, its resolved sampling, its budget."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import msgspec
import numpy as np

from gyre_sdk.errors import ProtocolError, RenderError
from gyre_sdk.harness.proxy.answers import Thinking, thinking_after
from gyre_sdk.harness.proxy.dialects.canonical import Answer, ModelRequest
from gyre_sdk.harness.proxy.dialects.history import History, Match, Origin
from gyre_sdk.harness.proxy.exchange import Exchange
from gyre_sdk.harness.proxy.recorder import durable
from gyre_sdk.harness.proxy.render import Ids, Template
from gyre_sdk.harness.proxy.render.grammar import constrained, constraint
from gyre_sdk.harness.proxy.server.begun import as_recorded, begun, ended
from gyre_sdk.harness.proxy.server.budgets import Prices, Spent, room
from gyre_sdk.harness.proxy.server.conduct import LiveCall, Services
from gyre_sdk.harness.proxy.server.hosted_turns import prepare_hosted
from gyre_sdk.harness.proxy.server.lane_states import spent_event, write_event
from gyre_sdk.harness.proxy.server.model_call import ModelCall
from gyre_sdk.harness.proxy.server.names import fresh_name
from gyre_sdk.harness.proxy.server.provider import Provider, wire_messages
from gyre_sdk.harness.proxy.server.settings import HistoryPolicy, SamplingPolicy, new_key
from gyre_sdk.harness.proxy.server.speech import PROMPT_TAIL
from gyre_sdk.harness.proxy.server.state import Lane, RequestRecord, RunState, key_digest, new_lane_id
from gyre_sdk.harness.proxy.server.turns import Turn
from gyre_sdk.journal import CallIntent
from gyre_sdk.records import CallId, LaneRecord, Sampling

P = ParamSpec("P")
T = TypeVar("T")

_NOT_TRAINED = ("logit_bias", "allowed_token_ids", "bad_words")
"""Sampling fields refused in a run whose rewards are compared, whatever the service's `sampling` says."""

_KEPT_WHOLE = 4096
"""Requests up to this many bytes are kept as they are for the retries of their turn; others without what is recorded."""
_SECRET = frozenset(("authorization", "x-api-key", "api-key", "cookie", "proxy-authorization"))
OFF_LOOP = 200_000
"""Bodies larger than this many bytes are parsed and rendered in a thread, so that other streams go on."""


async def prepare(
    services: Services, key: Lane, turn: Turn, digest: str, size: int, headers: Mapping[str, str]
) -> None:
    """Make a turn's calls: one per choice, ready to start.

    Raises:
        ProtocolError: the messages cannot be rendered, do not fit, or the run's budget is spent.
    """
    run, hosted = key.run, services.settings.hosted_model(turn.request.model)
    past = run.history if hosted is None else run.hosted_history
    turn.request = await _off_loop(size > OFF_LOOP, as_recorded, past, key.record.lane, turn.request)
    request, lane = turn.request, await _sorted(services, key, turn, headers)
    policy = services.settings.policy(lane.record.role)
    tools = list(request.tools)
    stored = RequestRecord(
        request.dialect,
        policy,
        digest,
        turn.name,
        0,
        request.fields,
        key.record.lane if lane is not key else "",
        tools if tools != (request.fields.get("tools") or []) else None,
        prefill=request.prefill,
        retry_key=turn.key,
    )
    if hosted is not None:
        calls = request.n * max(1, len(request.prompts))
        most = _room(services, lane, turn.at, calls, 0, Prices())
        prepare_hosted(services, lane, turn, stored, hosted, most)
        return
    template = await _template(services, policy, request.thinking)
    large, origins = size > OFF_LOOP, []
    if request.prompts:
        match = Match(None, 0, (), 0)
        for given in request.prompts:
            origins.append(await _off_loop(large, _verbatim, run.history, template, lane.record.lane, request, given))
    else:
        lenient = policy is HistoryPolicy.BRIDGE
        match, origin = await _off_loop(large, _continue, run.history, template, lane.record.lane, request, lenient)
        origins.append(origin)
    sampling = _resolve(services, request, template, max(origins, key=lambda origin: len(origin.prompt)), lane, turn.at)
    if size > _KEPT_WHOLE:
        turn.request = run.without_conversation(request)
    for index in range(request.n * len(origins)):
        origin = origins[index // request.n]
        call = CallId(f"c-{turn.name}" if not index else f"c-{turn.name}{index}")
        intent = CallIntent(
            call=call,
            run=run.run,
            lane=lane.record.lane,
            role=lane.record.role,
            parent=CallId(origin.parent.call) if origin.parent else None,
            fork_reason=origin.fork,
            shared=origin.shared,
            prompt_ids=origin.prompt,
            sampling=sampling,
            request=msgspec.to_builtins(msgspec.structs.replace(stored, index=index)),
            messages=match.messages,
            raw=request.raw,
            received_at=turn.at,
        )
        exchange = Exchange(call, sampling, pause=services.settings.retry_pause)
        turn.calls.append(LiveCall(services, turn.request, intent, exchange, template, origin))
    prompts = sum(call.prompt_tokens for call in turn.calls)
    run.charge(lane.record.lane, len(turn.calls), prompts, cost=services.settings.prices.of(prompts, 0))


async def count_prompt(services: Services, lane: Lane, request: ModelRequest, size: int) -> int:
    """Return how many tokens a request's prompt would have.

    Raises:
        ProtocolError: the messages cannot be rendered.
    """
    hosted = services.settings.hosted_model(request.model)
    if hosted is not None:
        return await Provider(hosted).count(wire_messages(request.messages, request.prefill), request.tools)
    policy = services.settings.policy(lane.record.role)
    template = await _template(services, policy, request.thinking)
    lenient = policy is HistoryPolicy.BRIDGE
    place, large = (lane.run.history, template, lane.record.lane), size > OFF_LOOP
    try:
        _, origin = await _off_loop(large, _continue, *place, request, lenient)
    except ProtocolError:
        if not request.prefill:
            raise
        _, origin = await _off_loop(large, _continue, *place, ended(request), lenient)
    return len(origin.prompt)


async def _sorted(services: Services, key: Lane, turn: Turn, headers: Mapping[str, str]) -> Lane:
    """Return the lane that a request belongs to: that of its key, unless a classifier tells more."""
    request, run = turn.request, key.run
    sorter = run.sorter(key.record)
    if sorter is None or request.prompts:
        return key
    async with sorter.lock:
        history = run.history if services.settings.hosted_model(request.model) is None else run.hosted_history
        assigned = sorter.decide(request, history.match("", request.tools, request.messages), _shown(headers))
        name = assigned.lane
        if name is None:
            name = new_lane_id()
            parent = assigned.parent or key.record.lane
            record = LaneRecord(name, run.run, assigned.role, assigned.name, parent, turn.at, assigned.parent_call)
            await durable(services.journal.open_lane(record, key_digest(new_key())))
            run.lanes[name] = Lane(record, run)
            sorter.opened(record, assigned.thread, assigned.tool_call)
        sorter.asked(name, CallId(f"c-{turn.name}"), request.messages, request.tools, assigned.thread)
        return run.lanes[name]


def _shown(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers as a classifier sees them: names in lower case, nothing secret."""
    return {name.lower(): value for name, value in headers.items() if name.lower() not in _SECRET}


async def _template(services: Services, policy: HistoryPolicy, thinking: bool | None) -> Template:
    known = services.templates.known(policy, thinking)
    return known if known is not None else await asyncio.to_thread(services.templates.of, policy, thinking)


async def _off_loop(large: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await asyncio.to_thread(function, *args, **kwargs) if large else function(*args, **kwargs)


def track(run: RunState, call: ModelCall) -> None:
    """Have a call join its run's history when it is complete."""
    messages = tuple(call.intent.messages)
    sorter = run.sorters.get(call.intent.request.get("key_lane") or call.intent.lane)

    def complete(done: ModelCall) -> None:
        intent, prefill = done.intent, done.request.prefill
        answer = (done.answer or Answer()).message(prefill)
        if sorter is not None:
            sorter.answered(intent.lane, intent.call, messages, answer)
        policy = isinstance(done, LiveCall)
        run.charge(intent.lane, 0, 0 if policy else done.prompt_tokens, done.sampled, done.cost)
        history = run.history if policy else run.hosted_history
        history.add(
            intent.call,
            intent.lane,
            done.request.tools,
            messages,
            answer,
            done.prompt if isinstance(done, LiveCall) else (),
            done.exchange.ids if isinstance(done, LiveCall) else (),
            intent.parent,
            intent.shared,
            done.prompt_text if isinstance(done, LiveCall) else b"",
            prefill,
        )

    call.on_complete = complete


def new_turn(request: ModelRequest) -> Turn:
    """Return a fresh turn."""
    return Turn(request, fresh_name(), time.time())


def _continue(
    history: History, template: Template, lane: str, request: ModelRequest, lenient: bool
) -> tuple[Match, Origin]:
    match = history.match(lane, request.tools, request.messages, lenient=lenient)
    if request.prefill:
        return match, _begun(history, template, lane, request, match)
    prompt = _prompt(template, request, match)
    return match, history.origin(lane, request.tools, match.messages, match, prompt)


def _begun(history: History, template: Template, lane: str, request: ModelRequest, match: Match) -> Origin:
    try:
        return begun(history, template, lane, request, match, lambda: _prompt(template, request, match))
    except RenderError as error:
        raise ProtocolError(str(error), code="cannot_render", param="messages") from error


def _verbatim(
    history: History, template: Template, lane: str, request: ModelRequest, given: str | tuple[int, ...]
) -> Origin:
    """Return the origin of a prompt that is taken as it is."""
    prompt = list(given) if isinstance(given, tuple) else template.tokenizer.encode(given)
    if not prompt:
        raise ProtocolError("the prompt has no tokens", code="invalid_value", param="prompt")
    return history.origin(lane, (), (), Match(None, 0, (), 0), prompt)


def _prompt(template: Template, request: ModelRequest, match: Match) -> Ids:
    past, new = match.messages[: match.consumed], match.messages[match.consumed :]
    try:
        if match.recorded is not None:
            bridged = template.bridge(match.recorded.whole, match.recorded.prompt_len, new, request.tools, past)
            if bridged is not None:
                return bridged
        return np.asarray(template.render(match.messages, request.tools), dtype=np.int32)
    except RenderError as error:
        raise ProtocolError(str(error), code="cannot_render", param="messages") from error


def _resolve(
    services: Services, request: ModelRequest, template: Template, origin: Origin, lane: Lane, at: float
) -> Sampling:
    sampling, prompt, run = request.sampling, len(origin.prompt), lane.run
    if run.training:
        for name in _NOT_TRAINED:
            if sampling.extra.get(name):
                problem = f"{name} is refused while a trainer uses the run: it changes what is sampled behind its back"
                raise ProtocolError(problem, code="invalid_value", param=name)
    calls = request.n * max(1, len(request.prompts))
    most = _room(services, lane, at, calls, prompt, services.settings.prices)
    longest = min(sampling.max_tokens or services.settings.max_tokens, most or 1 << 31)
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
    grammar = _grammar(request, template, origin.prompt, longest)
    if grammar is not None:
        extra["structured_outputs"] = grammar
    resolved = msgspec.structs.replace(sampling, max_tokens=longest, stop_token_ids=stops, extra=extra)
    if run.training and services.settings.sampling is SamplingPolicy.REFUSE:
        _check_reproducible(resolved)
    return resolved


def _check_reproducible(sampling: Sampling) -> None:
    """Refuse a call that a trainer would have to leave out."""
    setting = sampling.irreproducible
    if setting is None:
        return
    name = setting.partition("=")[0]
    if name == "structured_outputs":
        setting = "an answer held to a grammar (response_format, a strict tool, a forced tool)"
    raise ProtocolError(
        f"{setting} is refused while a trainer uses the run: it cannot compute the distribution that this samples from."
        " Leave it out (any temperature from 0.01 is fine); or start the service with --sampling untrained, and such"
        " calls are served, counted and not trained",
        code="invalid_value",
        param=name,
    )


def _room(services: Services, lane: Lane, at: float, calls: int, prompt: int, prices: Prices) -> int | None:
    """Return how many tokens each of a request's calls may sample, None for no bound; or end the run, or the lane."""
    run = lane.run
    most = room(run.limits, run.usage, prices, age=at - run.created_at, calls=calls, prompt=prompt)
    if isinstance(most, Spent):
        run.spend(most)
        services.journal.spend_run(run.run, most.status, most.what)
        raise most.refusal()
    for name, account in run.budgets.of(lane.record.lane):
        left = account.room(prices, at=at, calls=calls, prompt=prompt)
        if isinstance(left, Spent):
            if account.spent is None:
                run.spend_lane(name, left)
                write_event(services.journal, run.run, spent_event(name, left), at)
            raise left.refusal()
        if left is not None:
            most = left if most is None else min(most, left)
    return most


def _grammar(request: ModelRequest, template: Template, prompt: Ids, longest: int) -> dict[str, Any] | None:
    """Return what the engine must hold the answer to, or None."""
    form = None if request.prompts else template.format
    if form is None or not constrained(request):
        return constraint(request, None, Thinking.FREE, longest)
    tail = prompt[-PROMPT_TAIL:].tolist()
    begins = Thinking.OVER if request.prefill else thinking_after(template.tokenizer, form, tail)
    return constraint(request, form, begins, longest)
