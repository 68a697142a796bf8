"""Tools of the Responses protocol: how the model sees them, and how its calls go back to the agent.

The model knows functions only. A custom tool becomes a function with one text parameter, `local_shell` a function with
a command, the tools of a namespace functions with the namespace in their names. A call goes back in the tool's own
form where that form can hold exactly what the model wrote; otherwise the arguments go back as they are, and the call's
id says so. Tools that OpenAI itself runs (search, code, images, ...) are recorded and never shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from gyre_sdk.harness.proxy.dialects.canonical import ToolCall, same_arguments
from gyre_sdk.harness.proxy.dialects.fields import refuse

_RAW = "-raw"
"""Ends the id of a custom tool's call whose input is the model's arguments as they are."""
_SHELL = "local_shell"
_SHELL_KEYS = ("command", "env", "timeout_ms", "user", "working_directory")
_SHELL_PARAMETERS = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
        "env": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["command"],
}


class Kind(StrEnum):
    """The form in which a tool's calls go back to the agent."""

    FUNCTION = "function"
    CUSTOM = "custom"
    SHELL = "local_shell"


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model sees."""

    kind: Kind
    name: str
    """As the agent knows it."""
    namespace: str
    """Empty for most tools."""
    shown: dict[str, Any]
    """Definition in OpenAI's chat form."""


def tools_of(fields: dict[str, Any]) -> dict[str, Tool]:
    """Return the tools of a request that the model sees, by the name that it knows them by.

    Raises:
        ProtocolError: a definition is malformed.
    """
    given = fields.get("tools")
    found: dict[str, Tool] = {}
    _collect(given if given is not None else [], "tools", "", found)
    return found


def shown_name(namespace: object, name: str) -> str:
    """Return the name by which the model knows a tool of a namespace."""
    if not isinstance(namespace, str) or not namespace:
        return name
    return namespace + name if namespace.endswith("_") else f"{namespace}__{name}"


def call_item(call: ToolCall, tool: Tool | None, item_id: str, status: str) -> dict[str, Any]:
    """Return the output item of a call that the model made; `item_id` comes without the prefix of its kind."""
    if tool is not None and tool.kind is Kind.CUSTOM:
        text = _input(call.arguments)
        return {
            "type": "custom_tool_call",
            "id": f"ctc_{item_id}",
            "call_id": call.id + _RAW if text is None else call.id,
            "name": tool.name,
            **_namespace(tool),
            "input": call.arguments if text is None else text,
            "status": status,
        }
    action = _action(call.arguments) if tool is not None and tool.kind is Kind.SHELL else None
    if action is not None:
        head = {"type": "local_shell_call", "id": f"lsh_{item_id}", "call_id": call.id}
        return {**head, "action": action, "status": status}
    return {
        "type": "function_call",
        "id": f"fc_{item_id}",
        "call_id": call.id,
        "name": tool.name if tool else call.name,
        **_namespace(tool),
        "arguments": call.arguments,
        "status": status,
    }


def call_of(item: dict[str, Any], where: str) -> ToolCall:
    """Return the call that an input item of a history holds, whatever its arguments are.

    Raises:
        ProtocolError: it names no tool.
    """
    given = item.get("call_id") or item.get("id")
    name = call_name(given)
    if item["type"] == "local_shell_call":
        return ToolCall(name, _SHELL, _arguments(item.get("action")))
    tool = item.get("name")
    if not isinstance(tool, str) or not tool:
        refuse(f"{where}.name must be the name of a tool", f"{where}.name")
    tool = shown_name(item.get("namespace"), tool)
    if item["type"] == "function_call":
        return ToolCall(name, tool, _text(item.get("arguments")))
    text = _text(item.get("input"))
    return ToolCall(name, tool, text if is_raw(given) else custom_arguments(text))


def call_name(given: object) -> str:
    """Return the id of a call from the one that an item gives."""
    return given.removesuffix(_RAW) if isinstance(given, str) else ""


