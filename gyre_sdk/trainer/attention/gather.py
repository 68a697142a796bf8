"""The executor that runs a whole forest in one packed pass: every shared token once, forward and backward.

Shapes: U packed tokens, K targets, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gyre_sdk.trainer.attention.attend import NAME, Pass, attending
from gyre_sdk.trainer.attention.budget import Budget
from gyre_sdk.trainer.attention.executor import Objective, Scores
from gyre_sdk.trainer.attention.layout import Forest, groups, plant
from gyre_sdk.trainer.attention.policy import Policy, Targets, in_row_order
from gyre_sdk.trainer.attention.policy import supports as supports

if TYPE_CHECKING:
    from gyre_sdk.trainer.units import Row


class GatherExecutor:
    """Runs the rows of a unit as one forest, or as several where `budget.tokens` asks for it.

    A cut repeats the tokens above it: its rows go with their whole paths.
    """

    name = "gather"
    attention = NAME
    """Under which its attention is registered with transformers."""

    def __init__(self, model: Any, budget: Budget | None = None) -> None:
        """`model` is a transformers causal LM for which `supports` gives no reason, or one with peft adapters."""
        self._budget = budget or Budget()
        self._policy = Policy(model, self._budget)

    def forward(self, rows: Sequence[Row]) -> Scores:
        """Score the targets without a gradient."""
        found = []
        with torch.no_grad(), attending(self._policy.model, self.attention):
            for forest in self._forests(rows):
                targets = self._policy.targets(rows, forest)
                found.append((targets, *self._policy.scores(self._states(forest, targets), targets)))
        return in_row_order(found)

    def forward_backward(self, rows: Sequence[Row], objective: Objective) -> Scores:
        """Score the targets and add the gradient of the summed objective into the parameters' `.grad`."""
        found = []
        with torch.enable_grad(), attending(self._policy.model, self.attention):
            for forest in self._forests(rows):
                targets = self._policy.targets(rows, forest)
                states_KD = self._states(forest, targets)
                logp_K, entropy_K, slope_KD = self._policy.gradients(states_KD, targets, objective)
                if states_KD.requires_grad:
                    states_KD.backward(slope_KD)
                found.append((targets, logp_K, entropy_K))
        return in_row_order(found)

    def _forests(self, rows: Sequence[Row]) -> Iterator[Forest]:
        for part in groups(rows, self._budget.tokens):
            yield plant(rows, part)

    def _states(self, forest: Forest, targets: Targets) -> Tensor:
        seen = self._seen(forest, targets.at_K.device)
        return self._policy.states(forest, seen).index_select(0, targets.at_K)

    def _seen(self, forest: Forest, device: torch.device) -> Any:
        """Return the forest as the attention sees it; a model hands it through as it is."""
        return Pass(forest)
