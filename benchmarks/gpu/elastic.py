"""Elastic cells against fixed ones on one GPU that they share: the same training three ways, with real engines and workers.

    python benchmarks/gpu/elastic.py [--repeats 3] [--cells 2] [--share 0.2] [--kv-gib 4] [--steps 8] [--only elastic colocate]
    python benchmarks/gpu/elastic.py --device cpu --engine embedded --shape tiny --repeats 1 --steps 2     # a dry run

Cells have a share of the memory each, and take turns on the processors of the GPU: what a cell that waits leaves over, the
others get. So ratios say what switching costs and what overlap is worth, not what an idle device costs; for that, give
cells GPUs of their own. Arrangements are interleaved, each in a process of its own, on the same policy, tasks and waits;
ratios are within a repeat, and a repeat in which one failed is left out and named. Wall time is that of the training,
from its first run to its last checkpoint, engines running; what the first repeat compiles, the others find in torch's
cache on disk. Prints one JSON object with every repeat's figures; a table on standard error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import one_gpu
from report import say


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--groups", type=int, default=6, help="groups of a step")
    parser.add_argument("--runs", type=int, default=6, help="runs of a group")
    parser.add_argument("--wait", type=float, default=0.5, help="median seconds between an agent's calls")
    parser.add_argument("--only", nargs="+", help="arrangements, for example elastic async-1 colocate")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--dir", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    one_gpu.add_options(parser)
    options = parser.parse_args()
    missing = one_gpu.problems(options)
    if options.one:
        print(json.dumps(one(options)))
        return 0
    if options.repeats < 1:
        missing["repeats"] = "--repeats begins at 1"
    arrangements = options.only or ["elastic", "colocate", *(f"async-{k}" for k in range(1, options.cells))]
    for name in arrangements:
        kind, _, standing = name.partition("-")
        if kind not in ("elastic", "colocate", "async") or (kind == "async") != standing.isdigit():
            missing[name] = "no such arrangement: elastic, colocate, or async-K with K cells that train"
    result: dict[str, Any] = {"options": one_gpu.plain(options), "problems": missing}
    if not missing:
        found, failed = repeats(arrangements, options)
        result["problems"] = failed
        result = {"device": one_gpu.device_name(options.device), **figures(found), "measured": found, **result}
    text = json.dumps(result, indent=1)
    if options.json:
        options.json.write_text(text)
    print(text)
    return 1 if result["problems"] else 0


def repeats(
    arrangements: list[str], options: argparse.Namespace
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Train in every arrangement, in another order each time; return the repeats that are whole, and what failed."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arrangements}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="gyre-elastic-policy-") as place:
        policy = Path(place) / "policy"
        one_gpu.make_policy(policy, options)
        for repeat in range(options.repeats):
            first = repeat % len(arrangements)
            measured = {}
            for name in arrangements[first:] + arrangements[:first]:
                with tempfile.TemporaryDirectory(prefix="gyre-elastic-") as folder:
                    (Path(folder) / "policy").symlink_to(policy)
                    command = [sys.executable, __file__, *sys.argv[1:], "--one", name, "--dir", folder]
                    done = subprocess.run([*command, "--seed", str(repeat)], capture_output=True, text=True)
                if done.returncode:
                    said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
                    failed[f"{name}, repeat {repeat}"] = f"exit status {done.returncode}: {said[-500:]}"
                    say(f"{repeat} {name}: {failed[f'{name}, repeat {repeat}']}")
                    continue
                measured[name] = json.loads(done.stdout.splitlines()[-1])
                say(f"{repeat} {name}: {measured[name]['seconds']:.1f} s, rewards {measured[name]['rewards']}")
            if len(measured) == len(arrangements):
                for name, one_run in measured.items():
                    found[name].append(one_run)
    return found, failed


def figures(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return seconds, and ratios to elastic within a repeat, with their ranges; print the table."""
    if not all(found.values()):
        return {"seconds": {}, "times_elastic": {}}
    from elastic import table  # benchmarks/elastic.py: its folder comes first on the path

    say(table(found))
    seconds = {name: [run["seconds"] for run in runs] for name, runs in found.items()}
    ratios = {
        name: [mine / base for mine, base in zip(taken, seconds["elastic"], strict=True)]
        for name, taken in (seconds.items() if "elastic" in seconds else ())
    }
    return {
        "seconds": {name: _spread(values, 2) for name, values in seconds.items()},
        "times_elastic": {name: _spread(values, 3) for name, values in ratios.items()},
    }


def _spread(values: list[float], digits: int) -> dict[str, float]:
    return {
        "mean": round(statistics.mean(values), digits),
        "least": round(min(values), digits),
        "most": round(max(values), digits),
    }


def one(options: argparse.Namespace) -> dict[str, Any]:
    """Train once; return what was seen."""
    from gyre_sdk.events import SwitchMeasured, UnitsCommitted
    from gyre_sdk.trainer.stack import Stack
    from gyre_sdk.trainer.training import train

    folder, (kind, _, standing) = options.dir.resolve(), options.one.partition("-")
    concurrency = options.groups * options.runs * 2
    config = one_gpu.settings(
        folder / "training",
        folder / "policy",
        options,
        [
            f"tasks.seed={options.seed}",
            f"agent.options.median_s={options.wait}",
            f"train.seed={options.seed}",
            f"train.steps={options.steps}",
            f"train.save_every={options.steps}",
            "train.keep_checkpoints=1",
            f"rollout.groups_per_step={options.groups}",
            f"rollout.runs_per_group={options.runs}",
            f"rollout.concurrency={concurrency}",
            f"rollout.staleness={0 if kind == 'colocate' else 1}",
            f"cells.policy={kind}",
            f"cells.standing={standing or 0}",
            f"cells.runs_per_cell={concurrency}",
            "cells.drain_s=0.5",
        ],
    )
    events: list[Any] = []
    with Stack(config, events.append, base=one_gpu.AGENTS) as stack:
        stack.model()
        began = time.monotonic()
        train(config, stack=stack)
        seconds = time.monotonic() - began
        kept = [one_step.metrics for _, one_step in sorted(stack.ledger.state.steps.items())]
    shares: dict[str, int] = {}
    phases: dict[str, list[float]] = {}
    for event in events:
        if isinstance(event, UnitsCommitted):
            shares[event.cell] = shares.get(event.cell, 0) + event.units
        if isinstance(event, SwitchMeasured):
            for name, taken in event.phases.items():
                phases.setdefault(f"{event.to}: {name}", []).append(taken)
    switches = sum(isinstance(event, SwitchMeasured) for event in events)
    return {
        "seconds": round(seconds, 2),
        "rewards": [round(metrics["reward"], 3) for metrics in kept if "reward" in metrics],
        "units": shares,
        "switches": switches,
        "phases_s": {name: round(statistics.median(taken), 3) for name, taken in phases.items()},
        "gpu_peak_trainer_gib": _peak_gib(options.device),
    }


def _peak_gib(device: str) -> float | None:
    """Return the most that the trainer's own process held; None without a GPU."""
    import torch

    return None if device == "cpu" else round(torch.cuda.max_memory_reserved() / 2**30, 2)


if __name__ == "__main__":
    sys.exit(main())
