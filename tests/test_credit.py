"""Promise 4: every run weighs the same, whatever its rows; unknown rewards are unknown; promise 9: nothing silent."""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tree_inputs import call, case, from_case, recorded_runs, run

from gyre_sdk.credit import (
    Baseline,
    Dropped,
    Row,
    advantages,
    batch_scale,
    group_credit,
    run_weights,
    tally,
    trajectories,
)
from gyre_sdk.errors import SettingsError
from gyre_sdk.records import CallStatus, RunId, RunStatus, TrajectoryRecord
from gyre_sdk.select import Role, select
from gyre_sdk.tree import RunTree

R = RunId("r")


def records(rows: list[Row]) -> list[TrajectoryRecord]:
    return [row.record() for row in rows]


def chain(tokens: int, name: str = "c") -> list:
    return [call(name, [1], list(range(2, 2 + tokens)))]


def per_token(rows: list[Row]) -> set[float]:
    return {weight for row in rows for weight in row.weights.tolist()}


# -- weights -----------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(recorded_runs(), st.integers(1, 6), st.integers(0, 2**32))
def test_the_weights_of_a_run_sum_to_one(calls, j_max, seed):
    rows = trajectories(R, calls, j_max=j_max, seed=seed, advantage=0.5)
    assume(rows)
    assert math.fsum(weight for row in rows for weight in row.weights) == pytest.approx(1, abs=1e-12)
    assert len(per_token(rows)) == 1
    for row in (row.record() for row in rows):
        assert len(row.path_ids) == len(row.owned) == len(row.weights) == len(row.logprobs) == len(row.versions)
        assert {0, 1} >= set(row.owned)
        for owned, weight, logprob, version in zip(row.owned, row.weights, row.logprobs, row.versions, strict=True):
            assert (weight > 0) == bool(owned) and (version >= 0) == bool(owned) and (owned or logprob == 0)


def event_weights(calls: list, seed: int) -> dict[tuple[str, int], float]:
    """Return the loss weight of each sampling event, summed over the rows of the run."""
    tree = RunTree.from_calls(calls)
    found: dict[tuple[str, int], float] = {}
    for row in trajectories(R, calls, j_max=None, seed=seed):
        path = tree.path(row.leaf)
        for at, weight in zip(row.targets.tolist(), row.weights.tolist(), strict=True):
            event = path.owner(at)
            assert event is not None and event not in found
            found[event] = weight
    return found


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=8),
    st.lists(st.booleans(), min_size=8, max_size=8),
    st.integers(0, 99),
)
def test_cutting_a_run_into_rows_changes_no_weight(answers, cuts, seed):
    """The same answers as one chain, or with the history edited before any of them: a row more, the same weights."""
    weights = []
    for edits in ([False] * 8, cuts):
        history, calls = [1], []
        for number, size in enumerate(answers):
            if edits[number]:
                history = [500 + number, *history[1:]]
            prompt = [*history, 100 + number]
            calls.append(call(f"c{number}", prompt, [10] * size))
            history = prompt + [10] * size
        weights.append(event_weights(calls, seed))
    assert weights[0] == weights[1]


@settings(deadline=None)
@given(st.lists(st.floats(-2, 2), min_size=1, max_size=12), st.data())
def test_splitting_a_run_into_rows_changes_no_gradient(losses, data):
    """A batch of two runs: the loss, linear in the per-token losses, is the two-level mean for any cut into rows."""
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(losses) - 1)), max_size=4)) | {0, len(losses)})
    calls = [call(f"c{start}", [1000 + start], list(range(start, stop))) for start, stop in itertools.pairwise(cuts)]
    rows = trajectories(R, calls, j_max=None, advantage=1.0)
    other = trajectories(RunId("other"), chain(3), advantage=-1.0)
    scale = batch_scale(rows + other)
    assert scale == 0.5
    batch = scale * math.fsum(
        weight * losses[token] for row in rows for token, weight in zip(row.ids[row.targets], row.weights, strict=True)
    )
    assert batch == pytest.approx(0.5 * np.mean(losses), abs=1e-12)


