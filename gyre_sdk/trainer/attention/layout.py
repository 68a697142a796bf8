"""From rows to one packed forest: every shared prefix once, in an order in which attention needs no gathering.

Shapes: U packed tokens, S segments, K targets in row order, R rows.

A segment is a stretch of tokens that all rows through it share. Segments lie in depth-first pre-order, and of the
children of a segment the one with the most tokens below it comes first. So every token is followed by the token that
continues its heaviest path, the tokens of such a path are one contiguous stretch (a *chain*), and a path from a root to
any token crosses at most log2(U) chains.

Rows share tokens by equality of ids along the path. Loss terms are never shared: two rows that sampled the same token
are two targets, predicted at one packed position. Tokens that predict no target are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gyre_sdk.errors import TrainerError
from gyre_sdk.tree.radix import Node, Radix

if TYPE_CHECKING:
    from gyre_sdk.trainer.units import Row

Integers = NDArray[np.int64]
_NOTHING = np.empty(0, np.int32)


@dataclass(frozen=True)
class Forest:
    """Packed tokens of some rows and where each target is predicted."""

    ids_U: NDArray[np.int32]  # noqa: N815
    start_S: Integers  # noqa: N815
    """Packed index of the first token of each segment; they lie one after the other."""
    parent_S: Integers  # noqa: N815
    """Segment above, -1 for a root. A segment whose parent is the one before it continues that one's chain."""
    depth_S: Integers  # noqa: N815
    """Position of the first token in its path."""
    end_S: Integers  # noqa: N815
    """Packed index after the last token of the subtree."""
    at_K: Integers  # noqa: N815
    """Packed index of the token whose hidden state predicts each target."""
    label_K: Integers  # noqa: N815
    """Token id of each target."""
    index_K: Integers  # noqa: N815
    """Place of each target among the targets of all rows that were given."""
    raw: int = 0
    """Tokens of the same rows one by one; not known for a part of a forest."""
    raw_pairs: int = 0
    """Pairs of query and key of the same rows one by one; not known for a part of a forest."""

    @property
    def unique(self) -> int:
        """Tokens here."""
        return len(self.ids_U)

    @cached_property
    def stop_S(self) -> Integers:  # noqa: N802
        """Packed index after the last token of each segment."""
        return np.append(self.start_S[1:], self.unique)

    @cached_property
    def position_U(self) -> Integers:  # noqa: N802
        """Position of each token in its path."""
        return np.arange(self.unique) + np.repeat(self.depth_S - self.start_S, self.stop_S - self.start_S)

    @cached_property
    def end_U(self) -> Integers:  # noqa: N802
        """End of each token's subtree: query q sees key k exactly when `k <= q < end_U[k]`."""
        return np.repeat(self.end_S, self.stop_S - self.start_S)

    @property
    def pairs(self) -> int:
        """Pairs of query and key, without windows."""
        return int(self.position_U.sum()) + self.unique

    @property
    def kv_rows(self) -> int:
        """Rows that an attention which copies the keys of each segment's path would copy."""
        return int((self.depth_S + self.stop_S - self.start_S).sum())


