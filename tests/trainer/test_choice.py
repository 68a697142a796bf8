"""Which executor a model gets. Whatever is chosen is exact, and what would not be is refused with its reason."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from forest_rows import branching_rows, row_of
from model_families import family
from peft import LoraConfig, get_peft_model
from tiny_policy import VOCAB, gradient, relative, tiny_model
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.attention.budget import Budget
from gyre_sdk.trainer.attention.check import compare
from gyre_sdk.trainer.attention.choose import Auto, choose, costs, fastest, fitted, kept_bytes, segment_cost
from gyre_sdk.trainer.attention.dfs import DfsExecutor
from gyre_sdk.trainer.attention.flat import FlatExecutor
from gyre_sdk.trainer.attention.gather import GatherExecutor
from gyre_sdk.trainer.attention.probe import Call, Observed, judged, observe, obstacles

SHARING = (
    "qwen3", "qwen2", "llama", "mistral", "mixtral", "qwen3_moe", "gemma2", "gemma3", "cohere2", "granite", "olmo3", "phi3",
    "gpt_neox", "deepseek_v3",
)  # fmt: skip
APART = {
    "qwen3_next": "does not take its attention from",
    "qwen3_5": "does not take its attention from",
    "mamba": "does not take its attention from",
    "mamba2": "does not take its attention from",
    "lfm2": "layers of the type conv",
    "falcon_h1": "does not take its attention from",
    "jamba": "does not take its attention from",
    "recurrent_gemma": "layers of the type linear_attention",
    "rwkv": "does not take its attention from",
    "bloom": "does not take its attention from",
    "falcon": "does not take its attention from",
    "gpt_oss": "attention sinks",
    "llama4": "layers of the type chunked_attention",
    "nemotron": "does not hand keywords on",
    "diffllama": "attends more than once",
    "seed_oss": "drops attention with probability 0.1",
}


def objective(logp_C: Tensor, entropy_C: Tensor, index_C: Tensor) -> Tensor:
    return ((1.0 + index_C.to(logp_C)) * logp_C + 0.1 * entropy_C).sum()


@pytest.mark.parametrize("name", SHARING)
def test_models_of_plain_attention_share_prefixes_exactly(name: str) -> None:
    """In float32, to its rounding: experts, latent attention, windows, caps and scales included."""
    model = family(name)
    assert obstacles(model) == []
    budget = Budget(segment=7)
    flat = FlatExecutor(model, budget)
    for executor in (GatherExecutor(model, budget), DfsExecutor(model, budget)):
        found = compare(executor, flat, model, branching_rows())
        assert found.logp < 2e-6 and found.gradient < 5e-6, (executor.name, found)


@pytest.mark.parametrize("name", APART)
def test_other_models_get_flat_with_the_reason(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """And flat is exact for them: rows next to each other give what they give one by one."""
    model = family(name)
    with caplog.at_level(logging.INFO, logger="gyre.trainer"):
        executor = choose(model)
    assert isinstance(executor, FlatExecutor)
    assert APART[name] in caplog.text and type(model).__name__ in caplog.text
    for wanted in ("gather", "dfs"):
        with pytest.raises(TrainerError, match="would not be exact") as refused:
            choose(model, wanted)
        assert APART[name] in str(refused.value)
    found = compare(executor, FlatExecutor(model, Budget(tokens=1)), model, branching_rows()[:3])
    assert found.logp < 5e-6 and found.gradient < 1e-5, found


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_dropout": 0.1}, "0.1"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rotary embedding"),
    ],
)
def test_settings_that_speak_against_sharing(changes: dict[str, Any], reason: str) -> None:
    [found] = obstacles(family("llama", **changes))
    assert reason in found


def test_dropout_of_activations_and_the_loss_of_routers_speak_against_sharing() -> None:
    model = family("gpt_neox", hidden_dropout=0.2)
    assert obstacles(model) == ["its passes differ by chance (gpt_neox.emb_dropout.p = 0.2)"]
    [found] = obstacles(family("qwen3_moe", output_router_logits=True))
    assert "auxiliary loss" in found


def test_an_unknown_layer_that_carries_a_state_is_noticed_by_what_it_does() -> None:
    """Nothing in its config or in the names of its modules tells: only that one token notices another's change."""

    class Shift(nn.Module):
        """Adds a little of the token before, as RWKV does."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden_BTD: Tensor) -> Tensor:
            before_BTD = torch.cat([torch.zeros_like(hidden_BTD[:, :1]), hidden_BTD[:, :-1]], 1)
            return self.inner(hidden_BTD + 0.1 * before_BTD)

    model = tiny_model()
    model.model.layers[1].mlp = Shift(model.model.layers[1].mlp)
    assert obstacles(model) == ["its tokens meet outside of attention"]


def test_attention_with_an_argument_that_nobody_knows_is_noticed() -> None:
    model = tiny_model()
    attention = model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, **kwargs, distance_bias=torch.ones(1))
    assert obstacles(model) == ["its attention takes distance_bias"]


def test_looking_at_a_model_leaves_it_as_it_was() -> None:
    model = family("gemma3").train()
    model.model.layers[0].eval()
    before = model.config._attn_implementation
    seen = observe(model)
    assert [call.window for call in seen.calls] == [8, None] and not seen.mixes
    assert model.training and not model.model.layers[0].training and model.model.layers[1].training
    assert model.config._attn_implementation == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_is_read_from_what_was_seen() -> None:
    plain = Call(0, None, frozenset(), True)
    windowed = Call(1, 8, frozenset(), True)
    both = ("full_attention", "sliding_attention")
    assert judged(Observed((plain, windowed), False), both, 8) == []
    assert judged(Observed((plain, Call(1, None, frozenset(), True)), False), both, 8) == [
        "its attention is not told of its sliding windows"
    ]
    assert judged(Observed((plain,), False), (), 8) == ["its attention is not told of its sliding windows"]
    assert judged(Observed((), False), (), None) == ["it does not hand keywords on to its attention"]
    assert judged(Observed((plain, plain), False), (), None) == ["a layer attends more than once"]
    assert judged(Observed((plain,), True), (), None) == ["its tokens meet outside of attention"]


def test_an_encoder_with_a_decoder_is_refused() -> None:
    config = T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(TrainerError, match="causal"):
        choose(T5ForConditionalGeneration(config))


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(TrainerError, match="choose from auto, flat, gather, dfs"):
        choose(tiny_model(), "fastest")  # type: ignore[arg-type]


@pytest.mark.parametrize("wanted", ["flat", "gather", "dfs"])
def test_an_executor_that_is_asked_for_is_given(wanted: Any) -> None:
    assert choose(tiny_model(), wanted).name == wanted


def test_auto_takes_what_has_least_to_compute() -> None:
    draw = np.random.default_rng(0)

    def tokens(count: int) -> np.ndarray:
        return draw.integers(3, VOCAB, count)

    trunk = tokens(600)
    comb = [row_of(f"{n}", np.concatenate([trunk, tokens(40)]), 600) for n in range(4)]
    apart = [row_of(f"{n}", tokens(100), 5) for n in range(4)]
    assert fastest(comb, Budget()) == "gather"  # 760 tokens instead of 2560
    assert fastest(comb, Budget(tokens=680)) == "dfs"  # passes of two rows repeat the trunk
    assert fastest(apart, Budget()) == "flat"  # nothing is shared, nothing is padded
    little = [row_of(f"{n}", np.concatenate([trunk[:10], tokens(90)]), 10) for n in range(4)]
    assert fastest(little, Budget()) == "gather" and fastest(little, Budget(), 20.0) == "flat"  # in a tiny model
    assert fastest(comb[:1], Budget()) == "flat"
    assert fastest(comb[:1], Budget(tokens=500)) == "dfs"  # longer than a pass: cut
    found = costs(comb, Budget(tokens=680))
    assert found.dfs < found.gather < found.flat


def test_a_segment_costs_less_in_a_larger_model() -> None:
    tiny, larger = (family("qwen3", hidden_size=size, intermediate_size=2 * size) for size in (32, 128))
    assert segment_cost(tiny) > 4 * segment_cost(larger) > 0
    # neither its vocabulary nor its depth has to do with it
    assert segment_cost(family("qwen3", vocab_size=4096, tie_word_embeddings=True)) == pytest.approx(
        segment_cost(family("qwen3", num_hidden_layers=6, tie_word_embeddings=True)), rel=0.01
    )


def test_auto_gives_the_gradient_of_flat_whatever_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre_sdk.trainer.attention.choose._SEGMENT_WEIGHTS", 10_000)  # a model of some size
    model = tiny_model()
    budget = Budget(tokens=70, segment=16)
    auto, flat = choose(model, budget=budget), FlatExecutor(model, budget)
    assert isinstance(auto, Auto)
    draw = np.random.default_rng(0)
    apart = [row_of(f"{n}", draw.integers(3, VOCAB, 30), 5) for n in range(4)]
    long = [row_of("long", draw.integers(3, VOCAB, 100), 50)]
    taken = set()
    segment = segment_cost(model)
    for rows in (branching_rows(), apart, long, branching_rows()[:4]):
        taken.add(fastest(rows, budget, segment))
        flat.forward_backward(rows, objective)
        wanted = gradient(model)
        model.zero_grad()
        auto.forward_backward(rows, objective)
        assert relative(gradient(model), wanted) < 1e-5
        model.zero_grad()
        torch.testing.assert_close(auto.forward(rows).logp_K, flat.forward(rows).logp_K)
    assert taken == {"flat", "gather", "dfs"}


def test_adapters_are_trained_by_any_executor() -> None:
    """peft's wrapper is seen through, and only the adapters get a gradient."""
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    rows = branching_rows()
    flat = FlatExecutor(model)
    flat.forward_backward(rows, objective)
    wanted = gradient(model)
    for name in ("gather", "dfs", "auto"):
        model.zero_grad()
        choose(model, name, Budget(segment=8)).forward_backward(rows, objective)  # type: ignore[arg-type]
        assert relative(gradient(model), wanted) < 1e-5
        assert all("lora_" in key for key, parameter in model.named_parameters() if parameter.grad is not None)


def test_passes_fit_into_memory() -> None:
    """What a token keeps for its backward pass is measured; checkpointing keeps less, so more tokens fit."""
    model = tiny_model().train()
    kept = kept_bytes(model, Budget())
    assert kept_bytes(model, Budget(), tokens=256) == pytest.approx(kept, rel=0.05)
    assert fitted(model, Budget(memory=100 * kept)) == Budget(tokens=100, segment=100, memory=100 * kept)
    assert fitted(model, Budget(tokens=50, memory=100 * kept)).tokens == 50
    assert fitted(model, Budget()) == Budget()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert kept_bytes(model, Budget()) < kept / 3
