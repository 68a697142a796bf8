"""Every loss against numbers worked out by hand, and what must hold of all of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_sdk.errors import SettingsError, TrainerError
from gyre_sdk.trainer.loss import (
    LOSSES,
    MAXIMA,
    SUMS,
    LossOptions,
    LossSums,
    Targets,
    Totals,
    denominator,
    describe,
    loss,
    loss_sum,
)
from gyre_sdk.trainer.units import Row

WIDE = {"epsilon_low": 0.9, "epsilon_high": 9.0}


def row(run: str, advantages: list[float], *, calls: list[int] | None = None, versions: list[int] | None = None) -> Row:
    """Targets sampled with log-prob -1 each; each has the same weight in its run."""
    count = len(advantages)
    calls = calls or [0] * count
    return Row(
        run=run,
        leaf="leaf",
        role="main",
        ids=np.arange(count + 1, dtype=np.int32),
        targets=np.arange(1, count + 1, dtype=np.int32),
        weights=np.full(count, 1.0 / count),
        logprobs=np.full(count, -1.0),
        versions=np.array(versions or [0] * count, dtype=np.int32),
        advantage=advantages[0],
        calls=np.array(calls, dtype=np.int32),
        call_ids=tuple(f"c{number}" for number in range(max(calls) + 1)),
        call_roles=("main",) * (max(calls) + 1),
        advantages=np.array(advantages),
    )


def evaluate(
    options: LossOptions, rows: list[Row], ratios: list[float], entropies: list[float] | None = None, **given: Any
) -> tuple[float, list[float], dict[str, float]]:
    """Loss of a batch, its gradient with respect to the log-prob of each target, and the sums.

    `ratios`: policy in training / policy that sampled, of each target.
    """
    targets = Targets.of(rows, **given)
    logp_K = (targets.behaviour_K + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    entropy_K = torch.tensor(entropies or [0.7] * len(ratios), dtype=torch.float64, requires_grad=True)
    found = loss(options, targets, logp_K, entropy_K)
    totals = Totals()
    totals.add(runs=len({one.run for one in rows}), rows=len(rows), targets=len(ratios), calls=targets.calls)
    divide_by = denominator(options, totals, found.sums)
    value = found.loss_sum / divide_by
    value.backward()
    assert logp_K.grad is not None
    return value.item(), logp_K.grad.tolist(), dict(zip(SUMS, found.sums.tolist(), strict=True))


def one(options: LossOptions, *, ratio: float, advantage: float) -> tuple[float, float, dict[str, float]]:
    value, (slope,), sums = evaluate(options, [row("r", [advantage])], [ratio])
    return value, slope, sums


CLIP = LossOptions(epsilon_low=0.2, epsilon_high=0.28)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient", "low", "high"),
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
def test_clipping(ratio: float, advantage: float, value: float, gradient: float, low: int, high: int) -> None:
    found, slope, sums = one(CLIP, ratio=ratio, advantage=advantage)
    assert found == pytest.approx(value) and slope == pytest.approx(gradient)
    assert (sums["clipped_low"], sums["clipped_high"]) == (low, high)
    assert sums["ratio"] == pytest.approx(ratio)
    assert sums["approx_kl"] == pytest.approx(ratio - 1 - math.log(ratio))
    assert sums["entropy"] == 0.7 and sums["targets"] == 1


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (5.0, -2.0, 6.0, 0.0),  # two-sided: 5 is cut at 3
        (2.0, -2.0, 4.0, 4.0),
        (5.0, 2.0, -2.4, 0.0),  # the one-sided clip is the tighter one
        (0.5, -2.0, 1.6, 0.0),
    ],
)
def test_two_sided_clipping(ratio: float, advantage: float, value: float, gradient: float) -> None:
    found, slope, _ = one(LossOptions(delta=3.0), ratio=ratio, advantage=advantage)
    assert found == pytest.approx(value) and slope == pytest.approx(gradient)
    if advantage < 0 and ratio > 3:
        assert one(LossOptions(), ratio=ratio, advantage=advantage)[0] == pytest.approx(10.0), "without: unbounded"


# Two runs. r has two rows: one of two calls (1 target; 2 targets), one of one call (1 target). s has one row, 2 targets.
ROWS = [
    replace(row("r", [2.0, 2.0, 2.0], calls=[0, 1, 1]), weights=np.full(3, 0.25)),
    replace(row("r", [2.0]), leaf="other", weights=np.full(1, 0.25), call_ids=("d",)),
    row("s", [-1.0, -1.0]),
]
RATIOS = [1.1, 0.9, 1.0, 1.2, 1.0, 0.8]
LOSS = [-2.2, -1.8, -2.0, -2.4, 1.0, 0.8]  # -ratio * advantage: nothing is clipped


@pytest.mark.parametrize(
    ("loss_type", "value", "coefficients"),
    [
        # ((2.2 + 1.8 + 2.0 + 2.4) / 4 = 2.1 ; (1 + .8) / 2 = .9): (-2.1 + .9) / 2
        ("run", -0.6, [1 / 8] * 4 + [1 / 4] * 2),
        ("run_mean", -0.6, [1 / 8] * 4 + [1 / 4] * 2),
        # rows: -(2.2 + 1.8 + 2.0) / 3 = -2 ; -2.4 ; .9
        ("grpo", -3.5 / 3, [1 / 9] * 3 + [1 / 3] + [1 / 6] * 2),
        ("dapo", -6.6 / 6, [1 / 6] * 6),
        ("bnpo", -6.6 / 6, [1 / 6] * 6),
        ("dr_grpo", -6.6 / 30, [1 / 30] * 6),  # 3 rows of at most 10
    ],
)
def test_means(loss_type: Any, value: float, coefficients: list[float]) -> None:
    options = LossOptions(loss_type=loss_type, max_completion_length=10, **WIDE)
    found, slopes, _ = evaluate(options, ROWS, RATIOS)
    assert found == pytest.approx(value)
    assert slopes == pytest.approx([c * part for c, part in zip(coefficients, LOSS, strict=True)])


def test_gspo_takes_the_ratio_of_a_call() -> None:
    """s = geometric mean over a call's targets; each of the 4 calls counts the same."""
    options = LossOptions(loss_type="gspo", epsilon_low=0.2, epsilon_high=0.15)
    found, slopes, sums = evaluate(options, ROWS, RATIOS)
    second, last = math.sqrt(0.9), math.sqrt(0.8)
    assert found == pytest.approx((-2 * 1.1 - 2 * second - 2 * 1.15 + last) / 4)
    # d s / d logp = s / targets of the call; the third call is clipped
    wanted = [-2.2 / 4, -2 * second / 8, -2 * second / 8, 0.0, last / 8, last / 8]
    assert slopes == pytest.approx(wanted) and sums["clipped_high"] == 1
    whole = math.prod([1.1, 0.9, 1.0, 1.2]) ** 0.25
    assert sums["surrogate_ratio"] == pytest.approx(1.1 + 2 * second + 1.2 + 2 * last)
    assert abs(sums["surrogate_ratio"] - (4 * whole + 2 * last)) > 1e-3, "the ratio of the run would be another"


