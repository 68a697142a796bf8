"""The reference executor: rows next to each other, padded on the right, logits only where a target was sampled.

Shapes: B rows, T padded length, K targets of all rows, D hidden size, V vocabulary.

A causal model never looks to the right, so padding there needs no mask: nothing but padding can see it. That holds for
attention of any kind and for recurrent layers, so every causal LM runs here, also those whose head does more than a
matrix product: where the two cannot be told apart, the model computes its logits by itself. Dropout must be off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.attention.budget import Budget
from gyre_sdk.trainer.attention.executor import Objective, Scores
from gyre_sdk.trainer.attention.head import Head, separated
from gyre_sdk.trainer.units import Row


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass. Target k is `label_K[k]`, predicted at position `pos_K[k]` of row `row_K[k]`."""

    ids_BT: Tensor  # noqa: N815
    row_K: Tensor  # noqa: N815
    pos_K: Tensor  # noqa: N815
    label_K: Tensor  # noqa: N815
    temperature_K: Tensor | None  # noqa: N815
    """None for 1 everywhere."""
    index_K: Tensor  # noqa: N815
    """Place of each target among all targets in row order."""


def plan(lengths: Sequence[int], tokens: int) -> list[NDArray[np.int64]]:
    """Return rows grouped by length so that a group padded to its longest row has at most `tokens` tokens.

    A row that is longer than that is a group of its own.
    """
    order = np.argsort(np.asarray(lengths), kind="stable")
    groups: list[NDArray[np.int64]] = []
    start = 0
    for stop in range(1, len(order) + 1):
        if stop == len(order) or (stop - start + 1) * lengths[order[stop]] > tokens:
            groups.append(order[start:stop])
            start = stop
    return groups


def collate(rows: Sequence[Row], order: NDArray[np.int64], device: torch.device) -> MicroBatch:
    """Return the rows in `order` as tensors.

    A row goes in up to the token before its last target: nothing later can change a target's log-prob.
    """
    chosen = [rows[place] for place in order]
    counts = [len(row.targets) for row in chosen]
    needed = [int(row.targets[-1]) for row in chosen]
    ids_BT = np.zeros((len(chosen), max(needed)), dtype=np.int64)
    for place, (row, length) in enumerate(zip(chosen, needed, strict=True)):
        ids_BT[place, :length] = row.ids[:length]
    pos_K = np.concatenate([row.targets for row in chosen]).astype(np.int64) - 1
    if pos_K.min() < 0:
        raise TrainerError("the first token of a path is a target: nothing predicts it; report this as a bug of gyre")
    starts = np.concatenate([[0], np.cumsum([len(row.targets) for row in rows])])
    temperature_K = np.concatenate([row.temperatures for row in chosen])

    def tensor(array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        ids_BT=tensor(ids_BT),
        row_K=tensor(np.repeat(np.arange(len(chosen)), counts)),
        pos_K=tensor(pos_K),
        label_K=tensor(np.concatenate([row.ids[row.targets] for row in chosen]).astype(np.int64)),
        temperature_K=None if np.all(temperature_K == 1.0) else torch.from_numpy(temperature_K).to(device),
        index_K=tensor(np.concatenate([np.arange(starts[place], starts[place + 1]) for place in order])),
    )


class FlatExecutor:
    """Runs every row by itself."""

    name = "flat"

    def __init__(self, model: Any, budget: Budget | None = None) -> None:
        """`model` is a transformers causal LM, or one that peft has put adapters into."""
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._budget = budget or Budget()
        width = int(self._model.config.get_text_config().vocab_size)
        found = separated(self._model)
        if found is None:
            self._backbone = None
            self._head = Head(lambda logits_CV: logits_CV, width, self._budget)
        else:
            self._backbone, after = found
            output = self._model.get_output_embeddings()
            self._head = Head(lambda hidden_CD: after(output(hidden_CD)), width, self._budget)

    @property
    def head_is_separate(self) -> bool:
        """Whether logits are computed for targets only, a few at a time."""
        return self._backbone is not None

    def forward(self, rows: Sequence[Row]) -> Scores:
        """Score the targets without a gradient."""
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        with torch.no_grad():
            for batch in self._batches(rows):
                logp_K, entropy_K = self._head.scores(self._states(batch), batch.label_K, batch.temperature_K)
                found.append((batch.index_K, logp_K, entropy_K))
        return _in_row_order(found)

    def forward_backward(self, rows: Sequence[Row], objective: Objective) -> Scores:
        """Score the targets and add the gradient of the summed objective into the parameters' `.grad`."""
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for batch in self._batches(rows):
            with torch.enable_grad():
                states_KD = self._states(batch)
            logp_K, entropy_K, gradient_KD = self._head.gradients(
                states_KD.detach(), batch.label_K, batch.temperature_K, batch.index_K, objective
            )
            if states_KD.requires_grad:
                states_KD.backward(gradient_KD)
            found.append((batch.index_K, logp_K, entropy_K))
        return _in_row_order(found)

    def _batches(self, rows: Sequence[Row]) -> Iterator[MicroBatch]:
        device = next(self._model.parameters()).device
        places = np.flatnonzero([len(row.targets) > 0 for row in rows])
        for order in plan([int(rows[int(place)].targets[-1]) for place in places], self._budget.tokens):
            yield collate(rows, places[order], device)

    def _states(self, batch: MicroBatch) -> Tensor:
        """Return what the head takes at each target: hidden states, or logits where it is not separate."""
        with self._budget.precision(batch.ids_BT.device):
            if self._backbone is None:
                out_BTD = self._model(input_ids=batch.ids_BT, use_cache=False).logits
            else:
                out_BTD = self._backbone(input_ids=batch.ids_BT, use_cache=False).last_hidden_state
        picked: Tensor = out_BTD[batch.row_K, batch.pos_K]
        return picked


def _in_row_order(found: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Scores:
    """Put the `(index_K, logp_K, entropy_K)` of micro-batches where they belong."""
    if not found:
        return Scores(torch.empty(0), torch.empty(0))
    index_K = torch.cat([index for index, _, _ in found])
    logp_K, entropy_K = torch.cat([logp for _, logp, _ in found]), torch.cat([entropy for _, _, entropy in found])
    return Scores(
        torch.empty_like(logp_K).index_copy_(0, index_K, logp_K),
        torch.empty_like(entropy_K).index_copy_(0, index_K, entropy_K),
    )
