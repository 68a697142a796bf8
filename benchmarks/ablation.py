"""The bound on trajectories per run, ablated in small: J_max = 1, 5 and none on a branching variant of the demo.

python benchmarks/ablation.py train --dir DIR [--seeds 0 1 2] [--bounds 1 5 0]
python benchmarks/ablation.py report --dir DIR

`train` makes one training per seed and bound, one after the other, each in a process of its own, from one warm start per
seed; what is there already is kept, so it can be interrupted. `report` measures what each bound costs on the same
recorded runs, the bounds interleaved in one process, and prints tables and curves as Markdown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
QUICKSTART = ROOT / "examples" / "quickstart"
sys.path[:0] = [str(HERE), str(HERE / "branching"), str(QUICKSTART)]

from gyre_sdk.trainer.main import quiet_libraries  # noqa: E402

TRACES = 1000
"""Scripted runs of the warm start."""
SETTINGS = [
    "agent.function=branching_agent:solve",
    "tasks.loader=branching_tasks:load",
    "rollout.groups_per_step=4",
    "rollout.runs_per_group=6",
    "rollout.concurrency=12",
    "rollout.timeout_s=120.0",
    "rollout.workspace=local",
    "train.steps=24",
    "train.save_every=24",
]
"""What differs from the demo's settings."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("train", "one", "report"):
        command = commands.add_parser(name)
        command.add_argument("--dir", type=Path, required=True, help="where everything is kept")
        command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
        command.add_argument("--bounds", type=int, nargs="+", default=[1, 5, 0], help="J_max; 0 for none")
        command.add_argument("--tasks", type=int, default=50, help="held-out tasks of an evaluation")
        command.add_argument("--page", type=Path, help="`report`: a page to write the tables into, a picture beside it")
        command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the config")
    arguments = parser.parse_args()
    if arguments.command == "report":
        from ablation_report import report

        print(report(arguments.dir, arguments.seeds, arguments.bounds, arguments.page))
        return
    if arguments.command == "one":
        train_one(arguments, arguments.seeds[0], arguments.bounds[0])
        return
    for seed in arguments.seeds:
        warm(arguments.dir / f"policy-{seed}", seed)
        for bound in arguments.bounds:
            if (folder_of(arguments.dir, seed, bound) / "result.json").is_file():
                continue
            command = [sys.executable, __file__, "one", "--dir", str(arguments.dir), "--tasks", str(arguments.tasks)]
            command += ["--seeds", str(seed), "--bounds", str(bound)]
            command += [part for pair in arguments.set for part in ("--set", pair)]
            subprocess.run(command, check=True)


def folder_of(root: Path, seed: int, bound: int) -> Path:
    """Return where a training is kept."""
    return root / f"seed-{seed}-j-{bound}"


def warm(folder: Path, seed: int) -> None:
    """Make the policy of a seed, unless it is there."""
    if (folder / "config.json").is_file():
        return
    import branching_tasks
    import branching_traces
    from policy import make_renderer, make_tokenizer
    from traces import in_batches
    from warmstart import WarmStart, fit

    quiet_libraries()
    settings = WarmStart(seed=seed, traces=TRACES)
    tokenizer = make_tokenizer()
    tasks = branching_tasks.generate("train", settings.traces, seed=1000 + seed)
    rows = branching_traces.make_rows(tasks, tokenizer, make_renderer(tokenizer), seed)
    fit(folder, in_batches(rows, settings.batch, seed), settings, lambda line: print(line, flush=True))


def train_one(arguments: argparse.Namespace, seed: int, bound: int) -> None:
    """Evaluate, train and evaluate; write `result.json`."""
    import branching_tasks

    from gyre_sdk.trainer.config import load_config
    from gyre_sdk.trainer.evaluation import evaluate
    from gyre_sdk.trainer.stack import Stack
    from gyre_sdk.trainer.training import train
    from gyre_sdk.view import LiveView

    quiet_libraries()
    folder = folder_of(arguments.dir.resolve(), seed, bound)
    policy, tasks = arguments.dir.resolve() / f"policy-{seed}", arguments.dir.resolve() / "tasks"
    paths = [
        f"policy.model={policy}",
        f"store.path={folder / 'store.db'}",
        f"output.dir={folder / 'training'}",
        f"tasks.options.folder={tasks}",
        f"tasks.seed={seed}",
        f"train.seed={seed}",
        f"train.j_max={bound}",
    ]
    config = load_config(QUICKSTART / "quickstart.toml", [*SETTINGS, *paths, *arguments.set])
    held_out = branching_tasks.load(str(tasks), "heldout", arguments.tasks)
    began = time.monotonic()
    with LiveView(plain=True) as view, Stack(config, view, base=HERE / "branching") as stack:
        before = evaluate(config, held_out, name="before", temperature=1.0, stack=stack)
        done = train(config, stack=stack)
        after = evaluate(config, held_out, name="after", temperature=1.0, stack=stack)
        result: dict[str, Any] = {
            "seed": seed,
            "bound": bound,
            "before": before.reward,
            "after": after.reward,
            "trained_tokens": done.trained_tokens,
            "minutes": (time.monotonic() - began) / 60,
            "steps": [
                {
                    "rewards": [
                        reward
                        for group in kept.groups
                        if (closed := stack.ledger.state.groups[group].closed) is not None
                        for reward in closed.rewards
                    ],
                    "metrics": kept.metrics,
                }
                for _, kept in sorted(stack.ledger.state.steps.items())
            ],
        }
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
