"""What is known of a program, as data: the signs by which its requests show what they are for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from gyre_sdk.harness.proxy.dialects.canonical import Message
from gyre_sdk.harness.proxy.lanes import Asked

_SCANNED = 20_000
"""Characters of a text that a sign looks at, from its start."""


class Where(StrEnum):
    """The part of a request that a sign looks at."""

    HEADER = "header"
    SYSTEM = "system"
    """Each system message before the first other one."""
    LAST_USER = "last_user"
    """The last user message."""
    USER = "user"
    """Each of the first user messages."""


@dataclass(frozen=True, slots=True)
class Sign:
    """One fact about a request: a pattern found in one part of it."""

    where: Where
    pattern: re.Pattern[str]
    header: str = ""
    """With `HEADER`: the header's name in lower case."""
    key: str = ""
    """With `HEADER`: the header holds a JSON object and the pattern looks at this key of it."""

    def shown(self, asked: Asked) -> bool:
        """Tell whether a request shows it."""
        if self.where is Where.HEADER:
            return self.pattern.search(header(asked.headers, self.header, self.key)) is not None
        return any(self.pattern.search(item.content, 0, _SCANNED) for item in _part(asked, self.where))


@dataclass(frozen=True, slots=True)
class SideCall:
    """A kind of side call."""

    name: str
    signs: tuple[Sign, ...]
    """All must be shown."""


@dataclass(frozen=True, slots=True)
class Starter:
    """A tool whose calls start a sub-agent."""

    tool: re.Pattern[str]
    """Found in the tool's name."""
    prompt: tuple[str, ...]
    """Arguments that may hold the sub-agent's first message."""
    name: tuple[str, ...] = ()
    """Arguments that may name it, best first."""
    otherwise: str = ""
    """Its name where no argument gives one; empty: the tool's."""


@dataclass(frozen=True, slots=True)
class Thread:
    """Headers that name conversations."""

    names: tuple[str, ...]
    """Together they name one; empty ones count as empty."""
    child: str = ""
    """Header that only sub-agents send; its value names them where nothing else does."""
    parent: str = ""
    """Header that names the conversation which started this one; without it, `names` with `child` left out do."""


@dataclass(frozen=True, slots=True)
class Preset:
    """What is known of one program."""

    name: str
    program: tuple[Sign, ...] = ()
    """Any of them tells that a request comes from it."""
    thread: Thread | None = None
    summaries: tuple[Sign, ...] = ()
    """Any of them tells that a request asks for a summary of a conversation."""
    resumes: tuple[Sign, ...] = ()
    """Any of them tells that a request begins with such a summary."""
    summary: re.Pattern[str] | None = None
    """Finds, in an answer that sums up, the part that the next request repeats: group 1, else the whole answer."""
    sides: tuple[SideCall, ...] = ()
    starters: tuple[Starter, ...] = ()
    handoff: re.Pattern[str] | None = None
    """Matches the name of a tool that hands the conversation over; group 1 names the agent that takes it."""
    guess: bool = False
    """Its signs are guesses: a summary must also leave the recorded path, and repeat or quote a conversation."""


def header(headers: Mapping[str, str], name: str, key: str = "") -> str:
    """Return a header, or one key of the JSON object in it; empty where there is none."""
    value = headers.get(name, "")
    if not key or not value:
        return value
    try:
        found = json.loads(value)
    except ValueError:
        return ""
    found = found.get(key, "") if isinstance(found, dict) else ""
    return found if isinstance(found, str) else ""


def system_messages(asked: Asked) -> tuple[Message, ...]:
    """Return the system messages that a request begins with."""
    for at, item in enumerate(asked.messages):
        if item.role != "system":
            return asked.messages[:at]
    return asked.messages


def first_users(asked: Asked, count: int = 6) -> list[Message]:
    """Return the user messages among the first messages after the system's."""
    start = len(system_messages(asked))
    return [item for item in asked.messages[start : start + count] if item.role == "user"]


def last_user(asked: Asked) -> Message | None:
    """Return the last user message; None where an assistant or tool message comes after it."""
    for item in reversed(asked.messages):
        if item.role == "user":
            return item
        if item.role != "system":
            return None
    return None


def _part(asked: Asked, where: Where) -> list[Message]:
    if where is Where.SYSTEM:
        return list(system_messages(asked))
    if where is Where.USER:
        return first_users(asked)
    last = last_user(asked)
    return [last] if last is not None else []


__all__ = [
    "Preset",
    "SideCall",
    "Sign",
    "Starter",
    "Thread",
    "Where",
    "first_users",
    "header",
    "last_user",
    "system_messages",
]