def test_a_run_with_three_branches():
    """loss-run-with-three-branches, for any cut of B into rows."""
    found = case("loss", "loss-run-with-three-branches")
    prefix = call("p", [1], [2] * 4)
    branches = [call(f"b{size}", [1, 2, 2, 2, 2, 100 + size], [3] * size) for size in (3, 5, 8)]
    a, b = (
        trajectories(RunId("A"), chain(10), advantage=1.0),
        trajectories(RunId("B"), [prefix, *branches], advantage=1.0),
    )
    scale = batch_scale(a + b)
    expected = found["expected"]["weight_per_token"]
    assert {scale * weight for weight in per_token(a)} == {expected["A"]["float"]}
    assert {scale * weight for weight in per_token(b)} == {expected["B"]["float"]}
    assert sum(len(row.targets) for row in b) == found["expected"]["owned_tokens"]["B"]
    assert sorted(int((row.targets < 5).sum()) for row in b) == [0, 0, 4]
    loss = scale * math.fsum(
        weight * (2.0 if rows is a else 1.0 if token == 2 else 4.0)
        for rows in (a, b)
        for row in rows
        for token, weight in zip(row.ids[row.targets], row.weights, strict=True)
    )
    assert loss == pytest.approx(found["expected"]["loss_value"]["float"])


def test_weights_of_equal_samples():
    """tree-sibling-samples-equal-tokens: each sampling event counts."""
    found = case("tree", "tree-sibling-samples-equal-tokens")
    calls = [from_case(entry) for entry in found["input"]["calls"]]
    expected = found["expected"]
    rows = trajectories(R, calls)
    assert per_token(rows) == {1 / expected["three_calls"]["loss_terms"]}
    summed: dict[str, Fraction] = {}
    for row in rows:
        for token in row.ids[row.targets].tolist():
            summed[str(token)] = summed.get(str(token), Fraction(0)) + Fraction(1, 6)
    assert {token: str(value) for token, value in summed.items()} == {
        token: value["exact"] for token, value in expected["three_calls"]["summed_weight_at_position"].items()
    }
    resent = trajectories(R, [*calls, from_case(found["input"]["resent"])])
    assert sum(len(row.targets) for row in resent) == expected["with_resent"]["loss_terms"]
    undelivered = [
        from_case(entry, status=CallStatus.COMPLETE if entry["call"] == "b" else CallStatus.DELIVERED)
        for entry in found["input"]["calls"]
    ]
    rows = trajectories(R, undelivered)
    assert sum(len(row.targets) for row in rows) == expected["undelivered_variant"]["loss_terms"]
    assert per_token(rows) == {expected["undelivered_variant"]["weight_per_term"]["float"]}


def test_constant_advantage_gives_no_expected_gradient():
    """K samples of one token: the sum over events of d log p / d logit has expectation 0; counting strings once has not."""
    p, samples = {5: 0.9, 6: 0.1}, 8
    expected_events = expected_strings = 0.0
    for ones in range(samples + 1):
        probability = math.comb(samples, ones) * p[5] ** ones * p[6] ** (samples - ones)
        calls = [call(f"s{number}", [1], [5 if number < ones else 6]) for number in range(samples)]
        tree = RunTree.from_calls(calls)
        terms = [row.path.ids[1] for row in select(tree, j_max=None)]
        assert len(terms) == samples and tree.unique_tokens == 1 + len(set(terms))
        expected_events += probability * sum((token == 5) - p[5] for token in terms)
        expected_strings += probability * sum((token == 5) - p[5] for token in set(terms))
    assert expected_events == pytest.approx(0, abs=1e-9)
    assert expected_strings == pytest.approx(-0.41258, abs=1e-4), "the wrong rule pushes rare tokens up"


def test_role_weights_go_with_the_call_that_sampled():
    calls = [call("a", [1], [2, 2]), call("s", [1, 2, 2, 3], [4, 4], role="main-summary"), call("b", [9], [8] * 4)]
    tree = RunTree.from_calls(calls)
    selection = select(tree, j_max=None)
    weights = run_weights(selection, role_weights={"main-summary": 3.0})
    by_call = {
        row.owned_spans[place].call: value
        for row, weight in zip(selection, weights, strict=True)
        for place, value in zip(row.calls, weight, strict=True)
    }
    assert by_call == {"a": 1 / 12, "s": 3 / 12, "b": 1 / 12}
    assert math.fsum(weight.sum() for weight in weights) == pytest.approx(1)
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(SettingsError, match="role weight of 'main'"):
            run_weights(selection, role_weights={"main": wrong})


