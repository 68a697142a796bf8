"""A `rollout_func` for TRL's `GRPOTrainer`: whole agent runs in place of completions.

    rollout = RolloutFunc(stack)
    GRPOTrainer(model=..., rollout_func=rollout, reward_funcs=rollout.reward, train_dataset=rollout.dataset(), args=...)

The trainer takes one row per prompt and no more, so of a run that branches only one trajectory is trained: the one that
the selection draws first (`j_max = 1`). Its weights are published before it asks for runs of a new step.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import numpy as np
from datasets import Dataset

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.adapters.groups import WRONG_TEMPERATURE, ClosedGroup, Groups
from gyre_sdk.trainer.stack import Stack
from gyre_sdk.trainer.training import make_sealer
from gyre_sdk.trainer.units import Row, Sealer

_LOOK = 1.0
_STOP_SECONDS = 5.0


class RolloutFunc:
    """Runs the agent of a stack on the tasks that a `GRPOTrainer` asks for. Prompts are names of tasks.

    Args:
        stack: running processes; its `rollout` settings say how runs are made.
        sealer: how rows are made; None as `[train]` says. Its bound on trajectories is 1, whatever it says.
    """

    def __init__(self, stack: Stack, sealer: Sealer | None = None) -> None:
        self._stack = stack
        self._tasks = {task.name: task for task in stack.tasks}
        self._groups = Groups(stack, replace(sealer or make_sealer(stack.config.train, stack.base), j_max=1))
        self._published: int | None = None
        self._logged: dict[str, float] = {}
        self.untrained: Counter[str] = Counter()
        """What was recorded and is not trained, by reason, since the start."""

    def dataset(self) -> Dataset:
        """Return the stack's tasks as a TRL dataset: one prompt per task, its name."""
        return Dataset.from_dict({"prompt": list(self._tasks)})

    def reward(
        self, run_reward: Sequence[float | None], log_metric: Callable[[str, float], None] | None = None, **_: Any
    ) -> list[float | None]:
        """Reward function for the trainer: what the runs were scored with; None is no reward, which is not 0."""
        if log_metric is not None:
            for name, value in self._logged.items():
                log_metric(name, value)
        return list(run_reward)

    def close(self) -> None:
        """End the threads that runs are made in."""
        self._groups.stop(_STOP_SECONDS)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        """Make one run per prompt; return the rows in order.

        Returns:
            `prompt_ids`, `completion_ids`, `logprobs` (nats; 0 where nothing was sampled), `env_mask` (1 at targets),
            and for reward functions `run_reward` and `run` (the run's id).

        Raises:
            TrainerError: the trainer's settings do not fit, or runs cannot be made any more.
        """
        _check(trainer)
        self.publish(trainer)
        training = bool(trainer.model.training)
        size = trainer.num_generations if training else trainer.num_generations_eval
        rows: list[dict[str, Any]] = []
        found, logged = self._run(prompts, size, "train" if training else "trl-eval"), Counter[str]()
        end = int(trainer.processing_class.eos_token_id)
        sampled = trained = 0
        for group, members in found:
            by_run = {row.run: row for unit in group.sealed.units for row in unit.rows}
            by_member = {run.member: run for run in group.runs}
            logged.update(group.sealed.dropped)
            sampled += group.sampled
            for member in range(members):
                run = by_member.get(member)
                row, dropped = as_trl(by_run.get(run.run) if run else None, trainer.args.temperature, end)
                logged.update(dropped)
                trained += sum(row["env_mask"])
                reward = run.reward if run is not None else None
                rows.append({**row, "run_reward": reward, "run": run.run if run is not None else ""})
        self.untrained.update(logged)
        self._logged = {f"untrained/{name}": float(count) for name, count in logged.items()}
        self._logged["trained_share"] = trained / sampled if sampled else 0.0
        return {name: [row[name] for row in rows] for name in rows[0]}

    def publish(self, trainer: Any) -> None:
        """Have the replicas serve the trainer's weights; nothing to do where they were published after its last step.

        Raises:
            PublishError: a replica could not be brought to them.
        """
        step = int(trainer.state.global_step)
        if step != self._published:
            self._stack.publisher.publish(trainer.accelerator.unwrap_model(trainer.model), step)
            self._published = step

    def _run(self, prompts: Sequence[str], size: int, split: str) -> list[tuple[ClosedGroup, int]]:
        """Make the runs of a batch: `size` prompts in a row are one group."""
        batch, ended = uuid4().hex[:8], threading.Semaphore(0)
        closed: dict[int, ClosedGroup] = {}
        starts = range(0, len(prompts), size)

        def keep(number: int, group: ClosedGroup) -> None:
            closed[number] = group
            ended.release()

        for number, start in enumerate(starts):
            names = set(prompts[start : start + size])
            if len(names) != 1:
                raise TrainerError(f"prompts {start} to {start + size} are not one task: {sorted(names)[:4]}")
            task = self._tasks.get(names.pop())
            if task is None:
                raise TrainerError(
                    f"prompt {prompts[start]!r} is no name of a task; give the trainer `RolloutFunc.dataset()`"
                )
            done = lambda group, number=number: keep(number, group)  # noqa: E731
            self._groups.begin(task, f"trl-{batch}-{number:04d}", len(prompts[start : start + size]), done, split=split)
        for _ in starts:
            while not ended.acquire(timeout=_LOOK):
                self._groups.check()
        return [(closed[number], len(prompts[start : start + size])) for number, start in enumerate(starts)]


def _check(trainer: Any) -> None:
    if trainer.accelerator.num_processes > 1:
        raise TrainerError("RolloutFunc serves one training process; use gyre-train for several")
    if trainer.use_vllm:
        raise TrainerError("set use_vllm = False: runs are sampled by gyre's replicas, and gyre publishes the weights")


def as_trl(row: Row | None, temperature: float, end: int) -> tuple[dict[str, list[Any]], Counter[str]]:
    """Return a row in TRL's form, and the targets left out by reason.

    A run that trains nothing keeps its place as one masked token.

    Args:
        temperature: the trainer's.
        end: a token to stand for such a run.
    """
    if row is None:
        return {"prompt_ids": [end], "completion_ids": [end], "logprobs": [0.0], "env_mask": [0]}, Counter()
    right_K = np.isclose(row.temperatures, temperature)
    first, last = int(row.targets[0]), int(row.targets[-1]) + 1
    mask_T = np.zeros(last, np.int64)
    mask_T[row.targets[right_K]] = 1
    logprobs_T = np.zeros(last)
    logprobs_T[row.targets] = row.logprobs
    found = {
        "prompt_ids": row.ids[:first].tolist(),
        "completion_ids": row.ids[first:last].tolist(),
        "logprobs": logprobs_T[first:].tolist(),
        "env_mask": mask_T[first:].tolist(),
    }
    return found, +Counter({WRONG_TEMPERATURE: int((~right_K).sum())})
