"""Prompts of requests whose answer continues a text: the start of the model's own turn, or an answer that was cut off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gyre_sdk.harness.proxy.dialects.canonical import Message, ModelRequest
from gyre_sdk.harness.proxy.dialects.history import History, Ids, Match, Origin
from gyre_sdk.harness.proxy.dialects.prefill import continuable
from gyre_sdk.harness.proxy.render import Template
from gyre_sdk.records import ForkReason


def begun(
    history: History,
    template: Template,
    lane: str,
    request: ModelRequest,
    match: Match,
    prompt: Callable[[], Ids],
) -> Origin:
    """Return the origin of a prompt that ends with a request's `prefill`.

    Where the prefill is all that a recorded call said, its sampled ids are continued as they are. Else the text is
    written as the model's template writes it.

    Args:
        history: of the run.
        template: how the model writes.
        lane: of the request.
        request: what is asked.
        match: what its messages continue, the prefill left out.
        prompt: gives the ids of the conversation and of the opening of the model's turn.

    Raises:
        RenderError: the template cannot begin an answer with this text.
    """
    messages = (*request.messages, Message("assistant", request.prefill))
    recorded = history.match(lane, request.tools, messages)
    if recorded.recorded is not None and recorded.consumed == len(recorded.messages):
        said = recorded.messages[-1]
        whole, start = recorded.recorded.whole, recorded.recorded.prompt_len
        end = len(whole) - (len(whole) > start and int(whole[-1]) in template.stop_ids)
        sampled = template.text(whole[start:end].tolist())
        if not (said.reasoning or said.tool_calls) and request.prefill.endswith(sampled):
            fork = None if end == len(whole) else ForkReason.CLIENT_EDIT  # the model had ended its turn there
            return Origin(recorded.recorded, end, fork, whole[:end])
    after_tool = bool(request.messages) and request.messages[-1].role == "tool"
    ids = template.begin(prompt(), request.prefill, request.tools, after_tool=after_tool)
    return history.origin(lane, request.tools, match.messages, match, ids)


def as_recorded(history: History, lane: str, request: ModelRequest) -> ModelRequest:
    """Return a request whose prefill is a recorded answer in other pieces with that answer as it was recorded."""
    if not request.prefill:
        return request
    match = history.match(lane, request.tools, (*request.messages, Message("assistant", request.prefill)))
    if match.recorded is None or match.consumed < len(match.messages):
        return request
    *before, said = match.messages
    if said.content == request.prefill or not before or not continuable(said):
        return request
    return replace(request, messages=tuple(before), prefill=said.content)


def ended(request: ModelRequest) -> ModelRequest:
    """Return a request in which the text that its answer would continue is an answer that has ended."""
    return replace(request, messages=(*request.messages, Message("assistant", request.prefill)), prefill="")
