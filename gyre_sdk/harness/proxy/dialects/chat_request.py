"""OpenAI chat completions: the request. Fields we do not know pass and are recorded; fields we cannot honour are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from gyre_sdk.harness.proxy.dialects.billing import without_billing
from gyre_sdk.harness.proxy.dialects.canonical import Message, ModelRequest, ToolCall, ToolChoice, in_call_order
from gyre_sdk.harness.proxy.dialects.fields import (
    MAX_CANDIDATES,
    MAX_CHOICES,
    decode_object,
    flag,
    number,
    refuse,
    refuse_given,
    refuse_kind,
    sampling,
    text,
)
from gyre_sdk.harness.proxy.dialects.prefill import take_prefill
from gyre_sdk.harness.proxy.dialects.results import TEXTS, result_text

_REFUSED = (
    "best_of",
    "use_beam_search",
    "prompt_logprobs",
    "echo",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "audio",
    "web_search_options",
)
_MESSAGE_KEYS = frozenset(
    ("role", "content", "reasoning", "reasoning_content", "tool_calls", "tool_call_id", "refusal", "function_call")
)
_KNOWN_ROLES = ("system", "user", "assistant", "tool")
_ROLES = {"developer": "system", "function": "tool"}
_THINKING_PARTS = frozenset(("thinking", "reasoning"))


def parse_chat(body: bytes) -> ModelRequest:
    """Return the canonical form of a chat completions request.

    Raises:
        ProtocolError: with the field at fault.
    """
    fields = decode_object(body)
    refuse_given(fields, _REFUSED)
    if fields.get("functions"):
        refuse("functions is the older form of tools: send tools, and read tool_calls", "functions")
    messages = fields.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        refuse("messages must be a list with at least one message", "messages")
    stream = flag(fields, "stream")
    choice, forced, tools = _tool_choice(fields.get("tool_choice"), _tools(fields))
    limit = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    options = fields.get("stream_options")
    if options is not None and not isinstance(options, dict):
        refuse("stream_options must be an object", "stream_options")
    candidates = int(number(fields, "top_logprobs", 0, 0, MAX_CANDIDATES, integer=True))
    if candidates and not flag(fields, "logprobs"):
        refuse("top_logprobs needs logprobs to be true", "top_logprobs")
    parallel = fields.get("parallel_tool_calls")
    request = ModelRequest(
        dialect="chat",
        model=text(fields, "model"),
        messages=in_call_order(without_billing([_message(message, at) for at, message in enumerate(messages)])),
        tools=tools,
        sampling=sampling(fields, limit=limit),
        fields=fields,
        raw=tuple(messages),
        stream=stream,
        include_usage=bool(stream and options and options.get("include_usage")),
        logprobs=flag(fields, "logprobs"),
        candidates=candidates,
        names_tokens=flag(fields, "return_tokens_as_token_ids"),
        n=int(number(fields, "n", 1, 1, MAX_CHOICES, integer=True)),
        tool_choice=choice,
        forced_tool=forced,
        parallel_tool_calls=parallel is not False,
        structured=_structured(fields),
        thinking=_thinking(fields),
    )
    return _begun(request) if flag(fields, "continue_final_message") else request


def _begun(request: ModelRequest) -> ModelRequest:
    """Return a request whose answer continues the message that it ends with, which is the assistant's."""
    if request.fields.get("add_generation_prompt") is not False:
        refuse(
            "continue_final_message goes on with the last message and opens no new one: set add_generation_prompt to"
            " false",
            "add_generation_prompt",
        )
    if request.messages[-1].role != "assistant" or not request.messages[-1].content:
        refuse(
            "continue_final_message needs a last message of the assistant's with text; send one, or leave the field"
            " out",
            "continue_final_message",
        )
    thinks = request.thinking is True
    before, said = take_prefill(
        request.messages, request.tool_choice, thinking=thinks, about="chat_template_kwargs.enable_thinking"
    )
    return replace(request, messages=before, prefill=said)


def _message(message: Any, at: int) -> Message:
    if isinstance(message, dict) and len(message) == 2:  # nearly all of a long history
        role, content = message.get("role"), message.get("content")
        if isinstance(content, str) and role in _KNOWN_ROLES:
            return Message(role, content)
    where = f"messages[{at}]"
    if not isinstance(message, dict):
        refuse(f"{where} must be an object", where)
    role = message.get("role")
    role = _ROLES.get(role, role) if isinstance(role, str) else role
    if role not in _KNOWN_ROLES:
        refuse(f"{where}.role is {role!r}; use system, developer, user, assistant or tool", f"{where}.role")
    content, thought = _content(message.get("content"), role, f"{where}.content")
    refusal = message.get("refusal")
    if role == "assistant" and isinstance(refusal, str) and refusal:
        content = f"{content}\n{refusal}" if content else refusal
    given = (message.get("reasoning"), message.get("reasoning_content"), thought)
    tool_call_id = message.get("tool_call_id") or message.get("name") if role == "tool" else None
    return Message(
        role=role,
        content=content,
        reasoning=next((text for text in given if isinstance(text, str) and text), "") if role == "assistant" else "",
        tool_calls=_tool_calls(message, where) if role == "assistant" else (),
        tool_call_id=tool_call_id if isinstance(tool_call_id, str) else "",
        extra={key: value for key, value in message.items() if key not in _MESSAGE_KEYS},
    )