def plant(rows: Sequence[Row], which: Sequence[int] | None = None) -> Forest:
    """Return the forest of the rows, or of those whose places are given; `index_K` counts all of them.

    Raises:
        TrainerError: a row's first token is a target; nothing predicts it.
    """
    places = range(len(rows)) if which is None else sorted(which)
    radix = Radix()
    ends = []
    for place in places:
        row = rows[place]
        if len(row.targets) and int(row.targets[0]) < 1:
            raise TrainerError(
                f"row {row.leaf!r} of run {row.run!r} has its first token as a target: nothing predicts it; "
                "report this as a bug of gyre"
            )
        # what comes after the token that predicts the last target can change nothing
        ends.append(radix.insert(row.ids[: _needed(row)], _NOTHING)[0])
    segments = _Segments(radix)
    start_S, parent_S = np.array(segments.start, dtype=np.int64), np.array(segments.parent, dtype=np.int64)
    first_K = np.concatenate([[0], np.cumsum([len(row.targets) for row in rows], dtype=np.int64)])
    at, label, index = [], [], []
    for place, end in zip(places, ends, strict=True):
        row = rows[place]
        at.append(segments.packed(end, row.targets.astype(np.int64) - 1))
        label.append(row.ids[row.targets].astype(np.int64))
        index.append(np.arange(first_K[place], first_K[place + 1]))
    needed = np.array([_needed(rows[place]) for place in places], dtype=np.int64)
    return Forest(
        ids_U=segments.ids(),
        start_S=start_S,
        parent_S=parent_S,
        depth_S=np.array(segments.depth, dtype=np.int64),
        end_S=subtree_ends(start_S, parent_S, segments.size),
        at_K=_joined(at),
        label_K=_joined(label),
        index_K=_joined(index),
        raw=int(needed.sum()),
        raw_pairs=int((needed * (needed + 1) // 2).sum()),
    )


def groups(rows: Sequence[Row], tokens: int) -> list[list[int]]:
    """Split rows so that the forest of each part has at most `tokens` tokens, where a single path has not more.

    Rows that share much stay together: they are taken in the order of the forest, and a part repeats the tokens that
    it shares with others. Rows without targets are left out.
    """
    radix = Radix()
    paths = {}
    for place, row in enumerate(rows):
        if len(row.targets):
            paths[place] = radix.insert(row.ids[: _needed(row)], _NOTHING)[0]
    rank = {id(node): at for at, node in enumerate(_preorder(radix.root, _sizes(radix.root)))}
    found: list[list[int]] = []
    seen: set[int] = set()
    size = 0
    for place in sorted(paths, key=lambda place: rank[id(paths[place])]):
        path = {id(node): node.depth - node.start for node in paths[place].upward()}
        fresh = sum(length for node, length in path.items() if node not in seen)
        if not found or size + fresh > tokens:
            found.append([])
            seen, size, fresh = set(), 0, sum(path.values())
        found[-1].append(place)
        seen |= path.keys()
        size += fresh
    return [sorted(part) for part in found]


def subtree_ends(start_S: Integers, parent_S: Integers, unique: int) -> Integers:
    """Return the packed index after the last token of each segment's subtree."""
    ends = [*start_S[1:].tolist(), unique][: len(start_S)]
    for segment, above in reversed(list(enumerate(parent_S.tolist()))):
        if above >= 0:
            ends[above] = max(ends[above], ends[segment])
    return np.array(ends, dtype=np.int64)


class _Segments:
    """Segments of a radix tree in packed order. A node that is an only child belongs to its parent's segment."""

    def __init__(self, radix: Radix) -> None:
        self.start: list[int] = []
        self.parent: list[int] = []
        self.depth: list[int] = []
        self._tokens: list[NDArray[np.int32]] = []
        self._of: dict[int, int] = {}
        """Segment of each node."""
        self.size = 0
        for node in _preorder(radix.root, _sizes(radix.root)):
            above = node.parent
            if above is None:
                continue
            if above.parent is not None and len(above.children) == 1:
                self._of[id(node)] = self._of[id(above)]
            else:
                self._of[id(node)] = len(self.start)
                self.parent.append(-1 if above.parent is None else self._of[id(above)])
                self.start.append(self.size)
                self.depth.append(node.start)
            self._tokens.append(node.tokens)
            self.size += node.depth - node.start

    def ids(self) -> NDArray[np.int32]:
        return np.concatenate(self._tokens) if self._tokens else _NOTHING

    def packed(self, end: Node, positions: Integers) -> Integers:
        """Return the packed indices of positions on the path that ends with a node."""
        if not len(positions):
            return positions
        path = []
        segment = self._of[id(end)]
        while segment >= 0:
            path.append(segment)
            segment = self.parent[segment]
        on_path = np.array(path[::-1])
        depth = np.array(self.depth)[on_path]
        within = np.searchsorted(depth, positions, side="right") - 1
        return positions - depth[within] + np.array(self.start)[on_path][within]


def _needed(row: Row) -> int:
    return int(row.targets[-1]) if len(row.targets) else 0


def _sizes(root: Node) -> dict[int, int]:
    """Return the number of tokens in each node's subtree."""
    order, stack = [], [root]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += node.children.values()
    sizes: dict[int, int] = {}
    for node in reversed(order):
        sizes[id(node)] = node.depth - node.start + sum(sizes[id(child)] for child in node.children.values())
    return sizes


def _preorder(root: Node, sizes: dict[int, int]) -> list[Node]:
    """Return the nodes, a parent before its children, the heaviest child first."""
    order, stack = [], [root]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += sorted(node.children.values(), key=lambda child: sizes[id(child)])
    return order


def _joined(parts: list[Integers]) -> Integers:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
