"""Anthropic messages: the request. Fields we do not know pass and are recorded; what cannot be shown is refused.

Blocks become OpenAI's form, which templates know. A few rules are worth a word:

* Texts that follow each other are joined with a line feed, as serving templates join parts. Texts with another block
  between them, and thinking blocks, are joined as they are: that is how a stream splits one answer into blocks.
* Assistant messages that follow each other are one message, as Anthropic reads them. User messages stay apart.
* A failed tool's result is shown as the text that the agent sent, as serving stacks do, and as `Error` where it sent
  none; `is_error` is recorded. An `input` that is a text is the arguments as the model wrote them.
* Blocks of an assistant message that hold nothing a model can be shown (redacted thinking, the work of a provider's
  own tools) are left out of the prompt but make the message another one: the agent's copy says more than was sampled.
* A last message of the assistant's is the start of the answer (`ModelRequest.prefill`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from gyre_sdk.harness.proxy.dialects.billing import after_billing
from gyre_sdk.harness.proxy.dialects.canonical import Message, ModelRequest, ToolCall, ToolChoice, in_call_order
from gyre_sdk.harness.proxy.dialects.fields import (
    decode_object,
    flag,
    refuse,
    refuse_given,
    refuse_kind,
    sampling,
    text,
)
from gyre_sdk.harness.proxy.dialects.messages_input import arguments_of
from gyre_sdk.harness.proxy.dialects.prefill import continuable, take_prefill
from gyre_sdk.harness.proxy.dialects.results import result_text, written_out

_REFUSED = ("best_of", "use_beam_search", "prompt_logprobs", "echo", "n")
_ROLES = {"developer": "system"}
_MEDIA = ("image", "document", "container_upload", "audio", "video")


def parse_messages(body: bytes) -> ModelRequest:
    """Return the canonical form of a messages request.

    Raises:
        ProtocolError: with the field at fault.
    """
    fields = decode_object(body)
    if fields.get("max_tokens") is None:
        refuse("max_tokens: this field is required", "max_tokens")
    return _begun(_request(fields))


def parse_count(body: bytes) -> ModelRequest:
    """Return the canonical form of a request to count tokens: as a messages request, but nothing is sampled.

    Raises:
        ProtocolError: with the field at fault.
    """
    request = _request(decode_object(body))
    *before, last = request.messages
    return replace(request, messages=tuple(before), prefill=last.content) if before and continuable(last) else request


def _begun(request: ModelRequest) -> ModelRequest:
    """Return a request whose answer continues the assistant's message that it ends with, if it does."""
    if request.messages[-1].role != "assistant":
        return request
    given = request.fields.get("thinking")
    thinks = isinstance(given, dict) and given.get("type") not in (None, "disabled")
    thinks = thinks and bool(request.messages[-1].content)
    before, said = take_prefill(request.messages, request.tool_choice, thinking=thinks, about="thinking")
    if said != said.rstrip():
        refuse("messages: the last one is the assistant's and ends with white space; leave that out", "messages")
    if said and request.structured is not None:
        refuse(
            "output_config.format: the last message has begun the answer, which a schema describes from its start; end"
            " with a user message",
            "output_config.format",
        )
    return replace(request, messages=before, prefill=said)


def _request(fields: dict[str, Any]) -> ModelRequest:
    refuse_given({**fields, "n": None if fields.get("n") == 1 else fields.get("n")}, _REFUSED)
    given = fields.pop("messages", None)
    if not isinstance(given, list) or not given:
        refuse("messages: must be a list with at least one message", "messages")
    system = fields.pop("system", None)
    messages = in_call_order([*_system(system, "system", {}), *_messages(given)])
    if not messages:
        refuse("messages: hold nothing that the model can be shown", "messages")
    tools = _tools(fields)
    choice, forced, parallel = _tool_choice(fields, tools)
    return ModelRequest(
        dialect="messages",
        model=text(fields, "model"),
        messages=messages,
        tools=tools,
        sampling=sampling(fields, limit="max_tokens", stop="stop_sequences", greatest=1.0, top_k_low=0),
        fields=fields,
        raw=(*(system if isinstance(system, list) else [system] if system else []), *given),
        stream=flag(fields, "stream"),
        tool_choice=choice,
        forced_tool=forced,
        parallel_tool_calls=parallel,
        structured=_structured(fields),
        thinking=_thinking(fields),
    )