def test_luspo_sums_inside_a_call() -> None:
    found, slopes, _ = evaluate(LossOptions(loss_type="luspo", **WIDE), ROWS, RATIOS)
    second, last = math.sqrt(0.9), math.sqrt(0.8)
    assert found == pytest.approx((-2.2 - 4 * second - 2.4 + 2 * last) / 4)
    assert slopes == pytest.approx([-2.2 / 4, -2 * second / 4, -2 * second / 4, -2.4 / 4, last / 4, last / 4])


def test_any_clipped_loss_takes_ratios_of_calls() -> None:
    options = LossOptions(loss_type="run", importance_sampling_level="sequence", **WIDE)
    second, last = math.sqrt(0.9), math.sqrt(0.8)
    found, _, _ = evaluate(options, ROWS, RATIOS)
    assert found == pytest.approx(((-2.2 - 4 * second - 2.4) / 4 + last) / 2)


def test_a_call_that_two_rows_own_has_one_ratio() -> None:
    halves = [
        replace(row("r", [1.0]), weights=np.full(1, 0.5), call_ids=("c",)),
        replace(row("r", [1.0]), leaf="other", weights=np.full(1, 0.5), call_ids=("c",)),
    ]
    found, _, sums = evaluate(LossOptions(loss_type="gspo", **WIDE), halves, [2.0, 0.5])
    assert found == pytest.approx(-1.0) and sums["surrogate_ratio"] == pytest.approx(2.0)
    other = replace(halves[1], run="s")
    assert evaluate(LossOptions(loss_type="gspo", **WIDE), [halves[0], other], [2.0, 0.5])[0] == pytest.approx(-1.25)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (1.5, 2.0, 3.0, -3.0),  # -min(r, 5) A log pi; the gradient is -r A whatever the log-prob
        (7.0, 2.0, 10.0, -10.0),  # cut at 5, and still a gradient
        (7.0, -2.0, -10.0, 10.0),
        (0.1, 2.0, 0.2, -0.2),
    ],
)
def test_cispo(ratio: float, advantage: float, value: float, gradient: float) -> None:
    options = LossOptions(loss_type="cispo", epsilon_high=5.0)
    found, slope, sums = one(options, ratio=ratio, advantage=advantage)
    logp = -1.0 + math.log(ratio)
    assert found == pytest.approx(-value * logp if advantage < 0 else value * -logp)
    assert slope == pytest.approx(gradient)
    assert sums["clipped_high"] == (ratio > 5 and advantage > 0)


