"""A compressed radix tree over token sequences, with numpy edges that lie side by side in memory where they can.

Nodes know tokens only; who ends where is told by the keys in `Node.ends`.

Sequences may come with *routes*: W expert ids per token, of a model with mixture-of-experts layers. Then an edge's symbol
is a token together with the routes of the token before it, because these decided what was sampled here: sequences with
equal tokens part where their routes part, and the routes of a last token, which no engine has computed yet, part nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gyre_sdk.records import CallId

Ids: TypeAlias = NDArray[np.int32]
Routes: TypeAlias = NDArray[np.unsignedinteger]
Symbol: TypeAlias = int | tuple[int, bytes]
_STRIDE = 1 << 18
"""Bytes compared at a time, which stay in the second-level cache."""
_SHORT = 8192
"""Tokens up to which two copies and one comparison of bytes cost less than a comparison of arrays."""


class Block:
    """Memory that a branch grows into, so that its edges lie side by side. One that is full is followed by a larger one.

    Args:
        size: tokens to hold.
        width: expert ids per token; 0 without routes.
        before: tokens that the branch has in earlier blocks.
    """

    __slots__ = ("before", "ids", "routes", "used")

    def __init__(self, size: int, width: int, before: int = 0) -> None:
        self.ids: Ids = np.empty(size, np.int32)
        self.routes: Routes | None = np.empty((size, width), np.uint8) if width else None
        """Of the token before each token, (tokens, W)."""
        self.used = 0
        self.before = before

    def widen(self, dtype: np.dtype[np.unsignedinteger]) -> None:
        """Make expert ids of a wider type fit."""
        if self.routes is not None and self.routes.dtype.itemsize < dtype.itemsize:
            self.routes = self.routes.astype(dtype)

    def trim(self) -> None:
        """Give back what is not used, where that is much."""
        if len(self.ids) - self.used > len(self.ids) // 16:
            self.ids = self.ids[: self.used].copy()
            if self.routes is not None:
                self.routes = self.routes[: self.used].copy()


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
        self.children: dict[Symbol, Node] = {}
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
        return np.concatenate([block.ids[first:stop] for block, first, stop in self.stretches()])

    def routes(self) -> Routes | None:
        """Return the routes of every token from the root but the last, put together, (tokens - 1, W)."""
        rows = [block.routes[first:stop] for block, first, stop in self.stretches() if block.routes is not None]
        return np.concatenate(rows)[1:] if rows else None

    def stretches(self) -> list[tuple[Block, int, int]]:
        """Return where the tokens from the root lie, edges that lie side by side taken as one."""
        found: list[tuple[Block, int, int]] = []
        for node in self.upward():
            stop = node.offset + node.depth - node.start
            if found and found[-1][0] is node.block and found[-1][1] == stop:
                found[-1] = (node.block, node.offset, found[-1][2])
            else:
                found.append((node.block, node.offset, stop))
        return found[::-1]


class Radix:
    """The tree. A sequence comes as two arrays, so that nobody has to concatenate a long prompt with its answer.

    Args:
        width: expert ids per token; 0 for sequences without routes.
    """

    def __init__(self, width: int = 0) -> None:
        self._width = width
        self.size = 0
        """Tokens in the tree; one that two routes lead through counts twice, as what a forward pass computes."""
        self.root = Node(None, 0, 0, Block(0, width), 0)

    def insert(self, head: Ids, tail: Ids, routes: Routes | None = None) -> tuple[Node, int]:
        """Add head + tail; return the node that ends with its last token, and how many tokens were known before.

        Args:
            routes: of every token of head + tail but, at most, the last, (tokens - 1 or tokens, W).

        Raises:
            ValueError: a new token is negative; the tree is unchanged.
        """
        node, known = self._descend(head, tail, routes)
        total = len(head) + len(tail)
        least = _least(head, tail, known)
        if least < 0:
            raise ValueError(f"token id {least} is negative")
        if known < node.depth:
            node = self._split(node, known)
        if known < total:
            node = self._append(node, head, tail, known, routes)
        return node, known

    def _descend(self, head: Ids, tail: Ids, routes: Routes | None) -> tuple[Node, int]:
        """Return the deepest node that head + tail reach, and how many of their tokens lead there."""
        node, at = self.root, 0
        for ids, base in ((head, 0), (tail, len(head))):
            size = base + len(ids)
            while at < size:
                first = node
                if at == node.depth:
                    token = ids.item(at - base)
                    child = node.children.get(token if routes is None else _symbol(token, routes, at))
                    if child is None:
                        return node, at
                    first = child
                last = first
                while (after := last.next) is not None and last.depth < size:
                    # Where the path may leave, look before comparing what may be another branch.
                    if len(last.children) > 1 and ids.item(last.depth - base) != after.block.ids.item(after.offset):
                        break
                    last = after
                stop = last.depth if last.depth < size else size
                offset = first.offset + at - first.start
                same = _same(ids[at - base : stop - base], first.block.ids[offset : offset + stop - at])
                if routes is not None and first.block.routes is not None:
                    skip = int(at == 0)  # the first token has nothing before it
                    mine = routes[at + skip - 1 : at + same - 1]
                    same = skip + _same_rows(mine, first.block.routes[offset + skip : offset + same])
                at += same
                while first.depth < at:
                    assert first.next is not None
                    first = first.next
                node = first
                if at < stop and at < node.depth:
                    return node, at
        return node, at

    def _append(self, above: Node, head: Ids, tail: Ids, known: int, routes: Routes | None) -> Node:
        """Hang the tokens of head + tail after the first `known` below a node."""
        size = len(head) + len(tail) - known
        block, offset = above.block, above.offset + above.depth - above.start
        grows = offset == block.used and not above.children
        if not grows or offset + size > len(block.ids):
            before = block.before + block.used if grows else 0
            if grows:
                block.trim()
            # Blocks of a quarter of what there is keep the slack small and their number logarithmic.
            block, offset = Block(max(size, before // 4), self._width, before), 0
        node = Node(above, known, known + size, block, offset)
        middle = offset + max(0, len(head) - known)
        block.used = offset + size
        block.ids[offset:middle] = head[known:]
        block.ids[middle : block.used] = tail[max(0, known - len(head)) :]
        if routes is not None and block.routes is not None:
            block.widen(routes.dtype)
            if known == 0:
                block.routes[offset] = 0
            skip = int(known == 0)
            block.routes[offset + skip : block.used] = routes[known + skip - 1 : known + size - 1]
        symbol = _symbol(int(block.ids[offset]), routes, known)
        self.size += size + (known > 0 and _reroutes(symbol, above))
        above.children[symbol] = node
        if block is above.block:
            above.next = node
        return node

    def _split(self, node: Node, depth: int) -> Node:
        """Cut an edge at a depth and return the new upper node; `node` stays the lower end of its calls."""
        above, block, at = node.parent, node.block, node.offset + depth - node.start
        assert above is not None
        upper = Node(above, node.start, depth, block, node.offset)
        before = _stored(block, node.offset, node.start)
        above.children[before] = upper
        if above.next is node:
            above.next = upper
        upper.children[_stored(block, at, depth)] = node
        upper.next = node
        node.offset = at
        node.parent, node.start = upper, depth
        return upper


def _symbol(token: int, routes: Routes | None, at: int) -> Symbol:
    """Return what tells a token at a depth from its siblings."""
    return token if routes is None else (token, routes[at - 1].astype("<u2").tobytes() if at else b"")


def _stored(block: Block, at: int, depth: int) -> Symbol:
    """Return the symbol of a token that is in a block, `depth` tokens below the root."""
    token = int(block.ids[at])
    return token if block.routes is None else (token, block.routes[at].astype("<u2").tobytes() if depth else b"")


def _reroutes(symbol: Symbol, above: Node) -> bool:
    """Tell whether a new child gives the token above it routes that no other child does."""
    if isinstance(symbol, int) or not above.children:
        return False
    return all(isinstance(other, tuple) and other[1] != symbol[1] for other in above.children)


def _same(a: Ids, b: Ids) -> int:
    """Return the length of the common prefix of two arrays of equal length."""
    size = len(a)
    if size <= _SHORT and a.tobytes() == b.tobytes():
        return size
    for start in range(0, size, _STRIDE // 4):
        differs = a[start : start + _STRIDE // 4] != b[start : start + _STRIDE // 4]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
    return size


def _same_rows(a: Routes, b: Routes) -> int:
    """Return how many leading rows of two arrays of equal shape are equal."""
    size, stride = len(a), max(1, _STRIDE // max(1, a.shape[1]))
    for start in range(0, size, stride):
        differs = (a[start : start + stride] != b[start : start + stride]).any(axis=1)
        first = int(differs.argmax())
        if differs[first]:
            return start + first
    return size


def _least(head: Ids, tail: Ids, known: int) -> int:
    """Return the smallest id after the first `known`; 0 when there is none."""
    parts = (head[known:], tail[max(0, known - len(head)) :])
    return min((int(part.min()) for part in parts if part.size), default=0)
