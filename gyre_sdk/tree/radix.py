"""A compressed radix tree over token sequences, with numpy edges that lie side by side in memory where they can.

Nodes know tokens only; who ends where is told by the keys in `Node.ends`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gyre_sdk.records import CallId

Ids = NDArray[np.int32]
_STRIDE = 1 << 16
"""Tokens compared at a time: 256 KiB, which stays in the second-level cache."""


class Block:
    """Memory that one branch grows into, so that its edges lie side by side."""

    __slots__ = ("ids", "used")

    def __init__(self, capacity: int) -> None:
        self.ids = np.empty(capacity, np.int32)
        self.used = 0


class Node:
    """An edge and its lower end; its tokens are `block.ids[offset : offset + depth - start]`."""

    __slots__ = ("block", "children", "depth", "ends", "next", "offset", "parent", "start")

    def __init__(self, parent: Node | None, start: int, depth: int, block: Block, offset: int) -> None:
        self.parent = parent
        self.start = start
        """Tokens from the root to the upper end."""
        self.depth = depth
        """Tokens from the root to the lower end."""
        self.block = block
        self.offset = offset
        self.next: Node | None = None
        """The child whose tokens follow this node's in the same block."""
        self.children: dict[int, Node] = {}
        self.ends: list[CallId] = []

    @property
    def tokens(self) -> Ids:
        return self.block.ids[self.offset : self.offset + self.depth - self.start]

    def upward(self) -> Iterator[Node]:
        """Yield this node and those above it, up to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def path(self) -> Ids:
        """Return the tokens from the root to the lower end, put together."""
        return np.concatenate([node.tokens for node in self.upward()][::-1])


class Radix:
    """The tree. A sequence comes as two arrays, so that nobody has to concatenate a long prompt with its answer."""

    def __init__(self) -> None:
        self.size = 0
        """Tokens in the tree."""
        self.root = Node(None, 0, 0, Block(_STRIDE), 0)

    def insert(self, head: Ids, tail: Ids) -> tuple[Node, int]:
        """Add head + tail; return the node that ends with its last token, and how many tokens were known before.

        Raises:
            ValueError: a new token is negative; the tree is unchanged.
        """
        node, known = self._descend(head, tail)
        total = len(head) + len(tail)
        least = _least(head, tail, known)
        if least < 0:
            raise ValueError(f"token id {least} is negative")
        if known < node.depth:
            node = _split(node, known)
        if known < total:
            node = self._append(node, head, tail, known)
        self.size += total - known
        return node, known

    def _descend(self, head: Ids, tail: Ids) -> tuple[Node, int]:
        """Return the deepest node that head + tail reach, and how many of their tokens lead there."""
        node, at = self.root, 0
        for ids, base in ((head, 0), (tail, len(head))):
            size = base + len(ids)
            while at < size:
                first = node
                if at == node.depth:
                    child = node.children.get(int(ids[at - base]))
                    if child is None:
                        return node, at
                    first = child
                last = first
                while last.depth < size and last.next is not None:
                    last = last.next
                stop = min(size, last.depth)
                offset = first.offset + at - first.start
                at += _same(ids[at - base : stop - base], first.block.ids[offset : offset + stop - at])
                while first.depth < at:
                    assert first.next is not None
                    first = first.next
                node = first
                if at < stop and at < node.depth:
                    return node, at
        return node, at

    def _append(self, above: Node, head: Ids, tail: Ids, known: int) -> Node:
        """Hang the tokens of head + tail after the first `known` below a node."""
        size = len(head) + len(tail) - known
        block, offset = above.block, above.offset + above.depth - above.start
        grows = offset == block.used
        if not grows or offset + size > len(block.ids):
            # A branch that outgrows its block doubles it; a new branch starts small.
            block, offset = Block(max(2 * size, 2 * len(block.ids) if grows else 256)), 0
        node = Node(above, known, known + size, block, offset)
        middle = offset + max(0, len(head) - known)
        block.used = offset + size
        block.ids[offset:middle] = head[known:]
        block.ids[middle : block.used] = tail[max(0, known - len(head)) :]
        above.children[int(block.ids[offset])] = node
        if block is above.block:
            above.next = node
        return node


def _split(node: Node, depth: int) -> Node:
    """Cut an edge at a depth and return the new upper node; `node` stays the lower end of its calls."""
    above, tokens = node.parent, node.tokens
    assert above is not None
    upper = Node(above, node.start, depth, node.block, node.offset)
    above.children[int(tokens[0])] = upper
    if above.next is node:
        above.next = upper
    upper.children[int(tokens[depth - node.start])] = node
    upper.next = node
    node.offset += depth - node.start
    node.parent, node.start = upper, depth
    return upper


def _same(a: Ids, b: Ids) -> int:
    """Return the length of the common prefix of two arrays of equal length."""
    size = len(a)
    for start in range(0, size, _STRIDE):
        differs = a[start : start + _STRIDE] != b[start : start + _STRIDE]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
    return size


def _least(head: Ids, tail: Ids, known: int) -> int:
    """Return the smallest id after the first `known`; 0 when there is none."""
    parts = (head[known:], tail[max(0, known - len(head)) :])
    return min((int(part.min()) for part in parts if part.size), default=0)
