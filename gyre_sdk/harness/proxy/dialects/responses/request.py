"""OpenAI responses: the request. Fields we do not know pass and are recorded; fields we cannot honour are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gyre_sdk.harness.proxy.dialects.billing import without_billing
from gyre_sdk.harness.proxy.dialects.canonical import Message, ModelRequest, ToolChoice, in_call_order
from gyre_sdk.harness.proxy.dialects.fields import (
    MAX_CANDIDATES,
    decode_object,
    flag,
    number,
    refuse,
    refuse_given,
    sampling,
    text,
)
from gyre_sdk.harness.proxy.dialects.responses.items import item_type, messages_of
from gyre_sdk.harness.proxy.dialects.responses.tools import Tool, shown_name, tools_of

NAME: Final = "responses"
WITH_LOGPROBS: Final = "message.output_text.logprobs"
WITH_SEALED: Final = "reasoning.encrypted_content"
_INSTEAD = {
    "conversation": "conversations are not kept here; name the answer to go on from in previous_response_id, or send"
    " the whole input",
    "prompt": "stored prompts are not known here; send their text as instructions and input",
}
_REFUSED = (
    "best_of",
    "use_beam_search",
    "prompt_logprobs",
    "echo",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


def parse_responses(body: bytes) -> ModelRequest:
    """Return the canonical form of a request.

    `raw` holds the input items as sent; where the request gives `instructions`, `{"instructions": text}` comes first.

    Raises:
        ProtocolError: with the field at fault.
    """
    fields = decode_object(body)
    instructions, given = text(fields, "instructions"), fields.pop("input", None)
    fields.pop("instructions", None)
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given or []
    if not isinstance(items, list):
        refuse("input must be a string or a list of items", "input")
    raw = ([{"instructions": instructions}] if instructions else []) + items
    request = _request(fields, raw, _messages(instructions, items))
    referenced = any(item_type(item, "input") == "item_reference" for item in items)
    if not request.messages and not request.continues and not referenced:
        refuse("input must hold something that the model can read", "input")
    return request


def from_fields(fields: dict[str, Any], raw: Sequence[Any] = ()) -> ModelRequest:
    """Return the request again from what is recorded of it.

    Args:
        fields: `ModelRequest.fields`.
        raw: `ModelRequest.raw`; without it the request has no messages, which is enough to show a response.

    Raises:
        ProtocolError: the record is not of a request that `parse_responses` accepts.
    """
    instructions, items = split_raw(raw)
    return _request(dict(fields), raw, _messages(instructions, items))


def split_raw(raw: Sequence[Any]) -> tuple[str, list[Any]]:
    """Return the instructions and the input items of a request's `raw`."""
    first = raw[0] if raw else None
    if isinstance(first, dict) and set(first) == {"instructions"}:
        return first["instructions"], list(raw[1:])
    return "", list(raw)


def instructed(instructions: str) -> list[Message]:
    """Return the system message that a request's instructions are, if they say anything."""
    return without_billing([Message("system", instructions)]) if instructions else []


def included(fields: dict[str, Any], what: str) -> bool:
    """Tell whether a request's `include` names something."""
    given = fields.get("include")
    return isinstance(given, list) and what in given


def _messages(instructions: str, items: Sequence[Any]) -> tuple[Message, ...]:
    return in_call_order(instructed(instructions) + without_billing(messages_of(items)))


def _request(fields: dict[str, Any], raw: Sequence[Any], messages: tuple[Message, ...]) -> ModelRequest:
    refuse_given(fields, _REFUSED)
    for name, instead in _INSTEAD.items():
        if fields.get(name):
            refuse(f"{name}: {instead}", name)
    for name in ("include", "tools"):
        if fields.get(name) is not None and not isinstance(fields[name], list):
            refuse(f"{name} must be a list", name)
    for name in ("reasoning", "text", "metadata", "stream_options"):
        if fields.get(name) is not None and not isinstance(fields[name], dict):
            refuse(f"{name} must be an object", name)
    number(fields, "n", 1, 1, 1, integer=True)
    candidates = int(number(fields, "top_logprobs", 0, 0, MAX_CANDIDATES, integer=True))
    if candidates and not included(fields, WITH_LOGPROBS):
        refuse(f"top_logprobs needs include to hold {WITH_LOGPROBS!r}", "top_logprobs")
    if flag(fields, "background") and fields.get("store") is False:
        refuse("background needs store: the answer is fetched later", "background")
    flag(fields, "store")
    tools = tools_of(fields)
    choice, forced, tools = _tool_choice(fields.get("tool_choice"), tools)
    return ModelRequest(
        dialect=NAME,
        model=text(fields, "model"),
        messages=messages,
        tools=tuple(tool.shown for tool in tools.values()),
        sampling=sampling(fields, limit="max_output_tokens"),
        fields=fields,
        raw=tuple(raw),
        stream=flag(fields, "stream"),
        include_usage=True,
        logprobs=included(fields, WITH_LOGPROBS),
        candidates=candidates,
        tool_choice=choice,
        forced_tool=forced,
        parallel_tool_calls=fields.get("parallel_tool_calls") is not False,
        structured=_structured(fields.get("text") or {}),
        thinking=_thinking(fields),
        continues=text(fields, "previous_response_id") or None,
    )


def _tool_choice(choice: Any, tools: dict[str, Tool]) -> tuple[ToolChoice, str, dict[str, Tool]]:
    """Return the choice, the tool that must be called, and the tools that may be."""
    if choice is None or choice == "auto":
        return ToolChoice.AUTO, "", tools
    if isinstance(choice, str) and choice in ("none", "required"):
        return ToolChoice(choice), "", tools
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools":
        allowed = choice.get("tools")
        names = [_chosen(item, tools) for item in allowed] if isinstance(allowed, list) else []
        mode = choice.get("mode")
        if not names or mode not in ("auto", "required"):
            refuse("tool_choice allowed_tools needs mode auto or required, and a list of tools", "tool_choice")
        return ToolChoice(mode), "", {name: tools[name] for name in tools if name in names}
    return ToolChoice.NAMED, _chosen(choice, tools), tools


def _chosen(choice: Any, tools: dict[str, Tool]) -> str:
    kind = choice.get("type") if isinstance(choice, dict) else None
    name = choice.get("name") if kind in ("function", "custom") else kind
    if not isinstance(name, str):
        refuse(
            "tool_choice must be none, auto, required, {type: allowed_tools, ...} or {type: function or custom, name}",
            "tool_choice",
        )
    name = shown_name(choice.get("namespace"), name)
    if name not in tools:
        refuse(f"tool_choice names {name!r}, which is not among the tools that the model sees", "tool_choice")
    return name


def _structured(text_options: dict[str, Any]) -> dict[str, Any] | None:
    form = text_options.get("format")
    kind = form.get("type") if isinstance(form, dict) else form
    if kind is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    schema = form.get("schema") if isinstance(form, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        refuse("text.format must be text, json_object or {type: json_schema, name, schema}", "text.format")
    return {"json": schema}


def _thinking(fields: dict[str, Any]) -> bool | None:
    options = fields.get("chat_template_kwargs")
    if isinstance(options, dict) and isinstance(options.get("enable_thinking"), bool):
        return bool(options["enable_thinking"])
    return False if (fields.get("reasoning") or {}).get("effort") == "none" else None
