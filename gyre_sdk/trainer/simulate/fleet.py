"""A fleet of cells that serves runs and trains on them: discrete events over fluid rates.

Serving cells share the runs evenly (the proxy routes by load), so every live run advances at one rate and one clock of
*work done per run* orders all ends: an event costs O(log n). A run's length is seconds of work on a full cell; one that
has a cell for itself goes `solo` times faster, and above the capacity all share. Training work is a queue that is
eaten at one cell-second per training cell and second.

Runs start in the order of their dispatch. A burst's groups are fixed when they are dispatched; they train in the order
in which they close, `groups` to a step, and a step's last unit closes it. After `mu` steps weights are published and
more groups are dispatched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.cells.capacity import rollout_left
from gyre_sdk.trainer.cells.plan import Action, Move, Observation
from gyre_sdk.trainer.cells.state import CellEvent, CellState, after
from gyre_sdk.trainer.simulate.scenario import Scenario
from gyre_sdk.trainer.simulate.workload import Workload

_EPSILON = 1e-6
"""Seconds; far below any real duration, far above what adding up a training of years loses."""
_STUCK = 10_000
"""Events without the clock moving after which a policy is at fault."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How a policy's fleet works, apart from who moves."""

    streaming: bool = True
    """Groups train as they close, in units from one shared queue. False: a step waits for all its groups, which are then
    dealt to the cells by count, and the step lasts as long as the cell with most work."""
    ahead: bool = True
    """Runs may be under way beyond the open burst."""
    training: int = 0
    """Cells that train from the start."""
    dealt: int = 1
    """Cells that a step is dealt to when not streaming."""


@dataclass(slots=True)
class Counts:
    """What must add up."""

    dispatched: int = 0
    started: int = 0
    finished: int = 0
    trained: int = 0
    """Groups."""
    switches: int = 0
    """Cells that changed role."""


