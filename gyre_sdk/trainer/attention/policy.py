"""A causal LM as the forest executors use it: packed tokens in, hidden states out, targets through the head.

Shapes: U packed tokens, K targets, D hidden size (or vocabulary, where a model's head is not separate).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from gyre_sdk.trainer.attention.attend import Pass
from gyre_sdk.trainer.attention.budget import Budget
from gyre_sdk.trainer.attention.executor import Objective, Scores
from gyre_sdk.trainer.attention.head import Head, separated
from gyre_sdk.trainer.attention.layout import Forest

if TYPE_CHECKING:
    from gyre_sdk.trainer.units import Row

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_BY_LENGTH = {"dynamic", "longrope"}
"""Rotary embeddings whose frequencies depend on the length of the sequence."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of a pass, on the model's device."""

    at_K: Tensor  # noqa: N815
    """Packed token whose hidden state predicts each."""
    label_K: Tensor  # noqa: N815
    temperature_K: Tensor | None  # noqa: N815
    """None for 1 everywhere."""
    index_K: Tensor  # noqa: N815
    """Place among the targets of all rows."""


class Policy:
    """Runs a model on packed tokens."""

    def __init__(self, model: Any, budget: Budget) -> None:
        """`model` is a transformers causal LM, or one that peft has put adapters into."""
        self.model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._budget = budget
        width = int(self.model.config.get_text_config().vocab_size)
        found = separated(self.model)
        if found is None:
            self._backbone = None
            self._head = Head(lambda logits_CV: logits_CV, width, budget)
        else:
            self._backbone, after = found
            output = self.model.get_output_embeddings()
            self._head = Head(lambda hidden_CD: after(output(hidden_CD)), width, budget)

    def states(self, forest: Forest, seen: Pass) -> Tensor:
        """Return the hidden states (U, D) of a forest, or its logits where the head is not separate."""
        device = next(self.model.parameters()).device
        inputs = {
            "input_ids": torch.from_numpy(forest.ids_U.astype(np.int64))[None].to(device),
            "position_ids": torch.from_numpy(forest.position_U)[None].to(device),
            "use_cache": False,
            "gyre_pass": seen,
        }
        with self._budget.precision(device):
            if self._backbone is None:
                out_BUD: Tensor = self.model(**inputs).logits
            else:
                out_BUD = self._backbone(**inputs).last_hidden_state
        return out_BUD[0]

    def targets(self, rows: Sequence[Row], forest: Forest) -> Targets:
        """Return a forest's targets as tensors."""
        device = next(self.model.parameters()).device
        temperature_K = np.concatenate([row.temperatures for row in rows])[forest.index_K]
        return Targets(
            at_K=torch.from_numpy(forest.at_K).to(device),
            label_K=torch.from_numpy(forest.label_K).to(device),
            temperature_K=None if np.all(temperature_K == 1.0) else torch.from_numpy(temperature_K).to(device),
            index_K=torch.from_numpy(forest.index_K).to(device),
        )

    def scores(self, states_KD: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Return `(logp_K, entropy_K)` without gradient."""
        return self._head.scores(states_KD, targets.label_K, targets.temperature_K)

    def gradients(self, states_KD: Tensor, targets: Targets, objective: Objective) -> tuple[Tensor, Tensor, Tensor]:
        """Return `(logp_K, entropy_K, slope_KD)`: the slope is the objective's by the states, for the caller."""
        return self._head.gradients(
            states_KD.detach(), targets.label_K, targets.temperature_K, targets.index_K, objective
        )


def in_row_order(found: Sequence[tuple[Targets, Tensor, Tensor]]) -> Scores:
    """Put the `(targets, logp_K, entropy_K)` of several passes together in the order of the rows."""
    if not found:
        return Scores(torch.empty(0), torch.empty(0))
    index_K = torch.cat([targets.index_K for targets, _, _ in found])
    logp_K, entropy_K = torch.cat([logp for _, logp, _ in found]), torch.cat([entropy for _, _, entropy in found])
    return Scores(
        torch.empty_like(logp_K).index_copy_(0, index_K, logp_K),
        torch.empty_like(entropy_K).index_copy_(0, index_K, entropy_K),
    )


def supports(model: Any) -> str | None:
    """Return why a model cannot be run on forests, by what can be seen of it; None where nothing speaks against it."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = model.config.get_text_config()
    if config is not model.config or model.config.is_encoder_decoder:
        return f"{type(model).__name__} is more than a decoder of text"
    if not getattr(model, "_supports_attention_backend", False):
        return f"{type(model).__name__} does not take its attention from transformers' attention interface"
    strange = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if strange:
        return f"it has layers of the type {', '.join(sorted(strange))}"
    rope = getattr(config, "rope_parameters", None) or {}
    types = {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)}
    if types & _BY_LENGTH:
        return f"the frequencies of its rotary embedding ({', '.join(map(str, types & _BY_LENGTH))}) depend on a sequence's length"
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d | nn.RNNBase):
            return f"{name} mixes neighbouring tokens"
        if getattr(module, "sinks", None) is not None:
            return f"{name} has attention sinks"
        if getattr(module, "attention_dropout", 0.0):
            return f"{name} drops attention with probability {module.attention_dropout}"
        if getattr(module, "is_causal", True) is False:
            return f"{name} is not causal"
    backbone = getattr(model, model.base_model_prefix, model)
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        return f"{type(backbone).__name__} takes no position ids"
    return None
