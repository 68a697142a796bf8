"""Attention over one block, forward and backward, with the log-sum-exp that lets partial results be put together.

Shapes: B batch (1), H heads, G of them sharing a K/V head (J of those), Q queries, N keys, D head size, E value size.

For several blocks of one query, the backward pass of each takes the *merged* output and log-sum-exp, and then gives
that block's part of the gradient by itself: `p = exp(score - lse)` are the final probabilities (Dao et al., 2022).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer scores a query against a key: `scale * q k`, then `cap * tanh(score / cap)` where there is a cap."""

    scale: float
    cap: float | None = None

    def forward(self, q_BHQD: Tensor, k_BJND: Tensor, v_BJNE: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        """Return `(out_BHQE, lse_BHQ)`; the lse (nats) is float32, or the dtype where that is wider."""
        if self._fused(q_BHQD, v_BJNE):
            mask_QN = None if shape.causal else shape.mask(q_BHQD, k_BJND)
            out, lse = _flash(q_BHQD, k_BJND, v_BJNE, 0.0, shape.causal, attn_mask=mask_QN, scale=self.scale)
            return out, lse
        score_BJGQN, _ = self._scores(q_BHQD, k_BJND, shape)
        lse_BJGQ = score_BJGQN.logsumexp(-1)
        p_BJGQN = score_BJGQN.sub_(lse_BJGQ[..., None]).exp_()
        out_BJGQE = p_BJGQN @ v_BJNE[:, :, None].to(p_BJGQN.dtype)
        return out_BJGQE.flatten(1, 2).to(q_BHQD.dtype), lse_BJGQ.flatten(1, 2)

    def backward(
        self,
        slope_BHQE: Tensor,
        q_BHQD: Tensor,
        k_BJND: Tensor,
        v_BJNE: Tensor,
        out_BHQE: Tensor,
        lse_BHQ: Tensor,
        shape: Shape,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the block's part of the gradients of q, k and v, from the slope of the merged output."""
        if self._fused(q_BHQD, v_BJNE):
            mask_QN = None if shape.causal else shape.mask(q_BHQD, k_BJND)
            found: tuple[Tensor, Tensor, Tensor] = _flash_backward(
                slope_BHQE, q_BHQD, k_BJND, v_BJNE, out_BHQE, lse_BHQ, 0.0, shape.causal,
                attn_mask=mask_QN, scale=self.scale,
            )  # fmt: skip
            return found
        groups = (k_BJND.shape[1], q_BHQD.shape[1] // k_BJND.shape[1])
        score_BJGQN, bend_BJGQN = self._scores(q_BHQD, k_BJND, shape)
        p_BJGQN = score_BJGQN.sub_(lse_BHQ.unflatten(1, groups)[..., None]).exp_()
        wide = p_BJGQN.dtype
        slope_BJGQE = slope_BHQE.unflatten(1, groups).to(wide)
        dv_BJNE = (p_BJGQN.mT @ slope_BJGQE).sum(2)
        delta_BJGQ = (slope_BJGQE * out_BHQE.unflatten(1, groups)).sum(-1)
        ds_BJGQN = (slope_BJGQE @ v_BJNE[:, :, None].mT.to(wide)).sub_(delta_BJGQ[..., None]).mul_(p_BJGQN)
        if bend_BJGQN is not None:
            ds_BJGQN.mul_(bend_BJGQN)
        ds_BJGQN.mul_(self.scale)
        dq_BHQD = (ds_BJGQN @ k_BJND[:, :, None].to(wide)).flatten(1, 2)
        dk_BJND = (ds_BJGQN.mT @ q_BHQD.unflatten(1, groups).to(wide)).sum(2)
        return dq_BHQD, dk_BJND, dv_BJNE

    def _fused(self, q_BHQD: Tensor, v_BJNE: Tensor) -> bool:
        return self.cap is None and q_BHQD.device.type == "cpu" and q_BHQD.shape[-1] == v_BJNE.shape[-1]

    def _scores(self, q_BHQD: Tensor, k_BJND: Tensor, shape: Shape) -> tuple[Tensor, Tensor | None]:
        """Return the scores, and the slope of the cap at each."""
        q_BJGQD = q_BHQD.unflatten(1, (k_BJND.shape[1], -1))
        score_BJGQN = (q_BJGQD @ k_BJND[:, :, None].mT).mul_(self.scale)
        if score_BJGQN.dtype in (torch.bfloat16, torch.float16):
            score_BJGQN = score_BJGQN.float()
        bend_BJGQN = None
        if self.cap is not None:
            bent = torch.tanh(score_BJGQN / self.cap)
            bend_BJGQN = 1 - bent * bent
            score_BJGQN = bent * self.cap
        mask_QN = shape.mask(score_BJGQN, k_BJND)
        return score_BJGQN if mask_QN is None else score_BJGQN.add_(mask_QN), bend_BJGQN


@dataclass(frozen=True, slots=True)
class Shape:
    """Which keys a block's queries see: all, those up to themselves, or query i those from `band + i` on."""

    causal: bool
    band: int | None

    def mask(self, like: Tensor, keys: Tensor) -> Tensor | None:
        """Return what is added to the scores (Q, N), None for nothing. `like` has Q as its last but one dimension."""
        if not self.causal and self.band is None:
            return None
        query_Q1 = torch.arange(like.shape[-2], device=like.device)[:, None]
        key_N = torch.arange(keys.shape[-2], device=like.device)
        hidden_QN = key_N > query_Q1 if self.causal else key_N < query_Q1 + (self.band or 0)
        return torch.zeros_like(hidden_QN, dtype=like.dtype).masked_fill_(hidden_QN, float("-inf"))
