"""Moves of cells, carried out: those of one action side by side, each phase by phase.

They drain at the same time. Satellites wait for the core before their replicas are parked: none trains without it. On the
way back the core lets go last. A move that fails takes its own cell out of both roles, and no other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from gyre_sdk.errors import ServiceError, TrainerError
from gyre_sdk.events import CellMoved, SwitchFailed, SwitchMeasured
from gyre_sdk.harness.ports import Clock, Observer
from gyre_sdk.trainer.cells.capacity import Costs
from gyre_sdk.trainer.cells.state import CellEvent, CellState, after
from gyre_sdk.trainer.cells.switch import Cell, Patience, PhaseFailed, Switched, to_serving, to_training
from gyre_sdk.trainer.cells.training_side import TrainingSide
from gyre_sdk.trainer.publish import Publisher

__all__ = ["LOST", "Member", "Moves", "side_by_side"]

LOST = "its worker is not connected to the core any more"
_RETRY_S = (0.5, 30.0)
"""Seconds before a failed cell is brought back the first time, and at most; they double."""

_TOLD_S = 2.0
"""Seconds to wait for the proxy to be told that a cell failed; one that is away hears it later."""

_log = logging.getLogger("gyre.trainer")


class Member:
    """A cell under management."""

    def __init__(self, cell: Cell, core: bool, now: float) -> None:
        self.cell = cell
        self.core = core
        self.state = CellState.SERVING
        self.since = now
        self.leaves: bool | None = None
        """Of one that drains: whether it leaves; None while that may still be taken back."""
        self.retry_at = 0.0
        self.retry_s = _RETRY_S[0]
        self.worker: int | None = None
        """Process id of its worker when it was let in."""
        self.telling: threading.Thread | None = None
        """Tells the proxy that it failed: it does not come back before that has ended."""
        self.held = False
        """Whether its worker may still have the devices: it was let in, and did not leave in order."""

    @property
    def has_ended(self) -> bool:
        """Tell whether the worker that was let in is gone."""
        return self.worker != self.cell.worker_pid()


Stays = Callable[[Member], str | None]
"""Asked when a cell has drained: why it serves on after all, in words; None: it leaves, and that is not taken back."""


def side_by_side(works: Sequence[Callable[[], None]]) -> None:
    """Do all at the same time; return when all have ended, and raise what the first to fail raised."""
    failures: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # boundary: top of a thread; raised where it is waited for
            failures.append(error)

    if len(works) == 1:
        return works[0]()
    threads = [threading.Thread(target=run, args=(work,), name="move of a cell", daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


class Moves:
    """Carries out moves, and tells of them. `costs`: what they were measured to take."""

    def __init__(
        self,
        *,
        training: TrainingSide,
        publisher: Publisher,
        patience: Patience,
        observer: Observer,
        clock: Clock,
        costs: Costs,
    ) -> None:
        self.costs = costs
        self._training = training
        self._publisher = publisher
        self._patience = patience
        self._observer = observer
        self._clock = clock
        self._noting = threading.Lock()
        """Guards `costs` and the order of what is told."""

    def leave(self, members: Sequence[Member], reason: str, stays: Stays) -> None:
        """Take cells to training, the core among them or training already."""
        core_went = threading.Event()
        if not any(member.core for member in members):
            core_went.set()

        def decide(member: Member) -> str | None:
            if not member.core:
                core_went.wait()
            return stays(member)

        def go(member: Member) -> None:
            try:
                self._leave(member, reason, decide)
            finally:
                if member.core:
                    core_went.set()

        side_by_side([partial(go, member) for member in members])

    def go_back(self, members: Sequence[Member], reason: str) -> None:
        """Take cells back to serving, the core last."""
        let_go = {member.cell.name: threading.Event() for member in members if not member.core}

        def go(member: Member) -> None:
            if member.core:
                for event in let_go.values():
                    event.wait()
                self._go_back(member, reason, lambda: None)
                return
            gone = let_go[member.cell.name]
            try:
                self._go_back(member, reason, gone.set)
            finally:
                gone.set()

        side_by_side([partial(go, member) for member in members])

    def bring_back(self, members: Sequence[Member]) -> None:
        """Have failed cells serve again."""
        side_by_side([partial(self._bring_back, member) for member in members])

    def end(self, members: Sequence[Member]) -> None:
        """Note that cells are told to end."""
        for member in members:
            self._enter(member, CellEvent.STOP, "the training ends")

    def fail(self, member: Member, reason: str) -> None:
        """Take a cell out of both roles as far as that can be told to others."""
        _log.warning("%s failed: %s", member.cell.name, reason)
        self._enter(member, CellEvent.FAIL, reason)
        member.telling = threading.Thread(target=self._tell, args=(member.cell,), name="tell of a failure", daemon=True)
        member.telling.start()
        member.telling.join(_TOLD_S)
        self._later(member)

    def _tell(self, cell: Cell) -> None:
        try:
            self._publisher.withdraw(cell.url, 0.0)
        except (TrainerError, ServiceError) as error:
            _log.warning("%s: %s", cell.name, error)

    def joining_takes(self, seconds: float) -> None:
        """Note what a satellite's weight pull and gradient push take."""
        with self._noting:
            self.costs = replace(self.costs, join=replace(self.costs.join, value=seconds, measured=True))

    # -- one cell ------------------------------------------------------------------------------------------------------

    def _leave(self, member: Member, reason: str, stays: Stays) -> None:
        member.leaves = None
        why = reason

        def enter(event: CellEvent) -> None:
            if event is CellEvent.DRAINED and not member.core:
                member.worker, member.held = member.cell.worker_pid(), True
            self._enter(member, event, why)

        def kept() -> bool:
            nonlocal why
            found = stays(member)
            why = reason if found is None else found
            return found is not None

        try:
            switched = to_training(
                member.cell, member.core, self._publisher, self._training, self._patience, enter, kept
            )
        except PhaseFailed as error:
            self._broken_off(member, "training", error)
            return
        if member.state is not CellState.TRAINING:
            return
        member.retry_s = _RETRY_S[0]
        with self._noting:
            until_parked = switched.seconds - switched.phases["join"]  # that is a pull, and `Costs.join` has it
            self.costs = replace(self.costs, to_train=self.costs.to_train.after(until_parked))
        self._measured(member, "training", switched)

    def _go_back(self, member: Member, reason: str, gone: Callable[[], None]) -> None:
        if not member.core and member.cell.name not in self._training.waiting():
            self.fail(member, LOST)  # it may still have the devices
            return
        try:
            switched = self._serve(member, CellEvent.RETURN, reason, gone)
        except PhaseFailed as error:
            self._broken_off(member, "serving", error)
            return
        with self._noting:
            self.costs = replace(self.costs, to_serve=self.costs.to_serve.after(switched.seconds))
        self._measured(member, "serving", switched)

    def _bring_back(self, member: Member) -> None:
        try:
            self._serve(member, CellEvent.START, "its replica answers", lambda: None)
        except PhaseFailed as error:
            if member.state is CellState.FAILED:
                _log.warning("%s could not be brought back: %s", member.cell.name, error)
                self._later(member)
            else:
                self.fail(member, str(error))
            return
        member.retry_at = self._clock.monotonic() + member.retry_s  # it serves so long before it trains again

    def _serve(self, member: Member, event: CellEvent, reason: str, gone: Callable[[], None]) -> Switched:
        def enter(now: CellEvent) -> None:
            if now is event:
                member.held = False
            self._enter(member, now, reason)
            if now is event:
                gone()

        return to_serving(member.cell, member.core, self._publisher, self._training, self._patience, enter, event=event)

    def _later(self, member: Member) -> None:
        member.retry_at = self._clock.monotonic() + member.retry_s
        member.retry_s = min(2 * member.retry_s, _RETRY_S[1])

    # -- telling -------------------------------------------------------------------------------------------------------

    def _enter(self, member: Member, event: CellEvent, reason: str) -> None:
        with self._noting:
            before, now = member.state, self._clock.monotonic()
            member.state = after(before, event)
            seconds, member.since = now - member.since, now
            _log.info("%s is %s after %.2f s of %s: %s", member.cell.name, member.state, seconds, before, reason)
            cell, at = member.cell, self._clock.time()
            self._observer(CellMoved(at, cell.name, member.state, before, seconds, reason, cell.standalone))

    def _broken_off(self, member: Member, to: str, error: PhaseFailed) -> None:
        """Fail a cell whose switch has failed, and tell what it took until then."""
        phases = dict(error.phases)
        with self._noting:
            self._observer(SwitchFailed(self._clock.time(), member.cell.name, to, error.phase, phases))
        self.fail(member, str(error))

    def _measured(self, member: Member, to: str, switched: Switched) -> None:
        drained = switched.drained
        with self._noting:
            self._observer(
                SwitchMeasured(
                    self._clock.time(),
                    member.cell.name,
                    to,
                    switched.phases,
                    drained.finished,
                    drained.moved,
                    switched.starts,
                )
            )
