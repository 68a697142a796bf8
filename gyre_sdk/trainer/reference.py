"""The reference policy of the KL term: the model in training with its adapters off, or a frozen copy.

A copy can follow the policy, as TRL's `sync_ref_model` (arXiv:2404.09656)::

    reference = alpha * policy + (1 - alpha) * reference        every `ref_model_sync_steps` steps

It is then part of a checkpoint: without it a resumed training would have another loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.attention.executor import Executor
from gyre_sdk.trainer.units import Row

FILE = "reference.safetensors"


class Reference(Protocol):
    """Scores targets under a policy that is not trained."""

    def logp(self, rows: Sequence[Row]) -> Tensor:
        """Return the log-prob (nats) of every target, in row order."""


class AdapterOff:
    """What a model with adapters was before them."""

    def __init__(self, model: Any, executor: Executor) -> None:
        """`executor` runs `model`, which peft has put adapters into."""
        self._model = model
        self._executor = executor

    def logp(self, rows: Sequence[Row]) -> Tensor:
        """Return the log-prob (nats) of every target, in row order."""
        with self._model.disable_adapter():
            return self._executor.forward(rows).logp_K


class FrozenCopy:
    """A model of its own."""

    def __init__(self, model: Any, executor_of: Callable[[Any], Executor]) -> None:
        """Take a model as it is; it must not be the one in training. `executor_of` gives what runs it."""
        model.requires_grad_(False)
        model.eval()
        self.model = model
        self._executor = executor_of(model)

    def logp(self, rows: Sequence[Row]) -> Tensor:
        """Return the log-prob (nats) of every target, in row order."""
        return self._executor.forward(rows).logp_K

    @torch.no_grad()
    def follow(self, policy: Any, alpha: float) -> None:
        """Move towards the policy by `alpha`."""
        for own, other in zip(self.model.parameters(), policy.parameters(), strict=True):
            own.lerp_(other.detach().to(own.dtype), alpha)

    def save(self, folder: Path) -> None:
        """Write the weights next to a checkpoint's."""
        from safetensors.torch import save_model

        save_model(self.model, str(folder / FILE))

    def load(self, folder: Path) -> None:
        """Take the weights that `save` wrote.

        Raises:
            TrainerError: they are not there.
        """
        from safetensors.torch import load_model

        path = folder / FILE
        if not path.is_file():
            raise TrainerError(
                f"{folder} has no {FILE}: it was saved without sync_ref_model; resume with sync_ref_model = false, or start"
                " anew"
            )
        load_model(self.model, str(path))


def frozen_copy(model: Any) -> Any:
    """Return a copy of a model as it is now, to be a reference."""
    return copy.deepcopy(model)
