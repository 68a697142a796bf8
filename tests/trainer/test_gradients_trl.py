"""Loss and gradient equal TRL's `GRPOTrainer` on the same rows, for every loss that TRL has.

Each row holds one run and one call, so that TRL's sequence, row and sample are gyre's call, row and run.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_policy import gradient, pure64, random_row, relative, tiny_model, unit_of
from trl import GRPOConfig
from trl_kit import MAX_COMPLETION, trls, word_tokenizer

from gyre_sdk.trainer.attention.executor import linearised
from gyre_sdk.trainer.attention.flat import FlatExecutor
from gyre_sdk.trainer.loss import LOSSES, SUMS, LossOptions, Targets, Totals, denominator, loss, loss_sum
from gyre_sdk.trainer.trainer import TreeGRPOConfig, TreeGRPOTrainer
from gyre_sdk.trainer.units import Row


@dataclass(frozen=True)
class Case:
    ours: dict[str, Any]
    theirs: dict[str, Any] = field(default_factory=dict)
    """Where TRL's names or values are others."""
    masks: bool = False
    """TRL leaves masked tokens in its denominators, gyre does not: the numerators are compared."""


ELSEWHERE = {"loss_type": "dapo", "sampled_elsewhere": True, "vllm_importance_sampling_clip_max": 1.2}
SEQUENCE = {"importance_sampling_level": "sequence"}
CASES = {
    "dapo": Case({"loss_type": "dapo"}),
    "grpo": Case({"loss_type": "grpo"}),
    "bnpo": Case({"loss_type": "bnpo"}),
    "dr_grpo": Case({"loss_type": "dr_grpo", "epsilon_high": 0.28}),
    "cispo": Case({"loss_type": "cispo", "epsilon_high": 1.2}),
    "sapo": Case({"loss_type": "sapo", "sapo_temperature_pos": 1.1, "sapo_temperature_neg": 1.4}),
    "vespo": Case({"loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_neg": 2.5}),
    "luspo": Case({"loss_type": "luspo"}, {"loss_type": "luspo", **SEQUENCE}),
    "gspo": Case({"loss_type": "gspo"}, {"loss_type": "grpo", **SEQUENCE}),
    "grpo of calls": Case({"loss_type": "grpo", **SEQUENCE}),
    "dapo of calls": Case({"loss_type": "dapo", **SEQUENCE}),
    "cispo of calls": Case({"loss_type": "cispo", "epsilon_high": 0.9, **SEQUENCE}),
    "run": Case({"loss_type": "run"}, {"loss_type": "grpo"}),
    "delta": Case({"loss_type": "grpo", "delta": 1.3}),
    "beta": Case({"loss_type": "dapo", "beta": 0.1}),
    "beta without correction": Case({"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False}),
    "beta of calls": Case({"loss_type": "grpo", "beta": 0.1, **SEQUENCE}),
    "entropy": Case({"loss_type": "dapo", "entropy_coef": 0.05}),
    "high entropy": Case({"loss_type": "dapo", "top_entropy_quantile": 0.4}),
    "high entropy, entropy, beta": Case(
        {"loss_type": "bnpo", "top_entropy_quantile": 0.4, "entropy_coef": 0.05, "beta": 0.1}
    ),
    "token_truncate": Case(
        {"loss_type": "dapo", "importance_sampling": "truncate", "importance_sampling_cap": 1.2},
        {**ELSEWHERE, "vllm_importance_sampling_mode": "token_truncate"},
    ),
    "token_truncate with a floor": Case(
        {
            "loss_type": "grpo",
            "importance_sampling": "token_truncate",
            "importance_sampling_cap": 1.2,
            "importance_sampling_floor": 0.8,
        },
        {
            **ELSEWHERE,
            "loss_type": "grpo",
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_min": 0.8,
        },
    ),
    "sequence_truncate": Case(
        {"loss_type": "dapo", "importance_sampling": "sequence_truncate", "importance_sampling_cap": 1.2},
        {**ELSEWHERE, "vllm_importance_sampling_mode": "sequence_truncate"},
    ),
    "vespo, token_truncate": Case(
        {"loss_type": "vespo", "importance_sampling": "token_truncate", "importance_sampling_cap": 1.2},
        {**ELSEWHERE, "loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
    ),
    "token_mask": Case(
        {"loss_type": "dapo", "importance_sampling": "mask", "importance_sampling_cap": 1.2},
        {**ELSEWHERE, "vllm_importance_sampling_mode": "token_mask"},
        masks=True,
    ),
    "token_mask, grpo": Case(
        {
            "loss_type": "grpo",
            "importance_sampling": "token_mask",
            "importance_sampling_cap": 1.2,
            "importance_sampling_floor": 0.8,
        },
        {
            **ELSEWHERE,
            "loss_type": "grpo",
            "vllm_importance_sampling_mode": "token_mask",
            "vllm_importance_sampling_clip_min": 0.8,
        },
        masks=True,
    ),
    "sequence_mask": Case(
        {"loss_type": "dapo", "importance_sampling": "sequence_mask", "importance_sampling_cap": 1.2},
        {**ELSEWHERE, "vllm_importance_sampling_mode": "sequence_mask"},
        masks=True,
    ),
    "off-policy mask": Case({"loss_type": "dapo", "off_policy_mask_threshold": 0.01}, masks=True),
}
SINGLE = ["dapo", "grpo", "dr_grpo", "cispo", "sapo", "vespo", "luspo", "gspo", "beta", "entropy", "sequence_truncate"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


def one_call_rows(model: Any) -> list[Row]:
    rng = np.random.default_rng(1)
    shapes = [(7, 12, 1.3), (20, 5, -0.7), (3, 25, 0.4), (11, 1, -1.5), (5, 9, -0.9)]
    return [
        random_row(rng, f"r{place}", prompt=prompt, sampled=sampled, advantage=advantage, model=model)
        for place, (prompt, sampled, advantage) in enumerate(shapes)
    ]


def ours(model: Any, rows: list[Row], folder: Path, reference: Any, **options: Any) -> tuple[float, torch.Tensor]:
    """Loss and gradient of a training step."""
    args = TreeGRPOConfig(
        output_dir=str(folder),
        max_steps=1,
        use_cpu=True,
        report_to=[],
        max_completion_length=MAX_COMPLETION,
        **options,
    )
    trainer = TreeGRPOTrainer(model, args, lambda step: [unit_of(rows)], reference_model=reference)
    trainer.model.zero_grad()
    trainer.training_step(trainer.model, {"step": 0})
    report = trainer._done
    assert report is not None
    return report.metrics["loss"], gradient(trainer.model)


def kept(model: Any, rows: list[Row], options: dict[str, Any]) -> float:
    """What is left of a denominator after masking, as a share."""
    masking = LossOptions(**options)
    scores = FlatExecutor(model).forward(rows)
    sums = loss(masking, Targets.of(rows), scores.logp_K, scores.entropy_K).sums
    totals = Totals(runs=len(rows), rows=len(rows), targets=len(scores.logp_K))
    plain = replace(masking, importance_sampling="off", off_policy_mask_threshold=None)
    return denominator(masking, totals, sums) / denominator(plain, totals)


@pytest.mark.parametrize("name", CASES)
def test_equal_to_trl_in_float64(tmp_path: Path, tokenizer: Any, name: str) -> None:
    with pure64():
        compare(CASES[name], torch.float64, 1e-12, tmp_path, tokenizer)


@pytest.mark.parametrize("name", SINGLE)
def test_equal_to_trl_in_float32(tmp_path: Path, tokenizer: Any, name: str) -> None:
    tolerance = 3e-6 if name == "vespo" else 1e-6  # its weight is a power of a product of 23 ratios
    compare(CASES[name], torch.float32, tolerance, tmp_path, tokenizer)


def compare(case: Case, dtype: torch.dtype, tolerance: float, folder: Path, tokenizer: Any) -> None:
    model, reference = tiny_model(dtype=dtype), tiny_model(seed=1, dtype=dtype)
    rows = one_call_rows(model)
    reference_K = FlatExecutor(reference).forward(rows).logp_K
    value, theirs = trls(
        copy.deepcopy(model), rows, folder, tokenizer, reference_K=reference_K, **(case.theirs or case.ours)
    )
    share = 1.0
    if case.masks:
        share = kept(model, rows, case.ours)
        assert 0.1 < share < 0.95, "something is masked, and something is left"
    found, our = ours(model, rows, folder, reference if case.ours.get("beta") else None, **case.ours)
    assert theirs.norm() > 1e-3
    assert relative(our * share, theirs) < tolerance
    assert found * share == pytest.approx(value, rel=tolerance * 10, abs=tolerance)


def test_every_loss_of_trl_is_compared() -> None:
    """TRL's help begins with its losses; none is left out here."""
    text = GRPOConfig.__dataclass_fields__["loss_type"].metadata["help"]
    names = set(re.findall(r"'(\w+)'", text.split(". ")[1]))
    assert names == set(LOSSES) - {"run", "gspo"} and "dapo" in names
    assert names <= {(case.theirs or case.ours)["loss_type"] for case in CASES.values()}


def test_different_losses_have_different_gradients() -> None:
    """Negative control: what is compared above would not be equal to another loss of TRL's."""
    model = tiny_model()
    rows = one_call_rows(model)
    found: dict[str, torch.Tensor] = {}
    for name in ("dapo", "grpo", "dr_grpo", "cispo", "sapo", "vespo", "luspo", "gspo"):
        options = LossOptions(**CASES[name].ours, max_completion_length=MAX_COMPLETION)
        model.zero_grad()
        executor = FlatExecutor(model)
        whole = partial(loss_sum, options, Targets.of(rows))
        executor.forward_backward(rows, linearised(whole, executor.forward(rows))[1])
        targets = sum(len(row.targets) for row in rows)
        totals = Totals(runs=len(rows), rows=len(rows), targets=targets, calls=len(rows))
        found[name] = gradient(model) / denominator(options, totals)
    for one, other in combinations(found, 2):
        assert relative(found[one], found[other]) > 1e-3, (one, other)


def test_these_rows_are_clipped_on_both_sides() -> None:
    """The comparisons would prove little if no ratio left its range."""
    model = tiny_model()
    rows = one_call_rows(model)
    scores = FlatExecutor(model).forward(rows)
    for options in (LossOptions(), LossOptions(loss_type="gspo", epsilon_low=0.05, epsilon_high=0.05)):
        found = dict(
            zip(SUMS, loss(options, Targets.of(rows), scores.logp_K, scores.entropy_K).sums.tolist(), strict=True)
        )
        assert 0 < found["clipped_low"] + found["clipped_high"] < found["targets"]
        assert found["clipped_low"] > 0
    cut = loss(LossOptions(loss_type="grpo", delta=1.3), Targets.of(rows), scores.logp_K, scores.entropy_K)
    assert (
        cut.loss_sum != loss(LossOptions(loss_type="grpo"), Targets.of(rows), scores.logp_K, scores.entropy_K).loss_sum
    )


@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_a_proximal_policy_of_its_own_equals_trls_old_policy(tmp_path: Path, tokenizer: Any, loss_type: str) -> None:
    """Three policies: sampled by one, clipped against another, trained on a third."""
    with pure64():
        model = tiny_model(dtype=torch.float64)
        rows = one_call_rows(model)
        executor = FlatExecutor(model)
        current_K = executor.forward(rows).logp_K
        noise_K = torch.from_numpy(np.random.default_rng(3).standard_normal(len(current_K)))
        proximal_K = current_K + 0.2 * noise_K
        options = LossOptions(
            loss_type=loss_type,  # type: ignore[arg-type]
            importance_sampling="truncate",
            importance_sampling_cap=1.2,
            proximal="forward",
        )
        targets = Targets.of(rows, proximal_K=proximal_K)
        if options.separable:
            objective = partial(loss_sum, options, targets)
        else:
            _, objective = linearised(partial(loss_sum, options, targets), executor.forward(rows))
        model.zero_grad()
        scores = executor.forward_backward(rows, objective)
        totals = Totals(runs=len(rows), rows=len(rows), targets=len(current_K))
        divide_by = denominator(options, totals)
        found = gradient(model) / divide_by
        value = float(loss(options, targets, scores.logp_K, scores.entropy_K).loss_sum) / divide_by
        wanted, theirs = trls(
            copy.deepcopy(model),
            rows,
            tmp_path,
            tokenizer,
            proximal_K=proximal_K,
            **{**ELSEWHERE, "loss_type": loss_type, "vllm_importance_sampling_mode": "token_truncate"},
        )
    assert relative(found, theirs) < 1e-12 and value == pytest.approx(wanted, rel=1e-12)
