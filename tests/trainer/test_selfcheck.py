"""The self-check finds every mistake that is known of executors that share prefixes, and takes exact ones for exact."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from forest_rows import Mistake, OnePass, branching_rows, row_of
from model_families import family
from tiny_policy import VOCAB, gradient, relative, tiny_model
from torch import Tensor

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.attention.budget import Budget
from gyre_sdk.trainer.attention.check import Checked, Tolerance, compare, news
from gyre_sdk.trainer.attention.dfs import DfsExecutor
from gyre_sdk.trainer.attention.executor import Executor, Objective, Scores
from gyre_sdk.trainer.attention.flat import FlatExecutor
from gyre_sdk.trainer.attention.gather import GatherExecutor
from gyre_sdk.trainer.units import Row

EVERYWHERE: tuple[Mistake, ...] = (
    "flat positions",
    "no mask",
    "siblings are seen",
    "first token of a child is not trained",
    "targets of a branch are swapped",
    "gradient counted twice",
)
WITH_WINDOWS: tuple[Mistake, ...] = ("window by packed index", "window is lost")


def in_dtype(name: str, dtype: torch.dtype) -> Any:
    return family(name).to(dtype)


def difference(model: Any, executor: Executor, rows: Sequence[Row]) -> tuple[bool, Any]:
    found = compare(executor, FlatExecutor(model), model, rows)
    return found.within(Tolerance.of(next(model.parameters()).dtype)), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("mistake", EVERYWHERE)
def test_a_mistake_is_found(mistake: Mistake, dtype: torch.dtype) -> None:
    model = in_dtype("qwen3", dtype)
    exact, found = difference(model, OnePass(model, mistake), branching_rows())
    assert not exact, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("mistake", WITH_WINDOWS)
def test_a_mistake_with_windows_is_found(mistake: Mistake, dtype: torch.dtype) -> None:
    model = in_dtype("gemma3", dtype)
    exact, found = difference(model, OnePass(model, mistake), branching_rows())
    assert not exact, found


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_same_executor_without_a_mistake_is_exact(name: str, dtype: torch.dtype) -> None:
    model = in_dtype(name, dtype)
    exact, found = difference(model, OnePass(model), branching_rows())
    assert exact, found


def test_a_recurrent_state_that_runs_through_siblings_is_found() -> None:
    """A tree mask holds back attention only: Gated DeltaNet carries one branch's state into the next."""
    model = family("qwen3_next")
    exact, found = difference(model, OnePass(model), branching_rows())
    assert not exact, found
    chain = [row_of("r", np.random.default_rng(0).integers(3, VOCAB, 30), 4)]
    exact, found = difference(model, OnePass(model), chain)
    assert exact, found  # without a branch it is right: rows without one prove nothing about branches


@pytest.mark.parametrize("executor", [GatherExecutor, DfsExecutor])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_executors_are_exact_in_any_precision_and_with_checkpoints(
    executor: Any, checkpointing: bool, precision: str
) -> None:
    """float32: 1e-6 of the gradient. bfloat16 weights or mixed precision: within the self-check's tolerance."""
    model = in_dtype("gemma3", torch.bfloat16 if precision == "bfloat16" else torch.float32)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    budget = Budget(segment=8, tokens=64, autocast=torch.bfloat16 if precision == "autocast" else None)
    found = compare(executor(model, budget), FlatExecutor(model, budget), model, branching_rows())
    assert found.within(Tolerance(1e-6, 1e-6) if precision == "float32" else Tolerance.of(torch.bfloat16)), found


class _Counting:
    """Counts the passes of an executor."""

    def __init__(self, executor: Executor) -> None:
        self.name = executor.name
        self.executor = executor
        self.trained: list[int] = []

    def forward(self, rows: Sequence[Row]) -> Scores:
        return self.executor.forward(rows)

    def forward_backward(self, rows: Sequence[Row], objective: Objective) -> Scores:
        self.trained.append(len(rows))
        return self.executor.forward_backward(rows, objective)


def objective(logp_C: Tensor, entropy_C: Tensor, index_C: Tensor) -> Tensor:
    return -((1.0 + index_C.to(logp_C)) * logp_C).sum()


def test_a_wrong_executor_never_trains(caplog: pytest.LogCaptureFixture) -> None:
    """The gradient of a unit is flat's, and what had been added up before is still there, once."""
    model = tiny_model()
    rows = branching_rows()
    flat = FlatExecutor(model)
    flat.forward_backward(rows, objective)
    scores = flat.forward_backward(rows, objective)
    wanted = gradient(model)
    model.zero_grad()
    flat.forward_backward(rows, objective)
    checked = Checked(OnePass(model, "siblings are seen"), flat, model, Budget())
    with caplog.at_level(logging.WARNING, logger="gyre.trainer"):
        found = checked.forward_backward(rows, objective)
    assert relative(gradient(model), wanted) < 1e-6
    torch.testing.assert_close(found.logp_K, scores.logp_K)
    assert checked.name == "flat"
    [record] = caplog.records
    assert "one pass is not exact for Qwen3ForCausalLM" in record.getMessage()
    assert "goes on with flat" in record.getMessage()


def test_an_executor_that_refuses_a_model_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(OnePass):
        def forward_backward(self, rows: Sequence[Row], objective: Objective) -> Scores:
            raise TrainerError("it cannot")

    model = tiny_model()
    checked = Checked(Refusing(model), FlatExecutor(model), model, Budget())
    with caplog.at_level(logging.WARNING, logger="gyre.trainer"):
        checked.forward_backward(branching_rows(), objective)
    assert checked.name == "flat" and "it cannot" in caplog.text


def test_a_replacement_is_compared_too(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    flat = FlatExecutor(model)
    second = Checked(OnePass(model, "no mask"), flat, model, Budget())
    first = Checked(OnePass(model, "siblings are seen"), flat, model, Budget(), instead=second)
    flat.forward_backward(branching_rows(), objective)
    wanted = gradient(model)
    for _ in range(2):
        model.zero_grad()
        first.forward_backward(branching_rows(), objective)
        assert first.name == "flat" and relative(gradient(model), wanted) < 1e-6
    assert len(caplog.records) == 2


def test_running_out_of_memory_is_not_taken_for_a_mistake() -> None:
    class Full(OnePass):
        def forward_backward(self, rows: Sequence[Row], objective: Objective) -> Scores:
            raise torch.OutOfMemoryError("no room")

    model = tiny_model()
    checked = Checked(Full(model), FlatExecutor(model), model, Budget())
    with pytest.raises(torch.OutOfMemoryError):
        checked.forward_backward(branching_rows(), objective)
    assert checked.name == "one pass"


def test_a_branch_is_compared_when_the_first_one_comes() -> None:
    """Rows that share nothing say nothing about branches: what is proven of them is not taken for a proof of more."""
    model = tiny_model()
    chain = [row_of("r", np.random.default_rng(0).integers(3, VOCAB, 30), 4)]
    counting = _Counting(OnePass(model, "siblings are seen"))
    checked = Checked(counting, FlatExecutor(model), model, Budget())
    checked.forward_backward(chain, objective)
    checked.forward_backward(chain, objective)
    assert counting.trained == [1, 1, 1] and checked.name == "one pass"  # compared once, trained twice
    checked.forward_backward(branching_rows(), objective)
    assert checked.name == "flat"


def test_what_is_exact_is_compared_once_on_a_few_rows() -> None:
    model = tiny_model()
    rows = [replace(row, run=f"{n}", leaf=f"{n}{row.leaf}") for n in range(6) for row in branching_rows(n)]
    counting = _Counting(GatherExecutor(model))
    checked = Checked(counting, FlatExecutor(model), model, Budget(), tokens=128)
    for _ in range(3):
        checked.forward_backward(rows, objective)
    assert counting.trained[1:] == [30, 30, 30] and counting.trained[0] < 10


def test_what_is_new_in_rows() -> None:
    budget = Budget(tokens=60, segment=25)
    trunk, side, below, *_ = rows = branching_rows()
    assert news([trunk], budget, None) == {"path", "long segment"}
    assert news([side], Budget(), 20) == {"path", "path beyond the window"}
    assert news([trunk, side], Budget(), None) == {"path", "branch"}
    assert news([trunk, side, below], Budget(), None) == {"path", "branch", "branches below branches"}
    assert "several passes" in news(rows, budget, None) and "several passes" not in news(rows, Budget(), None)
    warm = replace(side, temperatures=np.full(len(side.targets), 0.5))
    assert news([warm], Budget(), None) == {"path", "temperature"}


def test_nan_is_a_difference() -> None:
    model = tiny_model()

    class Nan(FlatExecutor):
        def forward(self, rows: Sequence[Row]) -> Scores:
            scores = super().forward(rows)
            return Scores(scores.logp_K * float("nan"), scores.entropy_K)

    exact, found = difference(model, Nan(model), branching_rows())
    assert not exact, found
