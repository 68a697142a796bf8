"""Attention over the slot cache, as a transformers attention backend.

The model runs on one packed row of tokens: every running request's new tokens side by side, so the linear layers see no
padding. Only attention knows which token belongs to which request. A request with one new token (decode) is attended
in one batched call over the cache's low rows; a longer stretch (prefill) in a call of its own.

Shapes: T packed tokens, S slots, C positions per slot, H query heads, K key/value heads, G = H / K, D head size,
R rows spanned by the decode call, L longest length among them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

from gyre_sdk.errors import EngineError
from gyre_sdk.trainer.engines.slots import Move

__all__ = ["ATTENTION", "SlotCache", "StepPlan", "slot_attention"]

ATTENTION = "gyre_slots"
"""The name of this backend in transformers' registry."""


class SlotCache:
    """Keys and values of all slots: per layer a tensor [S, K, C, D]. Pages that no request touched take no memory."""

    def __init__(
        self, *, layers: int, slots: int, positions: int, heads: int, head_dim: int, dtype: Any, device: Any
    ) -> None:
        # A stride that is no power of two: rows of all slots would share the same cache sets otherwise.
        self.positions = positions + 8
        shape = (slots, heads, self.positions, head_dim)
        self.heads = heads
        self.keys = [_lazy_zeros(shape, dtype, device) for _ in range(layers)]
        self.values = [_lazy_zeros(shape, dtype, device) for _ in range(layers)]

    def apply(self, move: Move) -> None:
        """Do what the slot table decided."""
        for cache in (*self.keys, *self.values):
            source, target = cache[move.source, :, : move.length], cache[move.target, :, : move.length]
            kept = target.clone() if move.swap else None
            target.copy_(source)
            if kept is not None:
                source.copy_(kept)

    def wipe(self, slots: list[int]) -> None:
        """Zero some slots: a NaN left behind would reach later requests even through a masked position."""
        for cache in (*self.keys, *self.values):
            cache[slots] = 0


def _lazy_zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, np.uint8)).view(dtype).view(shape)  # calloc: untouched pages stay unmapped


@dataclass(slots=True)
class StepPlan:
    """Where the packed tokens of one forward pass go. Decode tokens come first, then each prefill stretch."""

    cache: SlotCache
    write: Any
    """[K * T] where each head of each token is written: `(slot * K + head) * positions + position`."""
    decodes: int
    """How many of the first tokens are decode tokens."""
    gather: Any
    """[R] for each low slot the packed index of its token (0 for slots without one); None if it is 0, 1, 2, ..."""
    scatter: Any
    """[decodes] the slots of the decode tokens, in packed order; None together with `gather`."""
    lengths: Any
    """[R] for each low slot how many positions are attended, at least 1."""
    longest: int
    """The largest of them."""
    prefills: list[tuple[int, int, int, int]]
    """(first token, end token, slot, length after the stretch) of each prefill stretch."""
    masks: dict[tuple[int, int | None], Any] = field(default_factory=dict)
    """Masks already built in this pass, by (stretch or -1 for decode, window)."""

    def decode_mask(self, window: int | None, dtype: Any) -> Any:
        """Return the additive mask [R, 1, 1, L] of the decode call."""
        if (mask := self.masks.get((-1, window))) is None:
            at_L = torch.arange(self.longest, device=self.lengths.device)
            keep = at_L < self.lengths[:, None]
            if window is not None:
                keep &= at_L >= self.lengths[:, None] - window
            mask = torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill_(~keep, float("-inf"))
            mask = self.masks[-1, window] = mask[:, None, None, :]
        return mask

    def prefill_mask(self, stretch: int, window: int | None, dtype: Any) -> Any:
        """Return the additive causal mask [new, length] of a prefill stretch."""
        if (mask := self.masks.get((stretch, window))) is None:
            first, end, _, length = self.prefills[stretch]
            device = self.lengths.device
            at_q = torch.arange(length - (end - first), length, device=device)[:, None]
            at_k = torch.arange(length, device=device)[None, :]
            keep = at_k <= at_q
            if window is not None:
                keep &= at_k > at_q - window
            mask = torch.zeros(keep.shape, dtype=dtype, device=device).masked_fill_(~keep, float("-inf"))
            self.masks[stretch, window] = mask
        return mask


def slot_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    gyre_plan: StepPlan | None = None,
    **extra: Any,
) -> tuple[Any, None]:
    """Write the new keys and values into the cache and attend; query is [1, H, T, D], key and value [1, K, T, D].

    Raises:
        EngineError: the model asks for something this backend does not compute (soft caps, sinks, no plan passed).
    """
    refused = [name for name in ("softcap", "s_aux") if extra.get(name) is not None]
    if gyre_plan is None or refused:
        raise EngineError(
            f"attention of {type(module).__name__} needs {refused or 'keyword passing'}, which the "
            "embedded engine does not support; serve this model with vLLM"
        )
    plan = gyre_plan
    keys, values = plan.cache.keys[module.layer_idx], plan.cache.values[module.layer_idx]
    keys.flatten(0, 2).index_copy_(0, plan.write, key[0].flatten(0, 1))
    values.flatten(0, 2).index_copy_(0, plan.write, value[0].flatten(0, 1))

    _, H, _, D = query.shape
    K = keys.shape[1]
    q_THD = query[0].transpose(0, 1)
    parts = []
    if plan.decodes:
        q = q_THD if plan.gather is None else q_THD.index_select(0, plan.gather)
        rows = plan.lengths.shape[0]
        q_RKGD = q[:rows].reshape(rows, K, H // K, D)
        k_RKLD = keys[:rows, :, : plan.longest]
        v_RKLD = values[:rows, :, : plan.longest]
        mask = plan.decode_mask(sliding_window, query.dtype)
        out = torch.nn.functional.scaled_dot_product_attention(q_RKGD, k_RKLD, v_RKLD, attn_mask=mask, scale=scaling)
        out = out.reshape(rows, H, v_RKLD.shape[-1])
        parts.append(out if plan.scatter is None else out.index_select(0, plan.scatter))
    for stretch, (first, end, slot, length) in enumerate(plan.prefills):
        q_1HtD = query[:, :, first:end]
        k_1KLD = keys[slot : slot + 1, :, :length]
        v_1KLD = values[slot : slot + 1, :, :length]
        plain = length == end - first and (sliding_window is None or sliding_window >= length)
        mask = None if plain else plan.prefill_mask(stretch, sliding_window, query.dtype)
        out = torch.nn.functional.scaled_dot_product_attention(
            q_1HtD, k_1KLD, v_1KLD, attn_mask=mask, is_causal=plain, scale=scaling, enable_gqa=H != K
        )
        parts.append(out[0].transpose(0, 1))
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


AttentionInterface.register(ATTENTION, slot_attention)
