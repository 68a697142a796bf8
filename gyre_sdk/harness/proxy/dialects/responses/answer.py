"""OpenAI responses: the Response object and its output items.

An item's id is made of the response's name, the item's kind and its place among its kind, so that a stream, the whole
answer and a later GET give the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects import Choice, TokenText
from gyre_sdk.harness.proxy.dialects.canonical import ModelRequest
from gyre_sdk.harness.proxy.dialects.chat import ChatCompletions
from gyre_sdk.harness.proxy.dialects.responses.logprobs import TokenFinder, shown_token
from gyre_sdk.harness.proxy.dialects.responses.request import WITH_SEALED, included, split_raw
from gyre_sdk.harness.proxy.dialects.responses.sealed import seal
from gyre_sdk.harness.proxy.dialects.responses.tools import call_item, tools_of

_ECHOED: dict[str, Any] = {
    "background": False,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""Fields of the request that the response repeats, with what they are where the request left them out."""

_CODES = {429: "rate_limit_exceeded"}
_chat = ChatCompletions()


def response_id(name: str) -> str:
    """Return the id of the response that `name` stands for."""
    return f"resp_{name}"


def response_object(
    request: ModelRequest,
    name: str,
    at: float,
    status: str,
    output: Sequence[dict[str, Any]] = (),
    usage: dict[str, Any] | None = None,
    error: ProtocolError | None = None,
) -> dict[str, Any]:
    """Return a Response.

    Args:
        request: what it answers.
        name: of the answer.
        at: seconds since the epoch when the request was received.
        status: `queued`, `in_progress`, `completed`, `incomplete`, `failed` or `cancelled`.
        output: items so far.
        usage: as `usage_of` gives it; None while it is not known.
        error: why it failed.
    """
    fields = request.fields
    echoed = {key: fields[key] if fields.get(key) is not None else empty for key, empty in _ECHOED.items()}
    reasoning, text = fields.get("reasoning") or {}, fields.get("text") or {}
    return {
        "id": response_id(name),
        "object": "response",
        "created_at": int(at),
        "status": status,
        "error": failure(error) if error else None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": split_raw(request.raw)[0] or None,
        "model": request.model,
        "output": list(output),
        "reasoning": {"effort": None, "summary": None, **reasoning},
        "text": {"format": {"type": "text"}, **text},
        "usage": usage,
        **echoed,
    }


def output_items(request: ModelRequest, name: str, choice: Choice) -> list[dict[str, Any]]:
    """Return the output items of a finished answer: reasoning, message, calls."""
    answer, tools = choice.answer, tools_of(request.fields)
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        sealed = included(request.fields, WITH_SEALED)
        items.append(reasoning_item(f"rs_{name}_0", answer.reasoning, "completed", sealed=sealed))
    if answer.content or not (answer.reasoning or answer.tool_calls):
        tokens = TokenFinder(choice.tokens or ()).take(answer.content) if request.logprobs else ()
        items.append(message_item(f"msg_{name}_0", answer.content, "completed", tokens))
    for place, call in enumerate(answer.tool_calls):
        items.append(call_item(call, tools.get(call.name), f"{name}_{place}", "completed"))
    items[-1]["status"] = item_status(choice)
    return items


def item_status(choice: Choice) -> str:
    """Return the status of an answer's last item, and of its response."""
    return "incomplete" if choice.finish == "length" else "completed"


def reasoning_item(item_id: str, text: str, status: str, *, sealed: bool) -> dict[str, Any]:
    """Return a reasoning item; `sealed` adds the text in its opaque form."""
    content = [{"type": "reasoning_text", "text": text}] if text else []
    item = {"type": "reasoning", "id": item_id, "summary": [], "content": content, "status": status}
    return item | {"encrypted_content": seal(text)} if sealed else item


def message_item(item_id: str, text: str | None, status: str, tokens: Sequence[TokenText] = ()) -> dict[str, Any]:
    """Return a message item; `text` None leaves it without content, as a stream begins it."""
    content = [] if text is None else [text_part(text, tokens)]
    return {"type": "message", "id": item_id, "role": "assistant", "content": content, "status": status}


def text_part(text: str, tokens: Sequence[TokenText] = ()) -> dict[str, Any]:
    """Return a part of a message's content."""
    shown = [shown_token(token) for token in tokens]
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": shown}


def usage_of(
    prompt_tokens: int, completion_tokens: int, reasoning_tokens: int, cached_tokens: int | None
) -> dict[str, Any]:
    """Return the usage of a response; 0 cached tokens where they are not known."""
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": prompt_tokens + completion_tokens,
    }


def failure(error: ProtocolError) -> dict[str, Any]:
    """Return the `error` of a response that failed."""
    code = _CODES.get(error.status, "server_error" if error.status >= 500 else error.code)
    return {"code": code, "message": str(error)}


def error_object(error: ProtocolError) -> dict[str, Any]:
    """Return the `error` of an error answer: OpenAI's, the same as chat completions give."""
    found: dict[str, Any] = msgspec.json.decode(_chat.error(error))["error"]
    return found
