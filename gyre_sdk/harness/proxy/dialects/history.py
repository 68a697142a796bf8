"""What a run has recorded, as an index that new requests are matched against.

The index is a trie of messages over a store of token ids. Messages find the recorded answer that a request
continues; tokens decide. The trie never changes ids, and nothing here decides what is sent to an engine.

Rules for a match: the longest recorded prefix wins; among equal ones an answer of the same lane, then the newest.
An assistant message sent back without its reasoning matches when asked to be `lenient` (history = bridge), else only
as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from gyre_sdk.errors import TreeError
from gyre_sdk.harness.proxy.dialects.canonical import Message, identity, split_thinking, tools_identity
from gyre_sdk.records import ForkReason

Ids = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Recorded:
    """A complete call's tokens."""

    call: str
    lane: str
    order: int
    prompt_len: int
    whole: Ids
    """Prompt + sampled ids. Calls of one chain share one buffer, so a chain of T tokens takes O(T) memory."""
    parent: Recorded | None
    extends: bool
    """Whether its prompt begins with all of its parent's `whole`."""
    extended: bool = False
    """Whether another call extends it."""


@dataclass(slots=True, eq=False)
class _Node:
    message: Message | None
    parent: _Node | None
    depth: int
    children: dict[bytes, list[_Node]] = field(default_factory=dict)
    answers: list[Recorded] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Match:
    """What a request continues."""

    recorded: Recorded | None
    """The call whose answer the request repeats last, or None."""
    consumed: int
    """Leading messages that the recorded path covers, the answer included."""
    messages: tuple[Message, ...]
    """The request's messages, recorded ones in their recorded form (arguments, reasoning, ids)."""
    found: int
    """Leading messages that any recorded request or answer shares."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a prompt's ids come from."""

    parent: Recorded | None
    shared: int
    """Leading tokens shared with the parent's `whole`."""
    fork: ForkReason | None
    prompt: Ids
    """The prompt's ids."""


