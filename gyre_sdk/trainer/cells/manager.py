"""The manager of cells: looks, asks the plan, and carries out what it says while agents notice nothing.

One thread ticks: who died and who is back, an observation from what was counted and measured, the plan, its actions, the
cells of one side by side: to training the core first, then satellites in their order; back in reverse. When a cell has
drained it looks at the water again: one that is not to leave any more serves on, the last first. What it must never do it
does not do whatever the plan says: take the last serving cell from runs that are unfinished (one cell alone alternates),
let a satellite train without the core, or wake a replica whose devices the training side has not let go.

A cell that fails takes no requests and no units. Once its replica answers and the training side has let go, it comes back
by loading the newest weights, like any other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import httpx

from gyre_sdk.errors import TrainerError
from gyre_sdk.events import CellsSeen
from gyre_sdk.harness.hooks import unobserved
from gyre_sdk.harness.ports import Clock, Observer
from gyre_sdk.trainer.cells.capacity import Capacity, Costs, Counters, Load, carried
from gyre_sdk.trainer.cells.health import Health
from gyre_sdk.trainer.cells.moves import LOST, Member, Moves, side_by_side
from gyre_sdk.trainer.cells.observe import observed
from gyre_sdk.trainer.cells.plan import Action, Move, Observation, Policy, plan, taken_back
from gyre_sdk.trainer.cells.state import CellState
from gyre_sdk.trainer.cells.switch import Cell, Patience
from gyre_sdk.trainer.cells.training_side import TrainingSide
from gyre_sdk.trainer.publish import Publisher
from gyre_sdk.trainer.transports import Unready

__all__ = ["Cell", "Manager"]

Decide = Callable[[Observation, Policy], Sequence[Action]]
_CHECK_S = 1.0
"""Seconds between looks at processes, and between reports of what was seen."""

_log = logging.getLogger("gyre.trainer")


class Manager:
    """Moves cells between serving and training.

    Args:
        cells: the core first, and last the replicas beside them, which never move; all serve, and are published to.
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
        self._members = [Member(cell, not n, clock.monotonic()) for n, cell in enumerate(cells)]
        self._cells = [member for member in self._members if not member.cell.standalone]
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
        self._moves = Moves(
            training=training,
            publisher=publisher,
            patience=self._patience,
            observer=observer,
            clock=clock,
            costs=costs or Costs(),
        )
        self._period_s = period_s
        self._clock = clock
        self._health = Health(clock, min(0.5, 2 * period_s))
        self._acting = threading.Lock()
        """Held while cells are moved: by the thread, or by who brings them back at the end."""
        self._looking = threading.Lock()
        """Held while it is decided whether a cell that has drained leaves: one at a time."""
        self._elsewhere: dict[str, str] = {}
        """Replicas that came back under another address."""
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
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(seconds)
        self._health.stop()
        # in a thread: a core that was broken off in the middle of a unit never lets go of it
        last = threading.Thread(target=self._gather, args=(seconds,), name="gather cells", daemon=True)
        last.start()
        last.join(max(0.0, give_up - time.monotonic()))
        if last.is_alive():
            _log.warning("cells were not all brought back to serving in %.0f s: %s", seconds, self.states())

    def end(self) -> None:
        """Note that all cells are told to end; after `stop`. Idempotent."""
        self._moves.end([member for member in self._members if member.state is not CellState.STOPPED])

    def check(self) -> None:
        """Raise what ended the manager or its looks at replicas, or that a cell's process was given up.

        Raises:
            TrainerError: naming it.
        """
        if self._failure is not None:
            raise TrainerError(
                f"the manager of cells ended: {type(self._failure).__name__}: {self._failure}"
            ) from self._failure
        self._health.check()
        for member in self._members:
            if member.cell.launched is not None:
                member.cell.launched.check()

    @property
    def costs(self) -> Costs:
        """What switches were measured to take."""
        return self._moves.costs

    def states(self) -> dict[str, CellState]:
        """Return what each cell does, the core first, and last the replicas beside them."""
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
        seen = self._observe()
        self._tell(seen)
        actions = self._decide(seen, self._policy)
        if actions and not self._publisher.can_route():
            return  # nothing can go over while the proxy is away; what was seen is old when it is back
        for action in actions:
            self._carry_out(action, seen)

    def _observe(self) -> Observation:
        counters, progress = self._counters(), self._training.progress()
        if progress.pull_s or progress.push_s:
            self._moves.joining_takes(progress.pull_s + progress.push_s)
        self._carried = carried(self._load(), self._bound)
        states, runs = [member.state for member in self._cells], self._carried.runs
        return observed(states, counters, progress, self.costs, capacity=runs, standalone=self._standalone)

    @property
    def _standalone(self) -> int:
        """Replicas beside the cells that serve now."""
        return sum(one.cell.standalone and one.state is CellState.SERVING for one in self._members)

    def _tell(self, seen: Observation) -> None:
        """Tell observers what was seen, when it has changed."""
        now = self._clock.monotonic()
        limit = str(self._carried.limit)
        told = (seen.water, seen.serving, seen.training, seen.moving, seen.standalone, round(seen.ready_s), limit)
        if told != self._told and now - self._told_at >= _CHECK_S:
            self._told, self._told_at = told, now
            at, capacity = self._clock.time(), seen.carrying * seen.cell_capacity
            cells = (seen.serving, seen.training, seen.moving)
            self._observer(CellsSeen(at, seen.water, capacity, *cells, seen.ready_s, limit, seen.standalone))

    # -- moving --------------------------------------------------------------------------------------------------------

    def _carry_out(self, action: Action, seen: Observation) -> None:
        if action.move is Move.TO_TRAINING:
            if self._stopping.is_set():
                return
            leaving = self._leaving(action.cells, seen)
            if self._members[0].state is CellState.TRAINING or any(member.core for member in leaving):
                self._moves.leave(leaving, action.reason, self._stays)
        else:
            training = [member for member in reversed(self._members) if member.state is CellState.TRAINING]
            self._moves.go_back(training[: action.cells], action.reason)

    def _leaving(self, cells: int, seen: Observation) -> list[Member]:
        """Return the next cells of the order that can leave."""
        now = self._clock.monotonic()
        serving = [member for member in self._cells if member.state is CellState.SERVING]
        if seen.water and len(self._cells) > 1 and not seen.standalone:
            cells = min(cells, len(serving) - 1)
        waiting = self._training.waiting() if len(self._cells) > 1 else set()
        fit = [one for one in serving if now >= one.retry_at and (one.core or one.cell.name in waiting)]
        return fit[: max(0, cells)]

    def _stays(self, member: Member) -> str | None:
        """Return in words why a cell that has drained serves on; None when it leaves, which is final."""
        with self._looking:
            found = self._reason_to_stay(member)
            member.leaves = found is None
            return found

    def _reason_to_stay(self, member: Member) -> str | None:
        if self._stopping.is_set():
            return "the training ends"
        if not member.core and self._members[0].state is not CellState.TRAINING:
            return "the core does not train"
        if len(self._cells) == 1 and not self._standalone:
            return None
        after = self._cells[self._cells.index(member) + 1 :]
        draining = [one for one in self._cells if one.state is CellState.DRAINING and one is not member]
        others = sum(one.leaves is False or (one.leaves is None and one in after) for one in draining)
        return taken_back(self._observe(), self._policy, others=others)

    def _gather(self, seconds: float) -> None:
        give_up = self._clock.monotonic() + seconds
        try:
            with self._acting:
                training = [member for member in reversed(self._members) if member.state is CellState.TRAINING]
                self._moves.go_back(training, "the training ends")
                if self._clock.monotonic() <= give_up:
                    self._moves.bring_back([member for member in self._members if self._may_return(member)])
        except Exception as error:  # boundary: top of the thread that gathers; the manager has ended all the same
            _log.exception("cells were not all brought back to serving")
            self._failure = self._failure or error

    # -- deaths and returns --------------------------------------------------------------------------------------------

    def _notice(self) -> None:
        """Mark cells that died or moved, and park replicas again that were started anew while their cell trains."""
        faults: dict[Member, str] = {}
        for old, new in list(self._elsewhere.items()):
            del self._elsewhere[old]
            for member in self._members:
                if member.cell.url.rstrip("/") == old:
                    member.cell = replace(member.cell, url=new)
                    self._watch()
                    if member.state is CellState.SERVING:
                        faults[member] = f"its replica came back at {new}"
        for member in self._members:
            if member.state is CellState.SERVING and (fault := self._health.fault(member.cell.url)):
                faults.setdefault(member, fault)
        now = self._clock.monotonic()
        parked: list[Member] = []
        if now - self._checked >= _CHECK_S:
            self._checked = now
            connected = self._training.waiting()
            for member in self._cells:
                if not member.core:
                    self._end_hung(member)
                if member.state is not CellState.TRAINING:
                    continue
                if not member.core and member.has_ended:
                    faults[member] = "its worker's process ended"
                elif not member.core and member.cell.name not in connected:
                    faults[member] = LOST
                elif self._health.answers(member.cell.url):
                    parked.append(member)
        side_by_side([partial(self._moves.fail, member, reason) for member, reason in faults.items()])
        side_by_side([partial(self._keep_parked, member) for member in parked])

    def _end_hung(self, member: Member) -> None:
        """Have a worker started again of which nothing is to be expected: else its cell is in neither role for ever."""
        launched, found = member.cell.launched, self._training.hung(member.cell.name)
        if launched is not None and found is not None and found.pid == member.cell.worker_pid():
            launched.replace(member.cell.worker_name, found.pid, found.reason)

    def _keep_parked(self, member: Member) -> None:
        try:
            with self._publisher.replica(member.cell.url) as replica:
                if not member.cell.parking.is_parked(replica):
                    _log.warning(
                        "the replica of %s was started anew while its cell trains; parked again", member.cell.name
                    )
                    member.cell.parking.park(replica)
        except (TrainerError, Unready, httpx.HTTPError) as error:
            _log.warning("the replica of %s does not say whether it is parked: %s", member.cell.name, error)

    def _bring_back(self) -> None:
        now = self._clock.monotonic()
        found = [one for one in self._members if now >= one.retry_at and self._may_return(one)]
        if found and self._publisher.can_route():
            self._moves.bring_back(found)

    def _may_return(self, member: Member) -> bool:
        """Tell whether a failed cell can come back: its replica answers, and its worker has ended or is known to wait."""
        if member.state is not CellState.FAILED or not self._health.answers(member.cell.url):
            return False
        if member.telling is not None and member.telling.is_alive():
            return False
        if member.core:
            return self._training.close_gate(0.0)
        return not member.held or member.has_ended or member.cell.name in self._training.waiting()

    def _watch(self) -> None:
        self._health.watch([member.cell.url for member in self._members])
