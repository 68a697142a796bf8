"""Elastic cells against fixed ones, end to end on processors: the same training three ways, each cell on a fixed share.

    python benchmarks/elastic.py [--repeats 5] [--cells 3] [--processors 0.3] [--steps 4]

Real runs of an agent whose commands take time, with a long tail; real proxy, embedded engines, training workers. Every cell
is held to its share of the processors by a control group, so that a cell that waits is really idle. The arrangements are
interleaved, each in a process of its own, on the same policy, tasks and command times. Wall time is that of the
training, from its first run to its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "cells"), str(HERE.parent / "tests" / "trainer")]

from gyre_sdk.trainer.main import quiet_libraries  # noqa: E402

CONFIG = """
[policy]
model = "policy"
[tasks]
loader = "talker:load"
[agent]
function = "talker:solve"
[store]
path = "store.db"
[output]
dir = "training"
[proxy]
renderer = "qwen3"
[rollout]
workspace = "local"
timeout_s = 600.0
[train]
learning_rate = 2e-3
threads = 1
micro_batch_tokens = 2048
unit_tokens = 800
keep_checkpoints = 1
[engine]
threads = 1
max_batch = 64
[cells]
drain_s = 0.2
"""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cells", type=int, default=3)
    parser.add_argument("--processors", type=float, default=0.3, help="share of each cell")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--groups", type=int, default=4, help="groups of a step")
    parser.add_argument("--runs", type=int, default=6, help="runs of a group")
    parser.add_argument("--staleness", type=int, default=1, help="steps, of all but colocate, which has none")
    parser.add_argument("--hidden", type=int, default=192, help="width of the policy")
    parser.add_argument("--layers", type=int, default=4, help="of the policy")
    parser.add_argument("--turns", type=int, default=4, help="of an agent")
    parser.add_argument("--tokens", type=int, default=48, help="that a turn samples, at most")
    parser.add_argument("--output", type=int, default=100, help="characters that a command prints; about a token each")
    parser.add_argument("--wait", type=float, default=0.5, help="median seconds of a command, lognormal over tasks")
    parser.add_argument("--sigma", type=float, default=1.2, help="of the logarithm of a task's seconds")
    parser.add_argument("--longest", type=float, default=2.0, help="bound of a task's scale, seconds")
    parser.add_argument("--only", nargs="+", help="arrangements, for example elastic async-1 colocate")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the config")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--dir", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options)))
        return
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
    from training_kit import make_model

    from gyre_sdk.events import SwitchMeasured, UnitsCommitted
    from gyre_sdk.trainer.config import load_config
    from gyre_sdk.trainer.stack import Stack
    from gyre_sdk.trainer.training import train

    quiet_libraries()
    folder, (kind, _, standing) = options.dir.resolve(), options.one.partition("-")
    concurrency = options.groups * options.runs * 2
    make_model(
        folder / "policy",
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers,
        head_dim=32,
        max_position_embeddings=4096,
    )
    (folder / "train.toml").write_text(CONFIG)
    config = load_config(
        folder / "train.toml",
        [
            f"tasks.seed={options.seed}",
            f"agent.options.turns={options.turns}",
            f"agent.options.tokens={options.tokens}",
            f"agent.options.output={options.output}",
            f"agent.options.median_s={options.wait}",
            f"agent.options.sigma={options.sigma}",
            f"agent.options.longest_s={options.longest}",
            f"train.seed={options.seed}",
            f"train.steps={options.steps}",
            f"train.save_every={options.steps}",
            f"rollout.groups_per_step={options.groups}",
            f"rollout.runs_per_group={options.runs}",
            f"rollout.concurrency={concurrency}",
            f"rollout.staleness={0 if kind == 'colocate' else options.staleness}",
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
        quotas.hold(0, os.getpid())
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
