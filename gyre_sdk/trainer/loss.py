"""From log-probs to loss: pure functions of tensors.

Shapes: K targets of a micro-batch, all its rows together; no padding. Everything is a *sum*: the division by
`denominator` happens once, when the batch is closed, so that no split of the work changes the gradient.

Objective (PPO's clipped surrogate per token; arXiv:2609.33848 for `run_mean`), with ratio r = pi / pi_old and advantage A::

    l_t = -min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A) * w

    run_mean   1/R sum_runs [ sum_t l_t / n_run ]      R trained runs; n_run targets of the run
    dapo       sum_t l_t / T                           T targets of the batch
    dr_grpo    sum_t l_t / (rows * max_completion_length)

`bypass`: pi_old is the behaviour policy, w = 1. `truncate`: pi_old is the current policy (one update per token, so
r = 1 in value and in gradient), w = min(pi / pi_behaviour, cap) without gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossType = Literal["run_mean", "dapo", "dr_grpo"]


@dataclass(frozen=True, slots=True)
class LossOptions:
    """What a token's loss depends on beside its numbers."""

    loss_type: LossType = "run_mean"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    importance_sampling: Literal["bypass", "truncate"] = "bypass"
    importance_sampling_cap: float = 2.0
    negative_advantage_scale: float = 1.0
    max_completion_length: int = 1024


@dataclass(slots=True)
class Totals:
    """Counts of a batch, known when it is closed."""

    runs: int = 0
    rows: int = 0
    targets: int = 0

    def add(self, *, runs: int, rows: int, targets: int) -> None:
        """Count a unit."""
        self.runs += runs
        self.rows += rows
        self.targets += targets


def denominator(options: LossOptions, totals: Totals) -> float:
    """Return what the summed loss of a batch is divided by at close."""
    match options.loss_type:
        case "run_mean":
            return float(totals.runs)
        case "dapo":
            return float(totals.targets)
        case "dr_grpo":
            return float(totals.rows * options.max_completion_length)


def coefficients(options: LossOptions, weight_K: Tensor) -> Tensor:
    """Return the factor of each target's loss: its weight in its run, or 1 where the loss counts tokens."""
    return weight_K if options.loss_type == "run_mean" else torch.ones_like(weight_K)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A micro-batch's loss, and what is logged of it (sums over its targets, without gradient)."""

    loss_sum: Tensor
    """sum_t c_t l_t, differentiable."""
    sums: Tensor
    """In the order of `SUMS`."""


SUMS = ("loss", "ratio", "clipped_low", "clipped_high", "approx_kl", "entropy", "targets")


def token_loss(
    options: LossOptions,
    *,
    logp_K: Tensor,
    behaviour_K: Tensor,
    advantage_K: Tensor,
    coefficient_K: Tensor,
    entropy_K: Tensor,
) -> TokenLoss:
    """Return the summed loss of targets.

    Args:
        logp_K: log-prob (nats) of each target under the policy in training.
        behaviour_K: log-prob at sampling.
        advantage_K: advantage of the target's run.
        coefficient_K: see `coefficients`.
        entropy_K: entropy (nats) of the policy where the target was sampled; only logged.
    """
    if options.negative_advantage_scale != 1.0:
        advantage_K = torch.where(advantage_K < 0, advantage_K * options.negative_advantage_scale, advantage_K)
    log_ratio_K = logp_K - behaviour_K
    if options.importance_sampling == "bypass":
        ratio_K = log_ratio_K.exp()
        weight_K = None
    else:
        ratio_K = (logp_K - logp_K.detach()).exp()
        weight_K = log_ratio_K.detach().exp().clamp(max=options.importance_sampling_cap)
    clipped_K = ratio_K.clamp(1 - options.epsilon_low, 1 + options.epsilon_high)
    loss_K = -torch.min(ratio_K * advantage_K, clipped_K * advantage_K)
    if weight_K is not None:
        loss_K = loss_K * weight_K
    loss_sum = (loss_K * coefficient_K).sum()
    with torch.no_grad():
        behaviour_ratio_K = log_ratio_K.exp()
        low_K = (ratio_K < 1 - options.epsilon_low) & (advantage_K < 0)
        high_K = (ratio_K > 1 + options.epsilon_high) & (advantage_K > 0)
        # k3 of KL(behaviour || policy): E[r - 1 - log r] over tokens of the behaviour policy
        kl_K = behaviour_ratio_K - 1 - log_ratio_K
        sums = torch.stack(
            [
                loss_sum.detach(),
                behaviour_ratio_K.sum(),
                low_K.sum().to(loss_sum.dtype),
                high_K.sum().to(loss_sum.dtype),
                kl_K.sum(),
                entropy_K.sum(),
                torch.tensor(float(len(logp_K)), dtype=loss_sum.dtype, device=loss_sum.device),
            ]
        )
    return TokenLoss(loss_sum, sums)


def describe(sums: Tensor, divide_by: float) -> dict[str, float]:
    """Return the metrics of a batch from its added-up `TokenLoss.sums`: means over targets, the loss as trained."""
    values = dict(zip(SUMS, sums.tolist(), strict=True))
    targets = max(values.pop("targets"), 1.0)
    loss = values.pop("loss") / divide_by
    means = {name: value / targets for name, value in values.items()}
    return {
        "loss": loss,
        "ratio": means["ratio"],
        "clip_ratio/low_mean": means["clipped_low"],
        "clip_ratio/high_mean": means["clipped_high"],
        "clip_ratio/region_mean": means["clipped_low"] + means["clipped_high"],
        "approx_kl": means["approx_kl"],
        "entropy": means["entropy"],
    }
