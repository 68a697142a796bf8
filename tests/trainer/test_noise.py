"""A policy in training has no noise of its own, wherever its model keeps the rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import family
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoConfig, GPTNeoForCausalLM, OPTConfig, OPTForCausalLM

from gyre_sdk.trainer.attention.noise import rates, silence
from gyre_sdk.trainer.config import TrainConfig
from gyre_sdk.trainer.trainer import make_trainer


def gpt2() -> Any:
    """Keeps modules of dropout, and functions of attention take a rate from one."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=64, attn_pdrop=0.5))


def gpt_neo() -> Any:
    """Reads its config at every pass."""
    return GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=64,
            hidden_size=16,
            num_layers=1,
            num_heads=2,
            attention_types=[[["global"], 1]],
            max_position_embeddings=64,
            attention_dropout=0.5,
        )
    )


def opt() -> Any:
    """Leaves out whole layers."""
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=64,
            hidden_size=16,
            ffn_dim=16,
            num_hidden_layers=4,
            num_attention_heads=2,
            word_embed_proj_dim=16,
            max_position_embeddings=64,
            layerdrop=0.5,
        )
    )


MODELS = {
    "attention": lambda: family("qwen3", attention_dropout=0.5),
    "attention and residuals": lambda: family("seed_oss", attention_dropout=0.1, residual_dropout=0.1),
    "routers": lambda: family("mixtral", router_jitter_noise=0.5),
    "modules": gpt2,
    "config": gpt_neo,
    "layers": opt,
}


def distance(model: Any) -> float:
    """How far apart a few passes of training are."""
    ids = torch.arange(3, 19)[None]
    passes = [model(input_ids=ids, use_cache=False).logits.detach() for _ in range(4)]
    return max(float((one - passes[0]).abs().max()) for one in passes)


@pytest.mark.parametrize("name", MODELS)
def test_no_noise_is_left(name: str) -> None:
    model = MODELS[name]().train()
    torch.manual_seed(0)
    assert distance(model) > 0
    silence(model)
    assert distance(model) == 0 and rates(model) == {}


def test_a_policy_in_training_is_silent(tmp_path: Path) -> None:
    model = family("qwen3", attention_dropout=0.5)
    assert rates(model) == {f"model.layers.{layer}.self_attn.attention_dropout": 0.5 for layer in range(2)}
    trainer = make_trainer(TrainConfig(steps=1), model, tmp_path, lambda step: [])
    assert rates(trainer.model) == {}
