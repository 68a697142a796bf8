"""What a request shares with the run's lanes and calls: the facts that rules decide by.

Texts are compared for the first few messages and the last one only, so that a request costs the same however long
its conversation is; whole histories are compared message by message and stop at the first difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gyre_sdk.harness.proxy.dialects.canonical import Message, ToolCall, identity, tools_identity
from gyre_sdk.harness.proxy.lanes import SIDE, Asked, CallView, LaneView
from gyre_sdk.harness.proxy.lanes.facts import Preset, first_users, last_user, system_messages
from gyre_sdk.records import SUMMARY_SUFFIX

_QUOTED = 24
"""Characters from which on a text that stands inside another counts as quoted; shorter ones must be all of it."""
_SUMMARY_QUOTED, _ANSWER_QUOTED = 8, 40
"""The same for a summary, and for an answer that was not known to be one."""
_SCANNED = 100_000
"""Characters of a message that are searched for such a text, from its start."""
_RECENT = 64
"""Calls that are looked at, from the newest."""


@dataclass(frozen=True, slots=True)
class Start:
    """The tool call that a sub-agent's first message comes from."""

    call: CallView
    tool_call: ToolCall
    name: str


def conversations(lanes: Sequence[LaneView]) -> list[LaneView]:
    """Return the lanes in use that are neither side calls nor summaries, last used first."""
    found = [lane for lane in lanes if lane.opening and lane.role != SIDE and not is_summary(lane)]
    return sorted(found, key=lambda lane: -lane.last_used)


def is_summary(lane: LaneView) -> bool:
    """Tell whether a lane holds summaries of another."""
    return lane.role.endswith(SUMMARY_SUFFIX)


def by_thread(lanes: Sequence[LaneView], thread: str) -> LaneView | None:
    """Return the lane that the program calls so."""
    return next((lane for lane in conversations(lanes) if lane.thread == thread), None) if thread else None


def repeats(asked: Asked, lane: LaneView) -> bool:
    """Tell whether a request repeats all of a lane's latest request or, where that fails, of its opening."""
    said = without_system(asked.messages)
    return any(starts_with(said, without_system(known)) for known in (lane.latest, lane.opening))


