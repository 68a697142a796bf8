"""Who moves between serving and training: a pure decision from a handful of measured numbers.

The waterlevel rule of arXiv:2609.33848: the next cell may leave rollout only when the remaining capacity covers the
unfinished runs, `w <= C_R - C_e`; cells leave in a fixed order, core first, and make a growing training prefix. On top of
it, because the rule by itself loses where there is little to train or where a switch is dear:

* a cell leaves only for work that is ready, and only when that work is worth the switch there and back (hysteresis), unless
  the burst is complete: then publication waits for nothing else;
* a satellite joins only when the time it saves exceeds switch, pull and push (join gate), and never more cells than
  finish what is left of the burst together (`pace`);
* cells that run out of ready work while runs live go back, and so do cells when the water rises above the capacity;
* `standing` cells train whatever the water is: with `elastic=False` this is a fixed split, the arrangement to fall back
  to where moving does not pay.

`plan` costs the same for ten runs and for a million.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import ceil, inf


class Move(StrEnum):
    """Which way cells go."""

    TO_TRAINING = "to_training"
    TO_SERVING = "to_serving"


@dataclass(frozen=True, slots=True)
class Action:
    """Cells to move now, together."""

    move: Move
    cells: int
    """How many: the next ones of the fixed order to training, the last ones of it back."""
    reason: str
    """Why, with the numbers that decided."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What a manager can count and measure; all of it aggregates, none of it per run."""

    serving: int
    """Cells that take requests."""
    training: int
    """Cells that take units."""
    moving: int
    """Cells on their way, either way."""
    dispatched: int
    """Runs handed out so far."""
    started: int
    """Runs that got a slot so far."""
    finished: int
    """Runs that ended so far."""
    cell_capacity: float
    """Runs that one serving cell carries at full speed (measured: KV bytes, token rate)."""
    ready_s: float
    """Sealed training work of the open burst that nobody has done yet, cell-seconds."""
    awaited_s: float
    """Training work of the open burst whose runs have not all ended yet, estimated, cell-seconds."""
    rollout_left_s: float
    """Estimated seconds until the last run of the open burst ends, as cells serve now."""
    to_train_s: float
    """Measured seconds from leaving the routing table until the replica has made room."""
    to_serve_s: float
    """Measured seconds from the last unit to the first request."""
    join_s: float
    """Measured seconds of one satellite's weight pull and gradient push at the core, which each batch needs."""
    standalone: int = 0
    """Replicas beside the cells, which serve all the time; each carries as much as a cell."""

    @property
    def water(self) -> int:
        """Unfinished runs."""
        return self.dispatched - self.finished

    @property
    def live(self) -> int:
        """Runs that hold a slot."""
        return self.started - self.finished

    @property
    def carrying(self) -> int:
        """Replicas that take requests."""
        return self.serving + self.standalone


@dataclass(frozen=True, slots=True)
class Policy:
    """How eager the plan is. The defaults suit runs of minutes to hours."""

    standing: int = 0
    """Cells that train whatever the water is; the training prefix never falls below it."""
    elastic: bool = True
    """False: hold `standing` and move nothing else."""
    hysteresis: float = 1.0
    """A move must be worth this many times its measured cost, by the work that is ready now. Below 1 it counts on more."""
    pace: float = 1.0
    """Training cells at most this many times what finishes the burst's training together with its runs; `inf`: no cap."""
    reserve: float = 1.0
    """Capacity to keep, in multiples of the water."""
    at_once: int = 0
    """Cells that may move in one action; 0: any number."""


def plan(seen: Observation, policy: Policy) -> tuple[Action, ...]:
    """Return what to move now: nothing, or one action.

    Never moves while a move is under way, and never takes the last serving cell while runs are unfinished.
    """
    if seen.moving:
        return ()
    action = _hold(seen, policy) or _give_back(seen, policy) or _release(seen, policy)
    return (action,) if action else ()


