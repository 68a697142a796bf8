"""Ways to share cells that do not look ahead, to compare the plan with: the simulator's `colocate` and `async`, for the manager."""

from __future__ import annotations

from collections.abc import Callable

from gyre_sdk.trainer.cells.plan import Action, Move, Observation, Policy, plan
from gyre_sdk.trainer.cells.settings import CellsConfig

Decide = Callable[[Observation, Policy], tuple[Action, ...]]


def colocate(seen: Observation, policy: Policy) -> tuple[Action, ...]:
    """All cells serve until no run is left, then all train until new runs wait."""
    if seen.moving:
        return ()
    if not seen.water and seen.serving:
        return (Action(Move.TO_TRAINING, seen.serving, "no run is left"),)
    if seen.water and seen.training:
        return (Action(Move.TO_SERVING, seen.training, f"{seen.water} runs wait"),)
    return ()


def decision_of(settings: CellsConfig) -> tuple[Decide, Policy]:
    """Return what decides under these settings, and its policy."""
    policy = Policy(
        standing=settings.standing,
        elastic=settings.policy == "elastic",
        hysteresis=settings.hysteresis,
        pace=settings.pace,
        reserve=settings.reserve,
    )
    return (colocate if settings.policy == "colocate" else plan), policy
