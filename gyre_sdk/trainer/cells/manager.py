"""The manager of cells: looks, asks the plan, and carries out what it says while agents notice nothing.

One thread ticks: who died and who is back, an observation from what was counted and measured, the plan, its actions one
cell after the other: to training the core first, then satellites in their order; back in reverse. What it must never do
it does not do whatever the plan says: take the last serving cell from runs that are unfinished (one cell alone
alternates), let a satellite train without the core, or wake a replica whose devices the training side has not let go.

A cell that fails takes no requests and no units. Once its replica answers and the training side has let go, it comes back
by loading the newest weights, like any other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import httpx

from gyre_sdk.errors import ServiceError, TrainerError
from gyre_sdk.events import CellMoved, CellsSeen, SwitchMeasured
from gyre_sdk.harness.hooks import unobserved
from gyre_sdk.harness.ports import Clock, Observer
from gyre_sdk.trainer.cells.capacity import Capacity, Costs, Counters, Load, carried
from gyre_sdk.trainer.cells.health import Health
from gyre_sdk.trainer.cells.observe import observed
from gyre_sdk.trainer.cells.plan import Action, Move, Observation, Policy, plan
from gyre_sdk.trainer.cells.state import CellEvent, CellState, after
from gyre_sdk.trainer.cells.switch import Cell, Patience, PhaseFailed, Switched, to_serving, to_training
from gyre_sdk.trainer.cells.training_side import TrainingSide
from gyre_sdk.trainer.publish import Publisher
from gyre_sdk.trainer.transports import Replica, Unready

__all__ = ["Cell", "Manager"]

Decide = Callable[[Observation, Policy], Sequence[Action]]
_CHECK_S = 1.0
"""Seconds between looks at processes, and between reports of what was seen."""
_RETRY_S = (0.5, 30.0)
"""Seconds before a failed cell is brought back the first time, and at most; they double."""
_LOST = "its worker is not connected to the core any more"

_log = logging.getLogger("gyre.trainer")


class Member:
    """A cell under management."""

    def __init__(self, cell: Cell, core: bool, now: float) -> None:
        self.cell = cell
        self.core = core
        self.state = CellState.SERVING
        self.since = now
        self.retry_at = 0.0
        self.retry_s = _RETRY_S[0]
        self.worker: int | None = None
        """Process id of its worker when it began to train."""
        self.held = False
        """Whether its worker may still have the devices: it was let in, and did not leave in order."""


class Manager:
    """Moves cells between serving and training.

    Args:
        cells: the core first; all serve, and are published to.
        training: the sharing of the batch's units.
        publisher: of the same replicas.
        counters: what rollouts count now.
        policy: how eager the plan is.
        drain_s: seconds that requests may take to end on a cell that leaves.
        runs_per_cell: bound of what one serving cell carries.
        decide: what moves, given what was seen.
        load: what was measured of one serving cell and its runs.
        patience: bounds of the other phases of a switch; None: a minute each.
        period_s: seconds between looks.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        *,
        training: TrainingSide,
        publisher: Publisher,
        counters: Callable[[], Counters],
        policy: Policy,
        drain_s: float,
        runs_per_cell: float,
        decide: Decide = plan,
        load: Callable[[], Load] = Load,
        observer: Observer = unobserved,
        patience: Patience | None = None,
        costs: Costs | None = None,
        period_s: float = 0.2,
        clock: Clock = time,
    ) -> None:
        if not cells:
            raise TrainerError("there are no cells to manage")
        self.costs = costs or Costs()
        """What switches were measured to take."""
        self._members = [Member(cell, not n, clock.monotonic()) for n, cell in enumerate(cells)]
        self._training = training
        self._publisher = publisher
        self._counters = counters
        self._policy = policy
        self._patience = patience or Patience(drain_s)
        self._bound = runs_per_cell
        self._decide = decide
        self._load = load
        self._carried = Capacity(runs_per_cell)
        """What one serving cell was seen to carry."""
        self._observer = observer
        self._period_s = period_s
        self._clock = clock
        self._health = Health(clock, min(0.5, 2 * period_s))
        self._acting = threading.Lock()
        """Held while cells are moved: by the thread, or by who gathers them."""
        self._elsewhere: dict[str, str] = {}
        """Replicas that came back under another address."""
        self._gathered = False
        self._failure: BaseException | None = None
        self._checked = self._told_at = 0.0
        self._told: tuple[object, ...] = ()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cells", daemon=True)

    # -- for the training ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin. The core does not compute before its cell has left serving."""
        if not self._training.close_gate(self._patience.leave_s):
            raise TrainerError("the core computes already: start the manager of cells before the first batch")
        self._watch()
        self._health.start()
        self._thread.start()

    def stop(self, seconds: float = 60.0) -> None:
        """Move nothing more and bring all cells back to serving, for about `seconds` at most. Idempotent."""
        give_up = time.monotonic() + seconds
        self._gathered = True
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(seconds)
        self._health.stop()
        # in a thread: a core that was broken off in the middle of a unit never lets go of it
        last = threading.Thread(target=self._gather_last, args=(seconds,), name="gather cells", daemon=True)
        last.start()
        last.join(max(0.0, give_up - time.monotonic()))
        if last.is_alive():
            _log.warning("cells were not all brought back to serving in %.0f s: %s", seconds, self.states())

    def check(self) -> None:
        """Raise what ended the manager, or that a cell's process was given up.

        Raises:
            TrainerError: naming it.
        """
        if self._failure is not None:
            raise TrainerError(
                f"the manager of cells ended: {type(self._failure).__name__}: {self._failure}"
            ) from self._failure
        for member in self._members:
            if member.cell.launched is not None:
                member.cell.launched.check()

    def gather(self) -> None:
        """Bring all cells back to serving now, and move nothing more. Cells that fail on the way are brought back later."""
        self._gathered = True
        self._gather(None)

    def states(self) -> dict[str, CellState]:
        """Return what each cell does, the core first."""
        return {member.cell.name: member.state for member in self._members}

    def moved(self, old: str, new: str) -> None:
        """Note that a replica came back under another address; it is brought to the current weights there."""
        self._elsewhere[old.rstrip("/")] = new.rstrip("/")

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                with self._acting:
                    self._tick()
                self._stopping.wait(self._period_s)
        except Exception as error:  # boundary: top of the manager's thread; `check` raises it
            _log.exception("the manager of cells ended")
            self._failure = error

    def _tick(self) -> None:
        self._notice()
        self._bring_back()
        if self._gathered:
            return
        seen = self._observe()
        self._tell(seen)
        for action in self._decide(seen, self._policy):
            self._carry_out(action, seen)

    def _observe(self) -> Observation:
        counters, progress = self._counters(), self._training.progress()
        if progress.pull_s or progress.push_s:
            join = progress.pull_s + progress.push_s
            if join != self.costs.join.value:
                self.costs = replace(self.costs, join=replace(self.costs.join, value=join, measured=True))
        self._carried = carried(self._load(), self._bound)
        return observed(list(self.states().values()), counters, progress, self.costs, capacity=self._carried.runs)

    def _tell(self, seen: Observation) -> None:
        """Tell observers what was seen, when it has changed."""
        now = self._clock.monotonic()
        limit = str(self._carried.limit)
        told = (seen.water, seen.serving, seen.training, seen.moving, round(seen.ready_s), limit)
        if told != self._told and now - self._told_at >= _CHECK_S:
            self._told, self._told_at = told, now
            at, capacity = self._clock.time(), seen.serving * seen.cell_capacity
            cells = (seen.serving, seen.training, seen.moving)
            self._observer(CellsSeen(at, seen.water, capacity, *cells, seen.ready_s, limit))

    # -- moving --------------------------------------------------------------------------------------------------------

    def _carry_out(self, action: Action, seen: Observation) -> None:
        if action.move is Move.TO_TRAINING:
            for member in self._leaving(action.cells, seen):
                if self._gathered or not (member.core or self._members[0].state is CellState.TRAINING):
                    return
                self._go(member, action.reason)
        else:
            training = [member for member in reversed(self._members) if member.state is CellState.TRAINING]
            for member in training[: action.cells]:
                self._go_back(member, action.reason)

    def _leaving(self, cells: int, seen: Observation) -> list[Member]:
        """Return the next cells of the order that can leave."""
        now = self._clock.monotonic()
        serving = [member for member in self._members if member.state is CellState.SERVING]
        if seen.water and len(self._members) > 1:
            cells = min(cells, len(serving) - 1)
        waiting = self._training.waiting() if len(self._members) > 1 else set()
        fit = [one for one in serving if now >= one.retry_at and (one.core or one.cell.name in waiting)]
        return fit[: max(0, cells)]

    def _go(self, member: Member, reason: str) -> None:
        """Take a cell to training."""
        member.worker, member.held = member.cell.worker_pid(), not member.core
        try:
            switched = to_training(
                member.cell,
                member.core,
                self._publisher,
                self._training,
                self._patience,
                lambda event: self._enter(member, event, reason),
            )
        except PhaseFailed as error:
            self._fail(member, str(error))
            return
        member.retry_s = _RETRY_S[0]
        self.costs = replace(self.costs, to_train=self.costs.to_train.after(switched.seconds))
        self._measured(member, "training", switched)

    def _go_back(self, member: Member, reason: str) -> None:
        """Take a cell back to serving."""
        if not member.core and member.cell.name not in self._training.waiting():
            self._fail(member, _LOST)  # it may still have the devices
            return
        try:
            switched = self._serve(member, CellEvent.RETURN, reason)
        except PhaseFailed as error:
            self._fail(member, str(error))
            return
        self.costs = replace(self.costs, to_serve=self.costs.to_serve.after(switched.seconds))
        self._measured(member, "serving", switched)

    def _serve(self, member: Member, event: CellEvent, reason: str) -> Switched:
        def enter(now: CellEvent) -> None:
            if now is event:
                member.held = False
            self._enter(member, now, reason)

        return to_serving(member.cell, member.core, self._publisher, self._training, self._patience, enter, event=event)

    def _gather_last(self, seconds: float) -> None:
        try:
            self._gather(self._clock.monotonic() + seconds)
        except Exception as error:  # boundary: top of the thread that gathers; the manager has ended all the same
            _log.exception("cells were not all brought back to serving")
            self._failure = self._failure or error

    def _gather(self, deadline: float | None) -> None:
        with self._acting:
            for member in reversed(self._members):
                if deadline is not None and self._clock.monotonic() > deadline:
                    return
                if member.state is CellState.TRAINING:
                    self._go_back(member, "cells are gathered")
                elif self._may_return(member):
                    self._try_again(member)

    # -- deaths and returns --------------------------------------------------------------------------------------------

    def _notice(self) -> None:
        """Mark cells that died or moved, and park replicas again that were started anew while their cell trains."""
        for old, new in list(self._elsewhere.items()):
            del self._elsewhere[old]
            for member in self._members:
                if member.cell.url.rstrip("/") == old:
                    member.cell = replace(member.cell, url=new)
                    self._watch()
                    if member.state is CellState.SERVING:
                        self._fail(member, f"its replica came back at {new}")
        for member in self._members:
            if member.state is CellState.SERVING and (fault := self._health.fault(member.cell.url)):
                self._fail(member, fault)
        now = self._clock.monotonic()
        if now - self._checked < _CHECK_S:
            return
        self._checked = now
        connected = self._training.waiting()
        for member in self._members:
            if member.state is not CellState.TRAINING:
                continue
            if not member.core and member.worker != member.cell.worker_pid():
                self._fail(member, "its worker's process ended")
            elif not member.core and member.cell.name not in connected:
                self._fail(member, _LOST)
            elif self._health.answers(member.cell.url):
                self._keep_parked(member)

    def _keep_parked(self, member: Member) -> None:
        try:
            with Replica(member.cell.url, self._publisher.current.version) as replica:
                if not member.cell.parking.is_parked(replica):
                    _log.warning(
                        "the replica of %s was started anew while its cell trains; parked again", member.cell.name
                    )
                    member.cell.parking.park(replica)
        except (TrainerError, Unready, httpx.HTTPError) as error:
            _log.warning("the replica of %s does not say whether it is parked: %s", member.cell.name, error)

    def _bring_back(self) -> None:
        for member in self._members:
            if self._clock.monotonic() >= member.retry_at and self._may_return(member):
                self._try_again(member)

    def _may_return(self, member: Member) -> bool:
        """Tell whether a failed cell can come back: its replica answers, and its worker has ended or is known to wait."""
        if member.state is not CellState.FAILED or not self._health.answers(member.cell.url):
            return False
        if member.core:
            return self._training.close_gate(0.0)
        gone = not member.held or member.worker != member.cell.worker_pid()
        return gone or member.cell.name in self._training.waiting()

    def _try_again(self, member: Member) -> None:
        try:
            self._serve(member, CellEvent.START, "its replica answers")
        except PhaseFailed as error:
            if member.state is CellState.FAILED:
                _log.warning("%s could not be brought back: %s", member.cell.name, error)
                self._later(member)
            else:
                self._fail(member, str(error))
            return
        member.retry_at = self._clock.monotonic() + member.retry_s  # it serves so long before it trains again

    def _fail(self, member: Member, reason: str) -> None:
        """Take a cell out of both roles as far as that can be told to others."""
        _log.warning("%s failed: %s", member.cell.name, reason)
        self._enter(member, CellEvent.FAIL, reason)
        try:
            self._publisher.withdraw(member.cell.url, 0.0)
        except (TrainerError, ServiceError) as error:
            _log.warning("%s: %s", member.cell.name, error)
        self._later(member)

    def _later(self, member: Member) -> None:
        member.retry_at = self._clock.monotonic() + member.retry_s
        member.retry_s = min(2 * member.retry_s, _RETRY_S[1])

    def _watch(self) -> None:
        self._health.watch([member.cell.url for member in self._members])

    # -- telling -------------------------------------------------------------------------------------------------------

    def _enter(self, member: Member, event: CellEvent, reason: str) -> None:
        before, now = member.state, self._clock.monotonic()
        member.state = after(before, event)
        seconds, member.since = now - member.since, now
        _log.info("%s is %s after %.2f s of %s: %s", member.cell.name, member.state, seconds, before, reason)
        self._observer(CellMoved(self._clock.time(), member.cell.name, member.state, before, seconds, reason))

    def _measured(self, member: Member, to: str, switched: Switched) -> None:
        drained = switched.drained
        self._observer(
            SwitchMeasured(self._clock.time(), member.cell.name, to, switched.phases, drained.finished, drained.moved)
        )
