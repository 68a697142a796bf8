"""What an executor promises: log-prob and entropy of every target, and the gradient of a sum of losses of them.

Shapes: K targets of all rows, in row order (the targets of `rows[0]`, then those of `rows[1]`, ...); C of them.

Executors differ in what they share. All of them forward a token once for every row whose path begins with the same
tokens (`flat` not at all), and none of them shares a loss term: a token that two rows sampled is two targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gyre_sdk.trainer.units import Row

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`(logp_C, entropy_C, index_C) -> ` summed loss of these targets, a differentiable scalar.

`index_C` (int64) places them among the row-order targets. It is separable: the executor may call it on any partition
of the targets, in any order, and adds up what it gets.
"""


@dataclass(frozen=True, slots=True)
class Scores:
    """Numbers of the targets in row order, detached; float32, or the model's dtype where that is wider."""

    logp_K: Tensor  # noqa: N815
    """Log-prob (nats) of `logits / temperature`."""
    entropy_K: Tensor  # noqa: N815
    """Entropy (nats) of the same distribution."""


class Executor(Protocol):
    """Runs the policy on the rows of a unit."""

    @property
    def name(self) -> str:
        """`flat`, `gather`, `dfs`, ..."""

    def forward(self, rows: Sequence[Row]) -> Scores:
        """Score the targets without a gradient."""

    def forward_backward(self, rows: Sequence[Row], objective: Objective) -> Scores:
        """Score the targets and add the gradient of the summed objective into the parameters' `.grad`."""


def linearised(loss: Callable[[Tensor, Tensor], Tensor], scores: Scores) -> tuple[Tensor, Objective]:
    """Return the value of a loss, and a separable objective with the same gradient.

    For losses that couple targets, such as a ratio of a whole call. At the scores of a first `forward`, with
    `g = dL/dlogp` and `h = dL/dentropy`, the sum of `g logp + h entropy` has the gradient of L by the chain rule.
    It holds at these weights only: nothing may be updated between the two passes.

    Args:
        loss: `(logp_K, entropy_K) -> ` scalar, over all targets of the unit at once.
        scores: of the same rows, from `Executor.forward`.
    """
    logp_K = scores.logp_K.detach().requires_grad_()
    entropy_K = scores.entropy_K.detach().requires_grad_()
    with torch.enable_grad():
        value = loss(logp_K, entropy_K)
    slope_K, entropy_slope_K = torch.autograd.grad(
        value, (logp_K, entropy_K), allow_unused=True, materialize_grads=True
    )

    def objective(logp_C: Tensor, entropy_C: Tensor, index_C: Tensor) -> Tensor:
        index_C = index_C.to(slope_K.device)
        linear = (slope_K[index_C].to(logp_C.device, logp_C.dtype) * logp_C).sum()
        return linear + (entropy_slope_K[index_C].to(entropy_C.device, entropy_C.dtype) * entropy_C).sum()

    return value.detach(), objective
