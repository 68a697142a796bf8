"""Attention over a forest, put into a transformers model: it takes the place of SDPA for the length of a pass.

Shapes: U packed tokens, H heads, J K/V heads, N keys of a block, D head size, all with batch B = 1.

A model is told about the forest by the keyword `gyre_pass`, which transformers hands through to its attention. The mask
that it builds is no mask here, but the window of the layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.attention.blocks import Block, blocks
from gyre_sdk.trainer.attention.kernels import CAUSAL, Scoring, Seen
from gyre_sdk.trainer.attention.layout import Forest

NAME = "gyre_forest"
"""Under which the attention is registered with transformers."""
_HALF = (torch.bfloat16, torch.float16)


class Rows:
    """K and V of a path in one layer, and their gradients, as far as they are known."""

    __slots__ = ("keys", "keys_slope", "values", "values_slope")

    def __init__(self, k_BJUD: Tensor, v_BJUD: Tensor, length: int) -> None:
        """Make room for `length` positions like those of k and v."""

        def room(like: Tensor, dtype: torch.dtype) -> Tensor:
            size = (like.shape[0], length, like.shape[1], like.shape[3])
            return torch.zeros(size, dtype=dtype, device=like.device).transpose(1, 2)

        self.keys, self.values = room(k_BJUD, k_BJUD.dtype), room(v_BJUD, v_BJUD.dtype)
        self.keys_slope, self.values_slope = room(k_BJUD, _wide(k_BJUD.dtype)), room(v_BJUD, _wide(v_BJUD.dtype))


@dataclass
class Path:
    """K and V of the path that a depth-first walk is on, layer by layer. Deeper passes overwrite what is left behind."""

    length: int
    """Positions to make room for."""
    layers: dict[Any, Rows] = field(default_factory=dict)
    """By attention module."""

    def clear(self, start: int, stop: int) -> None:
        """Forget the gradients of these positions."""
        for rows in self.layers.values():
            rows.keys_slope[:, :, start:stop] = 0
            rows.values_slope[:, :, start:stop] = 0


@dataclass
class Pass:
    """A forward pass over a forest, as its attention sees it.

    With a path, the roots of the forest hang from its first `before` positions: the backward pass adds to those rows'
    gradients. The first `kept` tokens of the forest (the beginning of one chain) become the path's next rows, and what
    deeper passes found as *their* gradient joins in the backward pass.
    """

    forest: Forest
    before: int = 0
    path: Path | None = None
    kept: int = 0
    _blocks: dict[int | None, list[Block]] = field(default_factory=dict)

    def blocks(self, window: int | None) -> list[Block]:
        if window not in self._blocks:
            self._blocks[window] = blocks(self.forest, self.before, window)
        return self._blocks[window]


@contextmanager
def attending(model: Any, attention: str = NAME) -> Iterator[None]:
    """Let a model attend by a registered function, by default over forests; backward passes included."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    before = [(config, config._attn_implementation_internal) for config in configs.values() if _has_attention(config)]
    try:
        for config, _ in before:
            config._attn_implementation_internal = attention
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name


def _has_attention(config: Any) -> bool:
    return hasattr(config, "_attn_implementation_internal")


def window_for_mask(*, local_size: int | None = None, **_: Any) -> Tensor | None:
    """Stand where transformers builds a mask: answer the window of the layers that it is for."""
    return None if local_size is None else torch.tensor(local_size)


def window_of(
    module: Any,
    gyre_pass: object | None,
    attention_mask: Tensor | None,
    sliding_window: int | None,
    dropout: float,
    others: Mapping[str, Any],
) -> int | None:
    """Return the window of a layer's attention, None for none, once it is found to ask for nothing that we do not compute.

    Raises:
        TrainerError: the layer attends with more than queries, keys, values, a scale, a cap and a window.
    """
    if gyre_pass is None:
        raise TrainerError(
            f"{type(module).__name__} was not handed `gyre_pass`: its model does not pass keywords on to its attention; "
            'train with executor = "flat"'
        )
    for name in ("s_aux", "position_bias", "head_mask"):
        if others.get(name) is not None:
            raise TrainerError(f'{type(module).__name__} attends with `{name}`; train with executor = "flat"')
    if dropout:
        raise TrainerError(f"{type(module).__name__} drops attention with probability {dropout}; set it to 0")
    if attention_mask is not None and attention_mask.dim():
        raise TrainerError(f'{type(module).__name__} makes a mask of its own; train with executor = "flat"')
    return sliding_window if attention_mask is None else int(attention_mask)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    gyre_pass: Pass | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention's output (B, U, H, D), for transformers' `AttentionInterface`."""
    window = window_of(module, gyre_pass, attention_mask, sliding_window, dropout, others)
    assert gyre_pass is not None
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    if torch.is_autocast_enabled(query.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(query.device.type)
    # Heads of keys and of values may differ in size (latent attention); the kernels know one, and zeros change nothing.
    scale, size = query.shape[-1] ** -0.5 if scaling is None else scaling, value.shape[-1]
    width = max(query.shape[-1], size)
    q_BHUD, k_BJUD, v_BJUD = (_sized(x.to(dtype), width) for x in (query, key, value))
    rows = None
    if gyre_pass.path is not None:
        rows = gyre_pass.path.layers.get(module)
        if rows is None:
            rows = gyre_pass.path.layers[module] = Rows(k_BJUD, v_BJUD, gyre_pass.path.length)
    call = _Call(gyre_pass.blocks(window), Scoring(scale, softcap), rows, gyre_pass.before, gyre_pass.kept)
    out_BHUD: Tensor = _Attention.apply(q_BHUD, k_BJUD, v_BJUD, call)
    return out_BHUD[..., :size].transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, window_for_mask)


@dataclass(frozen=True, slots=True)
class _Call:
    blocks: list[Block]
    scoring: Scoring
    rows: Rows | None
    before: int
    kept: int

    def keys(self, k_BJUD: Tensor, v_BJUD: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Return the K and V of a block."""
        if block.key < self.before:
            assert self.rows is not None
            k_BJUD, v_BJUD, start = self.rows.keys, self.rows.values, 0
        else:
            start = self.before
        part = slice(block.key - start, block.key_stop - start)
        return k_BJUD[:, :, part], v_BJUD[:, :, part]