@pytest.mark.parametrize(("ratio", "advantage"), [(1.0, 2.0), (1.5, 2.0), (1.5, -2.0), (0.5, -2.0)])
def test_sapo(ratio: float, advantage: float) -> None:
    found, slope, _ = one(LossOptions(loss_type="sapo"), ratio=ratio, advantage=advantage)
    tau = 1.0 if advantage > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    assert found == pytest.approx(-4 / tau * gate * advantage)
    assert slope == pytest.approx(-4 * gate * (1 - gate) * ratio * advantage)
    if ratio == 1.0:
        assert slope == pytest.approx(-advantage), "on policy: the policy gradient"


def test_vespo_weighs_calls() -> None:
    """phi(w) = w^k exp(lambda (1 - w)) of each call's product of ratios."""
    found, slopes, sums = evaluate(LossOptions(loss_type="vespo"), ROWS, RATIOS)
    good = lambda w: w**2 * math.exp(3 * (1 - w))  # noqa: E731
    bad = lambda w: w**3 * math.exp(2 * (1 - w))  # noqa: E731
    phi = [good(1.1), good(0.9), good(0.9), good(1.2), bad(0.8), bad(0.8)]
    logp = [-1 + math.log(ratio) for ratio in RATIOS]
    advantage = [2.0] * 4 + [-1.0] * 2
    parts = [-p * a * x for p, a, x in zip(phi, advantage, logp, strict=True)]
    assert found == pytest.approx(sum(parts) / 6)
    assert slopes == pytest.approx([-p * a / 6 for p, a in zip(phi, advantage, strict=True)])
    assert sums["phi"] == pytest.approx(sum(phi))


def test_kl_to_a_reference() -> None:
    """k3 = q - log q - 1 with q = reference / policy; times the ratio its gradient is r log(policy / reference)."""
    reference = torch.tensor([-1.0 + math.log(1.5)], dtype=torch.float64)
    plain = LossOptions(beta=0.1, use_bias_correction_kl=False)
    base, base_slope, _ = one(LossOptions(), ratio=1.1, advantage=2.0)
    q = 1.5 / 1.1
    found, (slope,), sums = evaluate(plain, [row("r", [2.0])], [1.1], reference_K=reference)
    assert found - base == pytest.approx(0.1 * (q - math.log(q) - 1)) and sums["kl"] == pytest.approx(
        (found - base) * 10
    )
    assert slope - base_slope == pytest.approx(0.1 * (1 - q))
    found, (slope,), _ = evaluate(LossOptions(beta=0.1), [row("r", [2.0])], [1.1], reference_K=reference)
    assert found - base == pytest.approx(0.11 * (q - math.log(q) - 1))
    assert slope - base_slope == pytest.approx(-0.11 * math.log(q))
    with pytest.raises(TrainerError, match="reference_K"):
        one(LossOptions(beta=0.1), ratio=1.0, advantage=1.0)


def test_the_entropy_bonus_is_a_mean_of_entropies() -> None:
    entropies = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    for loss_type, mean in [
        ("run", (2.5 + 5.5) / 2),
        ("grpo", (2.0 + 4.0 + 5.5) / 3),
        ("dr_grpo", (2.0 + 4.0 + 5.5) / 3),
        ("dapo", 3.5),
        ("gspo", (1.0 + 2.5 + 4.0 + 5.5) / 4),
        ("luspo", (1.0 + 2.5 + 4.0 + 5.5) / 4),
    ]:
        options = LossOptions(loss_type=loss_type, max_completion_length=10)  # type: ignore[arg-type]
        with_bonus = evaluate(replace(options, entropy_coef=0.01), ROWS, RATIOS, entropies)[0]
        assert evaluate(options, ROWS, RATIOS, entropies)[0] - with_bonus == pytest.approx(0.01 * mean)


def test_an_entropy_without_gradient_is_no_bonus() -> None:
    targets = Targets.of(ROWS)
    with pytest.raises(TrainerError, match="carry no gradient"):
        loss_sum(
            LossOptions(entropy_coef=0.1), targets, targets.behaviour_K.clone().requires_grad_(), torch.ones(6).double()
        )


