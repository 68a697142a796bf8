"""The gradient of a batch is independent of how the work is cut. That it is TRL's: `test_gradients_trl`."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_policy import VOCAB, gradient, pure64, random_row, relative, tiny_model, unit_of

from gyre_sdk.errors import MismatchError
from gyre_sdk.trainer.attention.budget import Budget
from gyre_sdk.trainer.attention.flat import FlatExecutor
from gyre_sdk.trainer.loss import SUMS, Totals, denominator
from gyre_sdk.trainer.trainer import TreeGRPOConfig, TreeGRPOTrainer
from gyre_sdk.trainer.units import Row, Unit

MAX_COMPLETION = 40


def ours(model: Any, units: list[Unit], folder: Path, **options: Any) -> torch.Tensor:
    """The gradient that one training step leaves, before clipping."""
    return step(make_trainer(model, folder, **options), units)


def step(trainer: TreeGRPOTrainer, units: list[Unit]) -> torch.Tensor:
    trainer._batches = lambda step: units
    trainer.model.zero_grad()
    trainer.training_step(trainer.model, {"step": 0})
    return gradient(trainer.model)


def some_rows(model: Any, seed: int = 1) -> list[Row]:
    rng = np.random.default_rng(seed)
    shapes = [(7, 12, 1.3), (20, 5, -0.7), (3, 25, 0.4), (11, 1, -1.5)]
    return [
        random_row(rng, f"r{place}", prompt=prompt, sampled=sampled, advantage=advantage, model=model)
        for place, (prompt, sampled, advantage) in enumerate(shapes)
    ]


def test_some_tokens_are_clipped_in_these_rows(tmp_path: Path) -> None:
    """The tests below would prove little if no ratio left the clip range."""
    model = tiny_model()
    trainer = make_trainer(model, tmp_path)
    sums = dict(zip(SUMS, trainer._accumulate(unit_of(some_rows(model)), Totals()).sums.tolist(), strict=True))
    assert sums["clipped_low"] > 0 and sums["clipped_high"] > 0
    assert sums["clipped_low"] + sums["clipped_high"] < sums["targets"]


def make_trainer(model: Any, folder: Path, **options: Any) -> TreeGRPOTrainer:
    args = TreeGRPOConfig(output_dir=str(folder), max_steps=1, use_cpu=True, report_to=[], **options)
    return TreeGRPOTrainer(model, args, lambda step: [])


def split_row(row: Row, at: list[int]) -> list[Row]:
    """Cut a row's targets over several rows with the same path: each target stays with exactly one."""
    bounds = [0, *sorted(at), len(row.targets)]
    return [
        replace(
            row,
            leaf=f"{row.leaf}-{start}",
            ids=row.ids[: row.targets[stop - 1] + 1],
            targets=row.targets[start:stop],
            weights=row.weights[start:stop],
            logprobs=row.logprobs[start:stop],
            versions=row.versions[start:stop],
            calls=row.calls[start:stop],
            advantages=row.advantages[start:stop],
            temperatures=row.temperatures[start:stop],
        )
        for start, stop in pairwise(bounds)
        if stop > start
    ]


