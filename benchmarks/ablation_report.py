"""What the ablation's trainings came to: tables as Markdown, and the reward curves as a picture.

Costs are measured here, on groups that the uncapped trainings recorded: the same runs, sealed under each bound, go through
the same executors in one process, bounds and executors interleaved, each timing the least of some repetitions.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from gyre_sdk.journal import Journal
from gyre_sdk.trainer.attention.budget import Budget
from gyre_sdk.trainer.attention.executor import Objective
from gyre_sdk.trainer.attention.flat import FlatExecutor
from gyre_sdk.trainer.attention.gather import GatherExecutor
from gyre_sdk.trainer.attention.layout import plant
from gyre_sdk.trainer.units import Row, Sealer

GROUPS = 8
"""Measured groups per seed."""
TOKENS = 2048
"""Of a forward pass, as the trainings had it."""
REPETITIONS = 3
LAST = 6
"""Steps at the end of a training whose rewards are averaged."""
_COLOURS = {1: "#c0392b", 5: "#2471a3", 0: "#7f8c8d"}


def report(root: Path, seeds: Sequence[int], bounds: Sequence[int], page: Path | None = None) -> str:
    """Return the tables; write them into a page, between its marks, and the picture next to it."""
    results = {
        (seed, bound): json.loads(path.read_text())
        for seed in seeds
        for bound in bounds
        if (path := root / f"seed-{seed}-j-{bound}" / "result.json").is_file()
    }
    whole = [seed for seed in seeds if (seed, 0) in results]
    tables = {"rewards": learning(results, bounds), "costs": costs(root, whole, bounds)}
    if page is not None:
        text = page.read_text()
        for name, table in tables.items():
            before, _, rest = text.partition(f"<!-- {name} -->")
            text = f"{before}<!-- {name} -->\n{table}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
        page.write_text(text)
        page.with_suffix(".svg").write_text(draw(results, bounds))
    return "\n\n".join(tables.values())


def learning(results: dict[tuple[int, int], Any], bounds: Sequence[int]) -> str:
    """Return the table of rewards and gradient norms, one line per bound and training."""
    lines = [
        f"| J_max | seed | held-out reward | mean reward of the last {LAST} steps | gradient norm | trained tokens |",
        "|---|---|---|---|---|---|",
    ]
    for bound in bounds:
        ours = [result for (_, kept), result in sorted(results.items()) if kept == bound]
        rows = [_figures(result) for result in ours]
        for result, (before, after, late, norm, tokens) in zip(ours, rows, strict=True):
            shown = f"{before:.3f} → {after:.3f} | {late:.3f} | {norm:.2f} | {tokens:.0f}"
            lines.append(f"| {_name(bound)} | {result['seed']} | {shown} |")
        if len(rows) > 1:
            before, after, late, norm, tokens = (fmean(values) for values in zip(*rows, strict=True))
            shown = f"**{before:.3f} → {after:.3f}** | **{late:.3f}** | **{norm:.2f}** | **{tokens:.0f}**"
            lines.append(f"| {_name(bound)} | mean of {len(rows)} | {shown} |")
    return "\n".join(lines)


def costs(root: Path, seeds: Sequence[int], bounds: Sequence[int]) -> str:
    """Return the table of what each bound costs, relative to no bound."""
    torch.set_num_threads(1)
    counts: dict[int, dict[str, float]] = {bound: defaultdict(float) for bound in bounds}
    seconds: dict[tuple[int, str], float] = defaultdict(float)
    for seed in seeds:
        model = AutoModelForCausalLM.from_pretrained(root / f"policy-{seed}", dtype=torch.float32).eval()
        budget = Budget(tokens=TOKENS)
        executors = {"flat": FlatExecutor(model, budget), "gather": GatherExecutor(model, budget)}
        for sealed in _sealed(root / f"seed-{seed}-j-0" / "store.db", bounds):
            for bound, rows in sealed.items():
                found = counts[bound]
                forest = plant(rows)
                found["rows"] += len(rows)
                found["runs"] += len({row.run for row in rows})
                found["targets"] += sum(len(row.targets) for row in rows)
                found["raw"] += forest.raw
                found["unique"] += forest.unique
            least: dict[tuple[int, str], float] = {}
            for _ in range(REPETITIONS):
                for bound, rows in sealed.items():
                    for name, executor in executors.items():
                        began = time.process_time()
                        executor.forward_backward(rows, _objective(rows))
                        took = time.process_time() - began
                        model.zero_grad(set_to_none=True)
                        least[bound, name] = min(took, least.get((bound, name), took))
            for key, took in least.items():
                seconds[key] += took
    whole = counts[0]
    lines = [
        "| J_max | trajectories per run | targets | raw tokens | shared tokens | raw / shared | time, each row by itself"
        " | time, prefixes shared |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for bound in bounds:
        found = counts[bound]
        parts = [f"{found['rows'] / found['runs']:.2f}"]
        parts += [f"{100 * found[name] / whole[name]:.1f}%" for name in ("targets", "raw", "unique")]
        parts.append(f"{found['raw'] / found['unique']:.2f}")
        parts += [f"{100 * seconds[bound, name] / seconds[0, name]:.1f}%" for name in ("flat", "gather")]
        lines.append(f"| {_name(bound)} | " + " | ".join(parts) + " |")
    ratio = seconds[0, "flat"] / seconds[0, "gather"]
    runs = f"{whole['runs']:.0f} runs of {len(seeds)} seeds"
    return "\n".join(lines) + f"\n\nMeasured on {runs}; without a bound, sharing prefixes is {ratio:.2f} times faster."


def _sealed(store: Path, bounds: Sequence[int]) -> list[dict[int, tuple[Row, ...]]]:
    """Return the rows of some trained groups under each bound, spread over the training."""
    found = []
    with Journal(store, "r") as journal:
        names = sorted({run.group for run in journal.runs() if run.group is not None})
        for group in names[:: max(1, len(names) // GROUPS)]:
            runs = [run.run for run in journal.runs(group=group)]
            sealed = {bound: Sealer(j_max=bound or None).seal(journal, group, runs).units for bound in bounds}
            if all(sealed.values()):
                found.append(
                    {bound: tuple(row for unit in units for row in unit.rows) for bound, units in sealed.items()}
                )
    return found


def _objective(rows: Sequence[Row]) -> Objective:
    behaviour = torch.from_numpy(np.concatenate([row.logprobs for row in rows])).float()
    pull = torch.from_numpy(np.concatenate([row.weights * row.advantage for row in rows])).float()

    def objective(logp_C: torch.Tensor, entropy_C: torch.Tensor, index_C: torch.Tensor) -> torch.Tensor:
        return -((logp_C - behaviour[index_C]).exp() * pull[index_C]).sum()

    return objective


def _figures(result: dict[str, Any]) -> tuple[float, float, float, float, float]:
    late = [reward for step in result["steps"][-LAST:] for reward in step["rewards"] if reward is not None]
    norms = [step["metrics"]["grad_norm"] for step in result["steps"] if "grad_norm" in step["metrics"]]
    return result["before"], result["after"], fmean(late), fmean(norms), result["trained_tokens"]


def _name(bound: int) -> str:
    return str(bound) if bound else "none"


def draw(results: dict[tuple[int, int], Any], bounds: Sequence[int]) -> str:
    """Return the reward curves as SVG: thin lines are trainings, thick ones the means, both over three steps."""
    width, height, left, top, right, bottom = 640, 360, 48, 16, 96, 40
    curves = {
        key: [fmean([r for r in step["rewards"] if r is not None]) for step in result["steps"]]
        for key, result in results.items()
    }
    steps = max(map(len, curves.values()))
    low, high = 0.3, 0.9

    def line(values: Sequence[float], style: str) -> str:
        smooth = [fmean(values[max(0, n - 1) : n + 2]) for n in range(len(values))]
        points = " ".join(
            f"{left + n * (width - left - right) / (steps - 1):.1f},"
            f"{top + (high - value) / (high - low) * (height - top - bottom):.1f}"
            for n, value in enumerate(smooth)
        )
        return f'<polyline fill="none" {style} points="{points}"/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for tick in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        y = top + (high - tick) / (high - low) * (height - top - bottom)
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:.1f}</text>')
    for step in range(0, steps, 4):
        x = left + step * (width - left - right) / (steps - 1)
        parts.append(f'<text x="{x:.1f}" y="{height - bottom + 18}" text-anchor="middle">{step + 1}</text>')
    parts.append(f'<text x="{(left + width - right) / 2}" y="{height - 6}" text-anchor="middle">step</text>')
    for place, bound in enumerate(bounds):
        ours = [curve for (_, kept), curve in curves.items() if kept == bound]
        if not ours:
            continue
        colour = _COLOURS.get(bound, "#000000")
        parts += [line(curve, f'stroke="{colour}" stroke-width="0.8" opacity="0.45"') for curve in ours]
        parts.append(
            line([fmean(values) for values in zip(*ours, strict=True)], f'stroke="{colour}" stroke-width="2.5"')
        )
        y = top + 20 + 20 * place
        parts.append(f'<text x="{width - right + 10}" y="{y}" fill="{colour}">J_max {_name(bound)}</text>')
    return "\n".join([*parts, "</svg>", ""])
