"""Conversations as a trie of messages, which new requests are followed in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gyre_sdk.harness.proxy.dialects.canonical import Message, identity, split_thinking

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Node(Generic[T]):
    """A message at the end of a conversation, or the start of all that have the same tools."""

    message: Message | None
    parent: Node[T] | None
    depth: int
    key: bytes = b""
    """Identity of its message."""
    newest: Node[T] | None = None
    """The child that was found last: likely the next one too."""
    children: dict[bytes, list[Node[T]]] = field(default_factory=dict)
    answers: list[T] = field(default_factory=list)
    """What is known of the answers that end here."""
    cut: list[Cut[T]] = field(default_factory=list)
    """Answers below it that agents may send in other pieces."""


@dataclass(frozen=True, slots=True)
class Cut(Generic[T]):
    """An answer that continues text of the assistant's."""

    end: Node[T]
    texts: tuple[str, ...]
    """From the start of that text to the answer's end."""
    nodes: tuple[Node[T], ...]
    """The recorded messages that hold them; `end` is the last."""


def steps(node: Node[T], message: Message, lenient: bool) -> list[Node[T]]:
    """Return what a message leads to. `lenient`: also where it lacks the reasoning that the recorded one has."""
    likely = node.newest
    same = likely is not None and likely.message == message
    children = node.children.get(likely.key if likely is not None and same else identity(message), [])
    if len(children) == 1 and ((same and children[0] is likely) or children[0].message == message):
        return children
    reasoning, _ = split_thinking(message)
    exact = [child for child in children if child.message and split_thinking(child.message)[0] == reasoning]
    if exact or reasoning or not lenient or message.role != "assistant":
        return exact
    return children


def descend(node: Node[T], message: Message) -> Node[T]:
    """Return what a message leads to, made if need be."""
    likely = node.newest
    if likely is not None and likely.message == message:
        return likely
    key = identity(message)
    children = node.children.setdefault(key, [])
    reasoning, _ = split_thinking(message)
    for child in children:
        if child.message is not None and split_thinking(child.message)[0] == reasoning:
            node.newest = child
            return child
    node.newest = Node(message, node, node.depth + 1, key)
    children.append(node.newest)
    return node.newest


def path(node: Node[T] | None) -> list[Node[T]]:
    """Return the nodes from the first message to a node."""
    found: list[Node[T]] = []
    while node is not None and node.message is not None:
        found.append(node)
        node = node.parent
    return found[::-1]


__all__ = ["Cut", "Node", "descend", "path", "steps"]
