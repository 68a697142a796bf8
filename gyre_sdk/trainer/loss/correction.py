"""Whose policy sampled a target, and what follows: the policy that ratios are taken against, weights, masks.

Three policies: *behaviour* sampled the target (its log-prob is recorded), the *current* one is in training, and the
*proximal* one is what the ratio of the surrogate is taken against::

    importance_sampling   ratio                   weight of the target
    bypass                current / behaviour     1
    off                   current / proximal      1
    *truncate             current / proximal      proximal / behaviour, cut to [floor, cap]
    *mask                 current / proximal      proximal / behaviour; outside [floor, cap] the target leaves

`bypass` is PPO against the samples themselves, `truncate` is truncated importance sampling (Yao et al., *Your efficient
RL framework secretly brings you off-policy RL training*), and together with a proximal policy of its own the decoupled
objective of Hilton et al. (arXiv:2110.00641), as in AReaL (arXiv:2505.24298). `token_*` (also `truncate`, `mask`) take the
ratio of a token; `sequence_*` the ratio of a call, the product over its targets.

Proximal policies: `current` is the one in training, without gradient (with one update per sample the ratio is 1 and has
the policy gradient). `forward` is given, from a forward pass at another time. `interpolated` needs none: between the two
log-probs that are there, by staleness d in versions (A-3PO, arXiv:2512.06547; AReaL's log-linear approximation)::

    log proximal = a log behaviour + (1 - a) log current,   a = 1 / d,   0 for d = 0

A target that is masked for doubt about its sampling leaves the whole loss, and its share leaves the denominator
(slime#657: left in, it shrinks the gradient of all others).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.loss.targets import Targets
from gyre_sdk.trainer.loss_options import LossOptions


@dataclass(frozen=True, slots=True)
class Correction:
    """What off-policy sampling makes of targets; nothing here has a gradient."""

    old_K: Tensor  # noqa: N815
    """Log-prob (nats) that ratios are taken against."""
    weight_K: Tensor | None  # noqa: N815
    """Factor on the policy's loss; None for 1."""
    outside_K: Tensor | None  # noqa: N815
    """True where the importance ratio is out of bounds and masks; None where nothing is."""
    stray_K: Tensor | None  # noqa: N815
    """True where a call of negative advantage is too far from its sampling; None where that is not looked at."""

    @property
    def keep_K(self) -> Tensor | None:  # noqa: N802
        """True for targets that stay; None where all do."""
        masks = [mask_K for mask_K in (self.outside_K, self.stray_K) if mask_K is not None]
        return ~torch.stack(masks).any(0) if masks else None


def call_sum(values_K: Tensor, targets: Targets) -> Tensor:
    """Return for each target the sum over the targets of its call."""
    total_N = values_K.new_zeros(int(targets.call_K.max()) + 1 if len(values_K) else 0)
    return total_N.index_add(0, targets.call_K, values_K)[targets.call_K]


@torch.no_grad()
def correction(options: LossOptions, targets: Targets, logp_K: Tensor) -> Correction:
    """Return the correction of targets at the log-probs (nats) of the policy in training."""
    current_K = logp_K.detach()
    old_K = _old(options, targets, current_K)
    weight_K = outside_K = stray_K = None
    if options.corrected:
        log_weight_K = old_K - targets.behaviour_K
        if options.correction_level == "sequence":
            log_weight_K = call_sum(log_weight_K, targets)
        weight_K = log_weight_K.exp()
        low, high = options.importance_sampling_floor, options.importance_sampling_cap
        if options.correction_masks:
            outside_K = torch.zeros_like(weight_K, dtype=torch.bool)
            if low is not None:
                outside_K |= weight_K < low
            if high is not None:
                outside_K |= weight_K > high
            weight_K = weight_K.masked_fill(outside_K, 0.0)
        elif low is not None or high is not None:
            weight_K = weight_K.clamp(low, high)
    if options.off_policy_mask_threshold is not None:
        drift_K = call_sum((targets.behaviour_K - current_K) * targets.call_share_K, targets)
        stray_K = (targets.advantage_K < 0) & (drift_K > options.off_policy_mask_threshold)
    return Correction(old_K, weight_K, outside_K, stray_K)


def _old(options: LossOptions, targets: Targets, current_K: Tensor) -> Tensor:
    if options.importance_sampling == "bypass":
        return targets.behaviour_K
    match options.proximal:
        case "current":
            return current_K
        case "forward":
            if targets.proximal_K is None:
                raise TrainerError(
                    "proximal = 'forward' needs the log-probs of a forward pass: give Targets.of(..., proximal_K=...)"
                )
            return targets.proximal_K
        case "interpolated":
            share_K = torch.where(targets.staleness_K > 0, 1.0 / targets.staleness_K.clamp(min=1), 0.0)
            return torch.lerp(current_K, targets.behaviour_K, share_K.to(current_K.dtype))