def taken_back(seen: Observation, policy: Policy, *, others: int) -> str | None:
    """Return in words why a cell that has drained serves on after all; None where it may go.

    It does where the water rose above what the other cells carry, but for the standing cells.

    Args:
        seen: with the cell among those that move.
        others: cells that drain too and serve on, or would do so before this one leaves.
    """
    serving = seen.carrying + others
    ahead = seen.training + seen.moving - others - 1
    if ahead < policy.standing and serving:
        return None
    if not seen.water or seen.water * policy.reserve <= serving * seen.cell_capacity:
        return None
    return f"the water, {seen.water} runs, is above what {serving} other replicas carry"


def _hold(seen: Observation, policy: Policy) -> Action | None:
    """Bring the standing split about."""
    missing = min(policy.standing - seen.training, _may_leave(seen))
    if missing > 0:
        return Action(Move.TO_TRAINING, missing, f"{policy.standing} cells train whatever the water is")
    return None


def _give_back(seen: Observation, policy: Policy) -> Action | None:
    """Return cells that have nothing to train, or that the water needs."""
    movable = seen.training - min(policy.standing, max(0, seen.training + seen.serving - _kept(seen)))
    if not policy.elastic or movable <= 0 or not seen.water:
        return None
    if not seen.ready_s:
        cost = policy.hysteresis * (seen.to_serve_s + seen.to_train_s)
        if not seen.carrying or seen.rollout_left_s > cost:
            runs = f"{seen.water} runs go on for about {seen.rollout_left_s:.0f} s"
            why = runs if seen.rollout_left_s < inf else f"{seen.water} runs go on, nobody knows how long"
            return Action(Move.TO_SERVING, movable, f"nothing is ready to train, {why}")
        return None
    lacking = seen.water * policy.reserve - seen.carrying * seen.cell_capacity
    if lacking <= 0:
        return None
    remaining = seen.ready_s / seen.training
    if seen.carrying and remaining <= policy.hysteresis * (seen.to_serve_s + seen.to_train_s):
        return None
    cells = min(movable, ceil(lacking / seen.cell_capacity))
    return Action(Move.TO_SERVING, cells, f"the water, {seen.water} runs, is above what {seen.carrying} replicas carry")


def _release(seen: Observation, policy: Policy) -> Action | None:
    """Let cells leave that the water does not need and the work is worth."""
    if not policy.elastic or seen.ready_s <= 0:
        return None
    spare = seen.carrying - ceil(seen.water * policy.reserve / seen.cell_capacity)
    cells = min(spare, _may_leave(seen), _useful(seen, policy) - seen.training)
    if policy.at_once:
        cells = min(cells, policy.at_once)
    if cells <= 0:
        return None
    if not seen.training:
        worth = policy.hysteresis * (seen.to_train_s + seen.to_serve_s)
        if seen.awaited_s and seen.ready_s <= worth:
            return None
        why = f"{seen.ready_s:.0f} cell-seconds are ready, {seen.carrying - cells} replicas carry {seen.water} runs"
        return Action(Move.TO_TRAINING, cells, why)
    saved = seen.ready_s / seen.training - seen.ready_s / (seen.training + cells)
    cost = seen.to_train_s + seen.to_serve_s + cells * seen.join_s
    if saved <= policy.hysteresis * cost:
        return None
    return Action(Move.TO_TRAINING, cells, f"joining saves {saved:.0f} s of training and costs {cost:.0f} s")


def _useful(seen: Observation, policy: Policy) -> int:
    """Return how many training cells the work can use.

    Work R on k cells with pulls one after the other takes about `k * join + R / k`: a further one is worth `hysteresis`
    times its pull and push up to `sqrt(R / (hysteresis * join))`.
    """
    wanted = seen.training + seen.serving
    dear = policy.hysteresis * seen.join_s
    if dear > 0 and seen.ready_s < dear * wanted**2:
        wanted = max(1, int((seen.ready_s / dear) ** 0.5))
    if seen.rollout_left_s > 0 and policy.pace < inf:
        together = policy.pace * (seen.ready_s + seen.awaited_s) / seen.rollout_left_s
        wanted = min(wanted, ceil(min(together, wanted)))
    return wanted


def _may_leave(seen: Observation) -> int:
    """Return how many cells can go without taking the last replica from unfinished runs."""
    return seen.serving - (_kept(seen) if seen.water else 0)


def _kept(seen: Observation) -> int:
    """Return how many cells must serve where there are runs: one, unless other replicas do."""
    return 0 if seen.standalone else 1
