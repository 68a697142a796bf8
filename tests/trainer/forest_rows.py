"""Rows that share prefixes, and an executor of one pass with a dense mask: right, or wrong in a way that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from tiny_policy import VOCAB
from torch import Tensor

from gyre_sdk.trainer.attention.executor import Objective, Scores
from gyre_sdk.trainer.attention.head import score
from gyre_sdk.trainer.attention.layout import Forest, plant
from gyre_sdk.trainer.units import Row

Mistake = Literal[
    "none",
    "flat positions",
    "no mask",
    "siblings are seen",
    "window by packed index",
    "window is lost",
    "first token of a child is not trained",
    "targets of a branch are swapped",
    "gradient counted twice",
]


def row_of(name: str, ids: np.ndarray, first: int, *, run: str | None = None) -> Row:
    """A row whose targets are its tokens from `first` on."""
    targets = np.arange(first, len(ids), dtype=np.int32)
    return Row(
        run=run or name,
        leaf=name,
        role="main",
        ids=ids.astype(np.int32),
        targets=targets,
        weights=np.full(len(targets), 1 / len(targets)),
        logprobs=np.full(len(targets), -3.0),
        versions=np.zeros(len(targets), np.int32),
        advantage=1.0,
    )


def branching_rows(seed: int = 0, *, long: int = 30) -> list[Row]:
    """Five rows of three levels: a trunk, three branches at one point, one of which branches, and one near the root."""
    draw = np.random.default_rng(seed)

    def tokens(count: int) -> np.ndarray:
        return draw.integers(3, VOCAB, count)

    trunk = tokens(long)
    cut = 2 * long // 3
    side = np.concatenate([trunk[:cut], tokens(12)])
    return [
        row_of("trunk", trunk, 4),
        row_of("side", side, cut),
        row_of("below", np.concatenate([side[: cut + 6], tokens(9)]), cut + 6),
        row_of("other", np.concatenate([trunk[:cut], tokens(14)]), cut),
        row_of("early", np.concatenate([trunk[:5], tokens(long)]), 5),
    ]


class OnePass:
    """A forest in one pass of the model with a dense mask. Only for models whose head is a matrix product."""

    name = "one pass"

    def __init__(self, model: Any, mistake: Mistake = "none") -> None:
        self._model = model
        self._mistake = mistake

    def forward(self, rows: Sequence[Row]) -> Scores:
        with torch.no_grad():
            forest = plant(rows)
            return self._ordered(forest, *self._score(forest))

    def forward_backward(self, rows: Sequence[Row], objective: Objective) -> Scores:
        forest = plant(rows)
        logp_K, entropy_K = self._score(forest)
        index_K = torch.from_numpy(forest.index_K)
        trained = torch.ones(len(index_K), dtype=torch.bool)
        if self._mistake == "first token of a child is not trained":
            last_above = (forest.stop_S - 1)[forest.parent_S[forest.parent_S >= 0]]
            trained = ~torch.from_numpy(np.isin(forest.at_K, last_above))
        loss = objective(logp_K[trained], entropy_K[trained], index_K[trained])
        (2 * loss if self._mistake == "gradient counted twice" else loss).backward()
        return self._ordered(forest, logp_K.detach(), entropy_K.detach())

    def _score(self, forest: Forest) -> tuple[Tensor, Tensor]:
        position_U = torch.from_numpy(forest.position_U)
        if self._mistake == "flat positions":
            position_U = torch.arange(forest.unique)
        hidden_UD = self._model.model(
            input_ids=torch.from_numpy(forest.ids_U.astype(np.int64))[None],
            position_ids=position_U[None],
            attention_mask=self._mask(forest),
            use_cache=False,
        ).last_hidden_state[0]
        at_K, label_K = torch.from_numpy(forest.at_K), torch.from_numpy(forest.label_K)
        if self._mistake == "targets of a branch are swapped":
            one, other = next(pair for pair in _twins(forest) if forest.label_K[pair[0]] != forest.label_K[pair[1]])
            label_K = label_K.clone()
            label_K[[one, other]] = label_K[[other, one]]
        return score(self._model.lm_head(hidden_UD[at_K]), label_K)

    def _mask(self, forest: Forest) -> Any:
        if self._mistake == "no mask":
            return None
        key_U = torch.arange(forest.unique)
        seen_UU = key_U[None, :] <= key_U[:, None]
        if self._mistake != "siblings are seen":
            seen_UU &= key_U[:, None] < torch.from_numpy(forest.end_U)[None, :]
        config = self._model.config
        layers = set(getattr(config, "layer_types", None) or ())
        if "sliding_attention" not in layers or self._mistake == "window is lost":
            return seen_UU[None, None]
        at_U = key_U if self._mistake == "window by packed index" else torch.from_numpy(forest.position_U)
        near_UU = at_U[:, None] - at_U[None, :] < config.sliding_window
        return {"full_attention": seen_UU[None, None], "sliding_attention": (seen_UU & near_UU)[None, None]}

    def _ordered(self, forest: Forest, logp_K: Tensor, entropy_K: Tensor) -> Scores:
        index_K = torch.from_numpy(forest.index_K)
        return Scores(
            torch.empty_like(logp_K).index_copy_(0, index_K, logp_K),
            torch.empty_like(entropy_K).index_copy_(0, index_K, entropy_K),
        )


def _twins(forest: Forest) -> list[tuple[int, int]]:
    """Pairs of targets that are predicted at the same token."""
    order = np.argsort(forest.at_K, kind="stable")
    return [(one, other) for one, other in pairwise(order.tolist()) if forest.at_K[one] == forest.at_K[other]]
