"""Turns of hosted models: their calls made from a request, or from what another process left in the store."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects.canonical import Message, ModelRequest
from gyre_sdk.harness.proxy.server.conduct import Services
from gyre_sdk.harness.proxy.server.hosted import HostedCall
from gyre_sdk.harness.proxy.server.model_call import OPEN
from gyre_sdk.harness.proxy.server.provider import parameters
from gyre_sdk.harness.proxy.server.state import Lane, Orphan, RequestRecord
from gyre_sdk.harness.proxy.server.turns import Turn
from gyre_sdk.journal import CallIntent
from gyre_sdk.records import CallId


def prepare_hosted(
    services: Services, lane: Lane, turn: Turn, stored: RequestRecord, model: str, most: int | None
) -> None:
    """Make a turn's calls of a hosted model: one provider request per choice.

    Args:
        services: what the calls need.
        lane: of the calls.
        turn: gets the calls.
        stored: what is recorded of the request.
        model: litellm's name.
        most: tokens that each call may sample; None for no bound.

    Raises:
        ProtocolError: the request asks for what hosted models do not have.
    """
    request, run = turn.request, lane.run
    limit = request.sampling.max_tokens or None
    if most is not None:
        limit = most if limit is None else min(limit, most)
    asked = {"model": model, "parameters": parameters(request, limit)}
    match = run.hosted_history.match(lane.record.lane, request.tools, request.messages, lenient=True)
    prompts: list[Sequence[Message]] = [match.messages]
    if request.prompts:
        prompts = [[Message("user", _text(prompt))] for prompt in request.prompts]
    for index in range(request.n * len(prompts)):
        messages = prompts[index // request.n]
        call = CallId(f"c-{turn.name}" if not index else f"c-{turn.name}{index}")
        record = msgspec.structs.replace(stored, index=index, hosted=True, provider=asked)
        intent = CallIntent(
            call=call,
            run=run.run,
            lane=lane.record.lane,
            role=lane.record.role,
            parent=CallId(match.recorded.call) if match.recorded and not request.prompts else None,
            fork_reason=None,
            shared=0,
            prompt_ids=[],
            sampling=msgspec.structs.replace(request.sampling, max_tokens=limit or 0),
            request=msgspec.to_builtins(record),
            messages=messages,
            raw=request.raw,
            received_at=turn.at,
        )
        turn.calls.append(HostedCall(services, request, intent))
    run.charge(lane.record.lane, calls=len(turn.calls))


def revive_hosted(services: Services, request: ModelRequest, orphan: Orphan) -> HostedCall:
    """Return a recorded call of another process; one that was open is asked again when it is started."""
    record = orphan.record
    intent = CallIntent(
        call=record.call, run=record.run, lane=record.lane, role=record.role, parent=record.parent,
        fork_reason=record.fork_reason, shared=0, prompt_ids=[], sampling=record.sampling,
        request=msgspec.to_builtins(orphan.request), messages=msgspec.convert(orphan.messages, list[Message]),
        received_at=record.received_at,
    )  # fmt: skip
    call = HostedCall(services, request, intent, resumed=True)
    if record.status not in OPEN and orphan.answer is not None:
        call.restore(record.status, msgspec.convert(orphan.answer, Message), record.finish_reason or "stop")
    return call


def _text(prompt: str | tuple[int, ...]) -> str:
    if not isinstance(prompt, str):
        problem = "a hosted model takes prompts of text: token ids mean something to one tokenizer only"
        raise ProtocolError(problem, code="invalid_value", param="prompt")
    return prompt
