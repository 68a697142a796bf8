"""A tiny random policy and random rows for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from gyre_sdk.trainer.units import Row, Unit, digest

VOCAB = 64


@contextmanager
def pure64() -> Iterator[None]:
    """Undo transformers' casts to float32 inside the norm and the rotary embedding."""

    def norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        variance = hidden.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden * torch.rsqrt(variance + self.variance_epsilon)

    def rotary(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.inv_freq.shape[0] * 2
        base = self.config.rope_parameters["rope_theta"]
        inverse = 1.0 / (base ** (torch.arange(0, size, 2, dtype=torch.float64) / size))
        angles = position_ids[..., None].double() * inverse
        both = torch.cat([angles, angles], -1)
        return both.cos(), both.sin()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_qwen3.Qwen3RMSNorm, "forward", norm)
        patch.setattr(modeling_qwen3.Qwen3RotaryEmbedding, "forward", rotary)
        yield


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).to(dtype).eval()


def logprobs_of(model: Any, ids: np.ndarray, targets: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
    logps = logits.double().log_softmax(-1)
    return np.array([logps[t - 1, ids[t]].item() for t in targets])


def random_row(
    rng: np.random.Generator,
    run: str,
    *,
    prompt: int,
    sampled: int,
    advantage: float,
    model: Any = None,
    noise: float = 0.3,
) -> Row:
    """A row whose targets are its last `sampled` tokens, a few of them context again."""
    ids = rng.integers(3, VOCAB, prompt + sampled).astype(np.int32)
    targets = np.arange(prompt, prompt + sampled, dtype=np.int32)
    if sampled > 4:
        targets = np.delete(targets, [2, 3])  # a tool's output in the middle
    logprobs = np.full(len(targets), -3.0) if model is None else logprobs_of(model, ids, targets)
    logprobs = logprobs + noise * rng.standard_normal(len(targets))
    return Row(
        run=run,
        leaf=f"{run}-leaf",
        role="main",
        ids=ids,
        targets=targets,
        weights=np.full(len(targets), 1.0 / len(targets)),
        logprobs=logprobs,
        versions=np.zeros(len(targets), np.int32),
        advantage=advantage,
    )


def unit_of(rows: list[Row], *, runs: int | None = None, group: str = "g") -> Unit:
    return Unit(
        id=digest(rows),
        group=group,
        rows=tuple(rows),
        runs=len({row.run for row in rows}) if runs is None else runs,
        tokens=sum(len(row.targets) for row in rows),
    )


def gradient(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.detach().reshape(-1).double() for p in model.parameters() if p.grad is not None])


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
