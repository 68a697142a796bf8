"""The executor for GPUs: a forest in one packed pass, attended by PyTorch's FlexAttention.

Shapes: U packed tokens, H heads, J K/V heads, D head size.

In depth-first order a subtree is one stretch, so who sees whom is two comparisons of packed places: query q sees key k if
`k <= q < end[k]`, and in a layer with a window if also `position[q] - position[k] < window`. FlexAttention turns that into
blocks that are skipped, blocks without a mask and blocks with one, and a fused kernel for them, forward and backward. On a CPU
it has no backward pass: there, this executor only scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface

from gyre_sdk.trainer.attention.attend import window_for_mask, window_of
from gyre_sdk.trainer.attention.gather import GatherExecutor
from gyre_sdk.trainer.attention.layout import Forest

NAME = "gyre_flex"
"""Under which the attention is registered with transformers."""
Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def sees(end_U: Tensor, position_U: Tensor, window: int | None) -> Sees:
    """Return FlexAttention's mask function: `(batch, head, query, key) -> ` whether the query sees the key."""

    def on_path(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end_U[key])

    def near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return on_path(batch, head, query, key) & (position_U[query] - position_U[key] < window)

    return on_path if window is None else near


@dataclass
class FlexPass:
    """A forward pass over a forest, as its attention sees it."""

    end_U: Tensor  # noqa: N815
    position_U: Tensor  # noqa: N815
    _masks: dict[int | None, BlockMask] = field(default_factory=dict)

    @classmethod
    def of(cls, forest: Forest, device: torch.device) -> FlexPass:
        """Take a forest to a device."""
        return cls(torch.from_numpy(forest.end_U).to(device), torch.from_numpy(forest.position_U).to(device))

    def mask(self, window: int | None) -> BlockMask:
        """Return the mask of layers with a window; made once for all of them."""
        if window not in self._masks:
            size = len(self.end_U)
            mask = sees(self.end_U, self.position_U, window)
            self._masks[window] = create_block_mask(mask, None, None, size, size, device=self.end_U.device)
        return self._masks[window]


class FlexExecutor(GatherExecutor):
    """Runs the rows of a unit as `GatherExecutor` does, for a model whose tokens meet in plain attention only."""

    name = "flex"
    attention = NAME

    def _seen(self, forest: Forest, device: torch.device) -> FlexPass:
        return FlexPass.of(forest, device)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    gyre_pass: FlexPass | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention's output (1, U, H, D), for transformers' `AttentionInterface`."""
    window = window_of(module, gyre_pass, attention_mask, sliding_window, dropout, others)
    assert gyre_pass is not None
    dtype = torch.get_autocast_dtype(query.device.type) if torch.is_autocast_enabled(query.device.type) else value.dtype
    kernel = _compiled() if query.device.type == "cuda" else flex_attention
    out_BHUD = kernel(
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=gyre_pass.mask(window),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out_BHUD.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, window_for_mask)


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


@cache
def _capped(cap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped
