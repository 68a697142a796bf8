"""The loss of a token, against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gyre_sdk.trainer.loss import SUMS, LossOptions, Totals, coefficients, denominator, describe, token_loss


def one(options: LossOptions, *, ratio: float, advantage: float) -> tuple[float, float, dict[str, float]]:
    """Loss, gradient with respect to the log-prob, and sums of a single token."""
    logp_K = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    found = token_loss(
        options,
        logp_K=logp_K,
        behaviour_K=torch.tensor([-1.0 - math.log(ratio)], dtype=torch.float64),
        advantage_K=torch.tensor([advantage], dtype=torch.float64),
        coefficient_K=torch.ones(1, dtype=torch.float64),
        entropy_K=torch.tensor([0.7], dtype=torch.float64),
    )
    found.loss_sum.backward()
    assert logp_K.grad is not None
    return found.loss_sum.item(), logp_K.grad.item(), dict(zip(SUMS, found.sums.tolist(), strict=True))


CLIP = LossOptions(epsilon_low=0.2, epsilon_high=0.28)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "low", "high"),
    [
        (1.0, 2.0, -2.0, -2.0, 0, 0),
        (1.1, 2.0, -2.2, -2.2, 0, 0),
        (1.5, 2.0, -2.56, 0.0, 0, 1),  # cut at 1.28, no gradient
        (1.5, -2.0, 3.0, 3.0, 0, 0),  # a bad token that became likelier is never cut
        (0.5, 2.0, -1.0, -1.0, 0, 0),
        (0.5, -2.0, 1.6, 0.0, 1, 0),  # cut at 0.8
        (0.9, -2.0, 1.8, 1.8, 0, 0),
    ],
)
def test_clipping(ratio: float, advantage: float, loss: float, gradient: float, low: int, high: int) -> None:
    found, slope, sums = one(CLIP, ratio=ratio, advantage=advantage)
    assert found == pytest.approx(loss) and slope == pytest.approx(gradient)
    assert (sums["clipped_low"], sums["clipped_high"]) == (low, high)
    assert sums["ratio"] == pytest.approx(ratio)
    assert sums["approx_kl"] == pytest.approx(ratio - 1 - math.log(ratio))
    assert sums["entropy"] == 0.7 and sums["targets"] == 1


@pytest.mark.parametrize(("ratio", "weight"), [(1.0, 1.0), (1.7, 1.7), (5.0, 2.0), (0.1, 0.1)])
def test_truncated_importance_sampling(ratio: float, weight: float) -> None:
    options = LossOptions(importance_sampling="truncate", importance_sampling_cap=2.0)
    found, slope, _ = one(options, ratio=ratio, advantage=3.0)
    assert found == pytest.approx(-3.0 * weight) and slope == pytest.approx(-3.0 * weight)


def test_negative_advantages_are_scaled() -> None:
    options = LossOptions(negative_advantage_scale=0.5)
    assert one(options, ratio=1.0, advantage=-2.0)[0] == pytest.approx(1.0)
    assert one(options, ratio=1.0, advantage=2.0)[0] == pytest.approx(-2.0)


@pytest.mark.parametrize(("loss_type", "wanted"), [("run_mean", 3.0), ("dapo", 40.0), ("dr_grpo", 500.0)])
def test_denominators(loss_type: Any, wanted: float) -> None:
    options = LossOptions(loss_type=loss_type, max_completion_length=100)
    totals = Totals()
    totals.add(runs=1, rows=2, targets=15)
    totals.add(runs=2, rows=3, targets=25)
    assert denominator(options, totals) == wanted


def test_only_run_mean_uses_the_weights() -> None:
    weight_K = torch.tensor([0.25, 0.75])
    assert torch.equal(coefficients(LossOptions(), weight_K), weight_K)
    assert torch.equal(coefficients(LossOptions(loss_type="dapo"), weight_K), torch.ones(2))


def test_metrics_are_means_over_targets_and_the_loss_is_as_trained() -> None:
    sums = torch.tensor([6.0, 8.0, 1.0, 2.0, 0.4, 2.8, 4.0])
    found = describe(sums, 3.0)
    assert found["loss"] == 2.0 and found["ratio"] == 2.0
    assert found["clip_ratio/low_mean"] == 0.25 and found["clip_ratio/region_mean"] == 0.75
    assert found["approx_kl"] == pytest.approx(0.1) and found["entropy"] == pytest.approx(0.7)