class _Attention(torch.autograd.Function):
    """All blocks of a layer. Nothing is kept for the backward pass beside q, k, v, the output and its log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q_BHUD: Tensor, k_BJUD: Tensor, v_BJUD: Tensor, call: _Call) -> Tensor:
        if call.rows is not None and call.kept:
            stretch = slice(call.before, call.before + call.kept)
            call.rows.keys[:, :, stretch] = k_BJUD[:, :, : call.kept]
            call.rows.values[:, :, stretch] = v_BJUD[:, :, : call.kept]
        out_BHUD, lse_BHU = _forward(q_BHUD, k_BJUD, v_BJUD, call)
        ctx.save_for_backward(q_BHUD, k_BJUD, v_BJUD, out_BHUD, lse_BHU)
        ctx.call = call
        return out_BHUD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_BHUD: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_BHUD, k_BJUD, v_BJUD, out_BHUD, lse_BHU = ctx.saved_tensors
        call: _Call = ctx.call
        dq, dk, dv = (torch.empty_like(x, dtype=_wide(x.dtype)) for x in (q_BHUD, k_BJUD, v_BJUD))
        for block in call.blocks:
            queries = slice(block.query, block.query_stop)
            k_BJND, v_BJND = call.keys(k_BJUD, v_BJUD, block)
            part_q, part_k, part_v = call.scoring.backward(
                slope_BHUD[:, :, queries],
                q_BHUD[:, :, queries],
                k_BJND,
                v_BJND,
                out_BHUD[:, :, queries],
                lse_BHU[:, :, queries],
                _seen(block),
            )
            if block.causal:  # the first to touch these rows
                dq[:, :, queries], dk[:, :, queries], dv[:, :, queries] = part_q, part_k, part_v
                continue
            dq[:, :, queries] += part_q
            if block.key < call.before:
                assert call.rows is not None
                to_k, to_v, start = call.rows.keys_slope, call.rows.values_slope, 0
            else:
                to_k, to_v, start = dk, dv, call.before
            part = slice(block.key - start, block.key_stop - start)
            to_k[:, :, part] += part_k
            to_v[:, :, part] += part_v
        if call.rows is not None and call.kept:
            stretch = slice(call.before, call.before + call.kept)
            dk[:, :, : call.kept] += call.rows.keys_slope[:, :, stretch]
            dv[:, :, : call.kept] += call.rows.values_slope[:, :, stretch]
        return dq.to(q_BHUD.dtype), dk.to(k_BJUD.dtype), dv.to(v_BJUD.dtype), None


def _forward(q_BHUD: Tensor, k_BJUD: Tensor, v_BJUD: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    size = (q_BHUD.shape[0], q_BHUD.shape[2], q_BHUD.shape[1])
    wide = _wide(q_BHUD.dtype)
    # in the order in which the model wants them: token by token
    out_BHUD = q_BHUD.new_empty((*size, v_BJUD.shape[-1]), dtype=wide).transpose(1, 2)
    lse_BHU = q_BHUD.new_empty(size, dtype=wide).transpose(1, 2)
    for block in call.blocks:
        queries = slice(block.query, block.query_stop)
        k_BJND, v_BJND = call.keys(k_BJUD, v_BJUD, block)
        part, part_lse = call.scoring.forward(q_BHUD[:, :, queries], k_BJND, v_BJND, _seen(block))
        if block.causal:
            out_BHUD[:, :, queries], lse_BHU[:, :, queries] = part, part_lse
            continue
        so_far = lse_BHU[:, :, queries]
        share = torch.sigmoid(part_lse - so_far)  # exp(part_lse) / (exp(part_lse) + exp(so_far))
        out_BHUD[:, :, queries].lerp_(part.to(wide), share[..., None])
        so_far.copy_(torch.logaddexp(so_far, part_lse))
    return out_BHUD.to(q_BHUD.dtype), lse_BHU


def _sized(x_BHUD: Tensor, width: int) -> Tensor:
    return x_BHUD if x_BHUD.shape[-1] == width else pad(x_BHUD, (0, width - x_BHUD.shape[-1]))


def _seen(block: Block) -> Seen:
    return CAUSAL if block.causal else Seen(first=block.band)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF else dtype