@dataclass(slots=True)
class Trace:
    """What happened, for reports and pictures."""

    cells: list[list[tuple[float, CellState]]]
    """Per cell, since when it was what; seconds."""
    water: list[tuple[float, int, float, float]] = field(default_factory=list)
    """Second, unfinished runs, capacity in runs, training work that is ready in cell-seconds. Empty unless asked for."""
    actions: list[tuple[float, Action]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    """Second at which each step closed."""
    trained: list[int] = field(default_factory=list)
    """Groups in the order in which they train."""
    staleness: list[int] = field(default_factory=list)
    """Per group of `trained`: its step minus the steps published when it was dispatched.
    Groups of a burst train as they close, so at most `2 mu - 1 + phi`."""


class Fleet:
    """One simulated training, driven to its end by `run`."""

    def __init__(self, scenario: Scenario, workload: Workload, mode: Mode, *, record: bool = False) -> None:
        cells = scenario.fleet.cells
        self.scenario, self.workload, self.mode = scenario, workload, mode
        self.now = 0.0
        self.serving, self.training, self.moving = cells - mode.training, mode.training, 0
        self.counts = Counts()
        self.published = 0
        self.train_busy = 0.0
        """Cell-seconds of training cells that had work."""
        self.slots_used = 0.0
        """Cell-seconds of serving cells, by the share of their slots in use."""
        first = [CellState.TRAINING] * mode.training + [CellState.SERVING] * self.serving
        self.trace = Trace([[(0.0, state)] for state in first])
        self._record = record
        self._done = 0.0
        """Work that every live run did since the start, seconds on a full cell; runs end at marks of this clock."""
        self._ends: list[tuple[float, int, float]] = []
        self._queue = deque[tuple[int, float]]()
        self._left = [len(group) for group in workload.lengths]
        self._version: list[int] = []
        """Per dispatched group, steps published at its dispatch."""
        self._closed: dict[int, list[int]] = {}
        """Groups of later bursts that are complete, by burst."""
        self._dealing: list[float] = []
        self._fed = 0
        """Groups whose work was queued."""
        self._queued = self._eaten = 0.0
        self._marks = deque[float]()
        """Queued work at which each coming step closes."""
        self._arrivals = deque[tuple[float, int, CellEvent]]()
        self._open_runs = 0
        """Unfinished runs of the open burst."""
        self._last_start = 0.0
        self._longest = self._length_sum = 0.0
        self._work_sum = 0.0
        self._closed_groups = 0
        self._dispatch()

    # What a policy may look at.

    @property
    def burst(self) -> int:
        """The open burst."""
        return len(self.trace.steps) // self.scenario.batch.mu

    @property
    def water(self) -> int:
        """Unfinished runs."""
        return self.counts.dispatched - self.counts.finished

    @property
    def unfinished(self) -> list[int]:
        """Unfinished runs of each dispatched group."""
        return self._left[: len(self._version)]

    @property
    def ready_s(self) -> float:
        """Training work that could be done now, cell-seconds."""
        left = self._queued - self._eaten
        return left if left > _EPSILON else 0.0

    @property
    def awaited_groups(self) -> int:
        """Groups of the open burst whose work is not queued yet."""
        batch = self.scenario.batch
        return min((self.burst + 1) * batch.mu, batch.steps) * batch.groups - self._fed

    @property
    def complete_steps(self) -> int:
        """Steps whose groups are all there and that are not closed."""
        return len(self._marks)

    def observe(self) -> Observation:
        """Return what a manager would measure now."""
        costs, counts = self.scenario.costs, self.counts
        mean = self._work_sum / self._closed_groups if self._closed_groups else 0.0
        return Observation(
            serving=self.serving,
            training=self.training,
            moving=self.moving,
            dispatched=counts.dispatched,
            started=counts.started,
            finished=counts.finished,
            cell_capacity=self.scenario.fleet.slots,
            ready_s=self.ready_s,
            awaited_s=self.awaited_groups * mean,
            rollout_left_s=self._rollout_left(),
            to_train_s=costs.drain_s + costs.switch_s,
            to_serve_s=costs.load_s,
            join_s=costs.join_s,
        )

    def _rollout_left(self) -> float:
        """Estimate when the open burst's last run ends, from the runs that ended so far: none of it looks ahead."""
        ended, waiting = self.counts.finished, max(0, self._open_runs - len(self._ends))
        return rollout_left(
            self._done - self._last_start if self._open_runs else None,
            self._longest if ended else None,
            self._length_sum / ended if ended else 0.0,
            waiting=waiting,
            slots=self.serving * self.scenario.fleet.slots,
            rate=self._rate(),
        )

    # The course of events.

    def run(self, decide: Callable[[Fleet], Sequence[Action]]) -> Fleet:
        """Go on until the last step closes.

        Raises:
            TrainerError: the policy leaves the fleet with nothing that could ever happen.
        """
        steps, stuck = self.scenario.batch.steps, 0
        while True:
            self._close_steps()
            if len(self.trace.steps) >= steps:
                return self
            for action in decide(self):
                self._act(action)
            self._fill()
            if self._record:
                capacity = self.serving * self.scenario.fleet.slots
                self.trace.water.append((self.now, self.water, capacity, self.ready_s))
            before = self.now
            self._advance()
            stuck = 0 if self.now > before else stuck + 1
            if stuck > _STUCK:
                raise TrainerError(f"the policy goes in circles {self.now:.1f} s into {self.scenario.name}")

    def _rate(self) -> float:
        """Return at what multiple of a full cell's speed each live run advances."""
        live = len(self._ends)
        if not live or not self.serving:
            return 0.0
        load = live / (self.serving * self.scenario.fleet.slots)
        solo = self.scenario.fleet.solo
        return solo / (1 + (solo - 1) * load) if load <= 1 else 1 / load

    def _advance(self) -> None:
        rate, eating = self._rate(), self.training if self.ready_s else 0
        mark = self._marks[0] if self._marks else self._queued
        ends = self.now + max(0.0, self._ends[0][0] - self._done) / rate if rate else inf
        eaten = self.now + max(0.0, mark - self._eaten) / eating if eating else inf
        then = min(ends, eaten, self._arrivals[0][0] if self._arrivals else inf)
        if then == inf:
            raise TrainerError(
                f"nothing can happen any more {self.now:.1f} s into {self.scenario.name}: {self.serving} cells serve,"
                f" {self.training} train, {self.water} runs are unfinished, {self.ready_s:.1f} cell-seconds are ready;"
                " the policy must move a cell"
            )
        passed = then - self.now
        self._done += passed * rate
        if ends == then:
            self._done = max(self._done, self._ends[0][0])  # however little the clock can tell of it
        self.slots_used += passed * min(self.serving, len(self._ends) / self.scenario.fleet.slots)
        self.train_busy += passed * eating
        self._eaten = mark if eaten == then else min(self._queued, self._eaten + passed * eating)
        self.now = then
        while self._arrivals and self._arrivals[0][0] <= then:
            self._arrive(*self._arrivals.popleft())
        while self._ends and self._ends[0][0] <= self._done + _EPSILON:
            _, group, length = heappop(self._ends)
            self._finish(group, length)

    # Runs.

    def _dispatch(self) -> None:
        """Hand out groups up to the allowed depth, `(phi + mu) * B` beyond what is published."""
        batch = self.scenario.batch
        depth = batch.mu + (batch.ahead if self.mode.ahead else 0)
        limit = min(int((self.published + depth) * batch.groups), batch.steps * batch.groups)
        for group in range(len(self._version), limit):
            lengths = self.workload.lengths[group]
            self._version.append(self.published)
            self._queue.extend((group, length) for length in lengths)
            self.counts.dispatched += len(lengths)
        size = batch.mu * batch.groups
        self._open_runs = sum(self._left[self.burst * size : (self.burst + 1) * size])

    def _fill(self) -> None:
        """Start waiting runs where there are slots."""
        free = int(self.serving * self.scenario.fleet.slots + _EPSILON) - len(self._ends)
        open_until = (self.burst + 1) * self.scenario.batch.mu * self.scenario.batch.groups
        while free > 0 and self._queue:
            group, length = self._queue.popleft()
            heappush(self._ends, (self._done + length, group, length))
            self.counts.started += 1
            free -= 1
            if group < open_until:
                self._last_start = self._done

    def _finish(self, group: int, length: float) -> None:
        self.counts.finished += 1
        self._length_sum += length
        self._longest = max(self._longest, length)
        burst = group // (self.scenario.batch.mu * self.scenario.batch.groups)
        if burst == self.burst:
            self._open_runs -= 1
        self._left[group] -= 1
        if self._left[group]:
            return
        self._closed_groups += 1
        self._work_sum += self.workload.work[group]
        if burst == self.burst:
            self._feed(group)
        else:
            self._closed.setdefault(burst, []).append(group)

    # Training.

    def _feed(self, group: int) -> None:
        """Queue a complete group of the open burst."""
        batch = self.scenario.batch
        step = self._fed // batch.groups
        self._fed += 1
        self.trace.trained.append(group)
        self.trace.staleness.append(step - self._version[group])
        if self.mode.streaming:
            self._queued += self.workload.work[group]
        else:
            self._dealing.append(self.workload.work[group])
        if self._fed % batch.groups == 0:
            if not self.mode.streaming:
                self._queued += _dealt(self._dealing, self.mode.dealt)
                self._dealing = []
            self._marks.append(self._queued)

    def _close_steps(self) -> None:
        batch = self.scenario.batch
        while self._marks and self._eaten >= self._marks[0] - _EPSILON:
            self._marks.popleft()
            self.trace.steps.append(self.now)
            self.counts.trained += batch.groups
            steps = len(self.trace.steps)
            if steps % batch.mu == 0 or steps == batch.steps:
                self.published = steps
                self._dispatch()
                for group in self._closed.pop(self.burst, ()):
                    self._feed(group)

    # Moves.

    def _act(self, action: Action) -> None:
        """Start a move; cells go side by side, as the manager's do.

        Satellites make room once the core trains. Those that pull weights together share its line, so all take as long as
        one after the other would. A cell without runs has nothing to drain.
        """
        if self.moving:
            raise TrainerError(f"{action.cells} cells to move while {self.moving} move; wait for them")
        available = self.serving if action.move is Move.TO_TRAINING else self.training
        if not 0 < action.cells <= available:
            raise TrainerError(f"{action.cells} cells to move {action.move.replace('_', ' ')}, of {available}")
        self.trace.actions.append((self.now, action))
        self.counts.switches += action.cells
        self.moving = action.cells
        costs = self.scenario.costs
        if action.move is Move.TO_TRAINING:
            drain = costs.drain_s if self._ends else 0.0
            self._done -= costs.recompute_s * action.cells / self.serving if self._ends else 0.0
            self.serving -= action.cells
            core = not self.training
            drained = self.now + drain
            at = drained + costs.switch_s
            waits, pulls = (
                (costs.switch_s * core, costs.join_s * (action.cells - core)) if self.mode.streaming else (0, 0)
            )
            for cell in range(self.training, self.training + action.cells):
                later = cell > 0
                self._enter(cell, CellEvent.LEAVE, self.now)
                self._enter(cell, CellEvent.DRAINED, drained + waits * later)
                self._arrivals.append((at + (waits + pulls) * later, cell, CellEvent.READY))
        else:
            self.training -= action.cells
            for cell in range(self.training, self.training + action.cells):
                self._enter(cell, CellEvent.RETURN, self.now)
                self._arrivals.append((self.now + costs.load_s, cell, CellEvent.LOADED))

    def _arrive(self, at: float, cell: int, event: CellEvent) -> None:
        self.moving -= 1
        if event is CellEvent.READY:
            self.training += 1
        else:
            self.serving += 1
        self._enter(cell, event, at)

    def _enter(self, cell: int, event: CellEvent, at: float) -> None:
        history = self.trace.cells[cell]
        history.append((at, after(history[-1][1], event)))


def _dealt(work: Sequence[float], cells: int) -> float:
    """Return the cell-seconds that a step occupies when its groups are dealt to cells by count, first come first."""
    return cells * max(sum(work[first::cells]) for first in range(min(cells, len(work))))


def gpu_seconds(fleet: Fleet) -> list[dict[CellState, float]]:
    """Return per cell how long it was in which state; each cell's sum is the makespan."""
    found = []
    for history in fleet.trace.cells:
        sums: dict[CellState, float] = {}
        for (start, state), (stop, _) in zip(history, [*history[1:], (fleet.now, history[-1][1])], strict=True):
            start, stop = min(start, fleet.now), min(stop, fleet.now)
            sums[state] = sums.get(state, 0.0) + stop - start
        found.append(sums)
    return found
