"""The reference executor: rows next to each other, padded on the right, logits only where a target was sampled.

Shapes: B rows, T padded length, K targets of all rows, D hidden size, V vocabulary.

A causal model never looks to the right, so padding there needs no mask: nothing but padding can see it. Models with
dropout are put in evaluation mode for it by the caller, and a head that does more than a matrix product is run whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gyre_sdk.errors import TrainerError

_SCALED_HEADS = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
"""Config fields of models whose logits are more than hidden states times the head's matrix."""
_LOGITS_AT_ONCE = 1 << 25
"""Logits (targets x vocabulary) computed at a time; more are recomputed in the backward pass."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass. Target k is `label_K[k]`, predicted at position `pos_K[k]` of row `row_K[k]`."""

    ids_BT: Tensor  # noqa: N815
    row_K: Tensor  # noqa: N815
    pos_K: Tensor  # noqa: N815
    label_K: Tensor  # noqa: N815
    order: NDArray[np.int64]
    """Rows of the unit, in the order in which they lie here."""


def plan(lengths: Sequence[int], budget: int) -> list[NDArray[np.int64]]:
    """Return rows grouped by length so that a group padded to its longest row has at most `budget` tokens.

    A row that is longer than the budget is a group of its own.
    """
    order = np.argsort(np.asarray(lengths), kind="stable")
    groups: list[NDArray[np.int64]] = []
    start = 0
    for stop in range(1, len(order) + 1):
        if stop == len(order) or (stop - start + 1) * lengths[order[stop]] > budget:
            groups.append(order[start:stop])
            start = stop
    return groups


def collate(
    ids: Sequence[NDArray[np.int32]], targets: Sequence[NDArray[np.int32]], order: NDArray[np.int64]
) -> MicroBatch:
    """Return the rows in `order` as tensors. `targets` are path positions of each row, ascending and above 0.

    A row goes in up to the token before its last target: nothing later can change a target's log-prob.
    """
    needed = [int(targets[row][-1]) for row in order]
    ids_BT = np.zeros((len(order), max(needed)), dtype=np.int64)
    for place, (row, length) in enumerate(zip(order, needed, strict=True)):
        ids_BT[place, :length] = ids[row][:length]
    row_K = np.repeat(np.arange(len(order)), [len(targets[row]) for row in order])
    pos_K = np.concatenate([targets[row] for row in order]).astype(np.int64) - 1
    if pos_K.min() < 0:
        raise TrainerError("the first token of a path is a target: nothing predicts it; report this as a bug of gyre")
    label_K = np.concatenate([ids[row][targets[row]] for row in order]).astype(np.int64)
    tensor = torch.from_numpy
    return MicroBatch(tensor(ids_BT), tensor(row_K), tensor(pos_K), tensor(label_K), order)


class FlatExecutor:
    """Computes log-prob and entropy of every target of a micro-batch."""

    def __init__(self, model: Any) -> None:
        """`model` is a transformers causal LM, or one that peft has put adapters into."""
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        text = self._model.config.get_text_config()
        scaled = [name for name in _SCALED_HEADS if getattr(text, name, None) not in (None, 1.0)]
        self._head = None if scaled else self._model.get_output_embeddings()
        self._backbone: Any = getattr(self._model, self._model.base_model_prefix, None)
        if self._backbone is None or self._backbone is self._model:
            self._head = None

    def __call__(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return `(logp_K, entropy_K)` in nats; the entropy has no gradient."""
        device = next(self._model.parameters()).device
        ids_BT, row_K, pos_K = batch.ids_BT.to(device), batch.row_K.to(device), batch.pos_K.to(device)
        label_K = batch.label_K.to(device)
        if self._head is None:
            logits_BTV = self._model(input_ids=ids_BT, use_cache=False).logits
            return _score(logits_BTV[row_K, pos_K], label_K)
        hidden_BTD = self._backbone(input_ids=ids_BT, use_cache=False).last_hidden_state
        return self._project(hidden_BTD[row_K, pos_K], label_K)

    def _project(self, hidden_KD: Tensor, label_K: Tensor) -> tuple[Tensor, Tensor]:
        head = self._head
        assert head is not None

        def score(hidden_CD: Tensor, label_C: Tensor) -> tuple[Tensor, Tensor]:
            return _score(head(hidden_CD), label_C)

        at_once = max(1, _LOGITS_AT_ONCE // head.weight.shape[0])
        if len(label_K) <= at_once:
            return score(hidden_KD, label_K)
        parts = [
            checkpoint(score, hidden_CD, label_C, use_reentrant=False)
            for hidden_CD, label_C in zip(hidden_KD.split(at_once), label_K.split(at_once), strict=True)
        ]
        return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])


def _score(logits_KV: Tensor, label_K: Tensor) -> tuple[Tensor, Tensor]:
    logits_KV = logits_KV.float() if logits_KV.dtype in (torch.bfloat16, torch.float16) else logits_KV
    logps_KV = logits_KV.log_softmax(-1)
    with torch.no_grad():
        entropy_K = -(logps_KV.exp() * logps_KV).sum(-1)
    return logps_KV.gather(-1, label_K[:, None]).squeeze(-1), entropy_K