def test_tokens_of_high_entropy() -> None:
    """Of entropies 1..6 the upper third: threshold at the quantile 2/3 = 1 + 5 * 2/3, so 5 and 6 stay."""
    options = LossOptions(loss_type="dapo", top_entropy_quantile=1 / 3, **WIDE)
    found, slopes, sums = evaluate(options, ROWS, RATIOS, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert found == pytest.approx((1.0 + 0.8) / 6), "as in TRL, the others stay in the denominator"
    assert slopes[:4] == [0.0] * 4 and sums["low_entropy"] == 4
    bonus = replace(options, entropy_coef=0.01)
    assert found - evaluate(bonus, ROWS, RATIOS, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])[0] == pytest.approx(0.01 * 5.5)


# -- off-policy correction ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "weight"), [(1.0, 1.0), (1.7, 1.7), (5.0, 2.0), (0.1, 0.1)])
@pytest.mark.parametrize("mode", ["truncate", "token_truncate", "sequence_truncate"])
def test_truncated_importance_sampling(ratio: float, weight: float, mode: Any) -> None:
    options = LossOptions(importance_sampling=mode, importance_sampling_cap=2.0)
    found, slope, sums = one(options, ratio=ratio, advantage=3.0)
    assert found == pytest.approx(-3.0 * weight) and slope == pytest.approx(-3.0 * weight)
    assert sums["weight"] == pytest.approx(weight) and sums["masked"] == 0


def test_a_floor_lifts_small_weights() -> None:
    options = LossOptions(importance_sampling="truncate", importance_sampling_floor=0.5)
    assert one(options, ratio=0.1, advantage=3.0)[0] == pytest.approx(-1.5)


def test_either_bound_of_importance_may_be_missing() -> None:
    rows = [row("r", [1.0]), row("s", [1.0])]
    for mode, low, high, slopes in [
        ("truncate", 0.5, None, [-0.25, -2.5]),
        ("truncate", None, 2.0, [-0.05, -1.0]),
        ("truncate", None, None, [-0.05, -2.5]),
        ("mask", 0.5, None, [0.0, -5.0]),
        ("mask", None, 2.0, [-0.1, 0.0]),
        ("mask", None, None, [-0.05, -2.5]),
    ]:
        options = LossOptions(importance_sampling=mode, importance_sampling_floor=low, importance_sampling_cap=high)  # type: ignore[arg-type]
        assert evaluate(options, rows, [0.1, 5.0])[1] == pytest.approx(slopes), (mode, low, high)


def test_a_weight_on_a_bound_is_within_it() -> None:
    options = LossOptions(importance_sampling="mask", importance_sampling_floor=1.0, importance_sampling_cap=1.0)
    assert one(options, ratio=1.0, advantage=3.0)[:2] == pytest.approx((-3.0, -3.0))


def test_off_takes_the_samples_as_the_current_policys() -> None:
    assert one(LossOptions(importance_sampling="off"), ratio=5.0, advantage=3.0)[:2] == pytest.approx((-3.0, -3.0))


def test_weights_of_calls_are_products() -> None:
    """Calls of ROWS: 1.1, 0.9 * 1.0, 1.2, 1.0 * 0.8."""
    options = LossOptions(loss_type="dapo", importance_sampling="sequence_truncate", importance_sampling_cap=1.15)
    _, slopes, _ = evaluate(options, ROWS, RATIOS)
    assert slopes == pytest.approx([-2 * 1.1 / 6, -2 * 0.9 / 6, -2 * 0.9 / 6, -2 * 1.15 / 6, 0.8 / 6, 0.8 / 6])


MASK = {"importance_sampling": "token_mask", "importance_sampling_cap": 1.15, "importance_sampling_floor": 0.85}


