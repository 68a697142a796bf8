"""The open batch at the core: the book, the units, the weights and the sums, shared by threads.

The trainer's thread begins and ends a batch and computes what it leases; a feeding thread enters units as they are
sealed; the thread of each satellite leases, stages and commits. One lock guards the book, another one the sums: a commit
and its addition are one step for whoever reads the sums.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from threading import BoundedSemaphore, Condition, Lock, Thread
from typing import Any

from torch import Tensor

from gyre_sdk import events
from gyre_sdk.errors import SettingsError
from gyre_sdk.harness.ports import Observer
from gyre_sdk.trainer.sharing.book import Book, Counts, Lease, Refusal, Ruling, Verdict
from gyre_sdk.trainer.sharing.deadline import Deadline
from gyre_sdk.trainer.sharing.tensors import Sums, fingerprint, frozen, weights
from gyre_sdk.trainer.sharing.wire import Counted
from gyre_sdk.trainer.units import Unit

OWN = "cell-0"
"""Holder of what the core computes itself: the name of its cell."""
_STAGED = 2
"""Contributions that are transferred at a time: each takes the memory of a gradient."""
_LOOK_S = 0.1
"""Seconds between two looks at what no one tells of: leases that end."""
_REPORT_S = 2.0
"""Seconds of the core's own work that an event tells of."""
_RECENT = 0.3
"""Weight of the newest measurement of a speed."""

_log = logging.getLogger("gyre.trainer")


@dataclass(frozen=True, slots=True)
class Open:
    """A batch that can be joined."""

    step: int
    version: int | None
    digest: str
    model: Any
    """With the weights of the batch, which nobody changes while it is open."""
    weights: Mapping[str, Tensor]
    """What satellites pull: those of the model, or a copy of them where it is in shards."""


@dataclass(frozen=True, slots=True)
class Whole:
    """What a model in shards is to satellites, put together on the core's leading rank."""

    weights: Mapping[str, Tensor]
    """Those that are trained, and the buffers."""
    base: str
    """Fingerprint of the others."""


@dataclass(slots=True)
class _Own:
    """Work of the core that no event has told of."""

    units: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Work:
    """What a batch holds beside its book."""

    open: Open
    units: list[Unit | None] = field(default_factory=list)
    """By place; None once it is committed."""
    names: list[str] = field(default_factory=list)
    counted: Counted = field(default_factory=Counted)
    """Of the satellites."""
    sums: Sums = field(default_factory=Sums)
    failure: BaseException | None = None
    """What the source of units raised, or what broke the sums."""


