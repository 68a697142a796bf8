"""What it costs to train on trees: each row by itself, gyre's executors, and TRL's packing, forward and backward on a CPU.

    python benchmarks/tree_training.py [--quick] [--rounds N] [--only comb,agent,short runs,memory,long] [--hidden 64,256]

Every round runs every system once, in turn, on the same rows and the same model; figures are medians over rounds, ratios are taken
within a round and their median and range are given. Processor time of one thread, so that other work on the machine hardly shows.
Every system's gradient is compared with that of the rows one by
one: a system that finds another is not measured. Time includes laying the rows out, for gyre; for TRL it does not.

`comb`: a prefix of 4096 tokens with 8 branches of 256. `agent`: 12 turns with a branch at each, then a compacted history. `short
runs`: 16 runs of about 100 tokens, as the demo has them: nothing may be slower there than padded rows. `memory`: growth of the
resident set in a step, each in a process of its own. `long`: a path of 128k tokens, 2 layers of a model shaped as Qwen2.5-0.5B; it is
run only when asked for by name (half an hour on two quiet cores). Prints one JSON object, and tables on standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report
import torch
from training.inputs import model, shapes
from training.systems import AUTO, DFS, FLAT, GATHER, OURS, SEPARATE, SYSTEMS, TRL, System, objective, system

from gyre_sdk.trainer.attention.layout import plant
from gyre_sdk.trainer.units import Row

HERE = Path(__file__).resolve().parent
_TREES = ("comb", "agent", "short runs")
_SECTIONS = (*_TREES, "memory", "long")
_SHARE = {"comb": 0.75, "agent": 0.6}
"""Part of the ratio of raw to unique tokens that the best executor reaches."""
_DFS_MEMORY = 1.3
_LONG_GIB = 8.0
_LONG_TOKENS = 131_072
_EXACT = 1e-5


def main() -> None:
    """Measure and print."""
    options = _options()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "quick": options.quick,
        "cores": os.cpu_count(),
        "rounds": options.rounds,
        "load": [round(os.getloadavg()[0], 1)],
        "problems": {},
    }
    trees = {name: rows for name, rows in shapes(options.quick).items() if name in options.only}
    result["trees"] = {name: _sizes(rows) for name, rows in trees.items()}
    result["times"] = {
        f"{name}, hidden {hidden}": _times(rows, hidden, options.rounds, result["problems"])
        for hidden in options.hidden
        for name, rows in trees.items()
    }
    if "memory" in options.only:
        result["memory"] = _memory(options.hidden[-1], options.quick, result["problems"])
    if "long" in options.only:
        tokens = 2048 if options.quick else options.long_tokens
        result["long"] = {"tokens": tokens, **_child("dfs", f"path:{tokens}", "0.5B", threads=os.cpu_count() or 1)}
    result["load"].append(round(os.getloadavg()[0], 1))
    result["aims"] = list(_aims(result))
    _tables(result)
    print(json.dumps(result))


def _sizes(rows: list[Row]) -> dict[str, float]:
    forest = plant(rows)
    return {
        "rows": len(rows),
        "raw": forest.raw,
        "unique": forest.unique,
        "raw_per_unique": round(forest.raw / forest.unique, 2),
        "raw_pairs_per_pair": round(forest.raw_pairs / forest.pairs, 2),
    }


def _times(rows: list[Row], hidden: int, rounds: int, problems: dict[str, str]) -> dict[str, Any]:
    """Return seconds of each system, and how many times as fast as each row by itself it is."""
    policy = model(hidden)
    systems: dict[str, System] = {}
    wanted = None
    for name in SYSTEMS:
        ready = system(name, policy)
        ready.prepare(rows)
        policy.zero_grad()
        ready.step(rows, objective)
        found = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
        wanted = found if wanted is None else wanted
        apart = float((found - wanted).norm() / wanted.norm())
        if apart > _EXACT:
            problems[f"{name}, hidden {hidden}"] = f"its gradient is off by {apart:.1e} of its norm"
        else:
            systems[name] = ready
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, ready in systems.items():
            policy.zero_grad()
            started = time.process_time()
            ready.step(rows, objective)
            seconds[name].append(time.process_time() - started)
    return {
        name: {"seconds": round(statistics.median(taken), 4), "faster": _ratio(seconds[SEPARATE], taken)}
        | ({"than_trl": _ratio(seconds[TRL], taken)} if TRL in seconds else {})
        | ({"than_flat": _ratio(seconds[FLAT], taken)} if FLAT in seconds else {})
        for name, taken in seconds.items()
    }


def _ratio(others: list[float], own: list[float]) -> dict[str, float]:
    ratios = [other / mine for other, mine in zip(others, own, strict=True)]
    return {
        "median": round(statistics.median(ratios), 2),
        "low": round(min(ratios), 2),
        "high": round(max(ratios), 2),
    }


def _memory(hidden: int, quick: bool, problems: dict[str, str]) -> dict[str, Any]:
    """Return the growth of each system on the comb, and of one path of it."""
    found: dict[str, Any] = {}
    for name in ("one path", DFS) if quick else ("one path", FLAT, GATHER, DFS, TRL):
        shape = "longest:comb" if name == "one path" else "comb"
        try:
            found[name] = _child(FLAT if name == "one path" else name, shape, str(hidden), quick=quick)
        except subprocess.CalledProcessError as error:
            problems[f"memory of {name}"] = error.stderr[-500:]
    return found


def _child(name: str, shape: str, hidden: str, *, quick: bool = False, threads: int = 1) -> dict[str, Any]:
    command = [sys.executable, "-m", "training.memory", name, shape, hidden, "--threads", str(threads)]
    done = subprocess.run(
        [*command, *(["--quick"] if quick else [])],
        cwd=HERE,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _aims(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    def aim(what: str, value: float, limit: float, met: bool) -> dict[str, Any]:
        return {"aim": what, "value": value, "limit": limit, "met": met}

    for title, systems in result["times"].items():
        tree = title.split(",")[0]
        if tree in _SHARE:
            ratio = result["trees"][tree]["raw_per_unique"]
            best = max(systems[name]["faster"]["median"] for name in (GATHER, DFS) if name in systems)
            share = round(best / ratio, 2)
            yield aim(f"{title}: part of raw/unique ({ratio})", share, _SHARE[tree], share >= _SHARE[tree])
            if TRL in systems:
                best = max(systems[name]["than_trl"]["median"] for name in (GATHER, DFS) if name in systems)
                yield aim(f"{title}: times as fast as TRL's packing", best, 1.0, best > 1.0)
        if AUTO in systems:
            yield aim(
                f"{title}: auto, times as fast as padded rows",
                systems[AUTO]["than_flat"]["median"],
                1.0,
                systems[AUTO]["than_flat"]["median"] >= 0.97,
            )
    memory = result.get("memory", {})
    if memory.get(DFS) and memory.get("one path", {}).get("growth_mib"):
        ratio = round(memory[DFS]["growth_mib"] / memory["one path"]["growth_mib"], 2)
        yield aim("comb: peak memory of dfs by that of one path", ratio, _DFS_MEMORY, ratio <= _DFS_MEMORY)
    if "long" in result:
        gib = round(result["long"]["peak_mib"] / 1024, 2)
        yield aim(f"peak GiB of a path of {result['long']['tokens']} tokens", gib, _LONG_GIB, gib <= _LONG_GIB)


def _tables(result: dict[str, Any]) -> None:
    for title, systems in result["times"].items():
        report.say(f"\n{title}: {result['trees'][title.split(',')[0]]}")
        columns: dict[str, dict[str, str]] = {"seconds": {}, "faster": {}, "range": {}, "than TRL": {}, "than flat": {}}
        for name, cells in systems.items():
            columns["seconds"][name] = f"{cells['seconds']:.3f}"
            columns["faster"][name] = f"{cells['faster']['median']:.2f}"
            columns["range"][name] = f"{cells['faster']['low']:.2f}-{cells['faster']['high']:.2f}"
            for key in ("than_trl", "than_flat"):
                if key in cells:
                    columns[key.replace("_trl", " TRL").replace("_flat", " flat")][name] = f"{cells[key]['median']:.2f}"
        report.table(columns, SYSTEMS, 11)
    if "memory" in result:
        report.say("\nmemory of a step on the comb beyond weights and gradients, MiB")
        growth = {name: f"{cells['growth_mib']:.0f}" for name, cells in result["memory"].items()}
        report.table({"growth": growth}, ("one path", *OURS, TRL), 11)
    report.say("")
    report.verdicts(result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small trees, one round: does it run?")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=report.chosen(_SECTIONS), default=[*_TREES, "memory"])
    parser.add_argument("--hidden", type=lambda text: [int(part) for part in text.split(",")], default=[64, 256])
    parser.add_argument("--long-tokens", type=int, default=_LONG_TOKENS)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.hidden = 1, options.hidden[:1]
    return options


if __name__ == "__main__":
    main()
