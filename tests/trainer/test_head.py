"""The head: a few targets at a time gives what all at once gives, also where a model does more than a matrix product."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_policy import VOCAB, gradient, random_row, relative, tiny_model
from torch import Tensor
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from gyre_sdk.trainer.attention.budget import Budget
from gyre_sdk.trainer.attention.flat import FlatExecutor
from gyre_sdk.trainer.attention.head import Head, score, separated
from gyre_sdk.trainer.units import Row

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_log_prob_and_entropy_have_the_gradients_that_autograd_finds() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_CV = torch.randn(5, 11, generator=generator, dtype=torch.float64, requires_grad=True)
    label_C = torch.tensor([0, 3, 10, 3, 7])
    temperature_C = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda z: score(z, label_C, temperature_C), (logits_CV,))
    logp_CV = (logits_CV / temperature_C[:, None]).log_softmax(-1)
    logp_C, entropy_C = score(logits_CV, label_C, temperature_C)
    torch.testing.assert_close(logp_C, logp_CV.gather(-1, label_C[:, None])[:, 0])
    torch.testing.assert_close(entropy_C, -(logp_CV.exp() * logp_CV).sum(-1))


def test_a_token_that_is_ruled_out_adds_nothing() -> None:
    logits_CV = torch.tensor([[1.0, 2.0, float("-inf")]], requires_grad=True)
    logp_C, entropy_C = score(logits_CV, torch.tensor([1]))
    (logp_C + entropy_C).sum().backward()
    two = torch.tensor([1.0, 2.0]).log_softmax(-1)
    torch.testing.assert_close(entropy_C.detach(), -(two.exp() * two).sum()[None])
    assert torch.isfinite(logits_CV.grad).all() and logits_CV.grad[0, 2] == 0


def test_half_precision_logits_are_widened() -> None:
    logits_CV = torch.randn(4, 9, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    logp_C, entropy_C = score(logits_CV, torch.tensor([0, 1, 2, 3]))
    assert logp_C.dtype == entropy_C.dtype == torch.float32
    logp_C.sum().backward()
    assert logits_CV.grad is not None and logits_CV.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_chunks_of_any_size_give_the_gradients_of_all_at_once(at_once: int) -> None:
    """Values, the gradient of the states, and that of the head's own weights; the objective couples logp and entropy."""
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(6, 13, dtype=torch.float64)
    hidden_KD = torch.randn(10, 6, generator=generator, dtype=torch.float64)
    label_K = torch.randint(0, 13, (10,), generator=generator)
    temperature_K = torch.rand(10, generator=generator, dtype=torch.float64) + 0.5
    index_K = torch.randperm(10, generator=generator)
    weight_K = torch.randn(10, generator=generator, dtype=torch.float64)

    def objective(logp_C: Tensor, entropy_C: Tensor, index_C: Tensor) -> Tensor:
        return (weight_K[index_C] * logp_C.exp() + 0.3 * entropy_C.square()).sum()

    chunked = Head(head, 13, Budget(logits=13 * at_once))
    logp_K, entropy_K, gradient_KD = chunked.gradients(hidden_KD, label_K, temperature_K, index_K, objective)
    of_weights = [parameter.grad.clone() for parameter in head.parameters()]
    head.zero_grad()
    whole_KD = hidden_KD.clone().requires_grad_()
    logp_KV = (head(whole_KD) / temperature_K[:, None]).log_softmax(-1)
    wanted_K, wanted_entropy_K = logp_KV.gather(-1, label_K[:, None])[:, 0], -(logp_KV.exp() * logp_KV).sum(-1)
    objective(wanted_K, wanted_entropy_K, index_K).backward()
    torch.testing.assert_close(logp_K, wanted_K.detach())
    torch.testing.assert_close(entropy_K, wanted_entropy_K.detach())
    torch.testing.assert_close(gradient_KD, whole_KD.grad)
    for found, parameter in zip(of_weights, head.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad)
    for found, again in zip(chunked.scores(hidden_KD, label_K, temperature_K), (logp_K, entropy_K), strict=True):
        torch.testing.assert_close(found, again)