def test_a_role_that_nobody_listed_weighs_as_one_that_says_nothing():
    for roles in (["main"], [Role("main")], []):
        rows = trajectories(R, [call("a", [1], [2]), call("s", [9], [4], role="critic")], roles=roles)
        assert [row.weights.tolist() for row in rows] == [[0.5], [0.5]], roles


def test_a_role_without_weight_is_context():
    calls = [call("a", [1], [2, 2]), call("s", [1, 2, 2, 3], [4, 4], role="side"), call("b", [1, 2, 2, 3, 4, 4], [5])]
    (row,) = trajectories(R, calls, roles=[Role("main"), Role("side", weight=0.0)])
    assert row.call_ids == ("a", "b") and row.targets.tolist() == [1, 2, 6] and len(row.ids) == 7
    assert per_token([row]) == {1 / 3}
    assert trajectories(R, calls[1:2], roles=[Role("side", weight=0.0)]) == []


def test_runs_draw_independently_under_one_seed():
    calls = [call("a", [1], [2] * 5), call("b", [3], [4] * 5)]
    first = {trajectories(RunId(f"r{number}"), calls, j_max=1, seed=7)[0].leaf for number in range(40)}
    assert first == {"a", "b"}
    turned = trajectories(R, reversed(calls), j_max=1, seed=7)
    assert records(trajectories(R, calls, j_max=1, seed=7)) == records(turned)
    assert len(trajectories(R, calls, seed=-1)) == 2, "any integer is a seed"


def test_a_batch_counts_runs_that_train():
    rows = trajectories(R, chain(2), advantage=0.0)
    unknown = trajectories(RunId("x"), chain(2))
    assert batch_scale(rows + unknown) == 1.0
    assert batch_scale(unknown) == 0.0 and batch_scale([]) == 0.0


def test_trajectories_survive_the_wire():
    calls = [call("a", [1], [2, 2]), call("b", [1, 2, 2, 3], [4])]
    for advantage in (0.5, None):
        (row,) = trajectories(R, calls, advantage=advantage)
        record = row.record()
        assert msgspec.json.decode(msgspec.json.encode(record), type=TrajectoryRecord) == record
        assert record.calls == [None, "a", "a", None, "b"] and record.advantage == advantage
        again = Row.from_record(record)
        assert again.record() == record
        for name in ("ids", "targets", "weights", "logprobs", "versions", "calls", "advantages", "temperatures"):
            before, after = getattr(row, name), getattr(again, name)
            assert before.dtype == after.dtype and np.array_equal(before, after, equal_nan=before.dtype.kind == "f"), (
                name
            )
        assert again.call_ids == row.call_ids


# -- advantages --------------------------------------------------------------------------------------------------------

_rewards = st.lists(
    st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True), st.sampled_from([0.0, 0.5, 1.0])), max_size=8
)


@settings(deadline=None)
@given(_rewards, st.sampled_from(Baseline), st.integers(0, 2), st.randoms(use_true_random=False))
def test_advantages_in_general(rewards, baseline, placeholders, shuffler):
    """Unknown rewards never count; results are finite, centred, monotone and independent of order."""
    members = [run(f"r{number}", reward) for number, reward in enumerate(rewards)]
    members += [run(f"p{number}", 0.0, placeholder=True) for number in range(placeholders)]
    credit = group_credit(members, baseline=baseline)
    known = {
        f"r{number}": reward for number, reward in enumerate(rewards) if reward is not None and math.isfinite(reward)
    }
    assert credit.scored == len(known) and credit.started == len(members) and credit.placeholders == placeholders
    shuffled = list(members)
    shuffler.shuffle(shuffled)
    assert group_credit(shuffled, baseline=baseline) == credit
    without_unknown = [member for member in members if member.run in known or member.placeholder]
    assert group_credit(without_unknown, baseline=baseline).advantages == credit.advantages
    if credit.dropped:
        assert credit.advantages == {}
        return
    assert set(credit.advantages) == set(known)
    assert all(math.isfinite(value) for value in credit.advantages.values())
    for one, other in itertools.combinations(known, 2):
        if known[one] > known[other]:
            assert credit.advantages[one] >= credit.advantages[other]


