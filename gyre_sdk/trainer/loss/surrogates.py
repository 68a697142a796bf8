"""One function from tensors to loss per kind of loss: K targets in, K losses out, no reduction.

`ratio_K` is pi / pi_old of a token, or of its call; `advantage_K` its advantage. Minimised.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LOG_FLOOR = math.log(1e-8)
_LOG_CEILING = 20.0


def clipped(
    ratio_K: Tensor, advantage_K: Tensor, *, epsilon_low: float, epsilon_high: float, delta: float | None = None
) -> Tensor:
    """Return PPO's clipped surrogate (arXiv:1707.06347), with DAPO's two ranges (arXiv:2503.14476)::

        -min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A)

    `delta` cuts the first r (INTELLECT-2, arXiv:2505.07291): it bounds what a negative advantage can do.
    """
    cut_K = ratio_K.clamp(1 - epsilon_low, 1 + epsilon_high)
    if delta is not None:
        ratio_K = ratio_K.clamp(max=delta)
    return -torch.min(ratio_K * advantage_K, cut_K * advantage_K)


def cispo(logp_K: Tensor, ratio_K: Tensor, advantage_K: Tensor, *, epsilon_high: float) -> Tensor:
    """Return CISPO's loss (MiniMax-M1, arXiv:2506.13585): `-min(r, epsilon_high) A log pi`, the ratio without gradient."""
    return -ratio_K.clamp(max=epsilon_high).detach() * advantage_K * logp_K


def sapo(ratio_K: Tensor, advantage_K: Tensor, *, temperature_pos: float, temperature_neg: float) -> Tensor:
    """Return SAPO's loss (arXiv:2511.20347), a gate in place of a clip: `-sigmoid(tau (r - 1)) 4 / tau A`."""
    tau_K = torch.where(advantage_K > 0, temperature_pos, temperature_neg).to(ratio_K.dtype)
    return -torch.sigmoid(tau_K * (ratio_K - 1)) * 4 / tau_K * advantage_K


def vespo_weight(
    log_weight_K: Tensor, advantage_K: Tensor, *, k_pos: float, lambda_pos: float, k_neg: float, lambda_neg: float
) -> Tensor:
    """Return VESPO's weight (arXiv:2602.10693) of a call's ratio w: `w^k exp(lambda (1 - w))`, without gradient.

    Args:
        log_weight_K: log w of the target's call: the sum of the log-ratios of its targets, not their mean.
    """
    log_w_K = log_weight_K.detach().clamp(_LOG_FLOOR, _LOG_CEILING)
    good_K = advantage_K >= 0
    k_K = torch.where(good_K, k_pos, k_neg).to(log_w_K.dtype)
    lambda_K = torch.where(good_K, lambda_pos, lambda_neg).to(log_w_K.dtype).clamp(min=1e-4)
    return (lambda_K + k_K * log_w_K - lambda_K * log_w_K.exp()).exp()


def vespo(logp_K: Tensor, weight_K: Tensor, advantage_K: Tensor) -> Tensor:
    """Return VESPO's loss: `-phi(w) A log pi`."""
    return -weight_K * advantage_K * logp_K


def kl(logp_K: Tensor, reference_K: Tensor) -> Tensor:
    """Return the k3 estimate of KL(pi || reference) (Schulman, *Approximating KL divergence*), never negative."""
    log_ratio_K = reference_K - logp_K
    return log_ratio_K.exp() - log_ratio_K - 1
