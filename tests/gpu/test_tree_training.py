"""Executors on a GPU give the gradients that `flat` gives on the CPU. Skipped where there is none."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: none is visible to torch"),
]

SHAPE = {"hidden_size": 128, "head_dim": 32}
"""Sizes that fused kernels take."""


def objective(logp_C: Any, entropy_C: Any, index_C: Any) -> Any:
    return ((1.0 + index_C.to(logp_C.device) % 7) * logp_C + 0.1 * entropy_C).sum()


@pytest.fixture(params=["qwen3", "gemma2", "gemma3"])
def model(request: pytest.FixtureRequest) -> Any:
    from model_families import family

    return family(request.param, **SHAPE)


@pytest.fixture
def rows() -> list[Any]:
    from forest_rows import branching_rows

    return branching_rows(long=300)


def test_each_executor_equals_flat_on_the_cpu(model: Any, rows: list[Any]) -> None:
    from tiny_policy import gradient, relative

    from gyre_sdk.trainer.attention.budget import Budget
    from gyre_sdk.trainer.attention.dfs import DfsExecutor
    from gyre_sdk.trainer.attention.flat import FlatExecutor
    from gyre_sdk.trainer.attention.flex import FlexExecutor
    from gyre_sdk.trainer.attention.gather import GatherExecutor

    scores = FlatExecutor(model).forward_backward(rows, objective)
    wanted = gradient(model)
    model.cuda()
    for executor in (FlatExecutor, FlexExecutor, GatherExecutor, DfsExecutor):
        model.zero_grad()
        found = executor(model, Budget(segment=64)).forward_backward(rows, objective)
        assert relative(gradient(model).cpu(), wanted) < 1e-3, executor.name
        torch.testing.assert_close(found.logp_K.cpu(), scores.logp_K, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_the_fused_kernel_passes_its_own_check(
    model: Any, rows: list[Any], precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    from gyre_sdk.trainer.attention.budget import Budget
    from gyre_sdk.trainer.attention.choose import choose

    model.to("cuda", torch.bfloat16 if precision == "bfloat16" else torch.float32)
    budget = Budget(autocast=torch.bfloat16 if precision == "autocast" else None)
    executor = choose(model, "gather", budget)
    with caplog.at_level(logging.WARNING, logger="gyre.trainer"):
        executor.forward_backward(rows, objective)
    assert executor.name == "flex", caplog.text


@pytest.mark.parametrize("mistake", ["siblings are seen", "flat positions", "no mask"])
def test_mistakes_are_found_on_a_gpu_too(mistake: Any, rows: list[Any]) -> None:
    from forest_rows import OnePass
    from model_families import family

    from gyre_sdk.trainer.attention.check import Tolerance, compare
    from gyre_sdk.trainer.attention.flat import FlatExecutor

    model = family("qwen3", **SHAPE)
    on_gpu = family("qwen3", **SHAPE).to("cuda", torch.bfloat16)
    wrong = compare(OnePass(model, mistake), FlatExecutor(model), model, rows)
    assert not wrong.within(Tolerance.of(torch.bfloat16))
    right = compare(FlatExecutor(on_gpu), FlatExecutor(on_gpu), on_gpu, rows)
    assert right.within(Tolerance.of(torch.bfloat16))


def test_dfs_holds_the_activations_of_a_segment_only() -> None:
    from forest_rows import row_of
    from model_families import family

    from gyre_sdk.trainer.attention.budget import Budget
    from gyre_sdk.trainer.attention.dfs import DfsExecutor
    from gyre_sdk.trainer.attention.flat import FlatExecutor

    model = family("qwen3", max_position_embeddings=1 << 15, **SHAPE).cuda()
    row = row_of("long", np.random.default_rng(0).integers(3, 64, 16_384), 16_000)
    peaks = []
    for executor in (FlatExecutor(model), DfsExecutor(model, Budget(tokens=2048, segment=1024))):
        model.zero_grad()
        executor.forward_backward([row], objective)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        executor.forward_backward([row], objective)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < peaks[0]