@pytest.mark.parametrize(
    ("loss_type", "slopes"),
    [  # kept: 1.1, 0.9, 1.0 of r's first row; 1.0 of s. The masked ones leave the denominators with their shares
        ("run", [-2 * w * 0.25 / (2 - 0.75) for w in (1.1, 0.9, 1.0)] + [0, 0.5 / (2 - 0.75), 0]),
        ("grpo", [-2 * w / 3 / (3 - 1.5) for w in (1.1, 0.9, 1.0)] + [0, 0.5 / (3 - 1.5), 0]),
        ("dapo", [-2 * w / 4 for w in (1.1, 0.9, 1.0)] + [0, 0.25, 0]),
        ("cispo", [-2 * w / 4 for w in (1.1, 0.9, 1.0)] + [0, 0.25, 0]),
        ("dr_grpo", [-2 * w / 15 for w in (1.1, 0.9, 1.0)] + [0, 1 / 15, 0]),
    ],
)
def test_masked_targets_leave_the_denominator(loss_type: Any, slopes: list[float]) -> None:
    options = LossOptions(loss_type=loss_type, max_completion_length=10, **{**WIDE, **MASK})  # type: ignore[arg-type]
    _, found, sums = evaluate(options, ROWS, RATIOS)
    assert found == pytest.approx(slopes)
    assert (sums["masked"], sums["outside"], sums["stray"]) == (2, 2, 0)
    # the negative control: with all of them counted every gradient is smaller
    totals = Totals(runs=2, rows=3, targets=6, calls=4)
    full = denominator(replace(options, importance_sampling="off"), totals)
    assert full > denominator(options, totals, torch.tensor([sums[name] for name in SUMS]))


def test_calls_are_masked_as_a_whole() -> None:
    """Products: 1.1, 0.9, 1.2, 0.8; the last two are outside, so 2 of 4 calls are left."""
    options = LossOptions(loss_type="gspo", **{**WIDE, **MASK, "importance_sampling": "sequence_mask"})  # type: ignore[arg-type]
    _, slopes, sums = evaluate(options, ROWS, RATIOS)
    assert slopes == pytest.approx([-2 * 1.1 / 2, -2 * 0.9 / 4, -2 * 0.9 / 4, 0, 0, 0])
    assert sums["masked"] == 3 and sums["masked_share"] == pytest.approx(2)


def test_strayed_calls_of_negative_advantage_are_masked() -> None:
    """s's call: mean log(behaviour / policy) = -log(0.8) / 2 = 0.11. A good call stays however far it is."""
    rows = [row("r", [2.0]), row("s", [-1.0, -1.0])]
    ratios = [0.01, 1.0, 0.8]
    far = LossOptions(loss_type="dapo", off_policy_mask_threshold=0.11, **WIDE)
    _, slopes, sums = evaluate(far, rows, ratios)
    assert slopes == pytest.approx([-0.02, 0, 0]) and (sums["stray"], sums["masked"]) == (2, 2)
    near = replace(far, off_policy_mask_threshold=0.12)
    assert evaluate(near, rows, ratios)[1] == pytest.approx([-0.02 / 3, 1 / 3, 0.8 / 3])


def test_where_everything_is_masked_there_is_nothing_to_train() -> None:
    options = LossOptions(importance_sampling="mask", importance_sampling_cap=0.5)
    targets = Targets.of(ROWS)
    found = loss(options, targets, targets.behaviour_K, targets.behaviour_K)
    assert found.loss_sum == 0
    assert denominator(options, Totals(runs=2, rows=3, targets=6), found.sums) == 0.0
    metrics = describe(options, LossSums(found.sums, found.maxima), 0.0)
    assert metrics["loss"] == 0.0 and metrics["masked/fraction"] == 1.0


def test_an_infinite_ratio_of_a_masked_target_poisons_nothing() -> None:
    rows = [row("r", [-1.0]), row("s", [1.0])]
    options = LossOptions(off_policy_mask_threshold=1.0)
    targets = Targets.of(rows)
    for logp in ([-1.0, -1.0], [-2000.0, -1.0]):
        logp_K = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
        found = loss(options, targets, logp_K, torch.zeros(2).double())
        found.loss_sum.backward()
        assert torch.isfinite(found.loss_sum) and torch.isfinite(logp_K.grad).all()  # type: ignore[arg-type]
    whole = replace(
        row("r", [-1.0, -1.0]), logprobs=np.array([-2000.0, -1.0])
    )  # one target strays far, the other is infinite
    logp_K = torch.tensor([-1.0, -5000.0, -1.0], dtype=torch.float64, requires_grad=True)
    loss_sum(options, Targets.of([whole, rows[1]]), logp_K, torch.zeros(3).double()).backward()
    assert logp_K.grad is not None and logp_K.grad.tolist() == [0.0, 0.0, -1.0]
    behind = Targets.of([replace(rows[0], logprobs=np.array([-2000.0])), rows[1]])
    masked = LossOptions(importance_sampling="mask")
    logp_K = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    loss_sum(masked, behind, logp_K, torch.zeros(2).double()).backward()
    assert logp_K.grad is not None and logp_K.grad.tolist() == [0.0, -1.0]


