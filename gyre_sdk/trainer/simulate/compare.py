"""All policies on the same draws: makespan, GPU-hours by role, idle time, staleness, switches; mean and spread over seeds.

What a policy leaves open (the split of a tuned `async`, when `colocate_carry` trains, the plan's knobs) is chosen on other
draws than those that are compared, the same for all: a user does not know the future either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gyre_sdk.trainer.cells.plan import Policy
from gyre_sdk.trainer.cells.state import CellState
from gyre_sdk.trainer.simulate import controls, timeline
from gyre_sdk.trainer.simulate.controls import Setup
from gyre_sdk.trainer.simulate.fleet import Fleet, gpu_seconds
from gyre_sdk.trainer.simulate.scenario import Scenario
from gyre_sdk.trainer.simulate.workload import Recorded, Workload, drawn, resampled

ELASTIC = "elastic"
BASELINES = (
    "colocate",
    "colocate_streaming",
    "colocate_carry",
    "async",
    "async_streaming",
    "async_tuned",
    "async_tuned_streaming",
)
"""What `elastic` is compared with. The paper's own are `colocate` and `async`; the last one is the fair one to beat."""
_TUNING_SEED = 1_000_003
_TUNING_RUNS = 6000
"""Runs to choose the plan's knobs on: one training of few runs says little."""
_TUNING_DRAWS = (2, 10)
_LONG_RUNS, _TRIAL_RUNS, _TRIAL_BURSTS = 50_000, 24_000, 3
"""Trainings of more runs than the first are tuned on their beginning: so many runs and bursts at least."""
_FIRST, _BEST = 2, 4
"""All candidates are tried on so many draws, and so many of the best on all."""
_HOUR = 3600.0

Draw = Callable[[int], Workload]


class Figure(Struct, frozen=True):
    """A number over seeds."""

    mean: float
    spread: float
    """Standard deviation over seeds; 0 for one seed."""


class PolicyResult(Struct, frozen=True):
    """What a policy came to."""

    makespan_h: Figure
    serving_gpu_h: Figure
    training_gpu_h: Figure
    moving_gpu_h: Figure
    """Draining, switching and loading."""
    idle_gpu_h: Figure
    """Training cells without work, and the free slots of serving cells; part of the two above."""
    staleness_mean: Figure
    """Steps."""
    staleness_max: Figure
    switches: Figure
    """Cells that changed role."""
    knobs: str
    """How the policy was set."""


class Comparison(Struct, frozen=True):
    """A scenario under all policies."""

    scenario: str
    seeds: int
    policies: dict[str, PolicyResult]
    ratios: dict[str, Figure]
    """Baseline -> its makespan as a multiple of elastic's, per seed. Below 1: elastic loses."""
    best_baseline: str
    bound_h: float
    """No policy can be faster: see `bound_s`."""


def compare(
    scenario: Scenario, *, seeds: int = 8, store: Recorded | None = None, policies: Iterable[str] = BASELINES
) -> Comparison:
    """Simulate a scenario under `elastic` and the named baselines."""
    draw, trial = _draw(scenario, store), beginning(scenario)
    workloads, others = [draw(seed) for seed in range(seeds)], _for_tuning(_draw(trial, store))
    setups: dict[str, Setup] = {}
    for name in policies:
        setups[name], *rest = baselines(scenario, name)
        if rest:
            setups[name] = best(trial, [setups[name], *rest], others)
    held = setups.get("async_tuned_streaming")
    setups[ELASTIC] = controls.elastic(tuned(trial, others, held.mode.training if held else None))
    fleets = {name: [setup.run(scenario, workload) for workload in workloads] for name, setup in setups.items()}
    ratios = {
        name: _figure([one.now / other.now for one, other in zip(found, fleets[ELASTIC], strict=True)])
        for name, found in fleets.items()
        if name != ELASTIC
    }
    return Comparison(
        scenario.name,
        seeds,
        {name: _result(scenario, found, setups[name].knobs) for name, found in fleets.items()},
        ratios,
        min(ratios, key=lambda name: ratios[name].mean),
        fmean(bound_s(scenario, workload) for workload in workloads) / _HOUR,
    )


def baselines(scenario: Scenario, name: str) -> list[Setup]:
    """Return the settings of a baseline to choose the best from."""
    cells = scenario.fleet.cells
    splits = range(1, cells)
    match name:
        case "colocate":
            return [controls.colocated(scenario, streaming=False)]
        case "colocate_streaming":
            return [controls.colocated(scenario, streaming=True)]
        case "colocate_carry":
            return [controls.carried(scenario, whole_burst=whole) for whole in (False, True)]
        case "async" | "async_streaming" if cells > 1:
            return [controls.fixed(scenario, scenario.given_split, streaming=name.endswith("streaming"))]
        case "async_tuned" | "async_tuned_streaming" if cells > 1:
            return [controls.fixed(scenario, split, streaming=name.endswith("streaming")) for split in splits]
        case _:
            return baselines(scenario, "colocate")


def best(scenario: Scenario, setups: Sequence[Setup], workloads: Sequence[Workload]) -> Setup:
    """Return the setup with the least mean makespan.

    Splits are searched from the middle in steps that are halved: makespan has one valley in the split.
    """
    known: dict[int, float] = {}

    def cost(index: int) -> float:
        if index not in known:
            known[index] = fmean(setups[index].run(scenario, workload).now for workload in workloads)
        return known[index]

    here, step = len(setups) // 2, max(1, len(setups) // 4)
    while step:
        near = [one for one in (here + step, here - step) if 0 <= one < len(setups)]
        found = min(near, key=cost, default=here)
        if found != here and cost(found) < cost(here):
            here = found
        else:
            step //= 2
    return setups[here]


def candidates(split: int) -> list[Policy]:
    """Return the policies that tuning tries: habits of the plan, and first the best fixed split to fall back to.

    Spare capacity for the tail pays where there is little to train; less haste where there is much, or where runs of the
    next burst hold the cells.
    """
    habits = ((1.0, 1.0), (1.5, 1.0), (2.0, 1.0), (1.0, 0.7), (2.0, 0.7))
    moving = [Policy()]
    for hysteresis in (0.5, 0.25):
        moving += [Policy(hysteresis=hysteresis, reserve=reserve, pace=pace) for reserve, pace in habits]
    if not split:
        return moving
    standing = [Policy(standing=split, hysteresis=0.5), Policy(standing=1, hysteresis=0.25, pace=0.7)]
    if split > 1:
        standing += [Policy(standing=split - 1), Policy(standing=split - 1, hysteresis=0.25)]
    return [controls.split(Policy(), split), *moving, *standing]


def tuned(scenario: Scenario, workloads: Sequence[Workload], split: int | None = None) -> Policy:
    """Choose the plan's knobs by simulating what was drawn for that; a manager does so with its own store's runs.

    The fixed split stays unless a policy is better by more than the standard error of how much better it is.

    Args:
        split: the best fixed one on these draws, cells that train; None: not known yet.
    """
    if split is None:
        split = best(scenario, baselines(scenario, "async_tuned_streaming"), workloads).mode.training
    first, *others = candidates(split)
    early = {policy: _makespans(scenario, policy, workloads[:_FIRST]) for policy in others}
    held = _makespans(scenario, first, workloads)
    chosen, least = first, 1.0
    for policy in sorted(others, key=lambda one: fmean(early[one]))[:_BEST]:
        found = early[policy] + _makespans(scenario, policy, workloads[_FIRST:])
        ratios = [one / other for one, other in zip(found, held, strict=True)]
        doubt = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
        if fmean(ratios) + doubt < least:
            chosen, least = policy, fmean(ratios) + doubt
    return chosen


def _makespans(scenario: Scenario, policy: Policy, workloads: Sequence[Workload]) -> list[float]:
    return [controls.elastic(policy).run(scenario, workload).now for workload in workloads]


def _draw(scenario: Scenario, store: Recorded | None) -> Draw:
    return partial(drawn, scenario) if store is None else partial(resampled, store, scenario)


def beginning(scenario: Scenario) -> Scenario:
    """Return what policies are chosen on: a training of many runs cut to its first bursts, any other as it is."""
    batch = scenario.batch
    per_step = batch.groups * batch.runs
    steps = batch.mu * max(_TRIAL_BURSTS, -(-_TRIAL_RUNS // (batch.mu * per_step)))
    if batch.steps * per_step <= _LONG_RUNS or steps >= batch.steps:
        return scenario
    return replace(scenario, batch=replace(batch, steps=steps))


def _for_tuning(draw: Draw) -> list[Workload]:
    first = draw(_TUNING_SEED)
    least, most = _TUNING_DRAWS
    number = min(max(least, -(-_TUNING_RUNS // first.runs)), most)
    return [first, *(draw(_TUNING_SEED + index) for index in range(1, number))]


def bound_s(scenario: Scenario, workload: Workload) -> float:
    """Return seconds below which no policy that publishes every burst can be.

    Two bounds, the larger counts: all work at full use of all cells; and burst by burst, the longest of the runs that
    could only be dispatched when the burst opened, at the speed of a run that has a cell for itself.
    """
    batch = scenario.batch
    serving = sum(map(sum, workload.lengths)) / scenario.fleet.slots
    work = (sum(workload.work) + serving) / scenario.fleet.cells
    latency, before = 0.0, 0
    for step in range(0, batch.steps, batch.mu):
        upto = min((step + batch.mu) * batch.groups, len(workload.lengths))
        latency += max((max(group) for group in workload.lengths[before:upto]), default=0.0) / scenario.fleet.solo
        before = int((step + batch.mu + batch.ahead) * batch.groups)
    return max(work, latency)


def as_object(found: Comparison) -> dict[str, Any]:
    """Return a comparison as plain JSON: means under the names, spreads beside them."""
    policies = {}
    for name, result in found.policies.items():
        flat: dict[str, Any] = {}
        for key in PolicyResult.__struct_fields__:
            value = getattr(result, key)
            if isinstance(value, Figure):
                flat[key], flat[f"{key}_spread"] = value.mean, value.spread
            else:
                flat[key] = value
        policies[name] = flat
    return {
        "scenario": found.scenario,
        "seeds": found.seeds,
        "policies": policies,
        "ratios": {name: figure.mean for name, figure in found.ratios.items()},
        "ratios_spread": {name: figure.spread for name, figure in found.ratios.items()},
        "best_baseline": found.best_baseline,
        "bound_h": found.bound_h,
    }


def _result(scenario: Scenario, fleets: Sequence[Fleet], knobs: str) -> PolicyResult:
    gpus = scenario.fleet.gpus_per_cell
    rows = []
    for fleet in fleets:
        states = [sum(cell.get(state, 0.0) for cell in gpu_seconds(fleet)) for state in CellState]
        seconds = dict(zip(CellState, states, strict=True))
        serving, training = seconds[CellState.SERVING], seconds[CellState.TRAINING]
        moving = max(0.0, sum(seconds.values()) - serving - training)
        idle = max(0.0, serving - fleet.slots_used + training - fleet.train_busy)
        hours = [gpus * value / _HOUR for value in (serving, training, moving, idle)]
        stale = fleet.trace.staleness
        rows.append((fleet.now / _HOUR, *hours, fmean(stale), float(max(stale)), float(fleet.counts.switches)))
    figures = [_figure(column) for column in zip(*rows, strict=True)]
    names = PolicyResult.__struct_fields__[: len(figures)]
    return PolicyResult(**dict(zip(names, figures, strict=True)), knobs=knobs)


def _figure(values: Sequence[float]) -> Figure:
    return Figure(fmean(values), stdev(values) if len(values) > 1 else 0.0)


def draw_timeline(scenario: Scenario, path: Path, store: Recorded | None = None, note: str = "") -> None:
    """Draw `colocate`, the fair fixed split and `elastic` on the first seed; `note` is said above them.

    Raises:
        SettingsError: the file's ending is not one of a picture, or it cannot be written.
    """
    timeline.check(path)
    trial = beginning(scenario)
    workload, others = _draw(scenario, store)(0), _for_tuning(_draw(trial, store))
    held = best(trial, baselines(scenario, "async_tuned_streaming"), others)
    setups = {
        "colocate": baselines(scenario, "colocate")[0],
        "async_tuned_streaming": held,
        ELASTIC: controls.elastic(tuned(trial, others, held.mode.training)),
    }
    lanes = [timeline.lane(name, setup.run(scenario, workload, record=True)) for name, setup in setups.items()]
    timeline.write(path, scenario.name, lanes, note=note)
