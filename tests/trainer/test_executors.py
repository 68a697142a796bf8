"""Executors that share prefixes give what separate sequences give: loss, scores and every parameter's gradient."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from executors_kit import (
    agent_rows,
    comb,
    cut_row,
    difference,
    everywhere,
    forests,
    nothing_narrowed,
    row,
    separately,
    shared,
    two_level,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from model_families import family
from peft import LoraConfig, get_peft_model
from tiny_policy import VOCAB, tiny_model
from torch import Tensor

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.attention import kernels
from gyre_sdk.trainer.attention.budget import Budget
from gyre_sdk.trainer.attention.dfs import DfsExecutor
from gyre_sdk.trainer.attention.executor import Executor, linearised
from gyre_sdk.trainer.attention.gather import GatherExecutor
from gyre_sdk.trainer.attention.layout import plant
from gyre_sdk.trainer.units import Row

EXACT = 1e-12


@pytest.fixture(autouse=True, scope="module")
def in_float64() -> Iterator[None]:
    with nothing_narrowed():
        yield


def executors(model: Any, rows: list[Row]) -> list[Executor]:
    """Whole forest; cut forest; a walk that keeps every graph; one that keeps none; one whose pieces hold several."""
    longest = max((len(one.ids) for one in rows), default=1)
    return [
        GatherExecutor(model),
        GatherExecutor(model, Budget(tokens=longest + 7, logits=9 * VOCAB)),
        DfsExecutor(model, Budget(segment=5)),
        DfsExecutor(model, Budget(segment=7, tokens=1)),
        DfsExecutor(model, Budget(segment=longest, logits=5 * VOCAB)),
    ]


def assert_exact(model: Any, rows: list[Row], *, few: bool = False) -> None:
    """`few`: the forest cut in two ways only, for what does not depend on how it is cut."""
    objective = two_level(rows)
    wanted = separately(model, rows, everywhere(objective))
    for executor in executors(model, rows)[1:4:2] if few else executors(model, rows):
        found = shared(executor, model, rows, objective)
        assert difference(found, wanted) < EXACT, (executor, executor._budget)
        again = executor.forward(rows)
        assert difference((found[0], again, found[2]), wanted) < EXACT


@settings(max_examples=10, deadline=None)
@given(rows=forests())
def test_any_forest(rows: list[Row]) -> None:
    """Two-level weights, temperatures, rows without targets, targets anywhere."""
    if any(len(one.targets) for one in rows):
        assert_exact(tiny_model(dtype=torch.float64), rows)


def test_an_agents_trees() -> None:
    """Turns, side calls, compactions that start again, and sub-agents under one system prompt."""
    rows = agent_rows()
    forest = plant(rows)
    assert forest.raw > 3 * forest.unique
    assert_exact(tiny_model(dtype=torch.float64), rows)


def test_a_long_prefix_with_eight_branches() -> None:
    """4096 + 8 x 256, in pieces of 1024 too; on a model that is small enough to wait for."""
    model = family("qwen3", hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4).double()
    rows = comb(4096, 8, 256)
    objective = two_level(rows)
    wanted = separately(model, rows, everywhere(objective))
    for executor in (GatherExecutor(model), DfsExecutor(model, Budget(segment=1024))):
        assert difference(shared(executor, model, rows, objective), wanted) < EXACT


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "cohere2", "deepseek_v3", "gpt_neox"])
def test_other_families(name: str) -> None:
    """Windows that a depth counts and an order does not, capped scores, heads of two sizes, tied embeddings."""
    assert_exact(family(name).double(), agent_rows(1, turns=3), few=True)


def test_windows_in_some_layers() -> None:
    layers = ["sliding_attention", "full_attention"]
    model = family("qwen2", sliding_window=5, use_sliding_window=True, max_window_layers=0, layer_types=layers)
    assert_exact(model.double(), agent_rows(2, turns=3), few=True)


def test_scores_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a fused kernel, queries are taken a few at a time."""
    monkeypatch.setattr(kernels, "_SCORES_AT_ONCE", 300)
    assert_exact(family("gemma2").double(), agent_rows(3, turns=2), few=True)


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_activation_checkpointing(reentrant: bool) -> None:
    model = tiny_model(dtype=torch.float64).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_exact(model, agent_rows(turns=3), few=True)