class _Widest(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the most rows that a tensor of the vocabulary's width ever has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.rows = width, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() >= 2 and out.shape[-1] == self.width:
            self.rows = max(self.rows, out.numel() // self.width)
        return out


def test_the_logits_of_a_path_never_exist_at_once() -> None:
    model = tiny_model()
    rows = [random_row(np.random.default_rng(0), "r", prompt=20, sampled=200, advantage=1.0)]
    executor = FlatExecutor(model, Budget(logits=40 * VOCAB))
    with _Widest(VOCAB) as seen:
        executor.forward_backward(rows, lambda logp_C, entropy_C, index_C: logp_C.sum())
        executor.forward(rows)
    assert 32 < seen.rows <= 40  # the head's own weights, transposed, have 32


MODELS: dict[str, Any] = {
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.25)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=3.0)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=0.5)),
    "falcon_h1": lambda: FalconH1ForCausalLM(
        FalconH1Config(
            **SHAPE, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, lm_head_multiplier=0.3
        )
    ),
    "opt": lambda: OPTForCausalLM(OPTConfig(**SHAPE, ffn_dim=48, word_embed_proj_dim=32)),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_does_around_its_head_is_done(name: str) -> None:
    """Scaled and capped logits, and a backbone that is not where its prefix says: values and gradients of the model."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    rows = _rows()
    executor = FlatExecutor(model, Budget(logits=3 * VOCAB))
    assert executor.head_is_separate
    _compare_with_the_model(model, executor, rows)


def test_a_head_that_cannot_be_told_apart_is_run_whole() -> None:
    class Doubling(type(tiny_model())):  # type: ignore[misc]
        def forward(self, **inputs: Any) -> Any:
            output = super().forward(**inputs)
            output.logits = output.logits * 2 + output.logits.square()
            return output

    model = tiny_model()
    model.__class__ = Doubling
    assert separated(model) is None
    executor = FlatExecutor(model, Budget(logits=3 * VOCAB))
    assert not executor.head_is_separate
    _compare_with_the_model(model, executor, _rows())


def _rows() -> list[Row]:
    draw = np.random.default_rng(0)
    rows = [random_row(draw, f"r{n}", prompt=4 + n, sampled=6, advantage=1.0) for n in range(3)]
    return [replace(row, temperatures=draw.uniform(0.5, 1.5, len(row.targets))) for row in rows]


def _compare_with_the_model(model: Any, executor: FlatExecutor, rows: list[Row]) -> None:
    def objective(logp_C: Tensor, entropy_C: Tensor, index_C: Tensor) -> Tensor:
        return ((1.0 + index_C) * logp_C + entropy_C).sum()

    scores = executor.forward_backward(rows, objective)
    found = gradient(model)
    model.zero_grad()
    logps, entropies = [], []
    for row in rows:
        logits_TV = model(input_ids=torch.from_numpy(row.ids.astype(np.int64))[None]).logits[0]
        at_K = torch.from_numpy(row.targets.astype(np.int64))
        logp_KV = (logits_TV[at_K - 1] / torch.from_numpy(row.temperatures).float()[:, None]).log_softmax(-1)
        logps.append(logp_KV.gather(-1, torch.from_numpy(row.ids[row.targets].astype(np.int64))[:, None])[:, 0])
        entropies.append(-(logp_KV.exp() * logp_KV).sum(-1))
    logp_K, entropy_K = torch.cat(logps), torch.cat(entropies)
    objective(logp_K, entropy_K, torch.arange(len(logp_K))).backward()
    torch.testing.assert_close(scores.logp_K, logp_K.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.entropy_K, entropy_K.detach(), atol=1e-5, rtol=1e-5)
    assert relative(found, gradient(model)) < 1e-5