def _messages(given: Sequence[Any]) -> Iterator[Message]:
    """Yield canonical messages: one or more of each, but one of assistant messages in a row."""
    held: list[tuple[str, dict[str, Any]]] = []
    extra: dict[str, Any] = {}
    for at, message in enumerate(given):
        where = f"messages[{at}]"
        if not isinstance(message, dict):
            refuse(f"{where}: must be an object", where)
        role = message.get("role")
        role = _ROLES.get(role, role) if isinstance(role, str) else role
        more = {key: value for key, value in message.items() if key not in ("role", "content")}
        if role == "assistant":
            held += _blocks(message.get("content"), f"{where}.content")
            extra |= more
            if at + 1 < len(given) and isinstance(given[at + 1], dict) and given[at + 1].get("role") == "assistant":
                continue
            yield _assistant(held, extra)
            held, extra = [], {}
        elif role == "user":
            yield from _user(_blocks(message.get("content"), f"{where}.content"), more)
        elif role == "system":
            yield from _system(message.get("content"), f"{where}.content", more)
        else:
            refuse(f"{where}.role: is {role!r}; use user, assistant or system", f"{where}.role")


def _blocks(content: Any, where: str) -> list[tuple[str, dict[str, Any]]]:
    """Return content as blocks, each with the place to name in an error."""
    if content is None:
        return []
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    if not isinstance(content, list):
        refuse(f"{where}: must be a string or a list of blocks", where)
    for at, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            refuse(f"{where}[{at}]: must be a block with a type", f"{where}[{at}]")
    return [(f"{where}[{at}]", block) for at, block in enumerate(content)]


def _system(content: Any, where: str, extra: dict[str, Any]) -> Iterator[Message]:
    """Yield the system message, or none where nothing is left to show."""
    shown = [after_billing(_text(*block)) for block in _blocks(content, where)]
    whole = "\n".join(item for item in shown if item)
    if whole:
        yield Message("system", whole, extra=extra)


def _user(blocks: Sequence[tuple[str, dict[str, Any]]], extra: dict[str, Any]) -> Iterator[Message]:
    """Yield the tool results of a user message, then what else it says."""
    texts: list[str] = []
    results = False
    for where, block in blocks:
        if block["type"] != "tool_result":
            texts.append(_text(where, block))
            continue
        results = True
        name = block.get("tool_use_id")
        failed = block.get("is_error") is True
        shown = result_text(block.get("content"))
        yield Message(
            "tool",
            shown or ("Error" if failed else ""),
            tool_call_id=name if isinstance(name, str) else "",
            extra={"is_error": True} if failed else {},
        )
    said = "\n".join(item for item in texts if item)
    if said or not results:
        yield Message("user", said, extra=extra)


def _assistant(blocks: Sequence[tuple[str, dict[str, Any]]], extra: dict[str, Any]) -> Message:
    content, before = "", ""
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    sealed: list[str] = []
    for where, block in blocks:
        kind = block["type"]
        if kind == "text":
            said = _text(where, block)
            content += f"\n{said}" if said and content and before == "text" else said
            before = kind if said else before
            continue
        before = kind
        if kind == "thinking":
            thought = block.get("thinking")
            reasoning.append(thought if isinstance(thought, str) else "")
        elif kind == "tool_use":
            calls.append(_call(where, block))
        elif kind in _MEDIA or kind == "tool_result":
            refuse(f"{where}: a block of type {kind!r} cannot be part of an assistant message", where)
        else:
            sealed.append(_seal(block))
    return Message("assistant", content, "".join(reasoning), tuple(calls), extra=extra, sealed=tuple(sealed))


