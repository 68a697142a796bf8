"""What every protocol's request becomes: canonical messages, tools and sampling, and when two messages are the same.

Identity follows one rule: what the model can see decides, what it cannot see does not (but see `Message.sealed`). So
unknown keys, nulls, the form of content (string or parts), key order and spacing in tool arguments and the ids of tool
calls are ignored; roles, text, tool names and argument values are not.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from gyre_sdk.records import Sampling

_EXACT = 1 << 53
"""Doubles hold each integer up to this one."""
_INLINE_THINKING = re.compile(r"\s*<think>(.*?)</think>\s*(.*)", re.DOTALL)


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool that an assistant message holds."""

    id: str
    name: str
    arguments: str = ""
    """Text of the arguments, byte for byte as written; usually JSON, not always valid."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message, the same for all protocols."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str = ""
    """Text; several text parts are joined with a line feed, as serving templates do."""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """For role `tool`: the call that this is the result of."""
    extra: dict[str, Any] = {}
    """Keys that gyre does not know, as sent; recorded, never shown to the model, never part of identity."""
    sealed: tuple[str, ...] = ()
    """Digests of what the message holds that no model can be shown (encrypted thinking): part of identity, because
    an answer that was sampled here holds none."""


class ToolChoice(StrEnum):
    """Whether the model's tool calls are taken as such, and whether it must make one."""

    AUTO = "auto"
    NONE = "none"
    """Tool calls stay text."""
    REQUIRED = "required"
    """At least one call, by a grammar in the engine."""
    NAMED = "named"
    """One call of `ModelRequest.forced_tool`, by a grammar in the engine."""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request of any protocol, canonical."""

    dialect: str
    model: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    """Tool definitions as sent, in OpenAI's form."""
    sampling: Sampling
    """Resolved, without the stop tokens of the renderer; `max_tokens` is 0 where the agent gave none."""
    fields: dict[str, Any]
    """The whole request but its messages, as sent: what is recorded."""
    raw: tuple[Any, ...] = ()
    """Messages, system texts, input items as sent: recorded beside the canonical messages."""
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    candidates: int = 0
    """Likeliest tokens to show at every place of the answer, beside the one sampled; with `logprobs` only."""
    names_tokens: bool = False
    """Whether tokens are shown as `token_id:N`: several may have one text."""
    n: int = 1
    """Answers asked for; with `prompts`, of each of them."""
    tool_choice: ToolChoice = ToolChoice.AUTO
    forced_tool: str = ""
    parallel_tool_calls: bool = True
    structured: dict[str, Any] | None = None
    """What the answer must match, as engines take it: `{"json": schema}`, `{"json_object": true}`, `{"regex": text}`,
    `{"choice": [text, ...]}` or `{"grammar": text}`; None for free text."""
    thinking: bool | None = None
    """Whether the model is to think before it answers; None leaves that to the service."""
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """For protocols without messages: texts or token ids to continue, as they are. `messages` is empty then."""
    prefill: str = ""
    """Text that the answer continues: the start of the model's own turn, after `messages`. Empty: it begins afresh."""
    continues: str | None = None
    """Name of the answer (`resp_...`) whose conversation `messages` continues; None when they are the whole of it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the sampled tokens say."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self, prefill: str = "") -> Message:
        """Return it, behind the text that it continues, as the assistant message that an agent will send back."""
        return Message("assistant", prefill + self.content, self.reasoning, self.tool_calls)


class Part(StrEnum):
    """What a delta of an answer adds to."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"
    """A tool call begins: `call` holds its id and name, no arguments yet."""
    ARGUMENTS = "arguments"
    """Text of the arguments of the tool call that began last."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in an answer that is being sampled. All deltas of an answer, in order, make the answer."""

    part: Part
    text: str = ""
    call: ToolCall | None = None
    """With `CALL` only."""


def answer_of(message: Message, prefill: str = "") -> Answer:
    """Return the answer that a recorded message stands for: `Answer.message` turned back."""
    return Answer(message.content.removeprefix(prefill), message.reasoning, message.tool_calls)


def split_thinking(message: Message) -> tuple[str, str]:
    """Return an assistant message's (reasoning, content); thinking in inline tags counts as reasoning."""
    if message.role == "assistant" and not message.reasoning and "</think>" in message.content:
        found = _INLINE_THINKING.fullmatch(message.content)
        if found:
            return found[1].strip(), found[2]
    return message.reasoning.strip(), message.content


def identity(message: Message) -> bytes:
    """Return 16 bytes that are equal for messages which the model sees alike, reasoning left out."""
    if message.role == "assistant":
        _, content = split_thinking(message)
        calls = [[call.name, same_arguments(call.arguments)] for call in message.tool_calls]
    else:
        content, calls = message.content, []
    return _digest(msgspec.json.encode([message.role, content, calls, *message.sealed]))


def same_arguments(text: str) -> str:
    """Return a text that is equal for arguments with equal JSON values; text that is not JSON stands for itself.

    Integers beyond 53 bits are equal where they are the same double: many agents cannot hold them in another way.
    """
    if not text.strip():
        return "{}"
    try:
        return json.dumps(_plain(json.loads(text)), sort_keys=True)
    except (ValueError, RecursionError):
        return "text:" + text.encode("utf-8", "surrogatepass").hex()


def tools_identity(tools: Sequence[dict[str, Any]]) -> bytes:
    """Return bytes that are equal for equal lists of tools, whatever the order of keys."""
    return _digest(msgspec.json.encode(list(tools), order="sorted")) if tools else b""


def in_call_order(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Put the results of parallel tool calls into the order of the calls.

    Templates that show no ids tell results apart by order alone. Runs of tool messages whose ids do not all belong
    to the calls before them stay as they are.
    """
    if not any(message.role == "tool" for message in messages):
        return tuple(messages)
    ordered = list(messages)
    calls: dict[str, int] = {}
    at = 0
    while at < len(ordered):
        if ordered[at].role != "tool":
            calls = {call.id: place for place, call in enumerate(ordered[at].tool_calls)}
            at += 1
            continue
        end = at
        while end < len(ordered) and ordered[end].role == "tool":
            end += 1
        ids = [message.tool_call_id for message in ordered[at:end]]
        if len(set(ids)) == len(ids) and all(name in calls for name in ids):
            ordered[at:end] = sorted(ordered[at:end], key=lambda message: calls[message.tool_call_id])
        at = end
    return tuple(ordered)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, int) and abs(value) > _EXACT:
        try:
            return int(float(value))
        except OverflowError:
            return value
    return value


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
