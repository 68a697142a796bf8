"""Conversations as they were recorded, in the form of chat templates: what supervised and preference trainers take."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gyre_sdk.journal import RecordedExchange
from gyre_sdk.records import CallStatus

Message = Mapping[str, Any]

_ANSWERED = (CallStatus.COMPLETE, CallStatus.DELIVERED)
_KEY = re.compile(r"(?<![\w-])gy-[\w-]{43}(?![\w-])")
"""Keys that gyre gives out."""
_SECRET_NAMES = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
_SHORTEST_SECRET = 8


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that ends with an answer of the model."""

    leaf: str
    """The call that gave the last answer."""
    role: str
    messages: tuple[Message, ...]
    tools: str | None
    """JSON text of the definitions that the model was shown; None without tools."""


def conversation(exchange: RecordedExchange, clean: Callable[[str], str]) -> Conversation | None:
    """Return what a call was asked and answered; None where no answer is on record.

    Args:
        clean: takes secrets out of a text.
    """
    if exchange.answer is None or exchange.status not in _ANSWERED:
        return None
    tools = exchange.request.get("tools")
    if tools is None:
        tools = (exchange.request.get("body") or {}).get("tools")
    messages = tuple(_wire(message, clean) for message in (*exchange.messages, exchange.answer))
    text = clean(json.dumps(tools, ensure_ascii=False)) if tools else None
    return Conversation(exchange.call, exchange.role, messages, text)


def ends(exchanges: Sequence[RecordedExchange]) -> list[RecordedExchange]:
    """Return the answered exchanges that no other goes on from: whose messages and answer begin no other's messages."""
    names: dict[int, int] = {}
    known: dict[str, int] = {}
    steps: dict[tuple[int, int], int] = {}

    def number(message: Message) -> int:
        """Return the same number for messages that say the same."""
        found = names.get(id(message))  # exchanges that are read together share their messages
        if found is None:
            found = names[id(message)] = known.setdefault(_identity(message), len(known))
        return found

    answered = [(one, one.answer) for one in exchanges if one.answer is not None and one.status in _ANSWERED]
    places = []
    for one, _ in answered:
        place = 0
        for message in one.messages:
            place = steps.setdefault((place, number(message)), len(steps) + 1)
        places.append(place)
    return [one for (one, answer), place in zip(answered, places, strict=True) if (place, number(answer)) not in steps]


def fork(one: Conversation, other: Conversation) -> int | None:
    """Return how many messages two conversations share before the first answer that differs; None where they have no such
    point: another kind of message differs first, or nothing does.
    """
    pairs = zip(one.messages, other.messages, strict=False)
    at = next((place for place, (a, b) in enumerate(pairs) if _identity(a) != _identity(b)), None)
    if not at or one.messages[at]["role"] != "assistant" or other.messages[at]["role"] != "assistant":
        return None
    return at


def cleaner(environment: Mapping[str, str]) -> Callable[[str], str]:
    """Return what takes keys of gyre out of a text, and the values of variables whose names say that they are secret."""
    values = {
        value: f"[{name}]"
        for name, value in environment.items()
        if len(value) >= _SHORTEST_SECRET and name.upper().endswith(_SECRET_NAMES)
    }

    def clean(text: str) -> str:
        for value, name in values.items():
            if value in text:
                text = text.replace(value, name)
        return _KEY.sub("[key]", text) if "gy-" in text else text

    return clean


def _wire(message: Message, clean: Callable[[str], str]) -> Message:
    """Return a recorded message in the form of chat templates. Arguments stay the JSON text that was sampled."""
    wire: dict[str, Any] = {"role": message["role"], "content": clean(message.get("content", ""))}
    if message.get("reasoning"):
        wire["reasoning_content"] = clean(message["reasoning"])
    if message.get("tool_calls"):
        wire["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": clean(call.get("arguments") or "{}")},
            }
            for call in message["tool_calls"]
        ]
    if message.get("tool_call_id"):
        wire["tool_call_id"] = message["tool_call_id"]
    return wire


def _identity(message: Message) -> str:
    """Return what makes two messages the same: role, text, tools called with which arguments. Ids and thinking do not."""
    calls: Iterable[Mapping[str, Any]] = message.get("tool_calls") or ()
    functions = [call.get("function", call) for call in calls]
    said = [(one["name"], _parsed(one.get("arguments", ""))) for one in functions]
    return json.dumps([message["role"], (message.get("content") or "").strip(), said], sort_keys=True)


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments
