"""A grid of workloads and costs: where elastic gains, where it can gain nothing, and that it never loses much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import exp, log
from statistics import fmean
from typing import Any

from gyre_sdk.trainer.simulate import controls
from gyre_sdk.trainer.simulate.compare import compare
from gyre_sdk.trainer.simulate.scenario import Batch, Costs, Fleet, Runs, Scenario, Training
from gyre_sdk.trainer.simulate.workload import Workload, drawn

RUN_S = (30.0, 300.0, 1800.0, 14400.0)
TAIL = (0.3, 0.6, 0.9)
"""Sigma of the lengths; the last is the long-tailed third."""
SHARE = (0.125, 0.3, 0.5)
"""Training's part of all work."""
MU = (1, 4)
PHI = (0.5, 2.0)
SWITCH_S = (8.5, 64.0)
AXES = ("run_s", "tail", "share", "mu", "phi", "switch_s")
LOSS, GAIN = 0.98, 1.15
_CELLS, _GROUPS, _RUNS, _STEPS = 8, 8, 8, 24
_RUNS_PER_SLOT = 1.75
_POLICIES = ("colocate_streaming", "colocate_carry", "async_tuned_streaming")
"""The fair baselines; the paper's own are slower than these by construction."""


def points() -> list[tuple[float, ...]]:
    """Return the grid."""
    return list(product(RUN_S, TAIL, SHARE, MU, PHI, SWITCH_S))


def scenario(point: Sequence[float]) -> Scenario:
    """Return the training of a point: 8 cells; a burst has 1.75 runs a slot; timeouts at six medians."""
    run_s, tail, share, mu, phi, switch_s = point
    slots = mu * _GROUPS * _RUNS / _RUNS_PER_SLOT / _CELLS
    rollout = _GROUPS * _RUNS * run_s * exp(tail * tail / 2) / (_CELLS * slots)
    return Scenario(
        name=" ".join(f"{axis} {value:g}" for axis, value in zip(AXES, point, strict=True)),
        fleet=Fleet(cells=_CELLS, slots=slots),
        batch=Batch(groups=_GROUPS, runs=_RUNS, steps=_STEPS, mu=int(mu), phi=phi),
        runs=Runs(median_s=run_s, sigma=tail, correlation=0.5, timeout_s=6 * run_s),
        training=Training(batch_s=share / (1 - share) * rollout),
        costs=Costs(drain_s=switch_s / 2, switch_s=switch_s / 2, load_s=switch_s * 0.4, join_s=switch_s * 0.6),
    )


def measured(seeds: int, part: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Yield a result per point of a part of the grid."""
    number, parts = part
    for point in points()[number - 1 :: parts]:
        asked = scenario(point)
        found = compare(asked, seeds=seeds, policies=_POLICIES)
        best = found.policies[found.best_baseline].makespan_h.mean
        free = fmean(_free_s(asked, drawn(asked, seed)) for seed in range(seeds)) / 3600
        yield {
            **dict(zip(AXES, point, strict=True)),
            "best": found.best_baseline,
            "ratio": round(found.ratios[found.best_baseline].mean, 3),
            "ceiling": round(best / max(found.bound_h, free), 3),
            "knobs": found.policies["elastic"].knobs,
        }


def _free_s(asked: Scenario, workload: Workload) -> float:
    """Return the makespan if training took no time and all cells served: what waiting for runs costs at least."""
    free = Workload(workload.lengths, (0.0,) * len(workload.work))
    return controls.fixed(asked, 0, streaming=True).run(asked, free).now


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the grid shows: worst loss, the long-tailed third, and what no policy could have reached there."""
    tailed = [one for one in results if one["tail"] == max(TAIL)]
    reachable = [one for one in tailed if one["ceiling"] >= GAIN]
    return {
        "points": len(results),
        "worst": min(one["ratio"] for one in results),
        "losing": [one for one in results if one["ratio"] < LOSS],
        "tailed": len(tailed),
        "tailed_mean": round(_geometric(tailed), 3),
        "tailed_reached": sum(one["ratio"] >= GAIN for one in tailed),
        "tailed_reachable": len(reachable),
        "tailed_reachable_mean": round(_geometric(reachable), 3) if reachable else None,
        "tailed_share_of_ceiling": round(
            fmean(log(one["ratio"]) for one in reachable) / fmean(log(one["ceiling"]) for one in reachable), 3
        )
        if reachable
        else None,
        "by_axis": {axis: _by(results, axis) for axis in AXES},
        "tailed_by_axis": {axis: _by(tailed, axis) for axis in AXES},
    }


def _by(results: Sequence[dict[str, Any]], axis: str) -> dict[str, float]:
    values = sorted({one[axis] for one in results})
    return {f"{value:g}": round(_geometric([one for one in results if one[axis] == value]), 3) for value in values}


def _geometric(results: Sequence[dict[str, Any]]) -> float:
    return exp(fmean(log(one["ratio"]) for one in results)) if results else float("nan")