def test_statistics_are_over_runs():
    """loss-group-statistics-over-runs."""
    found = case("loss", "loss-group-statistics-over-runs")
    expected = found["expected"]
    first = [run(entry["run"], entry["reward"]) for entry in found["input"]["group"]]
    second = [run(entry["run"], entry["reward"], group="h") for entry in found["input"]["second_group_same_batch"]]
    credit = group_credit(first)
    assert credit.mean == expected["mean"] and credit.std == pytest.approx(expected["population_std"])
    for baseline, key in [
        (Baseline.MEAN, "advantage_mean_only"),
        (Baseline.POPULATION_STD, "advantage_population_std"),
        (Baseline.LEAVE_ONE_OUT, "advantage_leave_one_out"),
    ]:
        assert group_credit(first, baseline=baseline).advantages == pytest.approx(expected[key])
    by_sample = group_credit(first, baseline=Baseline.SAMPLE_STD).advantages
    assert by_sample == pytest.approx({"r1": 1.0, "r2": -1.0, "r3": 0.0})
    for order in itertools.permutations(first + second[:1]):
        both = advantages([*order, *second[1:]])
        assert both == {**expected["advantage_mean_only"], "r4": 5.0, "r5": -5.0}


def test_each_baseline_is_what_its_name_says():
    rewards = {"a": 1.0, "b": 0.0, "c": 0.25, "d": 0.25}
    mean, values = statistics.fmean(rewards.values()), list(rewards.values())
    for baseline, expected in {
        Baseline.MEAN: {name: value - mean for name, value in rewards.items()},
        Baseline.POPULATION_STD: {name: (value - mean) / statistics.pstdev(values) for name, value in rewards.items()},
        Baseline.SAMPLE_STD: {name: (value - mean) / statistics.stdev(values) for name, value in rewards.items()},
        Baseline.LEAVE_ONE_OUT: {name: value - (4 * mean - value) / 3 for name, value in rewards.items()},
    }.items():
        found = group_credit([run(*one) for one in rewards.items()], baseline=baseline)
        assert found.advantages == pytest.approx(expected), baseline
        assert (found.mean, found.std) == pytest.approx((mean, statistics.pstdev(values)))


@pytest.mark.parametrize("missing", [None, math.nan, math.inf, -math.inf])
def test_an_unscored_run_is_unknown(missing):
    """loss-unscored-run-in-group."""
    found = case("loss", "loss-unscored-run-in-group")
    expected, entries = found["expected"], found["input"]["group"]
    members = [run(entry["run"], missing if entry["reward"] is None else entry["reward"]) for entry in entries]
    credit = group_credit(members)
    assert credit.mean == pytest.approx(expected["mean"]["float"]) and credit.std == pytest.approx(
        expected["population_std"]
    )
    assert credit.advantages == pytest.approx(
        {name: value["float"] for name, value in expected["advantage_mean_only"].items()}
    )
    assert (credit.scored, credit.started) == (3, 4)
    rows = [
        row
        for entry in entries
        for row in trajectories(entry["run"], chain(entry["tokens"]), advantage=credit.advantages.get(entry["run"]))
    ]
    scale = batch_scale(rows)
    assert scale == 1 / expected["R"]
    for row in rows:
        if math.isfinite(row.advantage):
            (weight,) = per_token([row])
            assert scale * weight == pytest.approx(expected["weight_per_token"][row.run]["float"])
    lonely = group_credit([members[0], *(run(f"u{number}", None) for number in range(3))])
    assert lonely.dropped is Dropped.TOO_SMALL and lonely.advantages == {}
    nobody = group_credit([run(f"u{number}", None) for number in range(4)])
    assert nobody.dropped is Dropped.TOO_SMALL and nobody.mean is None and (nobody.scored, nobody.started) == (0, 4)


@pytest.mark.parametrize("baseline", Baseline)
def test_flat_groups_and_lonely_runs_are_dropped(baseline):
    """loss-flat-groups-and-lonely-runs."""
    found = case("loss", "loss-flat-groups-and-lonely-runs")
    members = {
        group["id"]: [
            run(f"{group['id']} run {number + 1}", reward, group=group["id"])
            for number, reward in enumerate(group["rewards"])
        ]
        for group in found["input"]["groups"]
    }
    dropped = {name: group_credit(group, baseline=baseline).dropped for name, group in members.items()}
    assert dropped == {"g1": None, "g2": Dropped.FLAT, "g3": Dropped.TOO_SMALL, "g4": Dropped.FLAT}
    credited = advantages(itertools.chain(*members.values()), baseline=baseline)
    assert len(credited) == found["expected"]["trained_runs"]
    sizes = {
        member.run: size
        for group in found["input"]["groups"]
        for member, size in zip(members[group["id"]], group["tokens"], strict=True)
    }
    rows = [
        row for name, size in sizes.items() for row in trajectories(name, chain(size), advantage=credited.get(name))
    ]
    scale = batch_scale(rows)
    for row in rows:
        if math.isfinite(row.advantage):
            assert {scale * weight for weight in per_token([row])} == {
                found["expected"]["weights"][f"{row.run} per token"]["float"]
            }