class Batch:
    """One batch at a time, for the core and its satellites."""

    def __init__(self, lease_s: float, observer: Observer, clock: Callable[[], float], stuck_s: float = 600.0) -> None:
        """Begin without a batch.

        Args:
            lease_s: seconds of silence after which a holder is taken for dead.
            stuck_s: seconds that units may be in hand at least.
        """
        self.lease_s = lease_s
        self.deadline = Deadline(stuck_s)
        self.in_hand: tuple[int, int] | None = None
        """What the core computes now: a fencing token, and targets."""
        self.changed = Condition(Lock())
        """Guards the book; notified whenever somebody may go on."""
        self.book = Book(lease_s=lease_s, after=time.time_ns())
        self.gate = True
        """Whether the core computes."""
        self.computing = False
        """True from its first unit until it has rested, or the batch ends: it takes memory that its cell's replica may need."""
        self._resting = False
        self.closing = False
        """True when nobody is to wait any more."""
        self.staging = BoundedSemaphore(_STAGED)
        """Taken by whoever has a contribution between its transfer's begin and its commit."""
        self._speeds: dict[str, float] = {}
        """Targets per second of computing, by cell."""
        self._clock = clock
        self._observer = observer
        self._work: _Work | None = None
        self._last: _Work | None = None
        """The batch that ended last, until it is collected."""
        self._summing = Lock()
        self._own = _Own()
        self._base: tuple[int, str] | None = None
        """A model's identity, and the fingerprint of its frozen weights."""

    # -- the trainer's thread ------------------------------------------------------------------------------------------

    def begin(
        self, step: int, version: int | None, model: Any, units: Iterable[Unit], whole: Whole | None = None
    ) -> None:
        """Open a batch, and enter units as they come.

        Args:
            whole: what satellites get in place of the model's own weights.
        """
        if whole is None:
            if self._base is None or self._base[0] != id(model):
                self._base = (id(model), fingerprint(frozen(model)))
            whole = Whole(weights(model), self._base[1])
        self._base = (id(model), whole.base)
        digest = fingerprint(whole.weights)
        work = _Work(Open(step, version, digest, model, whole.weights))
        with self.changed:
            self._work, self._last = work, None
            self.book.open(step, version, digest)
            self.changed.notify_all()
        Thread(target=self._feed, args=(work, units), name=f"units of step {step}", daemon=True).start()

    def take_own(self, check: Callable[[], None] = lambda: None, count: int = 1) -> Sequence[tuple[Lease, Unit]] | None:
        """Wait for units that the core computes; none when the gate was closed, and it is to free what units took; None when
        every unit is committed.

        Args:
            check: asked again and again, without the lock; raises to end the wait.
            count: units at most.

        Raises:
            BaseException: what the source of units or `check` raised.
        """
        while True:
            check()
            with self.changed:
                work = self._work
                assert work is not None
                if self._resting:
                    self.computing = self._resting = False
                    self.changed.notify_all()
                if work.failure is not None:
                    raise work.failure
                if self.computing and not self.gate:
                    self._resting = True
                    return ()
                if self.book.finished:
                    return None
                if self.gate:
                    open_, now = work.open, self._clock()
                    leases = self.book.lease(OWN, open_.step, open_.digest, now, count, least=count, lasts=inf).leases
                    if leases:
                        self.computing = True
                        self.in_hand = leases[0].token, sum(lease.tokens for lease in leases)
                        units = [work.units[lease.place] for lease in leases]
                        return [(lease, unit) for lease, unit in zip(leases, units, strict=True) if unit is not None]
                self.changed.wait(_LOOK_S)

    def commit_own(self, leases: Sequence[Lease], seconds: float) -> None:
        """Count units as computed by the core, whose gradient is where it belongs already."""
        tokens = sum(lease.tokens for lease in leases)
        with self.changed:
            self.in_hand = None
            name, step = f"{OWN}-{leases[0].token}", self.book.step
            assert step is not None
            self.book.offer(name, OWN, step, leases, self._clock())
            ruling = self.book.commit(name, self._clock())
            assert ruling.verdict is Verdict.COMMITTED, ruling
            self._forget(leases)
            self._measure(OWN, tokens, seconds)
            self.changed.notify_all()
        own = self._own
        own.units, own.tokens, own.seconds = own.units + len(leases), own.tokens + tokens, own.seconds + seconds
        if own.seconds >= _REPORT_S:
            self.report_own(step)

    def report_own(self, step: int) -> None:
        """Tell of the core's work since this was told last."""
        own, self._own = self._own, _Own()
        if own.units:
            self._observer(events.UnitsCommitted(time.time(), OWN, step, own.units, own.tokens, own.seconds))

    def end(self) -> None:
        """Close the batch: whoever still works on it is refused."""
        with self.changed:
            self._last, self._work = self._work, None
            self.computing, self._resting, self.in_hand = False, False, None
            self.book.end()
            self.changed.notify_all()

    def collect(self) -> tuple[Counted, Sums, list[str]]:
        """Return what satellites counted and added up in the batch that has ended, and the ids of all units."""
        with self._summing:
            work, self._last = self._last, None
            if work is None:
                return Counted(), Sums(), []
            if work.failure is not None:
                raise work.failure
            return work.counted, work.sums, work.names

    def _feed(self, work: _Work, units: Iterable[Unit]) -> None:
        """Enter units as they are sealed."""
        failure: BaseException | None = None
        try:
            for unit in units:
                with self.changed:
                    if self._work is not work:
                        return
                    work.units.append(unit)
                    work.names.append(unit.id)
                    self.book.add(unit.id, unit.tokens)
                    self.changed.notify_all()
        except BaseException as error:  # boundary: top of the feeding thread; raised in the trainer's
            failure = error
        with self.changed:
            if self._work is work:
                work.failure = failure
                self.book.close()
                self.changed.notify_all()

    # -- threads of satellites -----------------------------------------------------------------------------------------

    def join(self, base: str, seconds: float, enter: Callable[[], bool], stop: Callable[[], bool]) -> Open | None:
        """Wait a while for a batch that can be joined, and return it; None where there was none, or `stop` says so.

        Args:
            base: fingerprint of the satellite's frozen weights.
            enter: asked under the lock when there is a batch; whether the satellite comes in.
            stop: asked under the lock.

        Raises:
            SettingsError: its frozen weights are others than the core's.
        """
        give_up = time.monotonic() + seconds
        with self.changed:
            while not (self.closing or stop()):
                if self._work is not None and not self.book.finished and enter():
                    assert self._base is not None
                    if base != self._base[1]:
                        raise SettingsError(
                            "its frozen weights are not the core's: give it the same policy.model and policy.lora"
                        )
                    return self._work.open
                left = give_up - time.monotonic()
                if left <= 0:
                    break
                self.changed.wait(min(left, _LOOK_S))
            return None

    def take(
        self,
        holder: str,
        step: int,
        digest: str,
        count: int,
        seconds: float,
        stop: Callable[[], bool],
        *,
        least: int = 1,
    ) -> tuple[Sequence[Lease], Sequence[Unit]] | Refusal:
        """Lease units, waiting a while for some; empty where there was none, or `stop` says so under the lock."""
        give_up = time.monotonic() + seconds
        with self.changed:
            while not (self.closing or stop()):
                found = self.book.lease(holder, step, digest, self._clock(), count, least=least)
                if found.refusal is not None:
                    return found.refusal
                if found.leases:
                    work = self._work
                    assert work is not None
                    units = [work.units[lease.place] for lease in found.leases]
                    self.changed.notify_all()
                    return found.leases, [unit for unit in units if unit is not None]
                left = give_up - time.monotonic()
                if left <= 0 or self.book.finished:
                    break
                self.changed.wait(min(left, _LOOK_S))
            return (), ()

    def offer(self, contribution: str, holder: str, step: int, leases: Sequence[Lease]) -> Ruling:
        """See `Book.offer`."""
        with self.changed:
            return self.book.offer(contribution, holder, step, leases, self._clock())

    def commit(
        self,
        contribution: str,
        holder: str,
        cell: str,
        leases: Sequence[Lease],
        counted: Counted,
        gradients: dict[str, Tensor],
        seconds: float,
    ) -> Ruling:
        """Make a staged contribution part of the batch, or not. Its leases hold while others are added."""
        while not self._summing.acquire(timeout=self.lease_s / 4):
            self.renew(holder)
        try:
            with self.changed:
                work, now = self._work, self._clock()
                ruling = self.book.commit(contribution, now)
                if ruling.verdict is Verdict.COMMITTED:
                    self._forget(leases)
                self.changed.notify_all()
            if ruling.verdict is not Verdict.COMMITTED:
                return ruling
            assert work is not None
            try:
                work.sums.add(gradients)
                work.counted.add(counted)
            except BaseException as error:
                work.failure = error  # what is committed and not added would be missing from the step
                raise
            tokens = sum(lease.tokens for lease in leases)
            with self.changed:
                self._measure(cell, tokens, seconds)
            # told before the batch can be collected
            self._observer(events.UnitsCommitted(time.time(), cell, work.open.step, len(leases), tokens, seconds))
            return ruling
        finally:
            self._summing.release()

    def abandon(self, contribution: str) -> None:
        """Give up an offer whose transfer failed."""
        with self.changed:
            self.book.abandon(contribution)
            self.changed.notify_all()

    def renew(self, holder: str) -> None:
        """Take a sign of life."""
        with self.changed:
            self.book.renew(holder, self._clock())

    def give_back(self, holder: str, leases: Sequence[Lease]) -> None:
        """Take units back that are not computed."""
        with self.changed:
            self.book.give_back(holder, leases)
            self.changed.notify_all()

    def release(self, holder: str) -> int:
        """Take everything back from who has gone; return how many units are free again."""
        with self.changed:
            found = self.book.release(holder)
            self.changed.notify_all()
            return found

    # -- any thread ----------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True between `begin` and `end`."""
        return self._work is not None

    def counts(self) -> tuple[int, Counts, dict[str, float]]:
        """Return the step (0 without a batch), where its units are, and the cells' speeds."""
        with self.changed:
            return self.book.step or 0, self.book.counts(self._clock()), dict(self._speeds)

    def _forget(self, leases: Sequence[Lease]) -> None:
        """Let go of units that are committed."""
        assert self._work is not None
        for lease in leases:
            self._work.units[lease.place] = None

    def _measure(self, cell: str, tokens: int, seconds: float) -> None:
        self.deadline.measure(tokens, seconds)
        if seconds > 0:
            speed = tokens / seconds
            before = self._speeds.get(cell, speed)
            self._speeds[cell] = before + _RECENT * (speed - before)
