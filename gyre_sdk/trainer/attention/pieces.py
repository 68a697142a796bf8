"""A forest cut into pieces for a depth-first walk: no piece larger than a limit, each hanging from one path.

A piece is a stretch of a chain together with small subtrees that hang from it, or a handful of small subtrees alone.
What hangs deeper, or does not fit, are pieces below it; all of them hang from the end of its stretch. So a walk needs
the keys and values of one path only, and a forest that fits is one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gyre_sdk.trainer.attention.layout import Forest, subtree_ends

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tokens of a forest that are run together."""

    ranges: tuple[Range, ...]
    """Packed indices, ascending; the first range begins with the stretch."""
    before: int
    """Tokens of the path that it hangs from."""
    kept: int
    """Tokens of its stretch, the first ones; 0 where nothing hangs below."""
    above: int
    """Place of the piece that it hangs from among the pieces; -1 for none."""

    @property
    def size(self) -> int:
        """Tokens."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def stretch(self) -> tuple[Range, ...]:
        """The tokens that others hang from."""
        start = self.ranges[0][0]
        return ((start, start + self.kept),)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Work to do: the chain from a token of a segment on."""

    segment: int
    at: int
    above: int


@dataclass(frozen=True, slots=True)
class _Hanging:
    """Work to do: subtrees that hang from one point."""

    heads: tuple[int, ...]
    above: int


def pieces(forest: Forest, limit: int) -> list[Piece]:
    """Return the pieces of a forest, in depth-first order: those below a piece follow it."""
    cutter = _Cutter(forest, max(1, limit))
    cutter.run()
    return cutter.found


class _Cutter:
    def __init__(self, forest: Forest, limit: int) -> None:
        self.found: list[Piece] = []
        self._limit = limit
        self._start, self._stop, self._end = (x.tolist() for x in (forest.start_S, forest.stop_S, forest.end_S))
        self._depth = forest.depth_S.tolist()
        self._children: list[list[int]] = [[] for _ in self._start]
        self._roots: list[int] = []
        for segment, above in enumerate(forest.parent_S.tolist()):
            (self._roots if above < 0 else self._children[above]).append(segment)

    def run(self) -> None:
        work: list[_Stretch | _Hanging] = [_Hanging(tuple(self._roots), -1)]
        while work:
            task = work.pop()
            work += self._hang(task) if isinstance(task, _Hanging) else self._stretch(task)

    def _size(self, head: int) -> int:
        return self._end[head] - self._start[head]

    def _hang(self, task: _Hanging) -> list[_Stretch | _Hanging]:
        """Put small subtrees together; return the large ones as work."""
        part: list[Range] = []
        size = 0
        large: list[_Stretch | _Hanging] = []
        for head in task.heads:
            if self._size(head) > self._limit:
                large.append(_Stretch(head, self._start[head], task.above))
                continue
            if size + self._size(head) > self._limit:
                self._add(part, self._depth[task.heads[0]], 0, task.above)
                part, size = [], 0
            part.append((self._start[head], self._end[head]))
            size += self._size(head)
        if part:
            self._add(part, self._depth[task.heads[0]], 0, task.above)
        return large

    def _stretch(self, task: _Stretch) -> list[_Stretch | _Hanging]:
        """Follow a chain while it and what hangs from it fit; return the rest as work."""
        segment, room = task.segment, self._limit
        before = self._depth[segment] + task.at - self._start[segment]
        at = task.at
        hanging: list[Range] = []
        while True:
            stop = self._stop[segment]
            if stop - at > room:
                place = self._stretched(task.at, at + room, hanging, before, True, task.above)
                return [_Stretch(segment, at + room, place)]
            room -= stop - at
            at = stop
            left = []
            for head in self._children[segment][1:]:
                if self._size(head) <= room:
                    hanging.append((self._start[head], self._end[head]))
                    room -= self._size(head)
                else:
                    left.append(head)
            more = self._children[segment][:1]
            if left or (more and not room):
                place = self._stretched(task.at, at, hanging, before, True, task.above)
                rest: list[_Stretch | _Hanging] = [_Stretch(head, self._start[head], place) for head in more]
                return [*rest, _Hanging(tuple(left), place)]
            if not more:
                self._stretched(task.at, at, hanging, before, False, task.above)
                return []
            segment = more[0]

    def _stretched(self, start: int, stop: int, hanging: list[Range], before: int, more: bool, above: int) -> int:
        return self._add([(start, stop), *sorted(hanging)], before, stop - start if more else 0, above)

    def _add(self, ranges: list[Range], before: int, kept: int, above: int) -> int:
        self.found.append(Piece(tuple(ranges), before, kept, above))
        return len(self.found) - 1


class Parts:
    """Takes parts out of a forest."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self._segment_U = np.repeat(np.arange(len(forest.start_S)), forest.stop_S - forest.start_S)
        self._order_K = np.argsort(forest.at_K, kind="stable")
        self._sorted_K = forest.at_K[self._order_K]

    def part(self, ranges: Sequence[Range]) -> Forest:
        """Return the forest of some tokens and of the targets that they predict; positions stay as they are.

        The tokens are whole subtrees, and at most one stretch of a chain.
        """
        whole = self._forest
        token_U = np.concatenate([np.arange(start, stop) for start, stop in ranges])
        segment_U = self._segment_U[token_U]
        start_S = np.flatnonzero(np.append(True, segment_U[1:] != segment_U[:-1]))
        old_S = segment_U[start_S]
        place = {-1: -1, **{old: new for new, old in enumerate(old_S.tolist())}}
        begins_S = token_U[start_S] == whole.start_S[old_S]
        parent_S = np.array(
            [
                place.get(above, -1) if begins else -1
                for above, begins in zip(whole.parent_S[old_S].tolist(), begins_S, strict=True)
            ]
        )
        offset = np.cumsum([0, *(stop - start for start, stop in ranges)])
        targets, at = [], []
        for (start, stop), shift in zip(ranges, offset, strict=False):
            low, high = np.searchsorted(self._sorted_K, (start, stop))
            targets.append(self._order_K[low:high])
            at.append(self._sorted_K[low:high] - start + shift)
        target_K = np.concatenate(targets)
        return Forest(
            ids_U=whole.ids_U[token_U],
            start_S=start_S,
            parent_S=parent_S,
            depth_S=whole.position_U[token_U[start_S]],
            end_S=subtree_ends(start_S, parent_S, len(token_U)),
            at_K=np.concatenate(at),
            label_K=whole.label_K[target_K],
            index_K=whole.index_K[target_K],
        )
