"""Sealing: what is trained, with which coefficients, and that everything else is counted. The cases of cases/loss."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from units_kit import call, flat_run, run_record, seal, two_runs

from gyre_sdk.credit import Baseline
from gyre_sdk.records import ROLE_ORDER, CallStatus, RunStatus, Sampling
from gyre_sdk.trainer.config import RoleConfig, TrainConfig
from gyre_sdk.trainer.loss import LossOptions, Targets, Totals, denominator
from gyre_sdk.trainer.loss import loss as summed_loss
from gyre_sdk.trainer.training import make_sealer
from gyre_sdk.trainer.units import Row, SealedGroup, digest, reproducible

CASES = Path(__file__).parents[3] / "shared" / "cases" / "loss"


def case(name: str) -> dict[str, Any]:
    path = CASES / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def loss_of(
    groups: list[SealedGroup], per_token: dict[str, Any], loss_type: Any = "run_mean"
) -> tuple[float, dict[str, float]]:
    """The batch's loss with given per-token losses, and the weight of a token per run, through the real loss.

    At ratio 1 a token's loss is minus its advantage, so the advantage carries the given value.
    """
    options = LossOptions(loss_type=loss_type, epsilon_low=9.0, epsilon_high=9.0)
    totals = Totals()
    total = torch.zeros((), dtype=torch.float64)
    weights: dict[str, float] = {}
    units = [unit for group in groups for unit in group.units]
    for unit in units:
        totals.add(runs=unit.runs, rows=len(unit.rows), targets=unit.tokens)
    divide_by = denominator(options, totals)
    for unit in units:
        for row in unit.rows:
            value = per_token[row.run]
            values = np.array([value(int(token)) if callable(value) else value for token in row.ids[row.targets]])
            targets = Targets.of([replace(row, advantages=-values)])
            found = summed_loss(options, targets, targets.behaviour_K, torch.zeros_like(targets.behaviour_K))
            total = total + found.loss_sum
            weights[row.run] = float(targets.share_K(options.definition.over)[0]) / divide_by
    return float(total.detach()) / divide_by, weights


def test_case_a_run_with_three_branches() -> None:
    expected = case("loss-run-with-three-branches")["expected"]
    prefix, ends = [100, 101, 102, 103], [[200, 201, 202], [210, 211, 212, 213, 214], list(range(220, 228))]
    branches = [call("B", "c0", [1, 2], prefix)]
    branches += [call("B", f"c{n}", [1, 2, *prefix, 50 + n], sampled) for n, sampled in enumerate(ends, 1)]
    calls = {"A": flat_run("A", 10), "B": branches}
    group = seal([run_record("A", 1.0), run_record("B", 0.0, member=1)], calls)
    loss, weights = loss_of([group], {"A": 2.0, "B": lambda token: 1.0 if token in prefix else 4.0})
    assert loss == pytest.approx(expected["loss_value"]["float"], abs=1e-12)
    assert {run: pytest.approx(expected["weight_per_token"][run]["float"]) for run in "AB"} == weights
    rows = [row for unit in group.units for row in unit.rows if row.run == "B"]
    assert len(rows) == 3
    owners = [row for row in rows if set(prefix) & set(row.ids[row.targets].tolist())]
    assert len(owners) == 1 and sum(len(row.targets) for row in rows) == 20
    wrong = expected["wrong_values"].values()
    assert all(abs(loss - value["float"]) > 1e-3 for value in wrong)


def test_case_group_statistics_over_runs() -> None:
    found = case("loss-group-statistics-over-runs")
    members = found["input"]["group"]
    runs = [run_record(row["run"], row["reward"], member=n) for n, row in enumerate(members)]
    calls = {
        row["run"]: [
            call(row["run"], f"c{n}", [1, 300 + n], list(range(10, 10 + row["sampled_tokens"] // row["rows"])))
            for n in range(row["rows"])
        ]
        for row in members
    }
    expected = found["expected"]
    for baseline, key in (
        (Baseline.MEAN, "advantage_mean_only"),
        (Baseline.POPULATION_STD, "advantage_population_std"),
        (Baseline.LEAVE_ONE_OUT, "advantage_leave_one_out"),
    ):
        for order in (runs, runs[::-1]):
            sealed = seal(order, calls, baseline=baseline)
            rows = [row for unit in sealed.units for row in unit.rows]
            assert {row.run: pytest.approx(row.advantage, abs=1e-9) for row in rows} == expected[key]
            assert len([row for row in rows if row.run == "r2"]) == 4
    assert sealed.units[0].runs == 3


def test_case_flat_groups_and_lonely_runs() -> None:
    found = case("loss-flat-groups-and-lonely-runs")
    sealed = []
    for group in found["input"]["groups"]:
        runs = [run_record(f"{group['id']}-{n}", reward, member=n) for n, reward in enumerate(group["rewards"], 1)]
        calls = {run.run: flat_run(run.run, tokens) for run, tokens in zip(runs, group["tokens"], strict=True)}
        for baseline in (Baseline.SAMPLE_STD, Baseline.MEAN):
            last = seal(runs, calls, baseline=baseline)
        sealed.append(last)
        expected = {"g1": {}, "g2": {"group_flat": 1}, "g3": {"group_too_small": 1}, "g4": {"group_flat": 1}}
        assert dict(last.dropped) == expected[group["id"]]
    assert sum(unit.runs for group in sealed for unit in group.units) == found["expected"]["trained_runs"]
    _, weights = loss_of(sealed, {"g1-1": 1.0, "g1-2": 1.0})
    wanted = found["expected"]["weights"]
    assert weights["g1-1"] == pytest.approx(wanted["g1 run 1 per token"]["float"])
    assert weights["g1-2"] == pytest.approx(wanted["g1 run 2 per token"]["float"])


@pytest.mark.parametrize("missing", [None, math.nan])
def test_case_unscored_run_in_group(missing: float | None) -> None:
    found = case("loss-unscored-run-in-group")
    members, expected = found["input"]["group"], found["expected"]
    runs = [
        run_record(
            row["run"],
            row["reward"] if row["reward"] is not None else missing,
            member=n,
            status=RunStatus.COMPLETED if row["reward"] is not None else RunStatus.SCORER_ERROR,
        )
        for n, row in enumerate(members)
    ]
    calls = {row["run"]: flat_run(row["run"], row["tokens"]) for row in members}
    sealed = seal(runs, calls)
    rows = {row.run: row for unit in sealed.units for row in unit.rows}
    assert "r2" not in rows and sealed.dropped == {"run_unscored": 1}
    for run, value in expected["advantage_mean_only"].items():
        assert rows[run].advantage == pytest.approx(value["float"], abs=1e-9)
    _, weights = loss_of([sealed], dict.fromkeys(rows, 1.0))
    assert sum(unit.runs for unit in sealed.units) == expected["R"]
    for run in rows:
        assert weights[run] == pytest.approx(expected["weight_per_token"][run]["float"])
    assert (sealed.credit.scored, sealed.credit.started) == (3, 4)
    lonely = seal([runs[0], *(run_record(f"u{n}", None) for n in range(3))], calls)
    assert lonely.units == () and lonely.dropped == {"group_too_small": 1, "run_unscored": 3}
    nobody = seal([run_record(f"u{n}", None) for n in range(4)], {})
    assert nobody.units == () and nobody.dropped == {"group_too_small": 1, "run_unscored": 4}


def test_weights_sum_to_one_over_a_run_and_nothing_is_trained_twice() -> None:
    runs, calls = two_runs()
    calls["a"] += [call("a", "d", [*calls["a"][0].prompt_ids, *calls["a"][0].sampled_ids, 7], [8, 9])]
    sealed = seal(runs, calls)
    for run in ("a", "b"):
        rows = [row for unit in sealed.units for row in unit.rows if row.run == run]
        assert sum(row.weights.sum() for row in rows) == pytest.approx(1.0)
        assert sum(len(row.targets) for row in rows) == sum(len(c.sampled_ids) for c in calls[run])


def test_the_same_record_gives_the_same_units() -> None:
    runs, calls = two_runs()
    calls["a"] += [call("a", f"x{n}", [1, 40 + n], [50 + n] * (n + 1)) for n in range(9)]
    first, second = seal(runs, calls, seed=1), seal(runs[::-1], {run: c[::-1] for run, c in calls.items()}, seed=1)
    assert [unit.id for unit in first.units] == [unit.id for unit in second.units]
    assert [unit.id for unit in seal(runs, calls, seed=2).units] != [unit.id for unit in first.units]


def test_the_id_covers_every_number_of_a_row() -> None:
    runs, calls = two_runs()
    row = seal(runs, calls).units[0].rows[0]
    changed = [
        replace(row, advantage=row.advantage + 1e-15 if row.advantage == 0 else row.advantage * 1.0000001),
        replace(row, ids=row.ids + 1),
        replace(row, weights=row.weights * 2),
        replace(row, logprobs=row.logprobs - 1e-9),
        replace(row, versions=row.versions + 1),
        replace(row, targets=row.targets[1:]),
        replace(row, run="other"),
        replace(row, calls=row.calls + 1),
        replace(row, call_ids=("other",)),
        replace(row, call_roles=("other",)),
        replace(row, advantages=row.advantages * 2),
        replace(row, temperatures=row.temperatures * 2),
    ]
    assert len({digest([row]), *(digest([other]) for other in changed)}) == len(changed) + 1


def test_a_row_knows_the_call_of_each_target() -> None:
    runs, calls = two_runs()
    first = calls["a"][0]
    history = [*first.prompt_ids, *first.sampled_ids, 7]
    calls["a"] += [call("a", "d", history, [8, 9], role="critic")]
    row = next(row for row in seal(runs, calls).units[0].rows if row.run == "a")
    assert row.call_ids == ("a-c", "a-d") and row.call_roles == ("main", "critic")
    assert row.calls.tolist() == [0] * 4 + [1] * 2 and row.calls.dtype == np.int32
    assert row.advantages.tolist() == [row.advantage] * 6 and row.temperatures.tolist() == [1.0] * 6


def test_a_row_fills_in_what_is_left_out() -> None:
    ids = np.arange(4, dtype=np.int32)
    numbers = {"weights": np.full(2, 0.5), "logprobs": np.full(2, -1.0), "versions": np.zeros(2, np.int32)}
    row = Row("r", "leaf", "main", ids, np.array([1, 3], np.int32), **numbers, advantage=-0.5)
    assert (row.call_ids, row.call_roles, row.calls.tolist()) == (("leaf",), ("main",), [0, 0])
    assert row.advantages.tolist() == [-0.5, -0.5] and row.temperatures.tolist() == [1.0, 1.0]


def test_a_config_says_how_units_are_made() -> None:
    roles = {"main": RoleConfig(2.0), "side": RoleConfig(0.0, 1)}
    config = TrainConfig(
        j_max=0, seed=4, scale_rewards="leave_one_out", unit_tokens=99, selection="longest", roles=roles,
        max_staleness=2, mask_truncated_completions=True, credit_hook="my_code:review",
    )  # fmt: skip
    assert make_sealer(config, Path("base")).settings == {
        "rule": "longest", "j_max": None, "seed": 4, "baseline": "leave_one_out", "credit_hook": "my_code:review",
        "roles": [{"name": "main", "weight": 2.0, "j_max": None}, {"name": "side", "weight": 0.0, "j_max": 1}],
        "max_staleness": 2, "mask_truncated": True, "unit_tokens": 99,
    }  # fmt: skip
    plain = make_sealer(TrainConfig()).settings
    assert [role["name"] for role in plain["roles"]] == list(ROLE_ORDER) and plain["rule"] == "paper"
    baselines = {make_sealer(TrainConfig(scale_rewards=name)).baseline for name in ("group", "population", "none")}
    assert baselines == {Baseline.SAMPLE_STD, Baseline.POPULATION_STD, Baseline.MEAN}


def test_j_max_bounds_the_rows_of_a_run() -> None:
    runs, calls = two_runs()
    calls["a"] = [call("a", f"x{n}", [1, 40 + n], [50 + n] * (n + 1)) for n in range(9)]
    for bound, rows in ((1, 1), (5, 5), (None, 9)):
        found = [row for unit in seal(runs, calls, j_max=bound).units for row in unit.rows if row.run == "a"]
        assert len(found) == rows
        assert sum(row.weights.sum() for row in found) == pytest.approx(1.0)


def test_large_groups_are_cut_into_units_that_count_each_run_once() -> None:
    runs, calls = two_runs()
    calls["a"] = [call("a", f"x{n}", [1, 40 + n], [50 + n] * (n + 1)) for n in range(5)]
    sealed = seal(runs, calls, unit_tokens=6)
    assert len(sealed.units) > 2
    assert sum(unit.runs for unit in sealed.units) == 2
    assert len({unit.id for unit in sealed.units}) == len(sealed.units)


def test_what_cannot_be_trained_is_counted() -> None:
    runs, calls = two_runs()
    calls["a"] += [
        call("a", "no-logprobs", [1, 41], [5, 6], logprobs=[-1.0, None]),
        call("a", "no-version", [1, 42], [5, 6], versions=[]),
        call("a", "failed", [1, 43], [5], status=CallStatus.FAILED),
        call("a", "undelivered", [1, 44], [5], status=CallStatus.COMPLETE),
        call("a", "greedy", [1, 45], [5], sampling=Sampling(temperature=0.0)),
        call("a", "hosted", [], []),
        call("a", "hosted-greedy", [], [], sampling=Sampling(temperature=0.0)),
    ]
    sealed = seal(runs, calls)
    assert sealed.dropped == {
        "call_no_logprobs": 1,
        "call_no_version": 1,
        "call_failed": 1,
        "call_orphan": 1,
        "call_sampling": 1,
        "call_hosted": 2,
    }
    assert sum(unit.tokens for unit in sealed.units) == 10


def test_a_run_without_targets_leaves_the_denominator() -> None:
    runs, calls = two_runs()
    runs.append(run_record("c", 1.0, member=2))
    sealed = seal(runs, calls)
    assert sealed.dropped == {"run_without_targets": 1}
    assert sum(unit.runs for unit in sealed.units) == 2


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        (Sampling(), True),
        (Sampling(temperature=0.7), True),
        (Sampling(temperature=0.0), False),
        (Sampling(top_p=0.9), False),
        (Sampling(top_k=20), False),
        (Sampling(extra={"min_p": 0.05}), False),
        (Sampling(extra={"min_p": 0.0, "repetition_penalty": 1.0, "logit_bias": {}}), True),
        (Sampling(extra={"logit_bias": {"5": 1.0}}), False),
    ],
)
def test_only_the_models_own_distribution_is_trained(sampling: Sampling, wanted: bool) -> None:
    assert reproducible(sampling) is wanted


def test_every_case_of_the_loss_is_covered() -> None:
    if not CASES.is_dir():
        pytest.skip(f"{CASES} is not here")
    mine = Path(__file__).read_text()
    assert all(f'case("{path.stem}")' in mine for path in CASES.glob("*.json"))