class History:
    """The recorded exchanges of one run. One thread adds; another may match meanwhile and sees a little less."""

    def __init__(self) -> None:
        self._roots: dict[bytes, _Node] = {}
        self._calls: dict[str, Recorded] = {}
        self._last: dict[str, tuple[bytes, tuple[Message, ...]]] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def get(self, call: str) -> Recorded | None:
        """Return a recorded call."""
        return self._calls.get(call)

    def match(
        self, lane: str, tools: Sequence[dict[str, object]], messages: Sequence[Message], *, lenient: bool = True
    ) -> Match:
        """Return the longest recorded path that the messages begin with."""
        root = self._roots.get(tools_identity(tools))
        frontier = [root] if root else []
        deepest, best = frontier, frontier[:0]
        for message in messages:
            frontier = [child for node in frontier for child in _steps(node, message, lenient)]
            if not frontier:
                break
            deepest = frontier
            best = [node for node in frontier if node.answers] or best
        ends = [(answer.lane == lane, answer.order, answer, node) for node in best for answer in node.answers]
        recorded, end = max(ends, key=lambda item: item[:2])[2:] if ends else (None, None)
        known = _path(end if end is not None else max(deepest, key=_newest) if deepest else None)
        restored = tuple(_restore(old, new) for old, new in zip(known, messages, strict=False))
        return Match(
            recorded,
            end.depth if end is not None else 0,
            restored + tuple(messages[len(restored) :]),
            deepest[0].depth if deepest else 0,
        )

    def add(
        self,
        call: str,
        lane: str,
        tools: Sequence[dict[str, object]],
        messages: Sequence[Message],
        answer: Message,
        prompt_ids: Sequence[int] | Ids,
        sampled_ids: Sequence[int],
        parent: str | None,
        shared: int,
    ) -> None:
        """Record a complete call; `messages` in the form that `match` gave.

        Raises:
            TreeError: the parent is not recorded or does not share that many tokens.
        """
        above = self._calls.get(parent) if parent else None
        if parent and (above is None or shared > len(above.whole)):
            raise TreeError(f"call {call} shares {shared} tokens with call {parent}, which does not have them")
        whole = np.concatenate([np.asarray(prompt_ids, np.int32), np.asarray(sampled_ids, np.int32)])
        extends = above is not None and shared == len(above.whole)
        record = Recorded(call, lane, len(self._calls), len(prompt_ids), whole, above, extends)
        self._calls[call] = record
        key = tools_identity(tools)
        node = self._roots.setdefault(key, _Node(None, None, 0))
        for message in (*messages, answer):
            node = _descend(node, message)
        node.answers.append(record)
        self._last[lane] = (key, tuple(messages))
        while record.extends and record.parent is not None:
            record = record.parent
            record.extended = True
            record.whole = whole[: len(record.whole)]

    def origin(
        self,
        lane: str,
        tools: Sequence[dict[str, object]],
        messages: Sequence[Message],
        match: Match,
        prompt_ids: Sequence[int],
    ) -> Origin:
        """Return the recorded call that shares most with a prompt, and why the prompt forks from it if it does."""
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        if match.recorded is not None:
            shared = _common(match.recorded.whole, prompt)
            if shared == len(match.recorded.whole):
                return Origin(match.recorded, shared, None, prompt)
        elif lane not in self._last:
            return Origin(None, 0, None, prompt)
        leaves = [record for record in list(self._calls.values()) if not record.extended]
        scored = [(_common(record.whole, prompt), record.lane == lane, record.order, record) for record in leaves]
        if not scored:
            return Origin(None, 0, None, prompt)
        shared, *_, nearest = max(scored, key=lambda item: item[:3])
        while nearest.extends and nearest.parent is not None and len(nearest.parent.whole) >= shared:
            nearest = nearest.parent
        if shared == len(nearest.whole):
            return Origin(nearest, shared, None, prompt)
        return Origin(nearest, shared, self._why(lane, tools, messages, match), prompt)

    def _why(
        self, lane: str, tools: Sequence[dict[str, object]], messages: Sequence[Message], match: Match
    ) -> ForkReason:
        key, before = self._last.get(lane, (tools_identity(tools), ()))
        if match.recorded is not None and not any(item.role == "assistant" for item in messages[match.consumed :]):
            return ForkReason.TEMPLATE
        if match.found == len(messages):
            return ForkReason.RETRY
        if key != tools_identity(tools):
            return ForkReason.TOOLS_CHANGED
        if not before:
            return ForkReason.UNKNOWN
        systems = [[identity(item) for item in side if item.role == "system"][:1] for side in (before, messages)]
        if systems[0] != systems[1]:
            return ForkReason.SYSTEM_CHANGED
        if len(messages) <= len(before) and messages[match.found].role != "assistant" and len(before) > 2:
            return ForkReason.COMPACTION
        return ForkReason.CLIENT_EDIT


def _steps(node: _Node, message: Message, lenient: bool) -> list[_Node]:
    children = node.children.get(identity(message), [])
    reasoning, _ = split_thinking(message)
    exact = [child for child in children if child.message and split_thinking(child.message)[0] == reasoning]
    if exact or reasoning or not lenient or message.role != "assistant":
        return exact
    return children


def _newest(node: _Node) -> int:
    return max((answer.order for answer in node.answers), default=-1)


def _descend(node: _Node, message: Message) -> _Node:
    children = node.children.setdefault(identity(message), [])
    reasoning, _ = split_thinking(message)
    for child in children:
        if child.message is not None and split_thinking(child.message)[0] == reasoning:
            return child
    children.append(_Node(message, node, node.depth + 1))
    return children[-1]


def _path(node: _Node | None) -> list[Message]:
    found: list[Message] = []
    while node is not None and node.message is not None:
        found.append(node.message)
        node = node.parent
    return found[::-1]


def _restore(old: Message, new: Message) -> Message:
    """Return the recorded form of a message; what was recorded wins, what the agent added stays on record."""
    return msgspec.structs.replace(old, tool_call_id=new.tool_call_id, extra=new.extra)


def _common(left: Ids, right: Ids) -> int:
    size = min(len(left), len(right))
    same = left[:size] == right[:size]
    return size if same.all() else int(np.argmin(same))


__all__ = ["History", "Match", "Origin", "Recorded"]