@pytest.mark.parametrize(
    ("options", "bad"),  # whether the loss of a bad token is flat far out, too
    [
        (LossOptions(), False),
        (LossOptions(delta=3.0), True),
        (LossOptions(loss_type="gspo"), False),
        (LossOptions(loss_type="cispo", epsilon_high=5.0), True),
        (LossOptions(loss_type="sapo"), True),
        (LossOptions(loss_type="vespo"), True),
    ],
    ids=str,
)
def test_a_ratio_too_large_for_float32_is_as_in_float64(options: LossOptions, bad: bool) -> None:
    """Where the loss is flat; else it is infinite."""
    far = np.array([-100.0, -1.0])
    rows = [replace(row(run, [a, a]), logprobs=far) for run, a in (("r", 2.0), ("s", 0.0), ("t", -2.0 if bad else 1.0))]

    def found(dtype: torch.dtype, rows: list[Row]) -> tuple[torch.Tensor, ...]:
        logp_K = torch.full((2 * len(rows),), -1.0, dtype=dtype, requires_grad=True)
        one = loss(options, Targets.of(rows), logp_K, torch.zeros_like(logp_K))
        one.loss_sum.backward()
        assert logp_K.grad is not None
        return one.loss_sum.detach().double(), logp_K.grad.double(), one.sums, one.maxima

    narrow = found(torch.float32, rows)
    assert all(torch.isfinite(part[part != -math.inf]).all() for part in narrow)
    torch.testing.assert_close(narrow, found(torch.float64, rows), rtol=1e-6, atol=0)
    if not bad and not options.call_ratio:
        worst = [replace(row("t", [-2.0, -2.0]), logprobs=far)]
        assert found(torch.float32, worst)[0] == math.inf and found(torch.float64, worst)[0] > 1e42


@pytest.mark.parametrize(
    ("versions", "exponents"),
    [([7, 6, 5, 3], [0.0, 1.0, 0.5, 0.25])],  # a = 0 for d = 0, else 1 / d
)
def test_the_interpolated_proximal_policy(versions: list[int], exponents: list[float]) -> None:
    """A-3PO: log proximal = a log behaviour + (1 - a) log current, so current / proximal = (current / behaviour) ** a."""
    options = LossOptions(loss_type="dapo", importance_sampling="off", proximal="interpolated", **WIDE)
    rows = [row("r", [1.0] * 4, versions=versions)]
    found, slopes, _ = evaluate(options, rows, [1.5] * 4, version=7)
    ratios = [1.5**exponent for exponent in exponents]
    assert found == pytest.approx(-sum(ratios) / 4) and slopes == pytest.approx([-ratio / 4 for ratio in ratios])
    weighted = replace(options, importance_sampling="truncate", importance_sampling_cap=None)
    found, _, _ = evaluate(weighted, rows, [1.5] * 4, version=7)
    assert found == pytest.approx(-1.5), "ratio times weight is current / behaviour"


def test_a_given_proximal_policy() -> None:
    """Behaviour -1, proximal 1.2 times that, current 1.5 times: the ratio is 1.25, clipped at 1.2, the weight 1.2."""
    options = LossOptions(importance_sampling="truncate", proximal="forward")
    given_K = torch.tensor([-1.0 + math.log(1.2)], dtype=torch.float64)
    found, (slope,), sums = evaluate(options, [row("r", [1.0])], [1.5], proximal_K=given_K)
    assert found == pytest.approx(-1.44) and slope == 0.0
    assert sums["surrogate_ratio"] == pytest.approx(1.25) and sums["weight"] == pytest.approx(1.2)
    with pytest.raises(TrainerError, match="proximal_K"):
        one(options, ratio=1.0, advantage=1.0)
    with pytest.raises(TrainerError, match="shape"):
        Targets.of([row("r", [1.0])], proximal_K=torch.zeros(2))


def test_negative_advantages_are_scaled() -> None:
    options = LossOptions(negative_advantage_scale=0.5)
    assert one(options, ratio=1.0, advantage=-2.0)[0] == pytest.approx(1.0)
    for advantage in (2.0, 0.5):
        assert one(options, ratio=1.0, advantage=advantage)[0] == pytest.approx(-advantage)


# -- what holds of all losses ------------------------------------------------------------------------------------------

ALL = [
    *(LossOptions(loss_type=name) for name in LOSSES),  # type: ignore[arg-type]
    LossOptions(loss_type="cispo", epsilon_high=5.0),
    LossOptions(importance_sampling="truncate", beta=0.1, entropy_coef=0.01),
    LossOptions(importance_sampling="mask", importance_sampling_cap=1.1, beta=0.1),
    LossOptions(loss_type="grpo", importance_sampling="sequence_mask", importance_sampling_cap=1.1),
    LossOptions(importance_sampling="truncate", proximal="interpolated", delta=2.0),
    LossOptions(off_policy_mask_threshold=0.05),
    LossOptions(loss_type="dapo", top_entropy_quantile=0.5),
]