def without_system(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages after the system messages at the start."""
    for at, item in enumerate(messages):
        if item.role != "system":
            return messages[at:] if at else messages
    return ()


def starts_with(messages: Sequence[Message], known: Sequence[Message]) -> bool:
    """Tell whether messages begin with known ones, of which there is at least one."""
    if not known or len(known) > len(messages):
        return False
    return all(same(one, other) for one, other in zip(known, messages, strict=False))


def same(one: Message, other: Message) -> bool:
    """Tell whether the model sees two messages alike."""
    if one.role != other.role or (one.role != "assistant" and one.content != other.content):
        return False
    return one.role != "assistant" or identity(one) == identity(other)


def same_agent(asked: Asked, lane: LaneView) -> bool:
    """Tell whether a request has the system prompt of a lane, or its tools."""
    system = system_messages(asked)
    if [item.content for item in system] == [item.content for item in lane.opening if item.role == "system"][
        : len(system)
    ]:
        return bool(system) or not lane.opening or lane.opening[0].role != "system"
    return bool(asked.tools) and tools_identity(asked.tools) == lane.tools


def last_assistant(asked: Asked) -> Message | None:
    """Return the last thing that the model is said to have said."""
    return next((item for item in reversed(asked.messages) if item.role == "assistant"), None)


def answered_last(
    asked: Asked, lanes: Sequence[LaneView], calls: Sequence[CallView]
) -> tuple[LaneView, CallView | None] | None:
    """Return the lane, and the call where it is known, that gave the last assistant message of a request."""
    last = last_assistant(asked)
    if last is None:
        return None
    ids = {call.id for call in last.tool_calls if call.id}
    known = {lane.lane: lane for lane in lanes}
    for call in recent(calls) if ids else ():
        if call.lane in known and any(item.id in ids for item in call.tool_calls):
            return known[call.lane], call
    if not last.content.strip() and not last.tool_calls:
        return None
    for lane in conversations(lanes):
        if lane.latest and lane.latest[-1].role == "assistant" and same(lane.latest[-1], last):
            return lane, next((call for call in recent(calls) if call.call == lane.last_call), None)
    return None


def recent(calls: Sequence[CallView]) -> Iterator[CallView]:
    """Return the latest calls, newest first."""
    return iter(calls[: -_RECENT - 1 : -1])


def start_of(asked: Asked, preset: Preset, lanes: Sequence[LaneView], calls: Sequence[CallView]) -> Start | None:
    """Return the tool call whose prompt a request begins with, among those that no lane came from yet."""
    texts = [item.content[:_SCANNED].strip() for item in first_users(asked)]
    if not texts or not preset.starters:
        return None
    taken = {lane.tool_call for lane in lanes if lane.tool_call}
    for call in recent(calls):
        for tool_call in call.tool_calls:
            if tool_call.id in taken and tool_call.id:
                continue
            name = _prompted(preset, tool_call, texts)
            if name is not None:
                return Start(call, tool_call, name)
    return None


def resumed_lane(asked: Asked, preset: Preset, lanes: Sequence[LaneView], calls: Sequence[CallView]) -> LaneView | None:
    """Return the lane whose summary a request begins with.

    Where the text is no summary on record, the program's own words tell: the lane that was summed up last, or, for a
    summary that was made elsewhere, the one that this agent used last.
    """
    known = {lane.lane: lane for lane in lanes}
    last = last_user(asked)
    given = (*system_messages(asked), *first_users(asked), *([last] if last is not None else []))
    texts = [item.content[:_SCANNED] for item in given]
    for call in recent(calls):
        lane = known.get(call.lane)
        if lane is None or lane.role == SIDE or not (preset.guess or is_summary(lane)):
            continue
        text = _summary(preset, call.content)
        least = _SUMMARY_QUOTED if is_summary(lane) else _ANSWER_QUOTED
        if len(text) >= least and any(text in said for said in texts):
            return known.get(lane.parent) if is_summary(lane) and lane.parent else lane
    if any(sign.shown(asked) for sign in preset.resumes):
        summaries = sorted((lane for lane in lanes if is_summary(lane)), key=lambda lane: -lane.last_used)
        summed = next((known[lane.parent] for lane in summaries if lane.parent in known), None)
        return summed or next((lane for lane in conversations(lanes) if same_agent(asked, lane)), None)
    return None


def quoted_lane(asked: Asked, lanes: Sequence[LaneView]) -> LaneView | None:
    """Return the lane whose latest answer the last user message holds, as one that asks to sum up a text does."""
    last = last_user(asked)
    for lane in conversations(lanes) if last is not None else ():
        answer = lane.latest[-1].content.strip() if lane.latest else ""
        if last is not None and len(answer) >= _QUOTED and answer in last.content:
            return lane
    return None


def _prompted(preset: Preset, call: ToolCall, texts: Sequence[str]) -> str | None:
    """Return the name of the sub-agent that a tool call starts with one of these texts, else None."""
    starter = next((item for item in preset.starters if item.tool.search(call.name)), None)
    if starter is None:
        return None
    arguments = _arguments(call.arguments)
    prompts = [arguments.get(key) for key in starter.prompt]
    for prompt in (item.strip() for item in prompts if isinstance(item, str)):
        if prompt and any(prompt == text or (len(prompt) >= _QUOTED and prompt in text) for text in texts):
            names = (arguments.get(key) for key in starter.name)
            return next((name for name in names if isinstance(name, str) and name), starter.otherwise or call.name)
    return None


def _arguments(text: str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _summary(preset: Preset, content: str) -> str:
    found = preset.summary.search(content) if preset.summary else None
    return (found[1] if found else content).strip()


__all__ = [
    "Start",
    "answered_last",
    "by_thread",
    "conversations",
    "is_summary",
    "last_assistant",
    "quoted_lane",
    "repeats",
    "resumed_lane",
    "same_agent",
    "start_of",
]