ANY_CUT: list[dict[str, Any]] = [
    {},
    {"importance_sampling": "mask", "importance_sampling_cap": 1.2, "entropy_coef": 0.1},
    {"loss_type": "dapo", "importance_sampling": "truncate", "proximal": "interpolated"},
]
"""Losses whose targets and shares do not know of rows or calls."""


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_no_cut_of_the_work_changes_the_gradient(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Promises 4 and 5: runs cut into rows, rows spread over units, units in any order, any micro-batch size."""
    folder = tmp_path_factory.mktemp("cut")
    with pure64():
        model = tiny_model(dtype=torch.float64)
        rows = some_rows(model)
        trainer = make_trainer(model, folder, **data.draw(st.sampled_from(ANY_CUT)))
        wanted = step(trainer, [unit_of(rows)])
        pieces = [
            piece
            for row in rows
            for piece in split_row(row, data.draw(st.lists(st.integers(0, len(row.targets)), max_size=3)))
        ]
        random.Random(data.draw(st.integers(0, 99))).shuffle(pieces)
        units, seen = [], set()
        while pieces:
            size = data.draw(st.integers(1, len(pieces)))
            part, pieces = pieces[:size], pieces[size:]
            units.append(unit_of(part, runs=len({row.run for row in part} - seen)))
            seen |= {row.run for row in part}
        trainer._executor = FlatExecutor(trainer.model, Budget(tokens=data.draw(st.integers(1, 200))))
        found = step(trainer, units)
    assert relative(found, wanted) < 1e-12


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "gspo", "importance_sampling": "sequence_mask", "importance_sampling_cap": 1.2},
        {"importance_sampling_level": "sequence", "off_policy_mask_threshold": 0.01},
        {"loss_type": "vespo"},
        {"top_entropy_quantile": 0.5, "entropy_coef": 0.1},
    ],
    ids=lambda options: next(iter(options.values())),
)
def test_no_cut_of_a_unit_changes_a_loss_that_couples_targets(tmp_path: Path, options: dict[str, Any]) -> None:
    """The targets of a call may lie in several rows, and be computed in any parts."""
    with pure64():
        model = tiny_model(dtype=torch.float64)
        rows = some_rows(model)
        trainer = make_trainer(model, tmp_path, **options)
        wanted = step(trainer, [unit_of(rows)])
        pieces = [piece for row in rows for piece in split_row(row, [1, 4, 9][: len(row.targets) // 4])]
        assert len(pieces) > len(rows)
        trainer._executor = FlatExecutor(trainer.model, Budget(tokens=60, logits=5 * VOCAB))
        found = step(trainer, [unit_of(pieces[::-1])])
    assert relative(found, wanted) < 1e-12


def test_a_row_weighted_loss_would_be_caught(tmp_path: Path) -> None:
    """Negative control for the test above: without the weights, cutting does change the gradient."""
    model = tiny_model()
    rows = some_rows(model)
    cut = [*split_row(rows[0], [3, 6]), *rows[1:]]
    wrong = [replace(row, weights=np.full(len(row.targets), 1 / len(row.targets))) for row in cut]
    assert relative(ours(model, [unit_of(wrong)], tmp_path), ours(model, [unit_of(rows)], tmp_path)) > 0.01


def test_a_run_weighs_the_same_whatever_its_length(tmp_path: Path) -> None:
    """Doubling every target of a run (another sampling event with equal numbers) leaves the gradient as it is."""
    model = tiny_model()
    rows = some_rows(model)
    half = [replace(rows[0], leaf=leaf, weights=rows[0].weights / 2) for leaf in ("a", "b")]
    assert relative(ours(model, [unit_of([*half, *rows[1:]])], tmp_path), ours(model, [unit_of(rows)], tmp_path)) < 1e-6


@pytest.mark.parametrize("loss_type", ["run", "dapo", "dr_grpo"])
def test_truncated_importance_sampling_is_a_weighted_policy_gradient(tmp_path: Path, loss_type: str) -> None:
    model = tiny_model()
    rows = some_rows(model)
    cap = 1.1
    found = ours(
        model,
        [unit_of(rows)],
        tmp_path,
        loss_type=loss_type,
        importance_sampling="truncate",
        importance_sampling_cap=cap,
        max_completion_length=MAX_COMPLETION,
    )
    model.zero_grad()
    loss = torch.zeros(())
    totals = Totals(runs=len(rows), rows=len(rows), targets=sum(len(row.targets) for row in rows))
    for row in rows:
        logps = model(input_ids=torch.from_numpy(row.ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
        label = torch.from_numpy(row.ids[row.targets].astype(np.int64))
        logp = logps[row.targets - 1].gather(-1, label[:, None]).squeeze(-1)
        weight = (logp.detach() - torch.from_numpy(row.logprobs).float()).exp().clamp(max=cap)
        coefficient = torch.from_numpy(row.weights).float() if loss_type == "run" else 1.0
        loss = loss - (row.advantage * weight * logp * coefficient).sum()
    options = make_trainer(model, tmp_path, loss_type=loss_type, max_completion_length=MAX_COMPLETION)._options
    (loss / denominator(options, totals)).backward()
    assert relative(found, gradient(model)) < 1e-5


def test_a_step_whose_targets_are_all_masked_changes_nothing_and_says_so(tmp_path: Path) -> None:
    model = tiny_model()
    masks_all = {"importance_sampling": "mask", "importance_sampling_cap": 1e-6}
    trainer = make_trainer(model, tmp_path, **masks_all)
    trainer._batches = lambda step: [unit_of(some_rows(model))]
    trainer.training_step(trainer.model, {"step": 0})
    report = trainer._done
    assert report is not None and report.skipped
    assert report.metrics["masked/fraction"] == 1.0 and report.metrics["loss"] == 0.0
    assert all(parameter.grad is None for parameter in model.parameters())
    strict = make_trainer(model, tmp_path, mismatch_threshold=0.01, **masks_all)
    strict._batches = lambda step: [unit_of(some_rows(model))]
    with pytest.raises(MismatchError, match="differ by"):
        strict.training_step(strict.model, {"step": 0})


def test_negative_advantages_can_be_scaled(tmp_path: Path) -> None:
    model = tiny_model()
    rows = some_rows(model)
    halved = [0.5 if row.advantage < 0 else 1.0 for row in rows]
    by_hand = [
        replace(row, advantage=row.advantage * factor, advantages=row.advantages * factor)
        for row, factor in zip(rows, halved, strict=True)
    ]
    found = ours(model, [unit_of(rows)], tmp_path, negative_advantage_scale=0.5)
    assert relative(found, ours(model, [unit_of(by_hand)], tmp_path)) < 1e-6


def test_a_head_with_scaled_logits_is_run_whole(tmp_path: Path) -> None:
    """Cohere multiplies its logits: taking the head's matrix alone would be silently wrong."""
    from transformers import CohereConfig, CohereForCausalLM

    torch.manual_seed(0)
    model = CohereForCausalLM(
        CohereConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            logit_scale=0.25,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    ).eval()
    rows = [random_row(np.random.default_rng(0), "r", prompt=4, sampled=6, advantage=1.0, model=model, noise=0.0)]
    sums = dict(
        zip(SUMS, make_trainer(model, tmp_path)._accumulate(unit_of(rows), Totals()).sums.tolist(), strict=True)
    )
    assert sums["ratio"] / sums["targets"] == pytest.approx(1.0, abs=1e-5)


def test_a_large_head_is_projected_in_parts(tmp_path: Path) -> None:
    model = tiny_model()
    rows = some_rows(model)
    wanted = ours(model, [unit_of(rows)], tmp_path)
    trainer = make_trainer(model, tmp_path)
    trainer._executor = FlatExecutor(trainer.model, Budget(logits=5 * VOCAB))
    assert relative(step(trainer, [unit_of(rows)]), wanted) < 1e-6
