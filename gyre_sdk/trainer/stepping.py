"""Around the optimizer's step: what ends a training before it spoils a policy, and whose settings a resumed optimizer has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from gyre_sdk.errors import TrainerError

__all__ = ["as_set", "check_gradient", "check_weights"]

LARGEST = torch.finfo(torch.float16).max
"""A weight beyond it could not be served in float16, and no policy that says anything has one."""


def check_gradient(norm: float, step: int) -> None:
    """Check a gradient by its norm, before a step is made of it.

    Raises:
        TrainerError: it is not finite.
    """
    if not math.isfinite(norm):
        raise TrainerError(
            f"the gradient of step {step} is not finite (its norm is {norm}), and no weight was changed by it. Lower"
            " train.learning_rate or train.max_grad_norm, set train.delta, which bounds the ratios of tokens with a negative"
            " advantage, or train.bf16 = false; the same command resumes at the last checkpoint"
        )


@torch.no_grad()
def check_weights(model: Any, step: int) -> None:
    """Check the trained weights that a step has left. Of a sharded model every process must call this.

    Raises:
        TrainerError: one of them is not finite, or absurdly large.
    """
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if largest(trained.values()) <= LARGEST:  # not where it is NaN
        return
    sizes = {name: largest([weight]) for name, weight in trained.items()}
    name, size = next((name, size) for name, size in sizes.items() if not size <= LARGEST)
    holds = f"values up to {size:.3g}" if math.isfinite(size) else "values that are not finite"
    raise TrainerError(
        f"step {step} has spoilt the policy: {name} holds {holds}. It is neither saved nor published. Lower"
        " train.learning_rate or train.weight_decay, then run the same command again: it resumes at the last checkpoint"
    )


def largest(weights: Iterable[Tensor]) -> float:
    """Return the largest absolute value; NaN where one is. Of shards: over all of them, a collective."""
    found = get_total_norm(list(weights), math.inf)
    return float(found.full_tensor() if isinstance(found, DTensor) else found)


@contextmanager
def as_set(optimizer: Any, schedule: Any) -> Iterator[None]:
    """Keep the settings of an optimizer and its schedule while their states are loaded, which hold those that they were saved
    with: a learning rate that was changed between two starts counts from the next step on."""
    groups = optimizer.param_groups
    said = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    yield
    schedule.base_lrs = [own["initial_lr"] for own in said]
    schedule._last_lr = [
        rate * share(schedule.last_epoch) for rate, share in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, own, rate in zip(optimizer.param_groups, said, schedule._last_lr, strict=True):
        group.update(own, lr=rate)
