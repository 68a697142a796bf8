"""The ways to share cells between serving and training that are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gyre_sdk.trainer.cells.plan import Action, Move, Policy, plan
from gyre_sdk.trainer.simulate.fleet import Fleet, Mode
from gyre_sdk.trainer.simulate.scenario import Scenario
from gyre_sdk.trainer.simulate.workload import Workload

Decide = Callable[[Fleet], Sequence[Action]]


@dataclass(frozen=True, slots=True)
class Setup:
    """A policy with its knobs set."""

    mode: Mode
    decide: Decide
    knobs: str = ""
    """The knobs in words, for reports."""

    def run(self, scenario: Scenario, workload: Workload, *, record: bool = False) -> Fleet:
        """Simulate one training."""
        return Fleet(scenario, workload, self.mode, record=record).run(self.decide)


def fixed(scenario: Scenario, training: int, *, streaming: bool) -> Setup:
    """Async: two pools that never change."""
    cells = scenario.fleet.cells
    mode = Mode(streaming=streaming, training=training, dealt=training)
    return Setup(mode, _stay, f"{training} of {cells} cells train")


def colocated(scenario: Scenario, *, streaming: bool) -> Setup:
    """Colocate, strictly synchronous: all cells serve until no run is left, then all train."""
    return Setup(Mode(streaming=streaming, ahead=False, dealt=scenario.fleet.cells), _together)


def carried(scenario: Scenario, *, whole_burst: bool, streaming: bool = True) -> Setup:
    """Colocate that carries partial runs over: all cells train once a step (or a burst) is complete, runs wait."""
    when = "a burst is complete" if whole_burst else "a step is complete"
    mode = Mode(streaming=streaming, dealt=scenario.fleet.cells)
    return Setup(mode, _carry_burst if whole_burst else _carry_step, f"trains when {when}")


def elastic(policy: Policy) -> Setup:
    """The waterlevel plan, as the manager of cells calls it; the standing cells are started in their role."""

    def decide(fleet: Fleet) -> Sequence[Action]:
        return plan(fleet.observe(), policy)

    return Setup(Mode(training=policy.standing), decide, _in_words(policy))


def _stay(fleet: Fleet) -> Sequence[Action]:
    return ()


def _together(fleet: Fleet) -> Sequence[Action]:
    if fleet.moving:
        return ()
    if not fleet.water and fleet.serving:
        return (Action(Move.TO_TRAINING, fleet.serving, "no run is left"),)
    if fleet.water and fleet.training:
        return (Action(Move.TO_SERVING, fleet.training, "new runs wait"),)
    return ()


def _carry_step(fleet: Fleet) -> Sequence[Action]:
    return _carry(fleet, fleet.complete_steps > 0)


def _carry_burst(fleet: Fleet) -> Sequence[Action]:
    return _carry(fleet, fleet.awaited_groups == 0)


def _carry(fleet: Fleet, complete: bool) -> Sequence[Action]:
    if fleet.moving:
        return ()
    if fleet.training and not complete and fleet.water:
        return (Action(Move.TO_SERVING, fleet.training, "the step is closed"),)
    if fleet.serving and complete and fleet.ready_s:
        return (Action(Move.TO_TRAINING, fleet.serving, "a step is complete"),)
    return ()


def _in_words(policy: Policy) -> str:
    plain = Policy()
    changed = {
        name: getattr(policy, name) for name in Policy.__slots__ if getattr(policy, name) != getattr(plain, name)
    }
    return ", ".join(f"{name} {value:g}" for name, value in changed.items()) or "as it comes"


def split(policy: Policy, training: int) -> Policy:
    """Return a policy that holds a fixed split."""
    return replace(policy, standing=training, elastic=False)
