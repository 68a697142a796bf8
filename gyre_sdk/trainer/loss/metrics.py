"""What is logged of a loss. Sums and extremes are kept, so that they can be put together in any order.

`SUMS` add up over partitions, units and processes; `MAXIMA` combine by maximum (a minimum is kept as the maximum of the
negated values). Neither has a gradient. `describe` makes metrics of them, under TRL's names where it has one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gyre_sdk.trainer.loss_options import LossOptions, Surrogate

STALE = 8
"""Staleness is counted by version up to here; from here on together."""

SUMS = (
    "loss",  # as trained, undivided
    "policy",  # its part that the advantages drive
    "targets",
    "ratio",  # current / behaviour
    "approx_kl",  # k3 of KL(behaviour || current)
    "entropy",
    "surrogate_ratio",  # the ratio that the surrogate takes
    "clipped_low",
    "clipped_high",
    "kl",  # to the reference, as it enters the loss
    "weight",  # importance
    "weight_squares",
    "outside",  # masked by their importance ratio
    "stray",  # masked by their call's drift
    "masked",  # by one or both
    "masked_share",  # their shares in what the loss counts
    "low_entropy",  # without a policy term
    "phi",  # of vespo
    "staleness",
    *(f"stale_{distance}" for distance in range(STALE + 1)),
    *(f"approx_kl_stale_{distance}" for distance in range(STALE + 1)),
)
MAXIMA = ("ratio_max", "ratio_negated_min", "weight_max", "weight_negated_min", "staleness_max")


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of some targets, and what is logged of it."""

    loss_sum: Tensor
    """Undivided, differentiable."""
    sums: Tensor
    """In the order of `SUMS`, float64."""
    maxima: Tensor
    """In the order of `MAXIMA`, float64; minus infinity without targets."""


def _no_sums() -> Tensor:
    return torch.zeros(len(SUMS), dtype=torch.float64)


def _no_maxima() -> Tensor:
    return torch.full((len(MAXIMA),), -math.inf, dtype=torch.float64)


@dataclass(slots=True)
class LossSums:
    """What was found so far, put together on the CPU. Over processes: all-reduce `sums` by SUM, `maxima` by MAX."""

    sums: Tensor = field(default_factory=_no_sums)
    maxima: Tensor = field(default_factory=_no_maxima)

    def add(self, found: TokenLoss | LossSums) -> None:
        """Take in the loss of further targets."""
        self.sums = self.sums + found.sums.to("cpu")
        self.maxima = torch.maximum(self.maxima, found.maxima.to("cpu"))


def observe(parts: Mapping[str, Tensor], staleness_K: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums and maxima of per-target numbers named as in `SUMS`; what is not given is 0."""
    device = staleness_K.device
    zero = torch.zeros((), dtype=torch.float64, device=device)
    totals = {name: values.detach().to(torch.float64).sum() for name, values in parts.items()}
    totals["targets"] = zero + len(staleness_K)
    totals["staleness"] = staleness_K.sum().to(torch.float64)
    bucket_K = staleness_K.clamp(max=STALE)
    empty_D = torch.zeros(STALE + 1, dtype=torch.float64, device=device)
    by_distance = {
        "stale": empty_D.index_add(0, bucket_K, torch.ones_like(bucket_K, dtype=torch.float64)),
        "approx_kl_stale": empty_D.index_add(0, bucket_K, parts["approx_kl"].detach().to(torch.float64)),
    }
    for name, values_D in by_distance.items():
        totals |= {f"{name}_{distance}": values_D[distance] for distance in range(STALE + 1)}
    sums = torch.stack([totals.get(name, zero) for name in SUMS])

    def highest(values_K: Tensor | None) -> Tensor:
        if values_K is None or not len(values_K):
            return zero - math.inf
        return values_K.detach().max().to(torch.float64)

    ratio_K, weight_K = parts["ratio"], parts.get("weight")
    maxima = torch.stack(
        [
            highest(ratio_K),
            highest(-ratio_K),
            highest(weight_K),
            highest(None if weight_K is None else -weight_K),
            highest(staleness_K),
        ]
    )
    return sums, maxima


def describe(options: LossOptions, found: LossSums, divide_by: float) -> dict[str, float]:
    """Return the metrics of a batch: means over its targets, and the loss as trained.

    Args:
        found: of the whole batch, all processes together.
        divide_by: its `denominator`.
    """
    sums = dict(zip(SUMS, found.sums.tolist(), strict=True))
    maxima = dict(zip(MAXIMA, found.maxima.tolist(), strict=True))
    targets = max(sums["targets"], 1.0)
    mean = {name: value / targets for name, value in sums.items()}
    metrics = {
        "loss": sums["loss"] / divide_by if divide_by else 0.0,
        "policy_loss": sums["policy"] / divide_by if divide_by else 0.0,
        "ratio": mean["ratio"],
        "ratio/min": -maxima["ratio_negated_min"],
        "ratio/max": maxima["ratio_max"],
        "approx_kl": mean["approx_kl"],
        "entropy": mean["entropy"],
    }
    match options.definition.surrogate:
        case Surrogate.CLIPPED:
            metrics["clip_ratio/low_mean"] = mean["clipped_low"]
            metrics["clip_ratio/high_mean"] = mean["clipped_high"]
            metrics["clip_ratio/region_mean"] = mean["clipped_low"] + mean["clipped_high"]
        case Surrogate.CISPO:
            metrics["cispo_clip_ratio"] = mean["clipped_high"]
        case Surrogate.VESPO:
            metrics["vespo/phi_mean"] = mean["phi"]
    if options.importance_sampling != "bypass":
        metrics["ratio/proximal"] = mean["surrogate_ratio"]
    if options.beta:
        metrics["kl"] = mean["kl"]
    if options.corrected:
        name = "sampling/importance_sampling_ratio"
        metrics[f"{name}/mean"] = mean["weight"]
        metrics[f"{name}/min"] = -maxima["weight_negated_min"]
        metrics[f"{name}/max"] = maxima["weight_max"]
        # Kish: how many equally weighted targets the weights are worth
        squares = sums["weight_squares"]
        metrics[f"{name}/effective"] = sums["weight"] ** 2 / squares / targets if squares else 0.0
    if options.correction_masks:
        metrics["masked/importance_sampling"] = sums["outside"]
    if options.off_policy_mask_threshold is not None:
        metrics["masked/off_policy"] = sums["stray"]
    if options.correction_masks or options.off_policy_mask_threshold is not None:
        metrics["masked/fraction"] = mean["masked"]
    if options.top_entropy_quantile < 1.0:
        metrics["masked/low_entropy"] = sums["low_entropy"]
    metrics["staleness/mean"] = mean["staleness"]
    metrics["staleness/max"] = max(maxima["staleness_max"], 0.0)
    for distance in range(STALE + 1):
        count = sums[f"stale_{distance}"]
        if count:
            name = str(distance) if distance < STALE else f"{STALE}_or_more"
            metrics[f"staleness/targets_{name}"] = count
            metrics[f"staleness/approx_kl_{name}"] = sums[f"approx_kl_stale_{distance}"] / count
    return metrics
