"""Tool calls in the forms of OpenAI chat, OpenAI responses and Anthropic messages, and answers in the same form. Pure.

A call, or a whole answer of a model, may be an object of an SDK or the JSON that it stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from gyre_sdk.errors import ProtocolError

_HINT = (
    "give an item of `message.tool_calls` (OpenAI chat), a `function_call` item (responses) or a `tool_use` block"
    " (Anthropic)"
)


class Form(StrEnum):
    """Protocol whose form a call has."""

    CHAT = "chat"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"


@dataclass(frozen=True, slots=True)
class Asked:
    """A model's call of a tool."""

    form: Form
    id: str
    name: str
    arguments: Any
    """JSON text, or what it says."""


def read_call(call: Any) -> Asked:
    """Return a call, whatever its form.

    Raises:
        ProtocolError: it has none of the forms.
    """
    kind = _get(call, "type")
    function = _get(call, "function")
    if function is not None:
        return Asked(Form.CHAT, str(_get(call, "id") or ""), str(_get(function, "name")), _get(function, "arguments"))
    if kind == "function_call":
        return Asked(Form.RESPONSES, str(_get(call, "call_id")), str(_get(call, "name")), _get(call, "arguments"))
    if kind == "tool_use":
        return Asked(Form.ANTHROPIC, str(_get(call, "id")), str(_get(call, "name")), _get(call, "input"))
    if kind in ("custom", "custom_tool_call"):
        form = Form.CHAT if kind == "custom" else Form.RESPONSES
        custom = _get(call, "custom") or call
        return Asked(form, str(_get(call, "call_id") or _get(call, "id")), str(_get(custom, "name")), None)
    raise ProtocolError(f"{_brief(call)} is not a tool call; {_HINT}", param="tool_calls")


def calls_of(answer: Any) -> tuple[Form, list[Any]]:
    """Return the form and the tool calls of a model's whole answer; no calls where it made none.

    Args:
        answer: a chat completion or its message, a response or its output, an Anthropic message or its content.

    Raises:
        ProtocolError: it is none of these.
    """
    choices = _get(answer, "choices")
    if choices:
        return calls_of(_get(choices[0], "message"))
    for name in ("output", "content"):
        items = _get(answer, name)
        if _is_items(items):
            return calls_of(items)
    if _is_items(answer):
        found = [item for item in answer if _get(item, "type") in ("function_call", "custom_tool_call", "tool_use")]
        anthropic = any(_get(item, "type") in ("text", "thinking", "tool_use") for item in answer)
        return (Form.ANTHROPIC if anthropic else Form.RESPONSES), found
    if _get(answer, "role") == "assistant":
        return Form.CHAT, list(_get(answer, "tool_calls") or ())
    raise ProtocolError(f"{_brief(answer)} is not a model's answer; give the response, or its message", param="answer")


def arguments_of(asked: Asked) -> Mapping[str, Any]:
    """Return a call's arguments.

    Raises:
        ValueError: they are not a JSON object; says so to the model.
    """
    given = asked.arguments
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given.encode()) if given.strip() else {}
        except msgspec.DecodeError as error:
            raise ValueError(f"the arguments are not JSON ({error}); send one JSON object") from error
    if isinstance(given, Mapping):
        return given
    raise ValueError(f"the arguments are {_brief(given)}; send one JSON object")


def result_of(asked: Asked, text: str, *, is_error: bool) -> dict[str, Any]:
    """Return a tool's result as the protocol of its call has it."""
    if asked.form is Form.CHAT:
        return {"role": "tool", "tool_call_id": asked.id, "content": text}
    if asked.form is Form.RESPONSES:
        return {"type": "function_call_output", "call_id": asked.id, "output": text}
    return {"type": "tool_result", "tool_use_id": asked.id, "content": text, **({"is_error": True} if is_error else {})}


def results_of(form: Form, results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return results as what is appended to a conversation: Anthropic's are one user message together."""
    if form is Form.ANTHROPIC and results:
        return [{"role": "user", "content": list(results)}]
    return list(results)


def definition(form: Form, name: str, description: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's definition as a protocol has it."""
    if form is Form.CHAT:
        return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}
    if form is Form.RESPONSES:
        return {
            "type": "function",
            "name": name,
            "description": description,
            "parameters": schema,
            "strict": False,
        }
    return {"name": name, "description": description, "input_schema": schema}


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _is_items(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping) and hasattr(value, "__len__")


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
