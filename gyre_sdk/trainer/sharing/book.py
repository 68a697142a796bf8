"""Who computes which unit of an open batch, and whose gradient counts: pure, with the time passed in.

A batch is opened with the weights that every unit of it is computed with; units are entered as they are sealed. A holder
leases units, adds up their gradients, offers the sum as a contribution, transfers it, and has it committed::

    free -> leased -> done          leased -> free    the lease ends, its holder dies, leaves or is refused
              offer, commit

* Every lease has a fencing token, higher than any given before: who comes back after its lease was given to another
  holds a token that nobody accepts any more.
* A contribution is committed as a whole or not at all, and a unit by exactly one contribution.
* An offer that is repeated after its commit is acknowledged, and adds nothing.

A unit is known by its place, in the order of entry: a batch may hold the same content twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count as counting
from math import inf

from gyre_sdk.errors import TrainerError


class Refusal(StrEnum):
    """Why a lease, an offer or a commit is refused."""

    WRONG_WEIGHTS = "wrong weights"
    """The holder has others than the batch is computed with."""
    OTHER_BATCH = "not the open batch"
    """The batch that it was for is over, or has not begun."""
    EXPIRED = "expired lease"
    """A lease is over, belongs to somebody else, or its unit is done."""
    UNKNOWN = "no such offer"
    """Nothing was offered under that name, or it was given up."""
    AGAIN = "committed before"
    """It is part of the batch already, and must not be added again."""


class Verdict(StrEnum):
    """What becomes of a contribution."""

    SEND = "send"
    """Transfer it."""
    COMMITTED = "committed"
    """It is part of the batch, now or since it was offered before."""
    REFUSED = "refused"
    """It is no part of the batch; the `Refusal` says why."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to compute a unit."""

    place: int
    """Of the unit in its batch, from 0."""
    unit: str
    """Id of the unit."""
    tokens: int
    """Targets of the unit."""
    token: int
    """Fencing token."""


@dataclass(frozen=True, slots=True)
class Leased:
    """The answer to who asked for units."""

    leases: tuple[Lease, ...] = ()
    """Empty where nothing is free now."""
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Ruling:
    """The answer to who offered or wants to commit."""

    verdict: Verdict
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """Where the units of the open batch are."""

    ready_units: int
    ready_tokens: int
    """Of units that nobody has leased, targets."""
    leased_units: int
    leased_tokens: int
    done_units: int
    done_tokens: int
    closed: bool
    """True when no unit is to come."""


@dataclass(slots=True)
class _Entry:
    """A unit of the batch."""

    unit: str
    tokens: int
    token: int = 0
    """Of the newest lease."""
    holder: str | None = None
    """Who has the lease, or had it when the unit was committed; None when it is free."""
    expires: float = 0.0
    done: bool = False


@dataclass(slots=True)
class _Batch:
    step: int
    version: int | None
    digest: str
    entries: list[_Entry] = field(default_factory=list)
    free: deque[int] = field(default_factory=deque)
    """Places, the next one first."""
    leased: set[int] = field(default_factory=set)
    holders: set[str] = field(default_factory=set)
    """Who has asked for units, and has not gone."""
    offers: dict[str, tuple[str, tuple[Lease, ...]]] = field(default_factory=dict)
    """Contribution -> its holder and leases, between offer and commit."""
    committed: set[str] = field(default_factory=set)
    """Contributions."""
    closed: bool = False


