"""The recorded cases of losses, at the loss itself: what a run weighs, and what is not there weighs nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gyre_sdk.trainer.loss import LOSSES, LossOptions, Targets, Totals, denominator, loss
from gyre_sdk.trainer.units import Row

CASES = Path(__file__).parents[3] / "shared" / "cases" / "loss"


def case(name: str) -> dict[str, Any]:
    path = CASES / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def row(run: str, values: list[float], share: float, leaf: str = "leaf", sampled: float = -1.0) -> Row:
    """Targets with these losses: at ratio 1 a target's loss is minus its advantage."""
    count = len(values)
    return Row(
        run=run,
        leaf=leaf,
        role="main",
        ids=np.arange(count + 1, dtype=np.int32),
        targets=np.arange(1, count + 1, dtype=np.int32),
        weights=np.full(count, share),
        logprobs=np.full(count, sampled),
        versions=np.zeros(count, np.int32),
        advantage=-values[0],
        advantages=-np.array(values),
    )


def cut(run: str, values: list[float], sizes: list[int]) -> list[Row]:
    ends = np.cumsum(sizes)
    parts = [values[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    return [row(run, part, 1 / len(values), leaf=f"leaf{number}") for number, part in enumerate(parts)]


def batch(options: LossOptions, rows: list[Row], logp: float = -1.0) -> tuple[float, torch.Tensor]:
    """Loss of a batch and its gradient with respect to each target's log-prob."""
    targets = Targets.of(rows)
    logp_K = torch.full_like(targets.behaviour_K, logp).requires_grad_()
    found = loss(options, targets, logp_K, torch.zeros_like(targets.behaviour_K))
    totals = Totals()
    totals.add(runs=len({one.run for one in rows}), rows=len(rows), targets=len(logp_K), calls=targets.calls)
    value = found.loss_sum / denominator(options, totals, found.sums)
    value.backward()
    assert logp_K.grad is not None
    return value.item(), logp_K.grad


B = [1.0] * 4 + [4.0] * 16


@pytest.mark.parametrize("sizes", [[20], [7, 13], [7, 5, 8], [4, *[1] * 15, 1]])
def test_a_run_weighs_the_same_in_any_number_of_rows(sizes: list[int]) -> None:
    """loss-run-with-three-branches."""
    expected = case("loss-run-with-three-branches")["expected"]
    rows = [*cut("A", [2.0] * 10, [10]), *cut("B", B, sizes)]
    value, slopes = batch(LossOptions(), rows)
    assert value == pytest.approx(expected["loss_value"]["float"], abs=1e-12)
    weights = (slopes / torch.tensor([2.0] * 10 + B)).tolist()
    assert weights[:10] == pytest.approx([expected["weight_per_token"]["A"]["float"]] * 10)
    assert weights[10:] == pytest.approx([expected["weight_per_token"]["B"]["float"]] * 20)
    # a mean over tokens is what dapo is, and forks do not change it either
    tokens = batch(LossOptions(loss_type="dapo"), rows)[0]
    assert tokens == pytest.approx(expected["wrong_values"]["mean over all 30 tokens"]["float"])


def test_the_wrong_values_are_what_row_means_give() -> None:
    """Negative control: the numbers of the reports come out where rows are counted, or a prefix in each of them."""
    wrong = case("loss-run-with-three-branches")["expected"]["wrong_values"]
    branches = [row("B", [1.0] * 4 + [4.0] * size, 1.0, leaf=f"leaf{size}") for size in (3, 5, 8)]
    doubled, _ = batch(LossOptions(loss_type="grpo"), [*cut("A", [2.0] * 10, [10]), *branches])
    assert doubled == pytest.approx(wrong["mean over 4 rows, prefix counted in each"]["float"])
    rows = [*cut("A", [2.0] * 10, [10]), *cut("B", B, [7, 5, 8])]
    targets = Targets.of(rows)
    found = loss(LossOptions(), targets, targets.behaviour_K, targets.behaviour_K)
    by_rows = denominator(LossOptions(), Totals(runs=len(rows), rows=len(rows), targets=30))
    assert found.loss_sum / by_rows == pytest.approx(wrong["divide by rows instead of runs"]["float"])


@pytest.mark.parametrize("loss_type", [name for name in LOSSES if name != "vespo"])
@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask"])
def test_what_is_masked_as_a_whole_is_as_if_it_were_not_there(loss_type: Any, mode: Any) -> None:
    """loss-flat-groups-and-lonely-runs, loss-unscored-run-in-group: what is not trained dilutes nothing."""
    options = LossOptions(loss_type=loss_type, importance_sampling=mode, importance_sampling_cap=2.0)
    kept = [*cut("A", [2.0] * 4, [4]), *cut("B", [1.0, -3.0, 2.0], [1, 2])]
    strange = [row("C", [5.0] * 6, 1 / 6, sampled=-9.0)]  # sampled where the policy hardly goes
    wanted, slopes = batch(options, kept)
    value, found = batch(options, [*kept, *strange])
    assert value == pytest.approx(wanted, rel=1e-12)
    torch.testing.assert_close(found[:7], slopes, rtol=1e-12, atol=0)
    assert found[7:].tolist() == [0.0] * 6
    diluted, _ = batch(replace(options, importance_sampling="off"), [*kept, row("C", [1e-30] * 6, 1 / 6)])
    assert abs(diluted / wanted - 1) > 0.1, "a run that stays in with nothing to say shrinks the others"


def test_the_weights_of_the_cases() -> None:
    """Per token: 1 / (runs that are trained * targets of the run)."""
    unscored = case("loss-unscored-run-in-group")["expected"]["weight_per_token"]
    rows = [row(name, [1.0] * size, 1 / size) for name, size in [("r1", 10), ("r3", 20), ("r4", 5)]]
    _, slopes = batch(LossOptions(), rows)
    assert slopes[[0, 10, 30]].tolist() == pytest.approx([unscored[name]["float"] for name in ("r1", "r3", "r4")])
    flat = case("loss-flat-groups-and-lonely-runs")["expected"]["weights"]
    _, slopes = batch(LossOptions(), [row("1", [1.0] * 4, 1 / 4), row("2", [1.0] * 5, 1 / 5)])
    assert slopes[[0, 4]].tolist() == pytest.approx([value["float"] for value in flat.values()])
