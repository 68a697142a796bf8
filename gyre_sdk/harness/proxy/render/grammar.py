"""What an answer must match, as vLLM's `structured_outputs`: forced tool calls, and output by a schema, around thinking.

The engine samples plain tokens; which of them are thinking, text and calls is known here. So the whole answer, with
the thinking before, is one grammar: a structural tag of xgrammar (https://xgrammar.mlc.ai), vLLM's own backend.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.answers import NUMBERED_SEPARATOR, BodyKind, Format, Thinking
from gyre_sdk.harness.proxy.dialects.canonical import ModelRequest, ToolChoice

Tag = dict[str, Any]

_SPACES = 16
"""Most white space at one place of a JSON text: enough for indented JSON, and an end to models that only indent."""
_ABOUT = re.compile("structur|grammar|schema|regex", re.IGNORECASE)
_FORCED = (ToolChoice.REQUIRED, ToolChoice.NAMED)
_WRITTEN_ONE_WAY = frozenset(
    (BodyKind.XML, BodyKind.KEYS, BodyKind.INVOKE, BodyKind.DSML, BodyKind.NUMBERED, BodyKind.JSON, BodyKind.OBJECTS)
)
"""Tool calls that a grammar can hold."""


def constrained(request: ModelRequest) -> bool:
    """Tell whether a request constrains its answer."""
    return request.tool_choice in _FORCED or request.structured is not None


def constraint(request: ModelRequest, form: Format | None, thinking: Thinking, longest: int) -> dict[str, Any] | None:
    """Return the value of `structured_outputs` for a request, or None where it asks for nothing of the kind.

    A tool that must be called is called with arguments that fit its schema, and nothing is said before but thinking.
    Where an answer by a schema may also be a tool call, the grammar allows either.

    Args:
        request: what is asked for.
        form: how the model writes; None where that is not known.
        thinking: where the answer begins.
        longest: tokens that the answer may have. Thinking may use half of them, so that what must follow it fits.

    Raises:
        ProtocolError: a tool call cannot be forced, or allowed beside a schema, because it is not known how the model
            writes one, or it writes them in several ways.
    """
    if not constrained(request):
        return None
    if form is not None and form.body is BodyKind.CHANNELS:
        form = None  # a grammar would have to hold the channels too
    forced = request.tool_choice in _FORCED
    if forced and form is None:
        _refuse("tool_choice: how this model writes tool calls is not known here, so none can be forced; use auto")
    if forced and form is not None and form.body not in _WRITTEN_ONE_WAY:
        _refuse("tool_choice: this model writes tool calls in several ways, so none can be forced; use auto")
    if forced and not request.tools:
        _refuse("tool_choice: a tool must be called, and there is none")
    if form is None:
        return request.structured
    if forced:
        said = _calls(request, form)
    else:
        output = _output(request.structured or {})
        if output is None:
            return request.structured
        callable_ = request.tools and request.tool_choice is ToolChoice.AUTO
        if callable_ and form.body not in _WRITTEN_ONE_WAY:
            field = _field(request)
            _refuse(
                f"{field}: this model writes tool calls in several ways, so an answer cannot be held to a schema where it"
                " may also be a tool call; set tool_choice to none, or leave the tools out",
                field,
            )
        said = _either([output, _calls(request, form)]) if callable_ else output
    whole = _after_thinking(said, form, thinking, max(longest // 2, 1))
    return {"structural_tag": msgspec.json.encode({"type": "structural_tag", "format": whole}).decode()}


def field_refused(request: ModelRequest, message: str) -> str | None:
    """Return the field of a request that an engine refuses with `message`, where that is about it."""
    if request.candidates and "logprobs" in message:
        return "logprobs" if request.prompts else "top_logprobs"
    if not constrained(request) or not _ABOUT.search(message):
        return None
    if request.tool_choice in _FORCED:
        return "tool_choice"
    return _field(request)


def _field(request: ModelRequest) -> str:
    """Return the field by which a request asks for an answer of some form."""
    fields = ("response_format", "text", "output_config", "output_format", "structured_outputs")
    return next((name for name in fields if request.fields.get(name)), "structured_outputs")


def _refuse(message: str, field: str = "tool_choice") -> NoReturn:
    raise ProtocolError(message, code="invalid_value", param=field)


def _after_thinking(said: Tag, form: Format, thinking: Thinking, budget: int) -> Tag:
    if thinking is Thinking.OVER or form.think is None:
        return said
    opening, closing = form.think
    thought = {"type": "any_text", "excludes": [closing], "max_tokens": budget}
    space = {"type": "regex", "pattern": r"\n{0,2}"}
    begins = "" if thinking is Thinking.OPEN else opening
    block = _sequence([{"type": "tag", "begin": begins, "content": thought, "end": closing}, space])
    return _sequence([block if thinking is Thinking.OPEN else {"type": "optional", "content": block}, said])


def _calls(request: ModelRequest, form: Format) -> Tag:
    """Return the grammar of one or more tool calls and nothing else."""
    functions = [tool.get("function", tool) for tool in request.tools]
    if request.tool_choice is ToolChoice.NAMED:
        functions = [function for function in functions if function.get("name") == request.forced_tool]
    single = request.tool_choice is ToolChoice.NAMED or not request.parallel_tool_calls or form.bare
    calls = {
        "type": "tags_with_separator",
        "tags": [_call(function, form) for function in functions],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": single,
    }
    if not form.wrap:
        return calls
    before, after = ({"type": "const_string", "value": tag} for tag in (form.wrap[0] + "\n", "\n" + form.wrap[-1]))
    return _sequence([before, calls, after])


def _call(function: Mapping[str, Any], form: Format) -> Tag:
    """Return the grammar of one call, tags included."""
    opening, closing = form.call
    name, content = function["name"], _json(function.get("parameters") or {"type": "object", "properties": {}})
    match form.body:
        case BodyKind.XML:
            begin, end = f"{opening}\n<function={name}>\n", f"\n</function>\n{closing}"
            content["style"] = "qwen_xml"
        case BodyKind.KEYS:
            begin, end = f"{opening}{name}\n", closing
            content["style"] = "glm_xml"
        case BodyKind.INVOKE | BodyKind.DSML:
            begin, end = f'{opening}{name}">\n', f"\n{closing}"
            content["style"] = "minimax_xml" if form.body is BodyKind.INVOKE else "deepseek_xml"
        case BodyKind.NUMBERED:
            begin, end = f"{opening}functions.{name}:", closing
            number = {"type": "regex", "pattern": "[0-9]{1,3}"}
            content = _sequence([number, {"type": "const_string", "value": NUMBERED_SEPARATOR}, content])
        case BodyKind.JSON | BodyKind.OBJECTS:
            space, opening = ("\n", opening) if closing else ("", "")
            begin = f'{opening}{space}{{"name": {_text(name)}, "{form.argument_keys[0]}": '
            end = f"}}{space}{closing}"
        case _:
            raise AssertionError(f"{form.body} is not among the ways of which each is one")
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _text(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _output(structured: Mapping[str, Any]) -> Tag | None:
    """Return the grammar of an answer's text; None for what only the engine understands."""
    match structured:
        case {"json": dict() as schema, **rest} if not rest:
            return _json(schema)
        case {"json_object": True, **rest} if not rest:
            return _json({"type": "object"})
        case {"regex": str() as pattern, **rest} if not rest:
            return {"type": "regex", "pattern": pattern}
        case {"choice": [*texts], **rest} if texts and not rest:
            return _either([{"type": "const_string", "value": text} for text in texts])
    return None


def _json(schema: Mapping[str, Any]) -> Tag:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _SPACES}


def _sequence(elements: Sequence[Tag]) -> Tag:
    return {"type": "sequence", "elements": list(elements)}


def _either(elements: Sequence[Tag]) -> Tag:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


__all__ = ["constrained", "constraint", "field_refused"]
