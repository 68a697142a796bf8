"""What lets TRL's asynchronous trainer run where its kernel cannot: its tree attention by PyTorch's own.

TRL packs samples into a trie and gives each segment the keys and values of its root-to-segment path; the kernel for it
(FlashAttention 3) needs a GPU. Here short packs take one mask over all their tokens, longer ones a segment at a time.

Shapes: H query heads, G key heads, N packed tokens, D head size, L segment length, P path length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo.packing import TREE_ATTENTION, tree_attention

from gyre_sdk.errors import TrainerError

_KERNEL_CAPABILITY = (8, 0)
"""Least compute capability of GPUs that the kernel is built for."""
_DENSE = 4096
"""Packed tokens up to which one mask is faster than going from segment to segment."""


def prepare() -> None:
    """Where there is no GPU, keep TRL's trainer from asking it for its name. Call it before the trainer is made."""
    if not torch.cuda.is_available():
        async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None


def register() -> None:
    """Take the place of TRL's kernel under its name. Call it once the trainer is made, which registers its own.

    Tensors on a GPU that has the kernel still go to it.
    """
    AttentionInterface.register(TREE_ATTENTION, _attention)


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> tuple[Tensor, None]:
    if query.is_cuda and torch.cuda.get_device_capability(query.device) >= _KERNEL_CAPABILITY:
        return tree_attention(module, query, key, value, mask, **more)
    return _attend(query, key, value, **more), None


def _attend(
    query_1HND: Tensor,
    key_1GND: Tensor,
    value_1GND: Tensor,
    *,
    tree_kv_index: Tensor,
    tree_cu_seqlens_q: Tensor,
    tree_cu_seqlens_k: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> Tensor:
    """Return the attention output, (1, N, H, D).

    Args:
        tree_kv_index: packed positions of each segment's path, one segment after the other.
        tree_cu_seqlens_q: where segments begin and end among the packed tokens.
        tree_cu_seqlens_k: where paths begin and end in `tree_kv_index`.
        sliding_window: tokens that a query sees, itself included, counted along its path.

    Raises:
        TrainerError: the model caps its attention scores.
    """
    if softcap:
        raise TrainerError(
            f"the model caps attention scores (softcap {softcap:g}), which PyTorch's attention cannot; train it on a GPU"
            " with TRL's kernel, or with gyre-train"
        )
    paths = tree_kv_index.split(tree_cu_seqlens_k.diff().tolist())
    lengths = tree_cu_seqlens_q.diff().tolist()

    def attend(query_1HLD: Tensor, key_1GPD: Tensor, value_1GPD: Tensor, seen_LP: Tensor) -> Tensor:
        return scaled_dot_product_attention(
            query_1HLD,
            key_1GPD,
            value_1GPD,
            attn_mask=seen_LP,
            scale=scaling,
            enable_gqa=query_1HLD.shape[1] != key_1GPD.shape[1],
        )

    N = query_1HND.shape[2]
    if N <= _DENSE:
        seen_NN = torch.zeros(N, N, dtype=torch.bool, device=query_1HND.device)
        for path_P, L in zip(paths, lengths, strict=True):
            seen_NN[path_P[-L:, None], path_P] = _seen(L, path_P, sliding_window)
        return attend(query_1HND, key_1GND, value_1GND, seen_NN).transpose(1, 2)
    parts = [
        attend(
            query_1HLD,
            key_1GND.index_select(2, path_P),
            value_1GND.index_select(2, path_P),
            _seen(query_1HLD.shape[2], path_P, sliding_window),
        )
        for query_1HLD, path_P in zip(query_1HND.split(lengths, 2), paths, strict=True)
    ]
    return torch.cat(parts, 2).transpose(1, 2)


def _seen(length: int, path_P: Tensor, window: int | None) -> Tensor:
    """Return what the last `length` tokens of a path see of it, (L, P)."""
    depth_P = torch.arange(len(path_P), device=path_P.device)
    depth_L1 = depth_P[-length:, None]
    seen_LP = depth_P <= depth_L1
    return seen_LP & (depth_P > depth_L1 - window) if window else seen_LP
