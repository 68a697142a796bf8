"""A grid of workloads and costs: where elastic gains, where it can gain nothing, and that it never loses much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from math import exp, log
from statistics import NormalDist, fmean
from typing import Any

from msgspec.structs import replace

from gyre_sdk.trainer.simulate import controls
from gyre_sdk.trainer.simulate.compare import compare
from gyre_sdk.trainer.simulate.scenario import Batch, Costs, Fleet, Runs, Scenario, Training
from gyre_sdk.trainer.simulate.workload import Workload, drawn

RUN_S = (30.0, 300.0, 1800.0, 14400.0)
TAIL = (0.3, 0.6, 0.9, 1.5)
"""Sigma of the lengths. Published trainings fit 0.4 to 0.65 with correlation, turns of recorded coding sessions 1.75 uncut
(TraceLab, arXiv:2606.30560)."""
LONG = (0.9, 1.5)
"""The long tails. At 1.5 the timeout ends an eighth of the runs, so most groups close with it."""
SHARE = (0.125, 0.3, 0.5)
"""Training's part of all work: rollout is reported at half to nine tenths."""
MU = (1, 4)
PHI = (0.0, 0.5, 2.0)
"""Allowed staleness: none, where both papers begin; half a step; and two, beyond which a fixed split is hardly ever idle."""
SWITCH_S = (8.5, 64.0)
"""arXiv:2609.33848's, and a large model's full update twice over."""
AXES = ("run_s", "tail", "share", "mu", "phi", "switch_s")
LOSS, GAIN = 0.98, 1.15
_CELLS, _GROUPS, _RUNS, _STEPS = 8, 8, 8, 24
_RUNS_PER_SLOT = 1.75
_TIMEOUT = 6.0
"""Medians after which a run is cut."""
_MOVE = 2.0
"""Switches that going there, joining and coming back take."""
_POLICIES = ("colocate_streaming", "colocate_carry", "async_tuned_streaming")
"""The fair baselines; the paper's own are slower than these by construction."""
_FIRST_GRID = {"tail": (0.3, 0.6, 0.9), "phi": (0.5, 2.0)}
"""The 288 points that were published first, for comparison."""


def points() -> list[tuple[float, ...]]:
    """Return the grid."""
    return list(product(RUN_S, TAIL, SHARE, MU, PHI, SWITCH_S))


def scenario(point: Sequence[float]) -> Scenario:
    """Return the training of a point: 8 cells; a burst has 1.75 runs a slot; timeouts at six medians."""
    run_s, tail, share, mu, phi, switch_s = point
    slots = mu * _GROUPS * _RUNS / _RUNS_PER_SLOT / _CELLS
    rollout = _GROUPS * _RUNS * run_s * _mean(tail) / (_CELLS * slots)
    return Scenario(
        name=" ".join(f"{axis} {value:g}" for axis, value in zip(AXES, point, strict=True)),
        fleet=Fleet(cells=_CELLS, slots=slots),
        batch=Batch(groups=_GROUPS, runs=_RUNS, steps=_STEPS, mu=int(mu), phi=phi),
        runs=Runs(median_s=run_s, sigma=tail, correlation=0.5, timeout_s=_TIMEOUT * run_s),
        training=Training(batch_s=share / (1 - share) * rollout),
        costs=Costs(drain_s=switch_s / 2, switch_s=switch_s / 2, load_s=switch_s * 0.4, join_s=switch_s * 0.6),  # _MOVE
    )


def _mean(tail: float) -> float:
    """Return the mean length in medians, the cut at the timeout counted."""
    normal, cut = NormalDist(), log(_TIMEOUT) / tail
    return exp(tail * tail / 2) * normal.cdf(cut - tail) + _TIMEOUT * (1 - normal.cdf(cut))


def measured(seeds: int, part: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Yield a result per point of a part of the grid."""
    number, parts = part
    for point in points()[number - 1 :: parts]:
        asked = scenario(point)
        found = compare(asked, seeds=seeds, policies=_POLICIES)
        best = found.policies[found.best_baseline].makespan_h.mean
        both = fmean(_both_s(asked, drawn(asked, seed)) for seed in range(seeds)) / 3600
        yield {
            **dict(zip(AXES, point, strict=True)),
            "best": found.best_baseline,
            "ratio": round(found.ratios[found.best_baseline].mean, 3),
            "ceiling": round(best / max(found.bound_h, both), 3),
            "knobs": found.policies["elastic"].knobs,
        }


def _both_s(asked: Scenario, workload: Workload) -> float:
    """Return the makespan if every cell could serve and train at the same time, and nothing had to move."""
    cells = asked.fleet.cells
    twice = replace(asked, fleet=replace(asked.fleet, cells=2 * cells))
    return controls.fixed(twice, cells, streaming=True).run(twice, workload).now


def reason(one: dict[str, Any]) -> str:
    """Say why a point stays below the aim: the first of these that holds; empty where it does not."""
    if one["ratio"] >= GAIN:
        return ""
    little = one["share"] < min(SHARE) * 1.5
    if one["ceiling"] < GAIN:
        return "ceiling: little to train" if little else "ceiling: staleness leaves the baseline little idle"
    if 3 * _MOVE * one["switch_s"] >= one["run_s"]:
        return "a move there and back takes a third of a run or more"
    return "little to train" if little else "idle beside the last runs, whose groups are not ready"


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the grid shows: the worst loss, each part with a long tail, and the points that were published first."""
    first = [one for one in results if all(one[axis] in values for axis, values in _FIRST_GRID.items())]
    tails = {f"{tail:g}": [one for one in results if one["tail"] == tail] for tail in TAIL}
    tailed = [one for one in results if one["tail"] in LONG]
    return {
        "points": len(results),
        "worst": min(one["ratio"] for one in results),
        "losing": [one for one in results if one["ratio"] < LOSS],
        "tails": {tail: _part(found) for tail, found in tails.items() if found},
        "first_grid": {"points": len(first), "tailed": _part([one for one in first if one["tail"] == 0.9])},
        "tailed": _part(tailed),
        "tailed_below": dict(Counter(filter(None, map(reason, tailed)))),
        "by_axis": {axis: _by(results, axis) for axis in AXES},
        "tailed_by_axis": {axis: _by(tailed, axis) for axis in AXES},
    }


def _part(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how a part of the grid is distributed; the share of the ceiling is of logarithms."""
    if not found:
        return {"points": 0}
    ratios = sorted(one["ratio"] for one in found)
    gained, possible = (sum(log(max(one[key], 1e-9)) for one in found) for key in ("ratio", "ceiling"))
    return {
        "points": len(found),
        "mean": round(_geometric(found), 3),
        "quantiles": [ratios[round(share * (len(ratios) - 1))] for share in (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)],
        "reached": sum(one["ratio"] >= GAIN for one in found),
        "reachable": sum(one["ceiling"] >= GAIN for one in found),
        "share_of_ceiling": round(gained / possible, 3) if possible > 0 else None,
    }


def _by(results: Sequence[dict[str, Any]], axis: str) -> dict[str, float]:
    values = sorted({one[axis] for one in results})
    return {f"{value:g}": round(_geometric([one for one in results if one[axis] == value]), 3) for value in values}


def _geometric(results: Sequence[dict[str, Any]]) -> float:
    return exp(fmean(log(one["ratio"]) for one in results)) if results else float("nan")
