"""A `rollout_func` for TRL's `GRPOTrainer`: whole agent runs in place of completions.

    rollout = RolloutFunc(stack)
    GRPOTrainer(
        model=..., rollout_func=rollout, reward_funcs=rollout.reward, train_dataset=rollout.dataset(),
        args=GRPOConfig(num_generations=rollout.num_generations, ...),
    )

The trainer takes one row per generation. A run has `rows_per_run` of them in a row, one per selected trajectory; places
without one are a masked token. All have the run's reward, so TRL's mean over a group's rows is the mean over its runs, and
its standard deviation of n runs with J places each is that of the runs times sqrt(J (n - 1) / (J n - 1)). The weights are
published before runs of a new step.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any
from uuid import uuid4

import numpy as np
from datasets import Dataset

from gyre_sdk.errors import SettingsError, TrainerError
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
        sealer: how rows are made; None as `[train]` says. Its bound on trajectories is `rows_per_run`, whatever it says.
        rows_per_run: most trajectories of a run; None takes `train.j_max`.

    Raises:
        SettingsError: `train.j_max` is 0, which bounds nothing.
    """

    def __init__(self, stack: Stack, sealer: Sealer | None = None, *, rows_per_run: int | None = None) -> None:
        self.rows_per_run = stack.config.train.j_max if rows_per_run is None else rows_per_run
        if self.rows_per_run < 1:
            raise SettingsError(
                f"rows_per_run is {self.rows_per_run}; GRPOTrainer's batches have a fixed number of rows: give at least 1,"
                " or set train.j_max"
            )
        self._stack = stack
        self._tasks = {task.name: task for task in stack.tasks}
        self._groups = Groups(
            stack, replace(sealer or make_sealer(stack.config.train, stack.base), j_max=self.rows_per_run)
        )
        self._published: int | None = None
        self._logged: dict[str, float] = {}
        self.untrained: Counter[str] = Counter()
        """What was recorded and is not trained, by reason, since the start."""

    @property
    def num_generations(self) -> int:
        """The trainer's `num_generations` for groups of `rollout.runs_per_group` runs."""
        return self.rows_per_run * self._stack.config.rollout.runs_per_group

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
        """Make a run for each `rows_per_run` prompts; return the rows in order.

        Returns:
            `prompt_ids`, `completion_ids`, `logprobs` (nats; 0 where nothing was sampled), `env_mask` (1 at targets),
            and for reward functions `run_reward` and `run` (the run's id).

        Raises:
            TrainerError: the trainer's settings do not fit, or runs cannot be made any more.
        """
        training = bool(trainer.model.training)
        size = int(trainer.num_generations if training else trainer.num_generations_eval)
        self._check(trainer, size, len(prompts))
        self.publish(trainer)
        rows: list[dict[str, Any]] = []
        groups, logged = self._run(prompts, size, "train" if training else "trl-eval"), Counter[str]()
        end = int(trainer.processing_class.eos_token_id)
        sampled = trained = 0
        for group, members in groups:
            of_run: dict[str, list[Row]] = defaultdict(list)
            for row in (row for unit in group.sealed.units for row in unit.rows):
                of_run[row.run].append(row)
            by_member = {run.member: run for run in group.runs}
            logged.update(group.sealed.dropped)
            sampled += group.sampled
            for member in range(members):
                run = by_member.get(member)
                name, reward = (run.run, run.reward) if run is not None else ("", None)
                for _, row in zip_longest(range(self.rows_per_run), of_run[name]):
                    found, dropped = as_trl(row, trainer.args.temperature, end)
                    logged.update(dropped)
                    trained += sum(found["env_mask"])
                    rows.append({**found, "run_reward": reward, "run": name})
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
            self._groups.begin(task, f"trl-{batch}-{number:04d}", size // self.rows_per_run, done, split=split)
        for _ in starts:
            while not ended.acquire(timeout=_LOOK):
                self._groups.check()
        return [(closed[number], size // self.rows_per_run) for number in range(len(starts))]

    def _check(self, trainer: Any, size: int, prompts: int) -> None:
        if trainer.accelerator.num_processes > 1:
            raise TrainerError("RolloutFunc serves one training process; use gyre-train for several")
        if trainer.use_vllm:
            raise TrainerError(
                "set use_vllm = False: runs are sampled by gyre's replicas, and gyre publishes the weights"
            )
        if size % self.rows_per_run or prompts % size:
            raise TrainerError(
                f"num_generations is {size} and a batch has {prompts} prompts; with {self.rows_per_run} rows per run,"
                f" num_generations must be a multiple of {self.rows_per_run} (RolloutFunc.num_generations is one), and a"
                " batch whole groups"
            )


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
