"""What an executor may use at once, and in what precision it runs the model. Nothing here changes a result."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one forward pass. A single segment or row that is longer than a limit is run all the same."""

    tokens: int = 8192
    """Tokens of a forward pass, padding included, where several rows or segments are packed into one."""
    logits: int = 1 << 25
    """Logits (targets x vocabulary) that exist at once."""
    segment: int = 2048
    """Tokens whose activations `dfs` holds at once; longer segments are cut."""
    memory: int = 0
    """Bytes that the activations of a forward pass may take, as far as they can be estimated; 0 for no limit."""
    autocast: torch.dtype | None = None
    """Mixed precision: dtype of matrix products over weights of another dtype; None runs the weights' own."""

    def precision(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the scope of a forward pass. A scope is either all with or all without gradient: it keeps cast weights."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast)