def _call(where: str, block: dict[str, Any]) -> ToolCall:
    name, number, given = block.get("name"), block.get("id"), block.get("input")
    if not isinstance(name, str):
        refuse(f"{where}.name: must be a string", f"{where}.name")
    if given is not None and not isinstance(given, dict | str):
        refuse(f"{where}.input: must be an object", f"{where}.input")
    arguments = given if isinstance(given, str) else arguments_of(given or {})
    return ToolCall(number if isinstance(number, str) else "", name, arguments)


def _text(where: str, block: dict[str, Any]) -> str:
    kind = block["type"]
    given = block.get("text") if kind == "text" else written_out(block)
    if given is None and kind != "text":
        refuse_kind(where, kind)
    if given is not None and not isinstance(given, str):
        refuse(f"{where}.text: must be a string", f"{where}.text")
    return given or ""


def _seal(block: dict[str, Any]) -> str:
    shown = {key: value for key, value in block.items() if key != "cache_control"}
    return hashlib.blake2b(msgspec.json.encode(shown, order="sorted"), digest_size=16).hexdigest()


def _tools(fields: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the tools that a model is shown; those that a provider runs or knows by heart have no schema."""
    given = fields.get("tools") or []
    if not isinstance(given, list):
        refuse("tools: must be a list", "tools")
    tools: list[dict[str, Any]] = []
    for at, tool in enumerate(given):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom" and "input_schema" not in tool:
            continue
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            refuse(f"tools[{at}].name: must be a string", f"tools[{at}].name")
        if not isinstance(tool.get("input_schema"), dict):
            refuse(f"tools[{at}].input_schema: must be an object", f"tools[{at}].input_schema")
        function = {"name": tool["name"]}
        if isinstance(tool.get("description"), str):
            function["description"] = tool["description"]
        tools.append({"type": "function", "function": {**function, "parameters": tool["input_schema"]}})
    return tuple(tools)


def _tool_choice(fields: dict[str, Any], tools: Sequence[dict[str, Any]]) -> tuple[ToolChoice, str, bool]:
    """Return the choice, the tool it names, and whether several calls may be made at once."""
    given = fields.get("tool_choice")
    if given is None:
        return ToolChoice.AUTO, "", True
    kind = given.get("type") if isinstance(given, dict) else None
    choices = {
        "auto": ToolChoice.AUTO,
        "any": ToolChoice.REQUIRED,
        "tool": ToolChoice.NAMED,
        "none": ToolChoice.NONE,
    }
    if not isinstance(kind, str) or kind not in choices:
        refuse("tool_choice: must be {type: auto}, {type: any}, {type: none} or {type: tool, name}", "tool_choice")
    names = [tool["function"]["name"] for tool in tools]
    name = given.get("name") if kind == "tool" else ""
    if kind == "tool" and name not in names:
        refuse(f"tool_choice.name: {name!r} is not among the tools that the model is shown", "tool_choice.name")
    if kind == "any" and not names:
        refuse("tool_choice: a tool must be called, but the model is shown none", "tool_choice")
    return choices[kind], name, given.get("disable_parallel_tool_use") is not True


def _structured(fields: dict[str, Any]) -> dict[str, Any] | None:
    config = fields.get("output_config")
    if config is not None and not isinstance(config, dict):
        refuse("output_config: must be an object", "output_config")
    given = (config or {}).get("format") or fields.get("output_format")
    if given is None:
        return None
    schema = given.get("schema") if isinstance(given, dict) else None
    if not isinstance(given, dict) or given.get("type") != "json_schema" or not isinstance(schema, dict):
        refuse("output_config.format: must be {type: json_schema, schema}", "output_config.format")
    return {"json": schema}


def _thinking(fields: dict[str, Any]) -> bool | None:
    given = fields.get("thinking")
    if given is None:
        return None
    if not isinstance(given, dict):
        refuse("thinking: must be an object", "thinking")
    return {"enabled": True, "disabled": False}.get(str(given.get("type")))
