"""Who continues whom among the calls of a tree, and which calls another one has taken the place of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gyre_sdk.records import SUMMARY_SUFFIX, CallId, CallStatus, ForkReason, VersionSpan
from gyre_sdk.tree.calls import Untrained
from gyre_sdk.tree.radix import Ids, Node

_WINDOW = 16
"""Tokens in a row by which an answer is known again."""


@dataclass(slots=True)
class Placed:
    """A call in the tree; its tokens are the path to `end`."""

    role: str
    lane: str
    status: CallStatus
    hint: CallId | None
    fork_reason: ForkReason | None
    shared: int
    prompt_len: int
    sampled_len: int
    logprobs: NDArray[np.float32] | NDArray[np.float64]
    versions: tuple[VersionSpan, ...]
    flaw: Untrained | None
    """Why the call is no target, whatever became of it and whatever the other calls are; None when that is open."""
    end: Node


@dataclass(slots=True)
class Families:
    """Which call continues which."""

    parent: dict[CallId, CallId | None] = field(default_factory=dict)
    children: dict[CallId | None, list[CallId]] = field(default_factory=dict)
    rejected: set[CallId] = field(default_factory=set)
    """Attempts at a compaction of which another one was taken up."""


def families(calls: Mapping[CallId, Placed]) -> Families:
    """Work out the families of all calls of a tree."""
    found = Families()
    for call in calls:
        parent = found.parent[call] = find_parent(calls, call)
        found.children.setdefault(parent, []).append(call)
    found.rejected = _rejected(calls, found)
    return found


def find_parent(calls: Mapping[CallId, Placed], call: CallId) -> CallId | None:
    """Return the deepest call that ends on the path to `call` within its prompt.

    Only calls that sampled something can be continued, so parents get strictly shorter and there is no cycle.
    Between several sampling events with the same tokens: the recorded parent, then the same lane, then one that
    was delivered, then the smallest id.
    """
    placed = calls[call]
    for node in placed.end.upward():
        if node.ends and node.depth <= placed.prompt_len:
            fits = [other for other in node.ends if calls[other].sampled_len and other != call]
            if fits:
                return min(fits, key=lambda other: _preference(calls, placed, other))
    return None


def _preference(calls: Mapping[CallId, Placed], placed: Placed, other: CallId) -> tuple[bool, bool, bool, bool, CallId]:
    candidate = calls[other]
    return (
        other != placed.hint,
        candidate.lane != placed.lane,
        candidate.status is not CallStatus.DELIVERED,
        candidate.status in (CallStatus.FAILED, CallStatus.ABORTED),
        other,
    )


def goes_through(placed: Placed, node: Node) -> bool:
    """Tell whether a call's path leads through a node."""
    return next(step for step in placed.end.upward() if step.depth <= node.depth) is node


def last_of_prompt(placed: Placed) -> Node:
    """Return the node that holds the last token of a call's prompt."""
    node = placed.end
    while node.start >= placed.prompt_len and node.parent is not None:
        node = node.parent
    return node


def given_way(calls: Mapping[CallId, Placed], family: Families, is_target: Callable[[CallId], bool]) -> set[CallId]:
    """Return the calls without an answer whose prompt another call with the same parent goes through.

    One that is a target stands for them all; where there is none, the longest prompt does, of equal ones the smallest id.
    """
    through: dict[tuple[CallId | None, int], list[CallId]] = {
        (family.parent[call], id(placed.end)): [] for call, placed in calls.items() if not placed.sampled_len
    }
    for call, placed in calls.items() if through else ():
        parent = family.parent[call]
        top = calls[parent].end.depth if parent is not None else 0
        for node in placed.end.upward():
            if (rivals := through.get((parent, id(node)))) is not None:
                rivals.append(call)
            if node.depth <= top:
                break
    found: set[CallId] = set()
    for (_, end), rivals in through.items():
        unanswered = [call for call in rivals if not calls[call].sampled_len]
        stays = min(unanswered, key=lambda call: (-calls[call].prompt_len, call))
        answered = any(calls[call].sampled_len and is_target(call) for call in rivals)
        found |= {call for call in unanswered if id(calls[call].end) == end and (answered or call != stays)}
    return found


def _rejected(calls: Mapping[CallId, Placed], family: Families) -> set[CallId]:
    """Return the attempts at a compaction that were not taken up although another attempt was.

    Attempts at one compaction are summaries of one role that continue the same call, or answer the same prompt. One is
    taken up when a call continues it, or when some of its answer comes back on a path of none of them. A summary that
    nothing is known of stays a target: it may have been rewritten by the agent, or the run may have ended before its use.
    """
    groups: dict[tuple[str, CallId | None, int, int], list[CallId]] = {}
    for call, placed in calls.items():
        if placed.sampled_len and placed.role.endswith(SUMMARY_SUFFIX):
            parent = family.parent[call]
            prompt = (0, 0) if parent is not None else (id(last_of_prompt(placed)), placed.prompt_len)
            groups.setdefault((placed.role, parent, *prompt), []).append(call)
    attempts = [group for group in groups.values() if len(group) > 1]
    found: set[CallId] = set()
    if attempts:
        edges = list(_edges(calls))
        for group in attempts:
            taken = _taken_up([calls[call] for call in group], edges)
            used = {call for call, back in zip(group, taken, strict=True) if back or family.children.get(call)}
            if used:
                found.update(set(group) - used)
    return found


def _edges(calls: Mapping[CallId, Placed]) -> Iterator[tuple[Node, int, bytes]]:
    """Yield every edge with the tokens of its paths that a window may begin in: where these start, and they as bytes."""
    seen: set[int] = set()
    for placed in calls.values():
        for node in placed.end.upward():
            if id(node) in seen:
                break
            seen.add(id(node))
            before = _last(node.parent, _WINDOW - 1)
            yield node, node.start - len(before), before.tobytes() + node.tokens.tobytes()


def _last(node: Node | None, count: int) -> Ids:
    """Return the last tokens of the path that ends with a node, at most `count`."""
    parts: list[Ids] = []
    while node is not None and count > 0:
        part = node.tokens[-count:]
        parts.append(part)
        count -= len(part)
        node = node.parent
    return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int32)


def _taken_up(group: list[Placed], edges: list[tuple[Node, int, bytes]]) -> list[bool]:
    """Tell of each attempt whether a stretch of its answer begins somewhere in the tree that no attempt's own path is."""
    own = {id(node) for placed in group for node in placed.end.upward()}

    def begins_elsewhere(node: Node, start: int, data: bytes, window: bytes) -> bool:
        for place in _found(data, window):
            first: Node | None = node
            while first is not None and first.start > start + place:
                first = first.parent
            if id(first) not in own:
                return True
        return False

    return [any(begins_elsewhere(*edge, window) for window in _windows(placed) for edge in edges) for placed in group]


def _windows(placed: Placed) -> list[bytes]:
    """Return stretches of an answer as bytes. Its ends are left out where it is long: they are often rendered anew."""
    answer = placed.end.path()[placed.prompt_len :]
    if len(answer) <= _WINDOW + 4:
        return [answer[: max(1, len(answer) - 1)].tobytes()]
    last = len(answer) - _WINDOW - 2
    starts = {last * quarter // 4 for quarter in range(5)}
    return [answer[start : start + _WINDOW].tobytes() for start in sorted(starts)]


def _found(data: bytes, window: bytes) -> Iterator[int]:
    """Yield the places of ids among ids, both as bytes."""
    at = data.find(window)
    while at >= 0:
        if at % 4 == 0:
            yield at // 4
        at = data.find(window, at + 1)
