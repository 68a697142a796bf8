"""Several processes train as one: the same gradient, the same weights, the same report, for any division of the units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks_kit import together
from tiny_policy import pure64, random_row, relative, tiny_model, unit_of

from gyre_sdk.errors import SettingsError, TrainerError
from gyre_sdk.trainer.config import LoraConfig, PolicyConfig
from gyre_sdk.trainer.policy import load_policy
from gyre_sdk.trainer.trainer import StepReport, TreeGRPOConfig, TreeGRPOTrainer
from gyre_sdk.trainer.units import Unit
from gyre_sdk.trainer.weights import full_weights

SHARDED = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}}


def some_units(step: int = 1, count: int = 5) -> list[Unit]:
    """Units of unequal size, from a few runs."""
    rng = np.random.default_rng(step)
    return [
        unit_of(
            [
                random_row(rng, f"r{step}-{n}-{m}", prompt=4 + 3 * n, sampled=5 + n, advantage=1.0 - 2 * (m % 2))
                for m in range(1 + n % 3)
            ]
        )
        for n in range(count)
    ]


def trainer_in(folder: Path, batches: Any, model: Any, **options: Any) -> tuple[TreeGRPOTrainer, list[StepReport]]:
    reports: list[StepReport] = []
    args = TreeGRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **{"max_steps": 1, "save_strategy": "no", **options},
    )
    return TreeGRPOTrainer(model, args, batches, on_step=reports.append), reports


def one_step(folder: Path, options: dict[str, Any], count: int) -> tuple[torch.Tensor, dict[str, float], list[str]]:
    """Train one step in float64; return the gradient before clipping, the metrics, and the units."""
    with pure64():
        model = tiny_model(dtype=torch.float64)
        trainer, reports = trainer_in(folder, lambda step: some_units(step, count), model, max_grad_norm=0.0, **options)
        seen: list[torch.Tensor] = []
        trainer.create_optimizer()
        before = trainer._get_grad_norm

        def look(model: Any, grad_norm: Any = None) -> Any:
            gradients = [whole(p.grad).reshape(-1) for p in model.parameters() if p.grad is not None]
            seen.append(torch.cat(gradients) if gradients else torch.empty(0))
            return before(model, grad_norm)

        trainer._get_grad_norm = look  # type: ignore[method-assign]
        trainer.train()
    return seen[0], reports[0].metrics, reports[0].units


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found: dict[Any, Any] = {}

    def of(count: int) -> Any:
        if count not in found:
            found[count] = one_step(tmp_path_factory.mktemp("alone"), {}, count)
        return found[count]

    return of


def steps(folder: Path, counts: list[int]) -> list[Any]:
    """Train a step on each number of units, with copies of the weights; then again with shards."""
    return [one_step(folder, sharding, count) for sharding in ({}, SHARDED) for count in counts]


@pytest.mark.parametrize(("size", "counts"), [(2, [5]), (3, [5, 2, 1])])
def test_ranks_find_the_gradient_of_one_process(tmp_path: Path, alone: Any, size: int, counts: list[int]) -> None:
    """Also where there are fewer units than ranks."""
    for found in together(size, steps, tmp_path, counts):
        for count, (gradient, metrics, units) in zip([*counts, *counts], found, strict=True):
            wanted, wanted_metrics, wanted_units = alone(count)
            assert relative(gradient, wanted) < 1e-12
            assert units == wanted_units
            assert metrics == pytest.approx(wanted_metrics, rel=1e-9, abs=1e-15)


def without_units(folder: Path) -> tuple[list[Any], str, str]:
    """Train on what rank 0 cannot give; then on nothing; then with what cannot work in shards."""

    def broken(step: int) -> Any:
        yield some_units(step)[0]
        raise ValueError("the store is gone")

    trainer, _ = trainer_in(folder, broken, tiny_model())
    with pytest.raises((ValueError, TrainerError)) as failed:
        trainer.train()
    found = steps(folder, [0])
    with pytest.raises(SettingsError) as refused:
        trainer_in(folder, some_units, tiny_model(), executor="gather", **SHARDED)
    return found, f"{failed.type.__name__}: {failed.value}", str(refused.value)


def test_what_ends_a_step_ends_it_on_every_rank(tmp_path: Path) -> None:
    lead, other = together(2, without_units, tmp_path)
    for found, _, refused in (lead, other):
        for gradient, metrics, units in found:
            assert (len(gradient), metrics, units) == (0, {}, [])
        assert refused.startswith("executor = 'gather' makes as many passes as its rows have segments")
    assert lead[1] == "ValueError: the store is gone"
    assert other[1] == "TrainerError: rank 0 cannot go on: ValueError: the store is gone"


def trainings(folder: Path, base: Path, lora: LoraConfig | None) -> Any:
    """Train with copies, then with shards."""
    return [
        two_trainings(folder / name, base, sharding, lora) for name, sharding in (("copies", {}), ("shards", SHARDED))
    ]


def two_trainings(folder: Path, base: Path, options: dict[str, Any], lora: LoraConfig | None) -> Any:
    """Train four steps; then again from the second one's checkpoint. Return weights and losses of both."""

    def run(name: str, resume: Path | None) -> tuple[dict[str, torch.Tensor], list[float]]:
        model = load_policy(PolicyConfig(model=base, lora=lora), resume)
        trainer, reports = trainer_in(
            folder / name,
            some_units,
            model,
            max_steps=4,
            save_strategy="steps",
            save_steps=1,
            learning_rate=1e-2,
            **options,
        )
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return full_weights(trainer.model), [report.metrics["loss"] for report in reports]

    return *run("whole", None), *run("resumed", folder / "whole" / "checkpoint-2")


@pytest.mark.parametrize("lora", [None, LoraConfig(r=4, alpha=8)], ids=["full", "lora"])
def test_a_resumed_training_of_ranks_is_the_uninterrupted_one(tmp_path: Path, lora: LoraConfig | None) -> None:
    tiny_model().save_pretrained(tmp_path / "base")
    lead, other = together(2, trainings, tmp_path, tmp_path / "base", lora)
    names = ("copies", "shards", "copies", "shards")
    for name, (weights, losses, again, later) in zip(names, [*lead, *other], strict=True):
        assert later == losses[2:]
        assert weights and all(torch.equal(tensor, again[key]) for key, tensor in weights.items())
        # what is saved can be loaded anywhere, and is what would be published
        checkpoint = tmp_path / name / "whole" / "checkpoint-4"
        saved = full_weights(load_policy(PolicyConfig(model=tmp_path / "base", lora=lora), checkpoint))
        for key, tensor in saved.items():
            torch.testing.assert_close(tensor, weights[key], rtol=0, atol=1e-7)