def test_adapters() -> None:
    """Only the adapters get a gradient, also where the first layers have none."""
    for targets in (["q_proj", "v_proj"], ["model.layers.1.mlp.down_proj"], ["k_proj", "lm_head"]):
        config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        model = get_peft_model(tiny_model(dtype=torch.float64), config)
        assert_exact(model, agent_rows(turns=2), few=True)


def test_only_the_head_is_trained() -> None:
    model = family("qwen3", tie_word_embeddings=False).double()
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    assert_exact(model, agent_rows(turns=2), few=True)


@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_no_cut_and_no_order_of_rows_matters(data: st.DataObject) -> None:
    """A target's numbers stay with it; each gradient is the one of the rows as they were."""
    model = tiny_model(dtype=torch.float64)
    rows = agent_rows(4, turns=3)
    wanted = separately(model, rows, everywhere(two_level(rows)))
    cuts = st.lists(st.integers(0, 8), max_size=3)
    pieces = [part for one in rows for part in cut_row(one, [min(at, len(one.targets)) for at in data.draw(cuts)])]
    random.Random(data.draw(st.integers(0, 99))).shuffle(pieces)
    budget = Budget(tokens=data.draw(st.integers(1, 200)), segment=data.draw(st.integers(1, 40)))
    for executor in (GatherExecutor(model, budget), DfsExecutor(model, budget)):
        found = shared(executor, model, pieces, two_level(pieces))
        alike = (found[0], wanted[1], found[2])  # scores are in another order
        assert difference(alike, wanted) < EXACT


def test_a_loss_that_couples_targets() -> None:
    """A ratio of a whole row, and a mask over it: through its linearisation, with the loss's own value."""
    model = tiny_model(dtype=torch.float64)
    rows = [one for one in agent_rows(5, turns=3) if len(one.targets)]
    sizes = [len(one.targets) for one in rows]

    def loss(logp_K: Tensor, entropy_K: Tensor) -> Tensor:
        total = torch.zeros((), dtype=logp_K.dtype)
        for one, logp, entropy in zip(rows, logp_K.split(sizes), entropy_K.split(sizes), strict=True):
            ratio = (logp - torch.from_numpy(one.logprobs).to(logp)).mean().exp()
            total = total - one.advantage * ratio * (ratio < 1.5) + 0.01 * entropy.mean().square()
        return total

    wanted = separately(model, rows, loss)
    for executor in executors(model, rows):
        value, objective = linearised(loss, executor.forward(rows))
        _, scores, gradient = shared(executor, model, rows, objective)
        assert difference((value, scores, gradient), wanted) < EXACT


def test_equal_samples_are_terms_of_their_own() -> None:
    """One position, three samples of it: summed weights 1/2, 1/3, 1/6 (kind of tree-sibling-samples-equal-tokens)."""
    model = tiny_model(dtype=torch.float64)
    rows = [row([1, 2, 7, last], [2, 3], run="r", weight=1 / 6) for last in (8, 8, 9)]
    forest = plant(rows)
    assert forest.ids_U.tolist() == [1, 2, 7] and len(forest.at_K) == 6
    logps_TV = model(input_ids=torch.tensor([[1, 2, 7]])).logits[0].log_softmax(-1)
    by_hand = -(logps_TV[1, 7] / 2 + logps_TV[2, 8] / 3 + logps_TV[2, 9] / 6)
    model.zero_grad()
    by_hand.backward()
    wanted = model.lm_head.weight.grad.clone()
    for executor in executors(model, rows):
        value, _, found = shared(executor, model, rows, lambda logp_C, entropy_C, index_C: -logp_C.sum() / 6)
        assert float(value) == pytest.approx(float(by_hand.detach()), rel=1e-13)
        assert float((found["model.embed_tokens.weight"] - wanted).norm() / wanted.norm()) < EXACT


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 5e-2)], ids=str)
def test_in_lower_precision(dtype: torch.dtype, tolerance: float) -> None:
    """The rounding of the dtype and not more: float32 to 5e-6, bfloat16 to 5e-2 of each parameter's gradient."""
    assert_rounded(tiny_model(dtype=dtype), Budget(segment=11), tolerance)


