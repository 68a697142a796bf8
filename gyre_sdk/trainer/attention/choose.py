"""Which executor a model gets: by looking at it, never by trust.

`auto` takes, for each unit, the one that has least to compute; a model whose tokens meet elsewhere than in plain attention
gets `flat`, and the log says why. An executor that was asked for by name and would be wrong is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.attention.budget import Budget
from gyre_sdk.trainer.attention.check import Checked
from gyre_sdk.trainer.attention.dfs import DfsExecutor
from gyre_sdk.trainer.attention.executor import Executor, Objective, Scores
from gyre_sdk.trainer.attention.flat import FlatExecutor, plan
from gyre_sdk.trainer.attention.flex import FlexExecutor
from gyre_sdk.trainer.attention.gather import GatherExecutor
from gyre_sdk.trainer.attention.head import separated
from gyre_sdk.trainer.attention.layout import groups, plant
from gyre_sdk.trainer.attention.probe import obstacles
from gyre_sdk.trainer.units import Row

_log = logging.getLogger("gyre.trainer")

Wanted = Literal["auto", "flat", "gather", "dfs"]
_SEGMENT_WEIGHTS = 600_000
"""What a segment costs in a layer beside its tokens (calls, merging of results), in weights that a token is multiplied with.

Measured on one CPU core: 16 tokens of a layer with 40 thousand weights, nothing worth counting from a million on."""
_RECOMPUTED = 1.33
"""What `dfs` pays for a token above a branch: a second forward pass beside a forward and a backward one."""


def choose(model: Any, wanted: Wanted = "auto", budget: Budget | None = None) -> Executor:
    """Return the executor for a model, to be used as it is: one that shares prefixes checks itself against `flat`.

    Raises:
        TrainerError: the executor that is wanted would not be exact for this model.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if base.config.is_encoder_decoder:
        raise TrainerError(f"{type(base).__name__} is an encoder and a decoder; gyre trains causal language models")
    budget = fitted(base, budget or Budget())
    flat = FlatExecutor(model, budget)
    if wanted == "flat":
        return flat
    if wanted not in ("auto", "gather", "dfs"):
        raise TrainerError(f"no executor {wanted!r}; choose from auto, flat, gather, dfs")
    reasons = obstacles(base)
    if reasons and wanted == "auto":
        _log.info("every row is run by itself (executor flat): %s: %s", type(base).__name__, "; ".join(reasons))
        return flat
    if reasons:
        raise TrainerError(
            f"executor = {wanted!r} would not be exact for {type(base).__name__}: {'; '.join(reasons)}. "
            'Set executor = "auto" or "flat"'
        )
    if wanted == "auto":
        return Auto(model, flat, budget)
    return _packed(model, flat, budget) if wanted == "gather" else _walked(model, flat, budget)


def _packed(model: Any, flat: FlatExecutor, budget: Budget) -> Executor:
    """Return the executor of one pass: with a fused kernel where there is one, and without where that is not exact."""
    packed = Checked(GatherExecutor(model, budget), flat, model, budget)
    if next(model.parameters()).device.type != "cuda":
        return packed
    return Checked(FlexExecutor(model, budget), flat, model, budget, instead=packed)


def _walked(model: Any, flat: FlatExecutor, budget: Budget) -> Executor:
    return Checked(DfsExecutor(model, budget), flat, model, budget)


class Auto:
    """Takes for each unit the executor that has least to compute. The choice depends on the rows only."""

    name = "auto"

    def __init__(self, model: Any, flat: FlatExecutor, budget: Budget) -> None:
        """`flat` is the reference that the others are checked against."""
        self._budget = budget
        self._segment = segment_cost(model)
        self._executors: dict[str, Executor] = {
            "flat": flat,
            "gather": _packed(model, flat, budget),
            "dfs": _walked(model, flat, budget),
        }

    def forward(self, rows: Sequence[Row]) -> Scores:
        """Score the targets without a gradient."""
        return self._executors[fastest(rows, self._budget, self._segment)].forward(rows)

    def forward_backward(self, rows: Sequence[Row], objective: Objective) -> Scores:
        """Score the targets and add the gradient of the summed objective into the parameters' `.grad`."""
        return self._executors[fastest(rows, self._budget, self._segment)].forward_backward(rows, objective)


@dataclass(frozen=True, slots=True)
class Costs:
    """What each executor would compute for some rows, in tokens of a forward and backward pass."""

    flat: float
    gather: float
    dfs: float


def costs(rows: Sequence[Row], budget: Budget, segment: float = 0.0) -> Costs:
    """Count what the executors would compute. Only `dfs` cuts a path that is longer than a pass may be.

    Args:
        segment: what a segment costs beside its tokens, in tokens.
    """
    lengths = [int(row.targets[-1]) for row in rows if len(row.targets)]
    whole = plant(rows)
    above = np.isin(np.arange(len(whole.start_S)), whole.parent_S)
    twice = int((whole.stop_S - whole.start_S)[above].sum())
    dfs = whole.unique + (_RECOMPUTED - 1) * twice + segment * len(whole.start_S)
    if max(lengths, default=0) > budget.tokens:
        return Costs(float("inf"), float("inf"), dfs)
    flat = sum(len(order) * lengths[int(order[-1])] for order in plan(lengths, budget.tokens))
    forests = [whole] if whole.unique <= budget.tokens else [plant(rows, part) for part in groups(rows, budget.tokens)]
    gather = sum(forest.unique + segment * len(forest.start_S) for forest in forests)
    return Costs(flat, gather, dfs)


def segment_cost(model: Any) -> float:
    """Return what a segment costs beside its tokens, in tokens: the more, the smaller the layers of a model."""
    text = model.config.get_text_config()
    tables = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Embedding))
    weights = sum(parameter.numel() for parameter in model.parameters()) - tables
    return float(_SEGMENT_WEIGHTS * text.num_hidden_layers / max(1, weights))


def fastest(rows: Sequence[Row], budget: Budget, segment: float = 0.0) -> str:
    """Return the name of the executor with least to compute; a tie goes to the simpler one."""
    found = costs(rows, budget, segment)
    return min(("flat", "gather", "dfs"), key=lambda name: getattr(found, name))


def fitted(model: Any, budget: Budget) -> Budget:
    """Return a budget whose passes fit into its memory, by what a pass of this model keeps for a token."""
    if not budget.memory:
        return budget
    tokens = max(1, budget.memory // kept_bytes(model, budget))
    return replace(budget, tokens=min(budget.tokens, tokens), segment=min(budget.segment, tokens))


def kept_bytes(model: Any, budget: Budget, tokens: int = 64) -> int:
    """Return the bytes that a forward pass keeps per token for its backward pass."""
    kept = 0
    seen: set[int] = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kept += storage.nbytes()
        return tensor

    device = next(model.parameters()).device
    ids_BT = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    found = separated(model)
    run = model if found is None else found[0]
    with torch.enable_grad(), budget.precision(device), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        output = run(input_ids=ids_BT, use_cache=False)
    del output  # until here it keeps what it needs for a backward pass, so that no address is counted twice
    return max(1, kept // tokens)