def _content(content: Any, role: str, where: str) -> tuple[str, str]:
    """Return the text of a message's content, and the thinking that an assistant's parts hold."""
    if role == "tool":
        return result_text(content), ""
    if content is None or isinstance(content, str):
        return content or "", ""
    if not isinstance(content, list):
        refuse(f"{where} must be a string or a list of parts", where)
    texts: list[str] = []
    thoughts: list[str] = []
    for at, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if role == "assistant" and kind in _THINKING_PARTS:
            thoughts.append(result_text(part.get("thinking") or part.get("reasoning") or part.get("text")))
            continue
        if not isinstance(kind, str) or (kind not in TEXTS and kind != "refusal"):
            refuse_kind(f"{where}[{at}]", kind)
        shown = part.get("refusal" if kind == "refusal" else "text")
        if shown is not None and not isinstance(shown, str):
            refuse(f"{where}[{at}].text must be a string", f"{where}[{at}]")
        texts.append(shown or "")
    return "\n".join(item for item in texts if item), "".join(thoughts)


def _tool_calls(message: dict[str, Any], where: str) -> tuple[ToolCall, ...]:
    legacy = message.get("function_call")
    calls = message.get("tool_calls") or ([{"id": "", "function": legacy}] if isinstance(legacy, dict) else [])
    if not isinstance(calls, list):
        refuse(f"{where}.tool_calls must be a list", f"{where}.tool_calls")
    found: list[ToolCall] = []
    for at, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            refuse(f"{where}.tool_calls[{at}] has no function with a name", f"{where}.tool_calls[{at}]")
        arguments = function.get("arguments")
        if arguments is not None and not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        name = call.get("id")
        found.append(ToolCall(name if isinstance(name, str) else "", function["name"], arguments or ""))
    return tuple(found)


def _tools(fields: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the tools as sent, but for their `type`, keys that hold nothing and cache marks."""
    tools = fields.get("tools") or []
    if not isinstance(tools, list):
        refuse("tools must be a list", "tools")
    found: list[dict[str, Any]] = []
    for at, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            refuse(f"tools[{at}] must be {{type: function, function: {{name, ...}}}}", f"tools[{at}]")
        found.append({"type": "function", **_said(tool), "function": _said(function)})
    return tuple(found)


def _said(given: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None and key != "cache_control"}


def _tool_choice(choice: Any, tools: tuple[dict[str, Any], ...]) -> tuple[ToolChoice, str, tuple[dict[str, Any], ...]]:
    """Return the choice, the tool that must be called, and the tools that may be."""
    if choice in (None, "auto"):
        return ToolChoice.AUTO, "", tools
    if choice in ("none", "required"):
        return ToolChoice(choice), "", tools
    allowed = choice.get("allowed_tools") if isinstance(choice, dict) else None
    if not isinstance(allowed, dict):
        return ToolChoice.NAMED, _chosen(choice, tools), tools
    given, mode = allowed.get("tools"), allowed.get("mode")
    names = [_chosen(item, tools) for item in given] if isinstance(given, list) else []
    if not names or mode not in ("auto", "required"):
        refuse("tool_choice.allowed_tools needs mode auto or required, and a list of tools", "tool_choice")
    return ToolChoice(mode), "", tuple(tool for tool in tools if tool["function"]["name"] in names)


def _chosen(choice: Any, tools: tuple[dict[str, Any], ...]) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        refuse(
            "tool_choice must be none, auto, required, {type: function, function: {name}} or {type: allowed_tools, ...}",
            "tool_choice",
        )
    if name not in [tool["function"]["name"] for tool in tools]:
        refuse(f"tool_choice names {name!r}, which is not among the tools", "tool_choice")
    return name


def _structured(fields: dict[str, Any]) -> dict[str, Any] | None:
    """Return what the answer must match, from `response_format` or the engine's own field."""
    modalities = fields.get("modalities")
    if modalities not in (None, ["text"]):
        refuse("modalities must be ['text']", "modalities")
    own = fields.get("structured_outputs")
    if own is not None and not isinstance(own, dict):
        refuse("structured_outputs must be an object", "structured_outputs")
    if own:
        return own
    given = fields.get("response_format")
    kind = given.get("type") if isinstance(given, dict) else given
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return {"json_object": True}
    schema = given.get("json_schema") if isinstance(given, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        refuse(
            "response_format must be text, json_object or {type: json_schema, json_schema: {schema}}", "response_format"
        )
    return {"json": schema["schema"]}


def _thinking(fields: dict[str, Any]) -> bool | None:
    options = fields.get("chat_template_kwargs")
    if isinstance(options, dict) and isinstance(options.get("enable_thinking"), bool):
        return bool(options["enable_thinking"])
    return False if fields.get("reasoning_effort") == "none" else None
