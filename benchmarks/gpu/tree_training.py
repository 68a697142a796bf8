"""Training on trees on a GPU: rows one by one, gyre's executors, and TRL's packing with its FlashAttention 3 kernel.

    python benchmarks/gpu/tree_training.py [--rounds N] [--quick]

Needs a GPU and the training extra; TRL's kernel comes with the `kernels` package (Hopper only) and is left out without it. bfloat16;
a model of 24 layers shaped as Qwen2.5-0.5B, random. Every round runs every system once; figures are medians over rounds, ratios
within a round. Prints one JSON object, and a table on standard error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import report
from training.inputs import agent, comb, half_billion, short_runs
from training.systems import AUTO, DFS, FLAT, SEPARATE, objective, system

from gyre_sdk.trainer.attention.layout import plant
from gyre_sdk.trainer.units import Row

FLEX, TRL_KERNEL = "flex", "TRL FA3"
SYSTEMS = (SEPARATE, FLAT, FLEX, DFS, AUTO, TRL_KERNEL)
_NOISE = 5e-2
"""Relative difference of gradients that bfloat16 explains."""


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small trees and two layers, one round: does it run?")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        report.say("no GPU is visible to torch: nothing to measure")
        return 1
    small = options.quick
    policy = half_billion(2 if small else 24).to("cuda", torch.bfloat16)
    trees = {
        "comb": comb(512, 4, 64) if small else comb(16_384, 8, 1024),
        "agent": agent(4, 128, 64, 32) if small else agent(24, 2048, 512, 256),
        "short runs": short_runs(8, 30, 50, 90) if small else short_runs(256, 300, 100, 400),
    }
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "problems": {}, "aims": [], "times": {}}
    for name, rows in trees.items():
        forest = plant(rows)
        result["times"][name] = {
            "raw_per_unique": round(forest.raw / forest.unique, 2),
            **_times(policy, rows, 1 if small else options.rounds, result["problems"]),
        }
    for name, cells in result["times"].items():
        report.say(f"\n{name}: raw/unique {cells.pop('raw_per_unique')}")
        columns = {key: {one: str(cell[key]) for one, cell in cells.items()} for key in ("ms", "faster", "peak_mib")}
        report.table(columns, SYSTEMS, 11)
    report.verdicts(result)
    print(json.dumps(result))
    return 0


def _times(policy: Any, rows: Sequence[Row], rounds: int, problems: dict[str, str]) -> dict[str, dict[str, float]]:
    ready = {}
    wanted = None
    for name in SYSTEMS:
        try:
            found = system(name, policy)
            found.prepare(rows)
            policy.zero_grad()
            found.step(rows, objective)
        except (RuntimeError, ImportError, OSError) as error:
            problems[name] = str(error).strip().splitlines()[0]
            continue
        slope = torch.cat([parameter.grad.flatten().float().cpu() for parameter in policy.parameters()])
        wanted = slope if wanted is None else wanted
        apart = float((slope - wanted).norm() / wanted.norm())
        if apart > _NOISE:
            problems[name] = f"its gradient is off by {apart:.1e} of its norm"
        else:
            ready[name] = found
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    peaks = dict.fromkeys(ready, 0.0)
    for _ in range(rounds):
        for name, found in ready.items():
            policy.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            started = time.perf_counter()
            found.step(rows, objective)
            torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - started)
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {
        name: {
            "ms": round(1e3 * statistics.median(taken), 1),
            "faster": round(statistics.median(a / b for a, b in zip(seconds[SEPARATE], taken, strict=True)), 2),
            "peak_mib": round(peaks[name]),
        }
        for name, taken in seconds.items()
    }


if __name__ == "__main__":
    sys.exit(main())
