"""Input items of the Responses protocol to canonical messages.

Reasoning, messages and calls of the assistant that follow each other are one canonical message. History is taken as it
is: arguments that are not JSON, empty content and results of unknown calls reach the model, because they are its own
mistakes or the agent's. Items of unknown types are recorded with the request and not shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gyre_sdk.harness.proxy.dialects.canonical import Message, ToolCall
from gyre_sdk.harness.proxy.dialects.fields import refuse, refuse_kind
from gyre_sdk.harness.proxy.dialects.responses.sealed import unseal
from gyre_sdk.harness.proxy.dialects.responses.tools import call_name, call_of
from gyre_sdk.harness.proxy.dialects.results import TEXTS, result_text

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = TEXTS | {"summary_text", "reasoning_text"}
_CALLS = frozenset(("function_call", "custom_tool_call", "local_shell_call"))
_RESULTS = frozenset(("function_call_output", "custom_tool_call_output", "local_shell_call_output"))


class _Assistant:
    """An assistant message that grows item by item.

    Texts of one kind that follow each other directly are separate and get a line feed between them. Texts with
    something else between them are one text that was cut there, as the stream cuts an answer.
    """

    def __init__(self) -> None:
        self.reasoning = ""
        self.content = ""
        self.calls: list[ToolCall] = []
        self.last = ""

    def add(self, kind: str, text: str) -> None:
        before: str = getattr(self, kind)
        gap = "\n" if self.last == kind and before and text else ""
        setattr(self, kind, before + gap + text)
        self.last = kind

    def call(self, call: ToolCall) -> None:
        self.calls.append(call)
        self.last = "call"

    def message(self) -> Message:
        return Message("assistant", self.content, self.reasoning, tuple(self.calls))


def messages_of(items: Sequence[Any]) -> list[Message]:
    """Return the canonical messages of input items.

    Raises:
        ProtocolError: an item is no object, or holds what the model cannot read.
    """
    found: list[Message] = []
    open_: _Assistant | None = None
    for at, item in enumerate(items):
        where = f"input[{at}]"
        kind = item_type(item, where)
        if kind in _CALLS or kind == "reasoning" or (kind == "message" and item.get("role") == "assistant"):
            open_ = _extend(open_, kind, item, where)
            continue
        other = _other(kind, item, where)
        if other is not None:
            found += [open_.message()] if open_ else []
            open_ = None
            found.append(other)
    return found + ([open_.message()] if open_ else [])


def item_type(item: Any, where: str) -> str:
    """Return the type of an input item; messages and references may leave theirs out.

    Raises:
        ProtocolError: it is no item.
    """
    if not isinstance(item, dict):
        refuse(f"{where} must be an object", where)
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference" if "id" in item else None
    if not isinstance(kind, str):
        refuse(f"{where}.type must be the type of an item", f"{where}.type")
    return kind


def _extend(open_: _Assistant | None, kind: str, item: dict[str, Any], where: str) -> _Assistant | None:
    if kind == "reasoning":
        text = _reasoning(item)
        if not text and open_ is None:
            return None
    open_ = open_ or _Assistant()
    if kind in _CALLS:
        open_.call(call_of({**item, "type": kind}, where))
    elif kind == "message":
        open_.add("content", _content(item.get("content"), f"{where}.content"))
    else:
        open_.add("reasoning", text)
    return open_


def _other(kind: str, item: dict[str, Any], where: str) -> Message | None:
    if kind == "message":
        given = item.get("role")
        role = _ROLES.get(given) if isinstance(given, str) else None
        if role is None:
            refuse(f"{where}.role is {given!r}; use system, developer, user or assistant", f"{where}.role")
        return Message(role, _content(item.get("content"), f"{where}.content"))
    if kind in _RESULTS:
        name = call_name(item.get("call_id") or item.get("id"))
        return Message("tool", result_text(item.get("output")), tool_call_id=name)
    return None


def _reasoning(item: dict[str, Any]) -> str:
    """Return the text of a reasoning item: what we sealed, else its content, else its summary."""
    sealed = unseal(item.get("encrypted_content"))
    return sealed if sealed is not None else _texts(item.get("content")) or _texts(item.get("summary"))


def _texts(parts: Any) -> str:
    if isinstance(parts, str):
        return parts
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "\n".join(text for text in texts if isinstance(text, str) and text)


def _content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        refuse(f"{where} must be a string or a list of parts", where)
    texts: list[str] = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or (kind not in _TEXTS and kind != "refusal"):
            refuse_kind(f"{where}[{at}]", kind)
        text = part.get("refusal" if kind == "refusal" else "text")
        if text is not None and not isinstance(text, str):
            refuse(f"{where}[{at}].text must be a string", f"{where}[{at}]")
        texts.append(text or "")
    return "\n".join(text for text in texts if text)
