"""Which queries meet which keys, as rectangles of contiguous rows: attention over a forest without a mask or a copy.

In a forest's order (see `layout`) the keys of a chain are contiguous, and so are all tokens below a segment. So a token's
attention is its own chain up to itself, plus, for each branch above it, the stretch of the chain that it hangs from.
All tokens below that branch meet that stretch as one rectangle without a mask. Each pair of query and key is in exactly
one block; partial results are put together by their log-sum-exp.

Keys are counted with the rows before the forest first: `before` rows of K/V that an earlier pass left, all of them
visible to everything here, then the forest's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gyre_sdk.trainer.attention.layout import Forest

_TILE = 512
"""Queries of a block in a layer with a window: more cost work at the window's edges, fewer cost calls."""


class Block(NamedTuple):
    """Queries `[query, query_stop)` against keys `[key, key_stop)`."""

    query: int
    query_stop: int
    key: int
    key_stop: int
    causal: bool
    """The ranges are the same tokens, each of which sees itself and those before it. These blocks come first, and
    every query is in exactly one."""
    band: int | None = None
    """Query i of the block sees its keys from `band + i` on; None: all of them."""


def blocks(forest: Forest, before: int = 0, window: int | None = None) -> list[Block]:
    """Return the blocks of a forest.

    Args:
        before: rows of K/V before the forest's own; the roots' positions start there.
        window: positions that a token sees, its own included; None for all.
    """
    if not forest.unique:
        return []
    chains, chain_S = _chains(forest)
    if window is not None and window <= int(forest.position_U.max()):
        return _windowed(forest, chains, chain_S, before, window)
    own = [Block(chain.start, chain.stop, before + chain.start, before + chain.stop, True) for chain in chains]
    if before:
        own.append(Block(0, forest.unique, 0, before, False))
    return own + _branches(forest, chains, chain_S, before)


class _Chain(NamedTuple):
    start: int
    stop: int
    position: int
    """Of its first token."""
    above: int
    """Segment that it hangs from, -1 for none."""


def _chains(forest: Forest) -> tuple[list[_Chain], NDArray[np.int64]]:
    """Return the chains in packed order, and the chain of each segment."""
    begins_S = forest.parent_S != np.arange(len(forest.parent_S)) - 1
    begins_S[0] = True
    heads = np.flatnonzero(begins_S)
    start = forest.start_S[heads]
    stop = np.append(start[1:], forest.unique)
    columns = (start, stop, forest.depth_S[heads], forest.parent_S[heads])
    return [_Chain(*row) for row in zip(*(column.tolist() for column in columns), strict=True)], begins_S.cumsum() - 1


def _branches(forest: Forest, chains: list[_Chain], chain_S: NDArray[np.int64], before: int) -> list[Block]:
    """Return, for each segment with several children, the subtrees of all but the first against the chain up to it."""
    found = []
    seen = {-1}
    for chain in chains:
        if chain.above in seen:  # a sibling that begins a chain too: it lies behind, and its subtree is in the block
            continue
        seen.add(chain.above)
        key, key_stop = chains[chain_S[chain.above]].start, int(forest.stop_S[chain.above])
        found.append(Block(chain.start, int(forest.end_S[chain.above]), before + key, before + key_stop, False))
    return found


def _windowed(
    forest: Forest, chains: list[_Chain], chain_S: NDArray[np.int64], before: int, window: int
) -> list[Block]:
    tile = min(window, _TILE)
    own: list[Block] = []
    others: list[Block] = []
    for chain in chains:
        for start in range(chain.start, chain.stop, tile):
            stop = min(start + tile, chain.stop)
            own.append(Block(start, stop, before + start, before + stop, True))
            position = chain.position + start - chain.start
            for stretch in _stretches(forest, chain, chains, chain_S, before, start):
                if stretch.position + stretch.stop - stretch.start <= position - window + 1:
                    break
                others += _in_window(start, stop, position, stretch, window)
    return own + others


def _stretches(
    forest: Forest, chain: _Chain, chains: list[_Chain], chain_S: NDArray[np.int64], before: int, start: int
) -> Iterator[_Chain]:
    """Yield the keys before a token of a chain as stretches of consecutive positions, from the token to the root."""
    stop = start
    while True:
        if stop > chain.start:
            yield _Chain(before + chain.start, before + stop, chain.position, chain.above)
        if chain.above < 0:
            break
        stop = int(forest.stop_S[chain.above])
        chain = chains[chain_S[chain.above]]
    if before:
        yield _Chain(0, before, 0, -1)


def _in_window(start: int, stop: int, position: int, keys: _Chain, window: int) -> Iterator[Block]:
    """Yield the part of the keys that every query of a tile sees, and the part that only the first ones see."""
    at = keys.start - keys.position  # key row of a position, on this stretch
    last = position + stop - start - 1
    first_seen, seen_by_all = position - window + 1, last - window + 1
    key_stop = keys.stop
    middle = min(max(keys.start, at + seen_by_all), key_stop)
    if middle < key_stop:
        yield Block(start, stop, middle, key_stop, False)
    key = max(keys.start, at + first_seen)
    if key < middle:
        # the query at position p sees from p - window + 1 on; whoever sees none of these keys is left out
        queries = min(stop - start, (middle - at) - first_seen)
        yield Block(start, start + queries, key, middle, False, first_seen - (key - at))