@settings(deadline=None)
@given(st.floats(1e-6, 1e6), st.integers(2, 6), st.floats(-2e-16, 2e-16), st.sampled_from(Baseline))
def test_rounding_is_no_contrast(reward, count, noise, baseline):
    members = [run(f"r{number}", reward * (1 + noise * (number % 2))) for number in range(count)]
    assert group_credit(members, baseline=baseline).dropped is Dropped.FLAT


@pytest.mark.parametrize("size", [1e-6, 1e150, 1e308])
def test_small_and_huge_rewards_have_contrast(size):
    """The sum, the difference and the squares of floats need not be floats."""
    credit = group_credit([run("a", size), run("b", 0.0)], baseline=Baseline.POPULATION_STD)
    assert credit.advantages == pytest.approx({"a": 1.0, "b": -1.0})
    credit = group_credit([run("a", size), run("b", -size)], baseline=Baseline.POPULATION_STD)
    assert credit.advantages == pytest.approx({"a": 1.0, "b": -1.0}) and credit.std == pytest.approx(size)
    credit = group_credit([run("a", size), run("b", size), run("c", -size)])
    assert credit.mean == pytest.approx(size / 3)
    assert credit.advantages == pytest.approx({"a": size / 1.5, "b": size / 1.5, "c": -size / 1.5 - size / 1.5})


def test_an_advantage_beyond_floats_is_the_largest():
    credit = group_credit([run("a", 1e308), run("b", -1e308)], baseline=Baseline.LEAVE_ONE_OUT)
    assert credit.advantages == {"a": sys.float_info.max, "b": -sys.float_info.max}


def test_outcome_table():
    """scoring-outcome-table: the two groups, with and without votes of placeholders, and the summary."""
    found = case("scoring", "scoring-outcome-table")
    expected = found["expected"]
    members = {
        name: run(name, row["reward"], placeholder=row.get("placeholder", False))
        for name, row in expected["table"].items()
    }
    group = lambda key: [members[name] for name in found["input"][key]]  # noqa: E731
    first = group_credit(group("group_1"))
    assert first.mean == pytest.approx(expected["group_1"]["mean"]["float"])
    assert first.advantages == pytest.approx(
        {name: value["float"] for name, value in expected["group_1"]["advantage"].items()}
    )
    assert (first.scored, first.placeholders, first.started) == (2, 1, 4)
    option = group_credit(group("group_1"), placeholders_vote=False)
    named = expected["group_1"]["if_placeholders_do_not_vote (named option)"]
    assert option.mean == pytest.approx(named["mean"]) and option.advantages == pytest.approx(named["advantage"])
    second = group_credit(group("group_2"))
    assert second.mean == pytest.approx(expected["group_2"]["mean"])
    assert second.advantages == pytest.approx(expected["group_2"]["advantage"])
    assert group_credit(group("group_2"), placeholders_vote=False).dropped is Dropped.TOO_SMALL
    rows = [
        row
        for name in "aceg"
        for row in trajectories(name, chain(2) if name != "g" else [], advantage=first.advantages.get(name))
    ]
    assert batch_scale(rows) == 1 / 2
    summary = tally(members.values())
    assert (summary.scored, summary.placeholders, summary.unscored, summary.started) == (6, 1, 5, 12)
    assert str(summary) == "scored 6 of 12, 1 placeholder, 5 unscored (5 scorer_error)"


def test_a_run_that_is_still_going_is_not_tallied():
    going = msgspec.structs.replace(run("a", None), status=RunStatus.RUNNING)
    assert tally([going]).started == 0
    assert advantages([run("a", 1.0, group=None), run("b", 0.0, group=None)]) == {}