class Book:
    """Keeps the leases and contributions of one batch at a time."""

    def __init__(self, *, lease_s: float, transfer_s: float | None = None, after: int = 0) -> None:
        """Begin without a batch.

        Args:
            lease_s: seconds that a lease lasts unless it is renewed.
            transfer_s: seconds that an accepted offer has from then on; None: as `lease_s`.
            after: fencing tokens are above this. Give a number that grows from one book to the next.
        """
        self._lease_s = lease_s
        self._transfer_s = lease_s if transfer_s is None else transfer_s
        self._tokens = counting(after + 1)
        self._batch: _Batch | None = None

    # -- the batch -----------------------------------------------------------------------------------------------------

    def open(self, step: int, version: int | None, digest: str) -> None:
        """Begin a batch. What was left of the one before is forgotten.

        Args:
            version: number of the weights in training.
            digest: of these weights.
        """
        self._batch = _Batch(step, version, digest)

    def add(self, unit: str, tokens: int) -> int:
        """Enter a sealed unit with its targets; return its place."""
        batch = self._opened()
        if batch.closed:
            raise TrainerError(f"unit {unit} comes after the batch of step {batch.step} was closed")
        place = len(batch.entries)
        batch.entries.append(_Entry(unit, tokens))
        batch.free.append(place)
        return place

    def close(self) -> None:
        """Say that no unit is to come."""
        self._opened().closed = True

    def end(self) -> None:
        """Forget the batch: whatever is still offered for it is refused."""
        self._batch = None

    @property
    def digest(self) -> str | None:
        """Of the weights of the open batch; None without one."""
        return None if self._batch is None else self._batch.digest

    @property
    def step(self) -> int | None:
        """Of the open batch; None without one."""
        return None if self._batch is None else self._batch.step

    @property
    def version(self) -> int | None:
        """Of the weights of the open batch; None without one, or where they have no number."""
        return None if self._batch is None else self._batch.version

    @property
    def finished(self) -> bool:
        """True when no unit is to come and every one is committed."""
        batch = self._batch
        return batch is not None and batch.closed and not batch.free and not batch.leased

    def counts(self, now: float) -> Counts:
        """Count units and targets; zeros without a batch."""
        self._expire(now)
        batch = self._batch or _Batch(0, None, "")
        ready = sum(batch.entries[place].tokens for place in batch.free)
        leased = sum(batch.entries[place].tokens for place in batch.leased)
        done = [entry.tokens for entry in batch.entries if entry.done]
        return Counts(len(batch.free), ready, len(batch.leased), leased, len(done), sum(done), batch.closed)

    def owners(self) -> list[str | None]:
        """Return who committed each unit, in the order of places; None for those that are not done."""
        batch = self._batch or _Batch(0, None, "")
        return [entry.holder if entry.done else None for entry in batch.entries]

    # -- leases --------------------------------------------------------------------------------------------------------

    def lease(
        self,
        holder: str,
        step: int,
        digest: str,
        now: float,
        count: int = 1,
        *,
        least: int = 1,
        lasts: float | None = None,
    ) -> Leased:
        """Lease free units, the oldest first.

        Near the end of what is there nobody gets more than half of an equal share, but `least`: so all end together.

        Args:
            step: of the batch that the holder works on.
            digest: of the weights that it has.
            now: seconds, on the caller's clock.
            count: units at most.
            least: units that the holder computes at the same time.
            lasts: seconds; None: as long as this book's leases do.
        """
        batch = self._batch
        if batch is None or step != batch.step:
            return Leased(refusal=Refusal.OTHER_BATCH)
        if digest != batch.digest:
            return Leased(refusal=Refusal.WRONG_WEIGHTS)
        self._expire(now)
        batch.holders.add(holder)
        share = max(least, len(batch.free) // (2 * len(batch.holders)))
        found = []
        for _ in range(min(count, share, len(batch.free))):
            place = batch.free.popleft()
            entry = batch.entries[place]
            entry.token, entry.holder = next(self._tokens), holder
            entry.expires = now + (self._lease_s if lasts is None else lasts)
            batch.leased.add(place)
            found.append(Lease(place, entry.unit, entry.tokens, entry.token))
        return Leased(tuple(found))

    def renew(self, holder: str, now: float) -> int:
        """Let a holder's leases last longer from now on; return how many it has. One that is over stays so."""
        self._expire(now)
        own = self._held(holder)
        for entry in own:
            entry.expires = max(entry.expires, now + self._lease_s)
        return len(own)

    def release(self, holder: str) -> int:
        """Take back all leases and offers of a holder that has gone; return how many units are free again."""
        batch = self._batch
        if batch is None:
            return 0
        batch.holders.discard(holder)
        for name in [name for name, (owner, _) in batch.offers.items() if owner == holder]:
            del batch.offers[name]
        return self._free([place for place in batch.leased if batch.entries[place].holder == holder])

    def give_back(self, holder: str, leases: Sequence[Lease]) -> int:
        """Take back some leases that a holder does not want; return how many units are free again."""
        batch = self._batch
        if batch is None:
            return 0
        return self._free([lease.place for lease in leases if self._holds(batch, holder, lease)])

    # -- contributions -------------------------------------------------------------------------------------------------

    def offer(self, contribution: str, holder: str, step: int, leases: Sequence[Lease], now: float) -> Ruling:
        """Say whether a contribution may be transferred; if so its leases last until the transfer must be over.

        Args:
            contribution: its name, never used for another one.
            step: of the batch that it is for.
            leases: of the units whose gradients it sums.
        """
        batch = self._batch
        if batch is not None and contribution in batch.committed:
            return Ruling(Verdict.COMMITTED)
        if batch is None or step != batch.step:
            return Ruling(Verdict.REFUSED, Refusal.OTHER_BATCH)
        self._expire(now)
        if not self._current(batch, holder, leases):
            return Ruling(Verdict.REFUSED, Refusal.EXPIRED)
        for lease in leases:
            entry = batch.entries[lease.place]
            entry.expires = max(entry.expires, now + self._transfer_s)
        batch.offers[contribution] = (holder, tuple(leases))
        return Ruling(Verdict.SEND)

    def commit(self, contribution: str, now: float) -> Ruling:
        """Make an offered and transferred contribution part of the batch, if all its leases still hold.

        Answers `COMMITTED` once for each contribution: the caller then adds the gradient.
        """
        batch = self._batch
        if batch is None:
            return Ruling(Verdict.REFUSED, Refusal.OTHER_BATCH)
        if contribution in batch.committed:
            return Ruling(Verdict.REFUSED, Refusal.AGAIN)
        if contribution not in batch.offers:
            return Ruling(Verdict.REFUSED, Refusal.UNKNOWN)
        self._expire(now)
        holder, leases = batch.offers.pop(contribution)
        if not self._current(batch, holder, leases):
            return Ruling(Verdict.REFUSED, Refusal.EXPIRED)
        for lease in leases:
            batch.entries[lease.place].done = True
            batch.leased.discard(lease.place)
        batch.committed.add(contribution)
        return Ruling(Verdict.COMMITTED)

    def abandon(self, contribution: str) -> int:
        """Give up an offer whose transfer failed; return how many units are free again."""
        batch = self._batch
        if batch is None or contribution not in batch.offers:
            return 0
        holder, leases = batch.offers.pop(contribution)
        return self._free([lease.place for lease in leases if self._holds(batch, holder, lease)])

    # -- inside --------------------------------------------------------------------------------------------------------

    def _opened(self) -> _Batch:
        if self._batch is None:
            raise TrainerError("no batch is open: call open(step, version, digest) first")
        return self._batch

    def _held(self, holder: str) -> list[_Entry]:
        batch = self._batch
        if batch is None:
            return []
        return [batch.entries[place] for place in batch.leased if batch.entries[place].holder == holder]

    def _expire(self, now: float) -> None:
        batch = self._batch
        if batch is not None:
            self._free([place for place in batch.leased if batch.entries[place].expires <= now])

    def _free(self, places: Sequence[int]) -> int:
        """Put leased places back, in front: what waited longest is computed next."""
        batch = self._opened()
        for place in sorted(places, reverse=True):
            batch.leased.discard(place)
            entry = batch.entries[place]
            entry.holder, entry.expires = None, -inf
            batch.free.appendleft(place)
        return len(places)

    @staticmethod
    def _holds(batch: _Batch, holder: str, lease: Lease) -> bool:
        if not 0 <= lease.place < len(batch.entries):
            return False
        entry = batch.entries[lease.place]
        return lease.place in batch.leased and entry.holder == holder and entry.token == lease.token

    def _current(self, batch: _Batch, holder: str, leases: Sequence[Lease]) -> bool:
        """Tell whether all leases hold, and each is named once."""
        places = {lease.place for lease in leases}
        return len(places) == len(leases) > 0 and all(self._holds(batch, holder, lease) for lease in leases)