def is_raw(given: object) -> bool:
    """Tell whether the id of a custom tool's call says that its input is the model's arguments as they are."""
    return isinstance(given, str) and given.endswith(_RAW)


def custom_arguments(text: str) -> str:
    """Return the arguments that stand for a custom tool's input."""
    return msgspec.json.encode({"input": text}).decode()


def _collect(given: Any, where: str, namespace: str, found: dict[str, Tool]) -> None:
    if not isinstance(given, list):
        refuse(f"{where} must be a list", where)
    for at, tool in enumerate(given):
        place = f"{where}[{at}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            refuse(f"{place} must be an object with a type", place)
        if kind == _SHELL:
            found[_SHELL] = _tool(Kind.SHELL, _SHELL, "", "Run a command on the agent's machine.", _SHELL_PARAMETERS)
        elif kind in ("function", "custom", "namespace"):
            inner = tool.get("function") if kind == "function" else None
            tool = inner if isinstance(inner, dict) else tool
            name = tool.get("name")
            if not isinstance(name, str) or not name:
                refuse(f"{place}.name must be a string", f"{place}.name")
            if kind != "namespace":
                found[shown_name(namespace, name)] = _named(Kind(kind), name, namespace, tool)
            elif namespace:
                refuse(f"{place}: a namespace cannot hold another", place)
            else:
                _collect(tool.get("tools") or [], f"{place}.tools", name, found)


def _named(kind: Kind, name: str, namespace: str, tool: dict[str, Any]) -> Tool:
    description = tool.get("description")
    if kind is Kind.CUSTOM:
        parameter = {"type": "string", "description": _format(tool.get("format"))}
        parameters = {"type": "object", "properties": {"input": parameter}, "required": ["input"]}
        return _tool(kind, name, namespace, description, parameters)
    given = tool.get("parameters")
    more = {"strict": tool["strict"]} if isinstance(tool.get("strict"), bool) else {}
    return _tool(kind, name, namespace, description, given if isinstance(given, dict) else None, **more)


def _tool(kind: Kind, name: str, namespace: str, description: Any, parameters: Any, **more: Any) -> Tool:
    function: dict[str, Any] = {"name": shown_name(namespace, name)}
    if isinstance(description, str):
        function["description"] = description
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return Tool(kind, name, namespace, {"type": "function", "function": function | more})


def _format(form: Any) -> str:
    if isinstance(form, dict) and form.get("type") == "grammar":
        return f"Text of this {form.get('syntax')} grammar:\n{form.get('definition')}"
    return "Free text."


def _namespace(tool: Tool | None) -> dict[str, str]:
    return {"namespace": tool.namespace} if tool and tool.namespace else {}


def _input(arguments: str) -> str | None:
    """Return the input of a custom tool, or None where it would not give the same arguments again."""
    found = _decoded(arguments)
    text = found.get("input") if isinstance(found, dict) else None
    same = isinstance(text, str) and same_arguments(custom_arguments(text)) == same_arguments(arguments)
    return text if same else None


def _action(arguments: str) -> dict[str, Any] | None:
    """Return the action of a shell call, or None where it would not give the same arguments again."""
    found = _decoded(arguments)
    command = found.get("command") if isinstance(found, dict) else None
    words = isinstance(command, list) and all(isinstance(word, str) for word in command)
    if not words or not isinstance(found.get("env", {}), dict):
        return None
    action = {"type": "exec", "env": {}} | {key: found[key] for key in _SHELL_KEYS if key in found}
    return action if same_arguments(_arguments(action)) == same_arguments(arguments) else None


def _arguments(action: Any) -> str:
    if not isinstance(action, dict):
        return _text(action)
    kept = {key: action[key] for key in _SHELL_KEYS if action.get(key) not in (None, {})}
    return msgspec.json.encode(kept).decode()


def _decoded(arguments: str) -> Any:
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return None


def _text(value: Any) -> str:
    """Return text as it is, nothing as an empty one, anything else as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    return msgspec.json.encode(value).decode()
