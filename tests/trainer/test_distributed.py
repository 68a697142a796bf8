"""Several processes train as one: the same gradient, the same weights, the same report, for any division of the units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks_kit import together
from tiny_policy import pure64, random_row, relative, tiny_model, unit_of

from gyre_sdk.trainer.trainer import StepReport, TreeGRPOConfig, TreeGRPOTrainer
from gyre_sdk.trainer.units import Unit

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
            seen.append(torch.cat([whole(p.grad).reshape(-1) for p in model.parameters() if p.grad is not None]))
            return before(model, grad_norm)

        trainer._get_grad_norm = look  # type: ignore[method-assign]
        trainer.train()
    return seen[0], reports[0].metrics, reports[0].units


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found: dict[Any, Any] = {}

    def of(options: dict[str, Any], count: int = 5) -> Any:
        key = (repr(options), count)
        if key not in found:
            found[key] = one_step(tmp_path_factory.mktemp("alone"), options, count)
        return found[key]

    return of


@pytest.mark.parametrize("sharding", [{}, SHARDED], ids=["copies", "shards"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_find_the_gradient_of_one_process(
    tmp_path: Path, alone: Any, size: int, sharding: dict[str, Any]
) -> None:
    wanted, metrics, units = alone({})
    for found, their_metrics, their_units in together(size, one_step, tmp_path, sharding, 5):
        assert relative(found, wanted) < 1e-12
        assert their_units == units
        assert set(their_metrics) == set(metrics)
        for name, value in metrics.items():
            assert their_metrics[name] == pytest.approx(value, rel=1e-9), name
