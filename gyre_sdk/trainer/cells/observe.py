"""What the plan is told, from what was counted and measured."""

from __future__ import annotations

from collections.abc import Collection

from gyre_sdk.trainer.cells.capacity import Costs, Counters, rollout_left
from gyre_sdk.trainer.cells.plan import Observation
from gyre_sdk.trainer.cells.state import CellState
from gyre_sdk.trainer.cells.training_side import Progress

__all__ = ["observed"]

_MOVING = (CellState.DRAINING, CellState.SWITCHING, CellState.LOADING)
_TOKENS_PER_SECOND = 1000.0
"""Training speed of a cell until the first has trained."""


def observed(
    states: Collection[CellState],
    counters: Counters,
    progress: Progress,
    costs: Costs,
    *,
    capacity: float,
    standalone: int = 0,
) -> Observation:
    """Return the plan's observation.

    Work is counted in tokens and told in cell-seconds, at the mean measured speed of a cell. Of the open burst, units that
    somebody computes count as ready: they are not done. So do closed groups that the burst's next steps will take: cells that
    went back while the core steps would be wanted again a moment later. Cells that failed count nowhere.

    Args:
        capacity: runs that one serving cell carries.
        standalone: replicas beside the cells.
    """
    speeds = [speed for speed in progress.tokens_per_second.values() if speed > 0]
    speed = sum(speeds) / len(speeds) if speeds else _TOKENS_PER_SECOND
    serving = sum(state is CellState.SERVING for state in states)
    ended = counters.durations
    per_run = max(1.0, counters.mean_tokens_per_run)
    ready = progress.ready_tokens + progress.leased_tokens + counters.closed_runs * per_run
    return Observation(
        serving=serving,
        training=sum(state is CellState.TRAINING for state in states),
        moving=sum(state in _MOVING for state in states),
        dispatched=counters.dispatched,
        started=counters.started,
        finished=counters.finished,
        cell_capacity=capacity,
        ready_s=ready / speed,
        awaited_s=counters.awaited_runs * per_run / speed,
        rollout_left_s=rollout_left(
            min(counters.live_ages, default=None),
            max(counters.longest, *ended) if ended else None,
            sum(ended) / len(ended) if ended else 0.0,
            waiting=max(0, counters.awaited_runs - len(counters.live_ages)),
            slots=(serving + standalone) * capacity,
        ),
        to_train_s=costs.to_train.value,
        to_serve_s=costs.to_serve.value,
        join_s=costs.join.value,
        standalone=standalone,
    )