def some_scores(seed: int = 0, count: int = 12) -> tuple[list[Row], torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    rows, left = [], count
    while left:
        size = int(rng.integers(1, left + 1))
        calls = np.sort(rng.integers(0, 3, size)).tolist()
        advantages = [float(rng.standard_normal())] * size
        rows.append(row(f"r{left}", advantages, calls=calls, versions=rng.integers(0, 12, size).tolist()))
        left -= size
    logp_K = torch.from_numpy(-1 + 0.3 * rng.standard_normal(count))
    return rows, logp_K, torch.from_numpy(rng.uniform(0.1, 3, count))


@pytest.mark.parametrize("options", ALL, ids=str)
def test_in_parts_or_as_a_whole(options: LossOptions) -> None:
    """Separable losses give the same gradient, sums and extremes in any parts; the others refuse parts."""
    rows, logp_K, entropy_K = some_scores()
    reference_K = logp_K - 0.1
    targets = Targets.of(rows, reference_K=reference_K)

    def graded(index_K: torch.Tensor | None) -> tuple[Any, torch.Tensor]:
        own_K = (logp_K if index_K is None else logp_K[index_K]).clone().requires_grad_()
        its_K = (entropy_K if index_K is None else entropy_K[index_K]).clone().requires_grad_()
        found = loss(options, targets, own_K, its_K, index_K)
        found.loss_sum.backward()
        assert own_K.grad is not None
        return found, own_K.grad

    if not options.separable:
        with pytest.raises(TrainerError, match="couples targets"):
            graded(torch.arange(3))
        return
    whole, gradient_K = graded(None)
    order = torch.randperm(len(logp_K), generator=torch.Generator().manual_seed(1))
    added, gathered = LossSums(), torch.zeros_like(logp_K)
    for index_K in order.split(5):
        part, gathered[index_K] = graded(index_K)
        added.add(part)
    added.add(loss(options, targets, logp_K[:0], entropy_K[:0], order[:0]))
    torch.testing.assert_close(gathered, gradient_K, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(added.sums, whole.sums, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(added.maxima, whole.maxima, rtol=0, atol=0)


def test_what_couples_targets_is_not_separable() -> None:
    """Negative control for the above: what `separable` denies does change when it is cut."""

    def change(options: LossOptions, seed: int) -> float:
        rows, logp_K, entropy_K = some_scores(seed)
        targets = Targets.of(rows, reference_K=logp_K - 0.1)
        whole = loss_sum(options, targets, logp_K, entropy_K)
        alone = sum(
            loss_sum(options, targets.take(index_K), logp_K[index_K], entropy_K[index_K])
            for index_K in torch.arange(len(logp_K)).split(1)
        )
        return abs(float(whole - alone))

    for options in ALL:
        biggest = max(change(options, seed) for seed in range(5))
        assert biggest < 1e-12 if options.separable else biggest > 1e-3, options


@settings(max_examples=20, deadline=None)
@given(factor=st.floats(0.01, 100), seed=st.integers(0, 50))
def test_losses_scale_with_the_advantages(factor: float, seed: int) -> None:
    """Positive homogeneity: a run's weight may ride in its advantage."""
    rows, logp_K, entropy_K = some_scores(seed)
    scaled = [replace(one, advantages=one.advantages * factor) for one in rows]
    for name in LOSSES:
        options = LossOptions(loss_type=name)  # type: ignore[arg-type]
        found = loss_sum(options, Targets.of(rows), logp_K, entropy_K)
        again = loss_sum(options, Targets.of(scaled), logp_K, entropy_K)
        assert float(again) == pytest.approx(factor * float(found), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("loss_type", list(LOSSES))
def test_on_policy_every_loss_has_the_policy_gradient(loss_type: Any) -> None:
    """At ratio 1 the gradient of a target is -advantage, times its coefficient."""
    options = LossOptions(loss_type=loss_type, epsilon_high=5.0 if loss_type == "cispo" else 0.2)
    _, slopes, _ = evaluate(options, ROWS, [1.0] * 6)
    share = Targets.of(ROWS).share_K(options.definition.over).tolist()
    coefficient = [1.0] * 6 if loss_type in ("dr_grpo", "luspo") else share
    divide_by = denominator(options, Totals(runs=2, rows=3, targets=6, calls=4))
    wanted = [-a * c / divide_by for a, c in zip([2.0] * 4 + [-1.0] * 2, coefficient, strict=True)]
    assert slopes == pytest.approx(wanted)


def test_a_wrong_setting_says_what_is_right() -> None:
    with pytest.raises(SettingsError, match="loss_type = 'ppo' is none of run, grpo"):
        LossOptions(loss_type="ppo")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="importance_sampling = 'clip'"):
        LossOptions(importance_sampling="clip")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="vespo weighs whole calls"):
        LossOptions(loss_type="vespo", importance_sampling="sequence_mask")
    with pytest.raises(SettingsError, match="floor = 3"):
        LossOptions(importance_sampling_floor=3.0)
    with pytest.raises(SettingsError, match="quantile = 20"):
        LossOptions(top_entropy_quantile=20)
    with pytest.raises(SettingsError, match="max_completion_length = 0 is not above 0"):
        LossOptions(loss_type="dr_grpo", max_completion_length=0)
    for value in (-0.1, math.nan):
        with pytest.raises(SettingsError, match=f"epsilon_high = {value} is not 0 or more"):
            LossOptions(epsilon_high=value)


@pytest.mark.parametrize(
    ("loss_type", "wanted"), [("run", 3.0), ("grpo", 5.0), ("dapo", 40.0), ("gspo", 9.0), ("dr_grpo", 500.0)]
)
def test_denominators(loss_type: Any, wanted: float) -> None:
    options = LossOptions(loss_type=loss_type, max_completion_length=100)
    totals = Totals()
    totals.add(runs=1, rows=2, targets=15, calls=4)
    totals.add(runs=2, rows=3, targets=25, calls=5)
    assert denominator(options, totals) == wanted


def test_a_denominator_that_lacks_something_is_refused() -> None:
    with pytest.raises(TrainerError, match="0 calls"):
        denominator(LossOptions(loss_type="gspo"), Totals(runs=1, rows=1, targets=5))
    with pytest.raises(TrainerError, match="sums"):
        denominator(LossOptions(importance_sampling="mask"), Totals(runs=1, rows=1, targets=5))


def test_metrics_are_means_over_targets_and_the_loss_is_as_trained() -> None:
    rows = [row("r", [2.0, 2.0], versions=[9, 0]), row("s", [-1.0], versions=[8])]
    options = LossOptions(importance_sampling="mask", importance_sampling_cap=1.4, beta=0.1)
    targets = Targets.of(rows, version=9, reference_K=torch.full((3,), -1.0).double())
    logp_K = targets.behaviour_K + torch.tensor([1.0, 1.5, 1.2], dtype=torch.float64).log()
    found = loss(options, targets, logp_K, torch.tensor([1.0, 2.0, 3.0]).double())
    kept = LossSums()
    kept.add(found)
    metrics = describe(options, kept, denominator(options, Totals(runs=2, rows=2, targets=3), found.sums))
    k3 = [0.0, 0.5 - math.log(1.5), 0.2 - math.log(1.2)]
    k = 1 / 1.2 - math.log(1 / 1.2) - 1
    assert metrics == pytest.approx(
        {
            "loss": (-2.0 / 2 + 1.2 + 0.1 * k) / 1.5,  # weights .5, .5 (masked), 1
            "policy_loss": (-2.0 / 2 + 1.2) / 1.5,
            "kl": k / 3,
            "ratio": 3.7 / 3,
            "ratio/min": 1.0,
            "ratio/max": 1.5,
            "ratio/proximal": 1.0,
            "approx_kl": sum(k3) / 3,
            "entropy": 2.0,
            "clip_ratio/low_mean": 0.0,
            "clip_ratio/high_mean": 0.0,
            "clip_ratio/region_mean": 0.0,
            "sampling/importance_sampling_ratio/mean": 2.2 / 3,
            "sampling/importance_sampling_ratio/min": 0.0,
            "sampling/importance_sampling_ratio/max": 1.2,
            "sampling/importance_sampling_ratio/effective": 2.2**2 / (1 + 1.44) / 3,
            "masked/importance_sampling": 1.0,
            "masked/fraction": 1 / 3,
            "staleness/mean": 10 / 3,
            "staleness/max": 9.0,
            "staleness/targets_0": 1.0,
            "staleness/approx_kl_0": 0.0,
            "staleness/targets_1": 1.0,
            "staleness/approx_kl_1": k3[2],
            "staleness/targets_8_or_more": 1.0,
            "staleness/approx_kl_8_or_more": k3[1],
        }
    )
    assert len(MAXIMA) == len(found.maxima)
