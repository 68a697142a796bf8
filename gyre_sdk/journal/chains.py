"""Lists that grow from call to call, kept as what each call adds to its parent's.

A call's list is the first `shared` items of its parent's list, then its own rest. So a run costs what it holds, and a
list costs its length to read: every step up the chain brings items of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar


class Sliced(Protocol):
    """What a list must offer: a tuple and an array do."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> Any: ...


T = TypeVar("T", bound=Sliced)


class Link(NamedTuple, Generic[T]):
    """One call's list, as what it adds."""

    parent: str | None
    shared: int
    """Leading items taken from the parent's list."""
    rest: T


class Chains(Generic[T]):
    """Lists of a run's calls by call."""

    def __init__(self) -> None:
        self._links: dict[str, Link[T]] = {}

    def add(self, call: str, link: Link[T]) -> None:
        """Keep a call's list. Its parent may be added later."""
        self._links[call] = link

    def length(self, call: str) -> int:
        """Return the length of a call's list."""
        link = self._links[call]
        return link.shared + len(link.rest)

    def parts(self, call: str | None, stop: int, start: int = 0) -> list[T]:
        """Return items `start` to `stop` of a call's list, in pieces.

        Raises:
            KeyError: a call of the chain is missing.
            ValueError: more is shared than there is.
        """
        parts: list[T] = []
        while stop > start:
            link = self._links[call or ""]
            if stop > link.shared + len(link.rest):
                raise ValueError(f"{stop} items are shared of the {link.shared + len(link.rest)} of call {call}")
            if stop > link.shared:
                parts.append(link.rest[max(0, start - link.shared) : stop - link.shared])
                stop = link.shared
            call = link.parent
        parts.reverse()
        return parts


def common(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the number of leading items that two lists share."""
    limit = min(len(one), len(other))
    if one[:limit] == other[:limit]:
        return limit
    return next(index for index in range(limit) if one[index] != other[index])
