"""OpenAI chat completions: the request. Fields we do not know pass and are recorded; fields we cannot honour are refused."""

from __future__ import annotations

from typing import Any, NoReturn

import msgspec

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects.canonical import Message, ModelRequest, ToolCall, ToolChoice, in_call_order
from gyre_sdk.records import Sampling

_NEUTRAL: dict[str, Any] = {
    "min_p": 0,
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "ignore_eos": False,
    "bad_words": [],
    "allowed_token_ids": [],
    "include_stop_str_in_output": False,
}
"""Fields that change the sampled distribution and are handed to the engine, with the value that changes nothing."""

_REFUSED = (
    "best_of",
    "use_beam_search",
    "prompt_logprobs",
    "echo",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "functions",
    "audio",
    "web_search_options",
)
_MESSAGE_KEYS = frozenset(
    ("role", "content", "reasoning", "reasoning_content", "tool_calls", "tool_call_id", "refusal", "function_call")
)
_ROLES = {"developer": "system", "function": "tool"}
_TEXT_PARTS = frozenset(("text", "input_text", "output_text"))
_MAX_CHOICES = 16


def parse_chat(body: bytes) -> ModelRequest:
    """Return the canonical form of a chat completions request.

    Raises:
        ProtocolError: with the field at fault.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        _refuse("the body must be a JSON object", None)
    for name in _REFUSED:
        if fields.get(name) not in (None, False, 0, "", [], {}):
            _refuse(f"{name} cannot be honoured by this service: it would change or hide what is sampled", name)
    messages = fields.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        _refuse("messages must be a list with at least one message", "messages")
    _check_format(fields)
    stream = _flag(fields, "stream")
    options = fields.get("stream_options")
    if options is not None and not isinstance(options, dict):
        _refuse("stream_options must be an object", "stream_options")
    if _number(fields, "top_logprobs", 0, 0, 20, whole=True):
        _refuse("top_logprobs above 0 is not offered; logprobs gives the sampled token's", "top_logprobs")
    parallel = fields.get("parallel_tool_calls")
    return ModelRequest(
        dialect="chat",
        model=_text(fields, "model"),
        messages=in_call_order([_message(message, at) for at, message in enumerate(messages)]),
        tools=_tools(fields),
        sampling=_sampling(fields),
        fields=fields,
        stream=stream,
        include_usage=bool(stream and options and options.get("include_usage")),
        logprobs=_flag(fields, "logprobs"),
        n=int(_number(fields, "n", 1, 1, _MAX_CHOICES, whole=True)),
        tool_choice=_tool_choice(fields),
        parallel_tool_calls=parallel is not False,
    )


def _sampling(fields: dict[str, Any]) -> Sampling:
    limit = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    stop = fields.get("stop")
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        _refuse("stop must be a string or a list of strings", "stop")
    ids = fields.get("stop_token_ids") or []
    if not isinstance(ids, list) or not all(_whole(item) for item in ids):
        _refuse("stop_token_ids must be a list of token ids", "stop_token_ids")
    seed = fields.get("seed")
    if seed is not None and not _whole(seed):
        _refuse("seed must be an integer", "seed")
    top_k = int(_number(fields, "top_k", 0, -1, 1 << 31, whole=True))
    extra = {
        name: fields[name]
        for name, neutral in _NEUTRAL.items()
        if fields.get(name) is not None and fields[name] != neutral
    }
    return Sampling(
        temperature=float(_number(fields, "temperature", 1.0, 0.0, 100.0)),
        top_p=float(_number(fields, "top_p", 1.0, 0.0, 1.0)),
        top_k=max(top_k, 0),
        max_tokens=int(_number(fields, limit, 0, 1, 1 << 31, whole=True)),
        stop=tuple(item for item in stops if item),
        stop_token_ids=tuple(ids),
        seed=seed,
        extra=extra,
    )


def _message(message: Any, at: int) -> Message:
    where = f"messages[{at}]"
    if not isinstance(message, dict):
        _refuse(f"{where} must be an object", where)
    role = message.get("role")
    role = _ROLES.get(role, role) if isinstance(role, str) else role
    if role not in ("system", "user", "assistant", "tool"):
        _refuse(f"{where}.role is {role!r}; use system, developer, user, assistant or tool", f"{where}.role")
    content = _content(message.get("content"), f"{where}.content")
    refusal = message.get("refusal")
    if role == "assistant" and isinstance(refusal, str) and refusal:
        content = f"{content}\n{refusal}" if content else refusal
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    tool_call_id = message.get("tool_call_id") or message.get("name") if role == "tool" else None
    return Message(
        role=role,
        content=content,
        reasoning=reasoning if role == "assistant" and isinstance(reasoning, str) else "",
        tool_calls=_tool_calls(message, where) if role == "assistant" else (),
        tool_call_id=tool_call_id if isinstance(tool_call_id, str) else "",
        extra={key: value for key, value in message.items() if key not in _MESSAGE_KEYS},
    )


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(f"{where} must be a string or a list of parts", where)
    texts: list[str] = []
    for at, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal") if kind == "refusal" else part.get("text") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS and kind != "refusal":
            _refuse(f"{where}[{at}] has type {kind!r}; this model reads text parts only", f"{where}[{at}]")
        if not isinstance(text, str):
            _refuse(f"{where}[{at}].text must be a string", f"{where}[{at}]")
        texts.append(text)
    return "\n".join(text for text in texts if text)


def _tool_calls(message: dict[str, Any], where: str) -> tuple[ToolCall, ...]:
    legacy = message.get("function_call")
    calls = message.get("tool_calls") or ([{"id": "", "function": legacy}] if isinstance(legacy, dict) else [])
    if not isinstance(calls, list):
        _refuse(f"{where}.tool_calls must be a list", f"{where}.tool_calls")
    found: list[ToolCall] = []
    for at, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            _refuse(f"{where}.tool_calls[{at}] has no function with a name", f"{where}.tool_calls[{at}]")
        arguments = function.get("arguments")
        if arguments is not None and not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        name = call.get("id")
        found.append(ToolCall(name if isinstance(name, str) else "", function["name"], arguments or ""))
    return tuple(found)


def _tools(fields: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    tools = fields.get("tools") or []
    if not isinstance(tools, list):
        _refuse("tools must be a list", "tools")
    for at, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            _refuse(f"tools[{at}] must be {{type: function, function: {{name, ...}}}}", f"tools[{at}]")
    return tuple(tools)


def _tool_choice(fields: dict[str, Any]) -> ToolChoice:
    choice = fields.get("tool_choice")
    if choice in (None, "auto"):
        return ToolChoice.AUTO
    if choice == "none":
        return ToolChoice.NONE
    _refuse("tool_choice must be auto or none: a forced call would need a grammar in the engine", "tool_choice")


def _check_format(fields: dict[str, Any]) -> None:
    given = fields.get("response_format")
    kind = given.get("type") if isinstance(given, dict) else given
    if kind not in (None, "text"):
        _refuse(f"response_format {kind!r} is not offered: it would need a grammar in the engine", "response_format")
    modalities = fields.get("modalities")
    if modalities not in (None, ["text"]):
        _refuse("modalities must be ['text']", "modalities")


def _number(
    fields: dict[str, Any], name: str, default: float, low: float, high: float, *, whole: bool = False
) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or (whole and not _whole(value)):
        _refuse(f"{name} must be {'an integer' if whole else 'a number'}, not {value!r}", name)
    if not low <= value <= high:
        _refuse(f"{name} is {value!r}; it must be between {low:g} and {high:g}", name)
    return value


def _whole(value: Any) -> bool:
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        _refuse(f"{name} must be true or false", name)
    return bool(value)


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        _refuse(f"{name} must be a string", name)
    return value or ""


def _refuse(message: str, param: str | None) -> NoReturn:
    raise ProtocolError(message, param=param, code="invalid_value" if param else "invalid_request")
