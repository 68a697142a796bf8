"""The cells of a training at work: what the manager needs to know of runs and batches, and its beginning and end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from gyre_sdk.events import CellMoved
from gyre_sdk.trainer.cells.baselines import decision_of
from gyre_sdk.trainer.cells.capacity import Counters
from gyre_sdk.trainer.cells.load import LoadMeter
from gyre_sdk.trainer.cells.manager import Cell, Manager
from gyre_sdk.trainer.cells.rates import RateMeter
from gyre_sdk.trainer.cells.state import CellState
from gyre_sdk.trainer.cells.switch import Patience, parking_of
from gyre_sdk.trainer.children import cell_names, engine_options, standalone_names
from gyre_sdk.trainer.rollouts import Rollouts
from gyre_sdk.trainer.stack import Stack
from gyre_sdk.trainer.transports import choose
from gyre_sdk.trainer.units import SealedGroup


class Crew:
    """Context manager: inside it cells go over as the plan says; at its end all serve again.

    Args:
        awaited: gives the groups of the open step and of the steps that follow in its burst, in their order.
    """

    def __init__(self, stack: Stack, rollouts: Rollouts, awaited: Callable[[], Sequence[str]]) -> None:
        settings = stack.config.cells
        assert settings is not None and stack.core is not None
        self._rollouts = rollouts
        self._awaited = awaited
        self._tokens = 0
        self._runs = 0
        self._sealed = set[str]()
        decide, policy = decision_of(settings)
        slow = max(60.0, 2 * settings.lease_s)  # a satellite's transfers, and the unit that it has in hand
        parking = parking_of(engine_options(stack.config), choose(stack.config))
        self._rates = RateMeter(lambda: stack.replicas)
        beside = standalone_names(settings)
        self._cells = [
            Cell(name, url, parking, launched, standalone=name in beside)
            for name, url, launched in zip([*cell_names(settings), *beside], stack.replicas, stack.cells, strict=True)
        ]
        self.manager = Manager(
            self._cells,
            training=stack.core,
            publisher=stack.publisher,
            counters=self.counters,
            policy=policy,
            decide=decide,
            load=LoadMeter(stack.journal, self._rates),
            drain_s=settings.drain_s,
            patience=Patience(settings.drain_s, join_s=slow, leave_s=slow),
            runs_per_cell=settings.runs_per_cell
            or -(-stack.config.rollout.concurrency // (settings.count + settings.standalone)),
            observer=stack.observer,
        )
        self._stack = stack
        self._alone, stack.on_moved = stack.on_moved, self.manager.moved
        stack.core.check = self.check
        stack.on_end = self.manager.end

    def __enter__(self) -> Self:
        states = CellState.SERVING, CellState.LOADING
        for cell in self._cells:  # one that never moves is heard of too
            self._stack.observer(
                CellMoved(time.time(), cell.name, *states, 0.0, "the training begins", cell.standalone)
            )
        self.manager.start()
        self._rates.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rates.stop()
        self.manager.stop()
        self._stack.on_moved = self._alone
        for url, state in zip(self._stack.replicas, self.manager.states().values(), strict=True):
            if state is CellState.FAILED:  # it serves again once it answers, whoever uses the stack next
                self._stack.publisher.returned(url, known=False)

    def check(self) -> None:
        """Raise when a process was given up, or the manager of cells or what it measures with has ended.

        Raises:
            TrainerError: naming it.
        """
        self._stack.check()
        self.manager.check()
        self._rates.check()

    def sealed(self, group: SealedGroup, runs: int) -> None:
        """Count what a group's runs gave to training."""
        self._sealed.add(group.group)
        self._tokens += sum(unit.tokens for unit in group.units)
        self._runs += runs

    def counters(self) -> Counters:
        """Return what the manager's observation is made of."""
        groups, rollout = self._awaited(), self._stack.config.rollout
        flow, awaited = self._rollouts.flow(), set(groups)
        closed = [group for group in groups if group not in flow.open and group not in self._sealed]
        return Counters(
            dispatched=flow.dispatched,
            started=flow.started,
            finished=flow.finished,
            live_ages=[age for (group, _), age in flow.ages.items() if group in awaited],
            durations=list(flow.durations),
            awaited_runs=sum(members for group, members in flow.open.items() if group in awaited),
            mean_tokens_per_run=self._tokens / self._runs if self._runs else 0.0,
            longest=flow.longest,
            closed_runs=len(closed) * rollout.runs_per_group,
        )
