"""Elastic cells against fixed ones, end to end on processors: the same training three ways, each cell on a fixed share.

    python benchmarks/elastic.py [--repeats 5] [--cells 3] [--processors 0.25] [--steps 8]

Real runs of the demo's agent with commands that take time, real proxy, embedded engines, training workers. Every cell
is held to its share of the processors by a control group, so that a cell that waits is really idle. The arrangements are
interleaved, each in a process of its own, on the same warm policy, tasks and command times. Wall time is that of the
training, from its first run to its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
QUICKSTART = ROOT / "examples" / "quickstart"
sys.path[:0] = [str(HERE), str(HERE / "cells"), str(QUICKSTART)]

from gyre_sdk.trainer.main import quiet_libraries  # noqa: E402

SETTINGS = [
    "agent.function=slow_agent:solve",
    "rollout.workspace=local",
    "rollout.timeout_s=180.0",
    "cells.drain_s=0.5",
    "train.keep_checkpoints=1",
]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cells", type=int, default=3)
    parser.add_argument("--processors", type=float, default=0.25, help="share of each cell")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--groups", type=int, default=6, help="groups of a step")
    parser.add_argument("--runs", type=int, default=8, help="runs of a group")
    parser.add_argument("--only", nargs="+", help="arrangements, for example elastic async-1 colocate")
    parser.add_argument("--policy", type=Path, default=ROOT / ".gyre/quickstart/seed-0/policy", help="a warm policy")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the config")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--dir", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options)))
        return
    if not (options.policy / "config.json").is_file():
        parser.error(f"{options.policy} holds no policy: run `make demo` first, or give --policy")
    arrangements = options.only or ["elastic", "colocate", *(f"async-{k}" for k in range(1, options.cells))]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arrangements}
    for repeat in range(options.repeats):
        for name in arrangements[repeat % len(arrangements) :] + arrangements[: repeat % len(arrangements)]:
            with tempfile.TemporaryDirectory(prefix="gyre-elastic-") as folder:
                command = [sys.executable, __file__, *sys.argv[1:], "--one", name, "--dir", folder]
                done = subprocess.run([*command, "--seed", str(repeat)], check=True, stdout=subprocess.PIPE, text=True)
            measured = json.loads(done.stdout.splitlines()[-1])
            found[name].append(measured)
            print(
                f"{repeat} {name}: {measured['seconds']:.1f} s, cells busy {measured['busy']}, rewards {measured['rewards']}",
                flush=True,
            )
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    print(table(found))


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return what was measured as Markdown, with ratios to elastic in the same repeat."""
    lines = [
        "| arrangement | seconds, mean (range) | times as long as elastic (range) | reward, last third |",
        "|---|---|---|---|",
    ]
    base = [one["seconds"] for one in found.get("elastic", [])]
    for name, measured in found.items():
        seconds = [one["seconds"] for one in measured]
        ratios = [a / b for a, b in zip(seconds, base, strict=False)]
        last = [statistics.mean(one["rewards"][-max(1, len(one["rewards"]) // 3) :]) for one in measured]
        ratio = f"{statistics.mean(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else ""
        span = f"{statistics.mean(seconds):.1f} ({min(seconds):.1f}-{max(seconds):.1f})"
        lines.append(f"| {name} | {span} | {ratio} | {statistics.mean(last):.3f} ({min(last):.3f}-{max(last):.3f}) |")
    return "\n".join(lines)


def one(options: argparse.Namespace) -> dict[str, Any]:
    """Train once, under quotas; return what was seen."""
    from quota import Quotas

    from gyre_sdk.events import SwitchMeasured, UnitsCommitted
    from gyre_sdk.trainer.config import load_config
    from gyre_sdk.trainer.stack import Stack
    from gyre_sdk.trainer.training import train

    quiet_libraries()
    folder, (kind, _, standing) = options.dir.resolve(), options.one.partition("-")
    concurrency = options.groups * options.runs * 2
    config = load_config(
        QUICKSTART / "quickstart.toml",
        [
            *SETTINGS,
            f"policy.model={options.policy.resolve()}",
            f"store.path={folder / 'store.db'}",
            f"output.dir={folder / 'training'}",
            f"tasks.options.folder={folder / 'tasks'}",
            f"tasks.seed={options.seed}",
            f"train.seed={options.seed}",
            f"train.steps={options.steps}",
            f"train.save_every={options.steps}",
            f"rollout.groups_per_step={options.groups}",
            f"rollout.runs_per_group={options.runs}",
            f"rollout.concurrency={concurrency}",
            f"rollout.staleness={0 if kind == 'colocate' else 1}",
            f"cells.count={options.cells}",
            f"cells.policy={kind}",
            f"cells.standing={standing or 0}",
            f"cells.runs_per_cell={concurrency}",
            *options.set,
        ],
    )
    events: list[Any] = []
    with (
        Quotas(options.cells, options.processors) as quotas,
        Stack(config, events.append, base=HERE / "cells") as stack,
    ):
        stack.model()
        for name, pid in stack.pids().items():
            cell, _, what = name.rpartition("-")
            if what in ("replica", "worker"):
                quotas.hold(int(cell.removeprefix("cell-")), pid)
        quotas.hold_this_thread(0)
        before, began = quotas.used(), time.monotonic()
        train(config, stack=stack)
        seconds = time.monotonic() - began
        busy = [(now - then) / (options.processors * seconds) for now, then in zip(quotas.used(), before, strict=True)]
        rewards = [
            round(kept.metrics["reward"], 3) if "reward" in kept.metrics else None
            for _, kept in sorted(stack.ledger.state.steps.items())
        ]
    shares: dict[str, int] = {}
    for event in events:
        if isinstance(event, UnitsCommitted):
            shares[event.cell] = shares.get(event.cell, 0) + event.units
    switches = [event for event in events if isinstance(event, SwitchMeasured)]
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "seconds": round(seconds, 2),
        "busy": [round(share, 2) for share in busy],
        "rewards": [reward for reward in rewards if reward is not None],
        "units": shares,
        "switches": len(switches),
        "switch_s": round(statistics.mean(sum(one.phases.values()) for one in switches), 3) if switches else 0.0,
    }


if __name__ == "__main__":
    main()
