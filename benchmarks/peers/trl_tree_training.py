"""TRL's tree packing with an SDPA kernel in place of FlashAttention 3, which needs a GPU.

TRL's `TreeRow` lays the samples out, TRL's kwargs say which keys each segment sees; the kernel gathers those as TRL's does, and
attends segment by segment. Masks are made once per batch, not per layer. The head is gyre's, a few targets at a time, so that the
comparison is one of layout and attention.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
from trl.experimental.async_grpo.packing import TREE_ATTENTION, TreeRow, register_tree_attention

from gyre_sdk.trainer.attention.budget import Budget
from gyre_sdk.trainer.attention.executor import Objective, Scores
from gyre_sdk.trainer.attention.head import Head
from gyre_sdk.trainer.units import Row


@dataclass(frozen=True, slots=True)
class Segments:
    """Query range, gathered keys and mask of each segment; no mask where the segment is all there is."""

    parts: list[tuple[int, int, Tensor, Tensor | None]]


def sdpa_by_segment(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, segments: Segments, **rest: Any
) -> tuple[Tensor, None]:
    """Attend each segment to the K/V of its path."""
    out = []
    for start, stop, keys, mask in segments.parts:
        out.append(
            torch.nn.functional.scaled_dot_product_attention(
                query[:, :, start:stop],
                key.index_select(2, keys),
                value.index_select(2, keys),
                attn_mask=mask,
                is_causal=mask is None,
                scale=rest.get("scaling"),
                enable_gqa=True,
            )
        )
    return torch.cat(out, 2).transpose(1, 2).contiguous(), None


register_tree_attention()
_SDPA = "trl_tree_sdpa"
AttentionInterface.register(_SDPA, sdpa_by_segment)
AttentionMaskInterface.register(_SDPA, lambda **_: None)


class TrlTree:
    """An executor whose layout is TRL's. Packing is prepared apart from execution: it is timed by itself."""

    name = "TRL"

    def __init__(self, model: Any, budget: Budget, *, own_kernel: bool = False) -> None:
        """`model` is a causal LM whose head is a matrix product. With TRL's own kernel, it has to be on a GPU."""
        self._model = model
        self._attention = TREE_ATTENTION if own_kernel else _SDPA
        self._head = Head(model.get_output_embeddings(), model.config.vocab_size, budget)
        self._packed: tuple[dict[str, Tensor], dict[str, Any]] | None = None

    def prepare(self, rows: Sequence[Row]) -> None:
        """Fold the rows into a trie and lay it out."""
        tree = TreeRow()
        for row in rows:
            mask = torch.zeros(len(row.ids), dtype=torch.bool)
            mask[torch.from_numpy(row.targets).long()] = True
            tree.add(
                {
                    "input_ids": torch.from_numpy(row.ids),
                    "completion_mask": mask,
                    "old_log_probs": torch.zeros(len(row.ids)),
                    "advantage": row.advantage,
                    "group_id": 0,
                }
            )
        device = next(self._model.parameters()).device
        batch = {key: value.to(device) for key, value in tree.pack().items()}
        if self._attention == TREE_ATTENTION:
            query_max, key_max = batch["tree_max_seqlens"].tolist()
            keys = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
            arguments = {key: batch[key] for key in keys}
            self._packed = (batch, arguments | {"tree_max_seqlen_q": query_max, "tree_max_seqlen_k": key_max})
        else:
            self._packed = (batch, {"segments": _segments(batch)})

    def forward_backward(self, rows: Sequence[Row], objective: Objective) -> Scores:
        """Execute what was prepared of these rows."""
        assert self._packed is not None
        batch, arguments = self._packed
        config, before = self._model.config, self._model.config._attn_implementation
        config._attn_implementation = self._attention
        try:
            hidden_TD = self._model.model(
                input_ids=batch["input_ids"][None].long(),
                position_ids=batch["position_ids"][None],
                use_cache=False,
                **arguments,
            ).last_hidden_state[0]
        finally:
            config._attn_implementation = before
        at_K = batch["token_index"]
        states_KD = hidden_TD[at_K]
        label_K = batch["shift_labels"][at_K].long()
        logp_K, entropy_K, slope_KD = self._head.gradients(
            states_KD.detach(), label_K, None, torch.arange(len(at_K), device=at_K.device), objective
        )
        states_KD.backward(slope_KD)
        return Scores(logp_K, entropy_K)


def _segments(batch: dict[str, Tensor]) -> Segments:
    queries, keys = batch["tree_cu_seqlens_q"].tolist(), batch["tree_cu_seqlens_k"].tolist()
    parts = []
    for start, stop, first, last in zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True):
        own, seen = stop - start, last - first
        mask = None
        if seen > own:
            mask = torch.arange(seen)[None] <= torch.arange(own)[:, None] + (seen - own)
        parts.append((start, stop, batch["tree_kv_index"][first:last], mask))
    return Segments(parts)