def test_mixed_precision() -> None:
    assert_rounded(tiny_model(), Budget(segment=11, autocast=torch.bfloat16), 5e-2)


def assert_rounded(model: Any, budget: Budget, tolerance: float) -> None:
    rows = agent_rows(turns=3)
    objective = two_level(rows)
    with budget.precision(torch.device("cpu")):
        wanted = separately(model, rows, everywhere(objective))
    for executor in (GatherExecutor(model, budget), DfsExecutor(model, budget)):
        found = shared(executor, model, rows, objective)
        assert difference(found, wanted) < tolerance
        assert found[1].logp_K.dtype == torch.float32


def test_no_row_has_a_target() -> None:
    model = tiny_model(dtype=torch.float64)
    for executor in executors(model, []):
        assert len(executor.forward([]).logp_K) == 0
        assert len(executor.forward_backward([row([1, 2, 3], [])], lambda *_: torch.zeros(())).logp_K) == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_hands_nothing_on_is_refused() -> None:
    with pytest.raises(TrainerError, match="gyre_pass"):
        GatherExecutor(family("nemotron")).forward(agent_rows(turns=1))


def test_the_models_own_attention_is_back_afterwards() -> None:
    model = tiny_model(dtype=torch.float64)
    before = model.config._attn_implementation
    DfsExecutor(model).forward(agent_rows(turns=1))
    with pytest.raises(ZeroDivisionError):
        GatherExecutor(model).forward_backward(agent_rows(turns=1), lambda *_: torch.zeros(()) / (1 // 0))
    assert model.config._attn_implementation == before


class Kept:
    """Counts the bytes that graphs keep, each piece of memory once, weights not at all."""

    def __init__(self, model: Any) -> None:
        self.now = self.most = 0
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._holders: Counter[int] = Counter()

    def pack(self, tensor: Tensor) -> Any:
        counter, place, size = self, tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()

        class Holder:
            def __init__(self) -> None:
                self.tensor = tensor.detach()
                counter.hold(place, size)

            def __del__(self) -> None:
                counter.drop(place, size)

        return Holder()

    def hold(self, place: int, size: int) -> None:
        if place not in self._weights and not self._holders[place]:
            self.now += size
            self.most = max(self.most, self.now)
        self._holders[place] += 1

    def drop(self, place: int, size: int) -> None:
        self._holders[place] -= 1
        if place not in self._weights and not self._holders[place]:
            self.now -= size

    def of(self, executor: Executor, rows: list[Row]) -> int:
        self.now = self.most = 0
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda holder: holder.tensor):
            executor.forward_backward(rows, lambda logp_C, entropy_C, index_C: logp_C.sum())
        return self.most


def test_a_walk_keeps_one_path_and_runs_no_token_three_times() -> None:
    model = tiny_model()
    rows = comb(96, 8, 32) + agent_rows(6, system=60, turns=6)
    path = max(rows, key=lambda one: len(one.ids))
    kept = Kept(model)
    one = kept.of(GatherExecutor(model), [path])
    all_at_once = kept.of(GatherExecutor(model), rows)
    assert all_at_once > 3 * one
    tokens: list[int] = []
    hook = model.model.embed_tokens.register_forward_hook(lambda module, args, output: tokens.append(args[0].numel()))
    forest = plant(rows)
    for budget in (Budget(segment=16), Budget(segment=16, tokens=1)):
        executor = DfsExecutor(model, budget)
        tokens.clear()
        assert kept.of(executor, rows) <= 1.3 * one
        above = np.isin(np.arange(len(forest.start_S)), forest.parent_S)
        inner = int((forest.stop_S - forest.start_S)[above].sum())
        assert forest.unique <= sum(tokens) <= 2 * forest.unique
        assert max(tokens) <= 16 and (budget.tokens > 1 or sum(tokens) >= forest.unique + inner // 2)
    hook.remove()
