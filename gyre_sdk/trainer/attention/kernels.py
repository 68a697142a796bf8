"""Attention over one block, forward and backward, with the log-sum-exp that lets partial results be put together.

Shapes: B batch (1), H heads, G of them sharing a K/V head (J of those), Q queries, N keys, D head size.

On a CPU the fused kernel of torch does it. It knows no cap on scores, and other devices have other kernels: there, matrix
products do, for as many queries at a time as keep the scores small.

For several blocks of one query, the backward pass of each takes the *merged* output and log-sum-exp, and then gives
that block's part of the gradient by itself: `p = exp(score - lse)` are the final probabilities (Dao et al., 2022).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_SCORES_AT_ONCE = 1 << 25
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Seen:
    """Which keys a block's queries see: those up to `last + i` for query i, those from `first + i` on; None: all."""

    last: int | None = None
    first: int | None = None

    def hidden(self, like_QN: Tensor) -> Tensor | None:
        """Return what is added to the scores: -inf where a key is not seen; None where all are."""
        if self.last is None and self.first is None:
            return None
        queries, keys = like_QN.shape[-2:]
        query_Q1 = torch.arange(queries, device=like_QN.device)[:, None]
        key_N = torch.arange(keys, device=like_QN.device)
        hidden_QN = torch.zeros(queries, keys, dtype=torch.bool, device=like_QN.device)
        if self.last is not None:
            hidden_QN |= key_N > query_Q1 + self.last
        if self.first is not None:
            hidden_QN |= key_N < query_Q1 + self.first
        return torch.zeros_like(hidden_QN, dtype=like_QN.dtype).masked_fill_(hidden_QN, float("-inf"))

    def later(self, queries: int) -> Seen:
        """Return the same without the first queries."""
        last = None if self.last is None else self.last + queries
        return Seen(last, None if self.first is None else self.first + queries)


CAUSAL = Seen(last=0)


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer scores a query against a key: `scale * q k`, then `cap * tanh(score / cap)` where there is a cap."""

    scale: float
    cap: float | None = None

    def forward(self, q_BHQD: Tensor, k_BJND: Tensor, v_BJND: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        """Return `(out_BHQD, lse_BHQ)`; the lse (nats) is float32, or the dtype where that is wider."""
        if self._fused(q_BHQD):
            mask_QN, causal = _masked(q_BHQD, k_BJND, seen)
            out, lse = _flash(q_BHQD, k_BJND, v_BJND, 0.0, causal, attn_mask=mask_QN, scale=self.scale)
            return out, lse
        outs, lses = [], []
        for queries, part in _tiles(q_BHQD, k_BJND, seen):
            p_BJGQN, _ = self._scores(q_BHQD[:, :, queries], k_BJND, part)
            lse_BJGQ = p_BJGQN.logsumexp(-1)
            p_BJGQN.sub_(lse_BJGQ[..., None]).exp_()
            outs.append((p_BJGQN @ v_BJND[:, :, None].to(p_BJGQN.dtype)).flatten(1, 2).to(q_BHQD.dtype))
            lses.append(lse_BJGQ.flatten(1, 2))
        return torch.cat(outs, 2), torch.cat(lses, 2)

    def backward(
        self,
        slope_BHQD: Tensor,
        q_BHQD: Tensor,
        k_BJND: Tensor,
        v_BJND: Tensor,
        out_BHQD: Tensor,
        lse_BHQ: Tensor,
        seen: Seen,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the block's part of the gradients of q, k and v, from the slope of the merged output."""
        if self._fused(q_BHQD):
            mask_QN, causal = _masked(q_BHQD, k_BJND, seen)
            found: tuple[Tensor, Tensor, Tensor] = _flash_backward(
                slope_BHQD, q_BHQD, k_BJND, v_BJND, out_BHQD, lse_BHQ, 0.0, causal, attn_mask=mask_QN, scale=self.scale
            )
            return found
        groups = (k_BJND.shape[1], -1)
        wide = lse_BHQ.dtype
        k_BJ1ND, v_BJ1ND = k_BJND[:, :, None].to(wide), v_BJND[:, :, None].to(wide)
        dk_BJND, dv_BJND = torch.zeros_like(k_BJND, dtype=wide), torch.zeros_like(v_BJND, dtype=wide)
        dqs = []
        for queries, part in _tiles(q_BHQD, k_BJND, seen):
            q, slope, out = (x[:, :, queries].unflatten(1, groups).to(wide) for x in (q_BHQD, slope_BHQD, out_BHQD))
            p_BJGQN, bend_BJGQN = self._scores(q_BHQD[:, :, queries], k_BJND, part)
            p_BJGQN.sub_(lse_BHQ[:, :, queries].unflatten(1, groups)[..., None]).exp_()
            dv_BJND += (p_BJGQN.mT @ slope).sum(2)
            ds_BJGQN = (slope @ v_BJ1ND.mT).sub_((slope * out).sum(-1, keepdim=True)).mul_(p_BJGQN).mul_(self.scale)
            if bend_BJGQN is not None:
                ds_BJGQN.mul_(bend_BJGQN)
            dqs.append((ds_BJGQN @ k_BJ1ND).flatten(1, 2))
            dk_BJND += (ds_BJGQN.mT @ q).sum(2)
        return torch.cat(dqs, 2), dk_BJND, dv_BJND

    def _fused(self, q_BHQD: Tensor) -> bool:
        return self.cap is None and q_BHQD.device.type == "cpu"

    def _scores(self, q_BHQD: Tensor, k_BJND: Tensor, seen: Seen) -> tuple[Tensor, Tensor | None]:
        """Return the scores (B, J, G, Q, N), and the slope of the cap at each."""
        score_BJGQN = (q_BHQD.unflatten(1, (k_BJND.shape[1], -1)) @ k_BJND[:, :, None].mT).mul_(self.scale)
        if score_BJGQN.dtype in _HALF:
            score_BJGQN = score_BJGQN.float()
        bend_BJGQN = None
        if self.cap is not None:
            bent = torch.tanh(score_BJGQN / self.cap)
            bend_BJGQN = 1 - bent * bent
            score_BJGQN = bent * self.cap
        mask_QN = seen.hidden(score_BJGQN)
        return score_BJGQN if mask_QN is None else score_BJGQN.add_(mask_QN), bend_BJGQN


def _masked(q_BHQD: Tensor, k_BJND: Tensor, seen: Seen) -> tuple[Tensor | None, bool]:
    """Return the mask that the fused kernel is given, and whether it is to be causal by itself."""
    if seen == CAUSAL:
        return None, True
    return seen.hidden(q_BHQD.new_empty(()).expand(q_BHQD.shape[2], k_BJND.shape[2])), False


def _tiles(q_BHQD: Tensor, k_BJND: Tensor, seen: Seen) -> Iterator[tuple[slice, Seen]]:
    queries = q_BHQD.shape[2]
    tile = max(1, _SCORES_AT_ONCE // (q_BHQD.shape[1] * k_BJND.shape[2]))
    for start in range(0, queries, tile):
        yield slice(start, start + tile), seen.later(start)
