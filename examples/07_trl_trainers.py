"""TRL's own trainers on whole agent runs: the demo's policy learns the demo's tasks with `GRPOTrainer` or `AsyncGRPOTrainer`.

python examples/07_trl_trainers.py --trainer grpo --dir .gyre/trl [--steps 40]      (needs gyre-sdk[train])

The demo (`examples/quickstart`) gives tasks, agent and policy; gyre runs the agent in workspaces, records its calls and
serves the weights; loss and loop are TRL's. Prints rewards on held-out tasks before and after, as one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "examples" / "quickstart"
sys.path.insert(0, str(QUICKSTART))
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from gyre_sdk.trainer.adapters import AsyncRollouts, RolloutFunc  # noqa: E402
from gyre_sdk.trainer.config import TrainerConfig, load_config  # noqa: E402
from gyre_sdk.trainer.evaluation import evaluate  # noqa: E402
from gyre_sdk.trainer.main import quiet_libraries  # noqa: E402
from gyre_sdk.trainer.stack import Stack  # noqa: E402
from gyre_sdk.view import LiveView  # noqa: E402


def settings(config: TrainerConfig, steps: int) -> dict[str, Any]:
    """Return the arguments that both trainers share."""
    return {
        "output_dir": str(config.output.dir / "trl"),
        "max_steps": steps,
        "learning_rate": config.train.learning_rate,
        "lr_scheduler_type": "linear",
        "adam_beta2": 0.99,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "temperature": 1.0,  # the agent's, too
        "seed": config.train.seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def train_grpo(stack: Stack, steps: int) -> None:
    """Train with `GRPOTrainer`: a batch of runs, a step, new weights, the next batch."""
    from trl import GRPOConfig, GRPOTrainer

    config, rollout = stack.config, RolloutFunc(stack)
    trainer = GRPOTrainer(
        model=str(config.policy.model),
        args=GRPOConfig(
            num_generations=rollout.num_generations,
            per_device_train_batch_size=rollout.num_generations,
            gradient_accumulation_steps=config.rollout.groups_per_step,
            loss_type="dapo",
            **settings(config, steps),
        ),
        train_dataset=rollout.dataset(),
        rollout_func=rollout,
        reward_funcs=rollout.reward,
    )
    try:
        trainer.train()
        rollout.publish(trainer)  # the last step's weights, for the evaluation
    finally:
        rollout.close()


def train_async(stack: Stack, steps: int, budget: int) -> None:
    """Train with `AsyncGRPOTrainer`: runs go on while it trains. All selected trajectories of a run.

    A step is as many samples as fit into `budget` tokens, those that samples share counted once.
    """
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    config, gyre = stack.config, AsyncRollouts(stack)
    trainer = AsyncGRPOTrainer(
        model=str(config.policy.model),
        args=AsyncGRPOConfig(
            per_device_train_batch_size=1, token_budget=budget, max_staleness=3, **settings(config, steps)
        ),
        train_dataset=gyre.dataset(),
        rollout_worker=gyre,
        weight_transfer=gyre,
    )
    trainer.train()


def main() -> None:
    """Evaluate, train, evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", choices=["grpo", "async"], required=True)
    parser.add_argument("--dir", type=Path, required=True, help="where everything goes")
    parser.add_argument("--policy", type=Path, help="model folder; else the demo's warm start is made, in a minute")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a step of the asynchronous trainer")
    parser.add_argument("--tasks", type=int, default=100, help="held-out tasks of an evaluation")
    parser.add_argument("--workspace", choices=["docker", "local"], default="local")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of quickstart.toml")
    arguments = parser.parse_args()
    quiet_libraries()
    folder = arguments.dir.resolve()
    policy = arguments.policy
    if policy is None:
        from warmstart import WarmStart, warm_start

        policy = warm_start(folder / "policy", WarmStart(), ROOT / ".cache" / "quickstart", print)
    config = load_config(
        QUICKSTART / "quickstart.toml",
        [
            f"policy.model={policy.resolve()}",
            f"store.path={folder / 'store.db'}",
            f"output.dir={folder / 'training'}",
            f"tasks.options.folder={ROOT / '.gyre' / 'quickstart' / 'tasks'}",
            f"rollout.workspace={arguments.workspace}",
            f"train.steps={arguments.steps}",
            *arguments.set,
        ],
    )
    from loader import load

    held_out = load(config.tasks.options["folder"], "heldout", arguments.tasks)
    began = time.monotonic()
    with LiveView(plain=True) as view, Stack(config, view, base=QUICKSTART) as stack:
        before = evaluate(config, held_out, name="before", temperature=1.0, stack=stack)
        if arguments.trainer == "grpo":
            train_grpo(stack, arguments.steps)
        else:
            train_async(stack, arguments.steps, arguments.budget)
        after = evaluate(config, held_out, name="after", temperature=1.0, stack=stack)
    found = {"trainer": arguments.trainer, "steps": arguments.steps, "before": before.reward, "after": after.reward}
    print(json.dumps({**found, "minutes": round((time.monotonic() - began) / 60, 2)}))


if __name__ == "__main__":
    main()
