"""The executor for GPUs, as far as a CPU goes: who sees whom, and the scores. Its gradients are tested where there is a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from forest_rows import branching_rows
from model_families import family
from torch.nn.attention import flex_attention
from transformers import AttentionInterface

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.attention.budget import Budget
from gyre_sdk.trainer.attention.choose import choose
from gyre_sdk.trainer.attention.flat import FlatExecutor
from gyre_sdk.trainer.attention.flex import FlexExecutor, sees
from gyre_sdk.trainer.attention.gather import GatherExecutor
from gyre_sdk.trainer.attention.layout import plant


@pytest.mark.parametrize("window", [None, 1, 6, 100])
def test_a_token_sees_its_own_path_within_its_window(window: int | None) -> None:
    """Against the rows: the tokens before one on any row through it are those that it may see."""
    rows = branching_rows()
    forest = plant(rows)
    mask = sees(torch.from_numpy(forest.end_U), torch.from_numpy(forest.position_U), window)
    at_U = torch.arange(forest.unique)
    nothing = torch.zeros((), dtype=torch.int64)
    found_UU = mask(nothing, nothing, at_U[:, None], at_U[None, :])
    wanted_UU = torch.zeros_like(found_UU)
    for segment in range(len(forest.start_S)):
        path: list[int] = []
        above = segment
        while above >= 0:
            path = [*range(forest.start_S[above], forest.stop_S[above]), *path]
            above = int(forest.parent_S[above])
        for position, query in enumerate(path):
            first = 0 if window is None else max(0, position - window + 1)
            wanted_UU[query, path[first : position + 1]] = True
    assert torch.equal(found_UU, wanted_UU)


def test_scores_are_those_of_the_other_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and caps of scores included; in one pass and in several; with temperatures."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # tracing takes 10 s here
    model = family("gemma2")
    draw = np.random.default_rng(1)
    rows = [replace(row, temperatures=draw.uniform(0.5, 2, len(row.targets))) for row in branching_rows()]
    wanted = FlatExecutor(model).forward(rows)
    for executor in (FlexExecutor(model), FlexExecutor(model, Budget(tokens=64)), GatherExecutor(model)):
        found = executor.forward(rows)
        torch.testing.assert_close(found.logp_K, wanted.logp_K, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(found.entropy_K, wanted.entropy_K, atol=2e-6, rtol=2e-6)


def test_it_is_chosen_on_gpus_only() -> None:
    assert choose(family("qwen3"), "gather").name == "gather"


@pytest.mark.parametrize("kernel", [GatherExecutor.attention, FlexExecutor.attention])
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"gyre_pass": None}, "was not handed `gyre_pass`"),
        ({"s_aux": torch.zeros(1)}, "attends with `s_aux`"),
        ({"position_bias": torch.zeros(1, 1, 2, 2)}, "attends with `position_bias`"),
        ({"dropout": 0.1}, "drops attention with probability 0.1"),
        ({"attention_mask": torch.zeros(1, 1, 2, 2)}, "makes a mask of its own"),
    ],
)
def test_what_a_kernel_does_not_compute_is_refused(kernel: str, asked: dict[str, Any], said: str) -> None:
    attend, tokens = AttentionInterface()[kernel], torch.zeros(1, 1, 2, 4)
    with pytest.raises(TrainerError, match=said):
        attend(torch.nn.Identity(), tokens, tokens, tokens, **{"attention_mask": None, "gyre_pass": object()} | asked)
