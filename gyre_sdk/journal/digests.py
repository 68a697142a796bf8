"""Lists of digests of calls: what a call's request consists of, stored as what it adds to its parent's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gyre_sdk.errors import JournalError
from gyre_sdk.journal.bodies import split_digests
from gyre_sdk.journal.chains import Chains, Link, common

Digests = tuple[bytes, ...]
COLUMNS = "messages_shared, messages, raw_shared, raw"
_CACHED = 1_000_000
"""Digests to keep in mind for the next calls' deltas (8 bytes each: lists share what they have in common)."""


class Items(NamedTuple):
    """What a request consists of, by digest."""

    messages: Digests = ()
    raw: Digests = ()


class ItemChains:
    """The lists of a run's calls."""

    def __init__(self) -> None:
        self._messages: Chains[Digests] = Chains()
        self._raw: Chains[Digests] = Chains()

    def add(self, call: str, parent: str | None, row: Sequence[Any]) -> None:
        """Take a call's columns `COLUMNS`."""
        self._messages.add(call, Link(parent, row[0], split_digests(row[1])))
        self._raw.add(call, Link(parent, row[2], split_digests(row[3])))

    def items(self, call: str) -> Items:
        """Return a call's lists, whole.

        Raises:
            JournalError: the chain is broken.
        """
        try:
            return Items(*(sum(chain.parts(call, chain.length(call)), ()) for chain in (self._messages, self._raw)))
        except (KeyError, ValueError) as error:
            raise JournalError(
                f"the messages of call {call} cannot be put together: {error}; run `gyre fsck`"
            ) from error


def load_items(rows: Callable[[str, Sequence[Any]], Sequence[Any]], call: str) -> Items:
    """Read one call's lists, and of its ancestors only what they share with it."""
    chains = ItemChains()
    found = rows(
        f"WITH RECURSIVE chain (call, parent, {COLUMNS}, seq) AS ("
        f" SELECT call, parent, {COLUMNS}, seq FROM call WHERE call=?"
        f" UNION ALL SELECT up.call, up.parent, {', '.join(f'up.{name}' for name in COLUMNS.split(', '))}, up.seq"
        " FROM chain JOIN call AS up ON up.call=chain.parent AND up.seq<chain.seq"
        " WHERE chain.messages_shared>0 OR chain.raw_shared>0)"
        f" SELECT call, parent, {COLUMNS} FROM chain",
        (call,),
    )
    for row in found:
        chains.add(row[0], row[1], row[2:])
    return chains.items(call) if found else Items()


class ItemCache:
    """The lists of calls written lately, to state the next calls' lists as deltas."""

    def __init__(self) -> None:
        self._items: OrderedDict[str, Items] = OrderedDict()
        self._size = 0

    def delta(
        self, rows: Callable[[str, Sequence[Any]], Sequence[Any]], parent: str | None, items: Items
    ) -> tuple[tuple[int, bytes, int, bytes], Items]:
        """Return a call's columns `COLUMNS`, and its lists sharing memory with its parent's."""
        before = Items()
        if parent is not None:
            before = self._items.get(parent) or load_items(rows, parent)
        messages, raw = common(before.messages, items.messages), common(before.raw, items.raw)
        shared = Items(before.messages[:messages] + items.messages[messages:], before.raw[:raw] + items.raw[raw:])
        return (messages, b"".join(items.messages[messages:]), raw, b"".join(items.raw[raw:])), shared

    def keep(self, call: str, items: Items) -> None:
        """Keep the lists of a call that was just stored."""
        if call in self._items:
            self._size -= sum(map(len, self._items.pop(call)))
        self._items[call] = items
        self._size += sum(map(len, items))
        while self._size > _CACHED and len(self._items) > 1:
            self._size -= sum(map(len, self._items.popitem(last=False)[1]))

    def forget(self) -> None:
        """Forget all lists."""
        self._items.clear()
        self._size = 0
