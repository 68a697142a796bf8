"""TRL's own trainers for real: two steps each on runs of real sessions, with weights that reach a real engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_kit import make_training
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from gyre_sdk.errors import SettingsError, TrainerError
from gyre_sdk.trainer.adapters import AsyncRollouts, RolloutFunc
from gyre_sdk.trainer.config import load_config
from gyre_sdk.trainer.stack import Stack
from gyre_sdk.trainer.weights import full_weights

pytestmark = pytest.mark.timeout(300)
RUNS = 4
SHARED: dict[str, Any] = {
    "max_steps": 2,
    "learning_rate": 1e-2,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "logging_steps": 1,
    "report_to": [],
    "disable_tqdm": True,
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("trl")
    config = load_config(make_training(folder), [f"rollout.runs_per_group={RUNS}", "rollout.concurrency=8"])
    with Stack(config, base=folder) as running:
        yield running


def served(stack: Stack) -> dict[str, torch.Tensor]:
    return dict(load_file(stack.publisher.current.file))


def starting(stack: Stack) -> dict[str, torch.Tensor]:
    return dict(load_file(stack.config.policy.model / "model.safetensors"))


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_grpo_trainer(stack: Stack, tmp_path: Path) -> None:
    """Each step's runs are sampled by the weights of the step before; the trainer's numbers are the store's."""
    rollout = RolloutFunc(stack, rows_per_run=2)
    assert rollout.num_generations == 2 * RUNS
    seen: list[dict[str, Any]] = []

    def spied(prompts: list[str], trainer: Any) -> dict[str, Any]:
        seen.append(rollout(prompts, trainer))
        return seen[-1]

    trainer = GRPOTrainer(
        model=str(stack.config.policy.model),
        args=GRPOConfig(
            output_dir=str(tmp_path),
            num_generations=2 * RUNS,
            per_device_train_batch_size=2 * RUNS,
            gradient_accumulation_steps=2,
            loss_type="dapo",
            **SHARED,
        ),
        train_dataset=rollout.dataset(),
        rollout_func=spied,
        reward_funcs=rollout.reward,
    )
    trainer.train()
    rollout.publish(trainer)
    rollout.close()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(seen) == len(logs) == 2
    for step, (batch, entry) in enumerate(zip(seen, logs, strict=True)):
        runs = {run.run: run for run in stack.journal.runs() if run.run in batch["run"]}
        assert len(runs) == 2 * RUNS and len({run.group for run in runs.values()}) == 2
        assert [runs[run].reward for run in batch["run"]] == batch["run_reward"] and len(batch["run"]) == 4 * RUNS
        assert batch["run"][::2] == batch["run"][1::2], "two places of a run are next to each other"
        assert entry["reward"] == pytest.approx(np.mean(batch["run_reward"]))
        assert 0 < entry["trained_share"] <= 1
        calls = {run: list(stack.journal.calls(run)) for run in runs}
        assert {span.version for found in calls.values() for call in found for span in call.versions} == {step + 1}
        for run, places in ((batch["run"][place], (place, place + 1)) for place in range(0, 4 * RUNS, 2)):
            marked = sum(sum(batch["env_mask"][place]) for place in places)
            assert marked in (0, sum(len(call.sampled_ids) for call in calls[run])), "0: a group without contrast"
            paths = [call.prompt_ids + call.sampled_ids for call in calls[run]]
            for place in places:
                whole = batch["prompt_ids"][place] + batch["completion_ids"][place]
                assert not any(batch["env_mask"][place]) or whole in [path[: len(whole)] for path in paths]
    assert same(served(stack), full_weights(trainer.model)) and not same(served(stack), starting(stack))


def test_async_grpo_trainer(stack: Stack, tmp_path: Path) -> None:
    """Every sampled token is in one sample; the first step's log-probs are the engine's; staleness is in TRL's count."""
    gyre = AsyncRollouts(stack)
    taken, put = [], gyre.rollout_buffer.put

    def spied(sample: Any, **more: Any) -> None:
        put(sample, **more)
        taken.append(sample)

    gyre.rollout_buffer.put = spied  # type: ignore[method-assign]
    trainer = AsyncGRPOTrainer(
        model=str(stack.config.policy.model),
        args=AsyncGRPOConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=1, token_budget=1024, max_staleness=2, **SHARED
        ),
        train_dataset=gyre.dataset(),
        rollout_worker=gyre,
        weight_transfer=gyre,
    )
    trainer.train()
    first, second = [entry for entry in trainer.state.log_history if "ratio" in entry]
    assert first["ratio"] == pytest.approx(1, abs=1e-3) and first["kl"] == pytest.approx(0, abs=1e-5)
    assert first["sample/staleness_max"] == 0 <= second["sample/staleness_max"] <= 2
    assert first["batch/packing_ratio"] > 1 and 0 <= first["rollout/reward"] <= 1
    assert same(served(stack), full_weights(trainer.model)) and not same(served(stack), starting(stack))
    whole = {}
    for sample in taken:
        row = (sample.completion[0]["content"], *sample.input_ids.tolist())
        whole[row] = whole.get(row, 0) + sample.completion_mask
        assert 0 <= sample.model_version <= trainer.model_version
    assert all(mask.max() == 1 for mask in whole.values())
    groups = {run.group for run in stack.journal.runs() if run.group and run.group.startswith("trl-")}
    assert len(groups) > len({sample.group_id for sample in taken}) > 1
    assert not [thread for thread in threading.enumerate() if thread.name == "rollouts"]


def test_what_does_not_fit_is_refused(stack: Stack, tmp_path: Path) -> None:
    rollout = RolloutFunc(stack, rows_per_run=1)
    trainer = GRPOTrainer(
        model=str(stack.config.policy.model),
        args=GRPOConfig(output_dir=str(tmp_path), num_generations=RUNS, per_device_train_batch_size=RUNS, **SHARED),
        train_dataset=rollout.dataset(),
        rollout_func=rollout,
        reward_funcs=rollout.reward,
    )
    with pytest.raises(TrainerError, match="'nothing' is no name of a task"):
        rollout(["nothing"] * RUNS, trainer)
    with pytest.raises(TrainerError, match=r"are not one task: \['count-0', 'count-1'\]"):
        rollout(["count-0", "count-1"] * 2, trainer)
    rollout.close()
    with pytest.raises(TrainerError, match="num_generations must be a multiple of 3"):
        RolloutFunc(stack, rows_per_run=3)(["count-0"] * RUNS, trainer)
    with pytest.raises(SettingsError, match="rows_per_run is 0"):
        RolloutFunc(stack, rows_per_run=0)


def test_health(stack: Stack) -> None:
    gyre = AsyncRollouts(stack)
    gyre.check_health(60)
    with pytest.raises(TrainerError, match="no group of runs has closed for"):
        gyre.check_health(-1)
    gyre.stop()
