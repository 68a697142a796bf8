"""Which request owns which row of the KV cache, and which finished rows can serve as prefixes. Pure (numpy).

A slot is one row of the cache: room for one sequence. A finished request leaves its keys and values in its slot; a
later request whose prompt continues the same ids takes the slot over, or copies the common prefix out of it. Running
rows are kept near the low end, because a step's attention spans the rows from 0 to the highest running one.

Shapes: S slots, C positions per slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Move", "SlotTable"]

_MIN_REUSE = 8
"""Shorter common prefixes are computed again: a copy costs more than that."""


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the first `length` positions of slot `source` to slot `target`, or exchange the two."""

    source: int
    target: int
    length: int
    swap: bool = False


class SlotTable:
    """The bookkeeping of the cache. Invariant: `tokens[s, :cached[s]]` are the ids whose keys and values slot s holds."""

    def __init__(self, slots: int, positions: int, *, reuse: bool) -> None:
        self.tokens_SC: npt.NDArray[np.int32] = np.zeros((slots, positions), np.int32)
        self.cached_S: npt.NDArray[np.int64] = np.zeros(slots, np.int64)
        self.owned_S: npt.NDArray[np.bool_] = np.zeros(slots, bool)
        self._salt_S: list[str | None] = [None] * slots
        self._used_S: npt.NDArray[np.int64] = np.zeros(slots, np.int64)
        self._clock = 0
        self._reuse = reuse

    def place(self, ids: npt.NDArray[np.int32], salt: str | None) -> tuple[int, list[Move]]:
        """Give a sequence a slot; return it with the moves to do first, in order.

        Afterwards `cached_S[slot]` positions need no computation; it is always below `len(ids)`.

        Raises:
            RuntimeError: every slot is owned (the batcher admits no more rows than there are slots).
        """
        free = np.flatnonzero(~self.owned_S)
        if not len(free):
            raise RuntimeError(f"all {len(self.owned_S)} KV slots are owned")
        reach = self._reach(int(self.owned_S.sum()) + 1)
        low = free[free < reach]
        target = int(low[int(self._age(low).argmin())])
        source, common = self._best_prefix(ids, salt)
        moves: list[Move] = []
        if common and not self.owned_S[source] and common == self.cached_S[source]:
            if source < reach:
                target = source
            else:
                self._exchange(source, target, moves)
        else:
            if common and source < reach and not self.owned_S[source]:
                target = source
            self._save(target, free, moves, keep=source if common else -1)
            if common and source != target:
                moves.append(Move(source, target, common))
        self._clock += 1
        self.owned_S[target] = True
        self._salt_S[target] = salt
        self.tokens_SC[target, : len(ids)] = ids
        self.cached_S[target] = common
        return target, moves

    def release(self, slot: int) -> None:
        """End an ownership; the slot's content stays reusable until another request needs the room."""
        self._clock += 1
        self._used_S[slot] = self._clock
        self.owned_S[slot] = False
        if not self._reuse:
            self.cached_S[slot] = 0

    def compact(self) -> list[tuple[Move, int, int]]:
        """Move running rows down when holes waste much of a step; return (move, old slot, new slot)."""
        out: list[tuple[Move, int, int]] = []
        running = int(self.owned_S.sum())
        while running and (top := int(np.flatnonzero(self.owned_S)[-1])) >= self._reach(running):
            hole = int(np.flatnonzero(~self.owned_S)[0])
            moves: list[Move] = []
            self._exchange(top, hole, moves)
            out.append((moves[0] if moves else Move(top, hole, 0), top, hole))
        return out

    def forget(self) -> None:
        """Drop every cached position: keys and values never outlive the weights that made them."""
        self.cached_S[:] = 0

    @staticmethod
    def _reach(running: int) -> int:
        """How many low slots a step may span for `running` rows: some holes cost less than moving rows."""
        return running + max(2, running // 8)

    def _age(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Order of eviction of idle slots: empty ones first, then the least recently used."""
        return np.where(self.cached_S[slots] > 0, self._used_S[slots], -1)

    def _best_prefix(self, ids: npt.NDArray[np.int32], salt: str | None) -> tuple[int, int]:
        if not self._reuse or len(ids) <= _MIN_REUSE:
            return 0, 0
        usable = np.minimum(self.cached_S, len(ids) - 1)
        usable[[own != salt for own in self._salt_S]] = 0
        rows = np.flatnonzero(usable >= _MIN_REUSE)
        rows = rows[self.tokens_SC[rows, _MIN_REUSE - 1] == ids[_MIN_REUSE - 1]]
        if not len(rows):
            return 0, 0
        width = int(usable[rows].max())
        same = self.tokens_SC[rows, :width] == ids[:width]
        common = np.minimum(np.where(same.all(1), width, same.argmin(1)), usable[rows])
        best = int(np.lexsort((self.cached_S[rows] != common, -common))[0])
        if common[best] < _MIN_REUSE:
            return 0, 0
        return int(rows[best]), int(common[best])

    def _save(self, slot: int, free: npt.NDArray[np.int64], moves: list[Move], keep: int = -1) -> None:
        """Keep what `slot` caches by writing it over the least recently used idle slot, which may be itself."""
        if not self.cached_S[slot]:
            return
        order = self._age(free)
        order[free == keep] = np.iinfo(np.int64).max
        victim = int(free[int(order.argmin())])
        if victim == slot:
            return
        length = int(self.cached_S[slot])
        moves.append(Move(slot, victim, length))
        self._copy_row(slot, victim)

    def _exchange(self, a: int, b: int, moves: list[Move]) -> None:
        both = [a, b]
        length = int(self.cached_S[both].max())
        if length:
            moves.append(Move(a, b, length, swap=bool(self.cached_S[b])))
        for array in (self.tokens_SC, self.cached_S, self.owned_S, self._used_S):
            array[both] = array[both[::-1]]
        self._salt_S[a], self._salt_S[b] = self._salt_S[b], self._salt_S[a]

    def _copy_row(self, source: int, target: int) -> None:
        for array in (self.tokens_SC, self.cached_S, self._used_S):
            array[target] = array[source]
        self._salt_S[target] = self._salt_S[source]
