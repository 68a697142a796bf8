"""Calls that are left out by a filter: context where they lie on a path, nothing in weights and denominators, counted."""

from __future__ import annotations

import numpy as np
import pytest
from units_kit import call, run_record, seal

from gyre_sdk.errors import SettingsError
from gyre_sdk.records import CallRecord, CallStatus, Sampling, VersionSpan
from gyre_sdk.select import Role
from gyre_sdk.trainer.units import Row, SealedGroup


def turns(run: str, **changed: dict) -> list[CallRecord]:
    """Three calls that continue each other: two tokens each; `c1={...}` changes a call."""
    made, prompt = [], [1, 2, 3]
    for number in range(3):
        sampled = [10 + number, 20 + number]
        made.append(call(run, f"c{number}", prompt, sampled, **changed.get(f"c{number}", {})))
        prompt = [*prompt, *sampled, 90 + number]
    return made


def sealed(first: list[CallRecord], **options: object) -> tuple[SealedGroup, list[Row]]:
    """Seal a run beside a plain one; return the group and the first run's rows."""
    runs = [run_record("a", 1.0), run_record("b", 0.0, member=1)]
    group = seal(runs, {"a": first, "b": turns("b")}, **options)
    return group, [row for unit in group.units for row in unit.rows if row.run == "a"]


CASES = {
    "sampling": ({"sampling": Sampling(top_p=0.9)}, {}),
    "truncated": ({"finish_reason": "length"}, {"mask_truncated": True}),
    "role": ({"role": "side"}, {"roles": (Role("main"), Role("side", weight=0.0))}),
    "stale": ({"versions": [VersionSpan(2, 0, 1), VersionSpan(3, 1, 2)]}, {"max_staleness": 2, "lag": lambda v: 5 - v}),
}


@pytest.mark.parametrize("reason", CASES)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_masked_call_leaves_targets_weights_and_denominators(reason: str, at: int) -> None:
    changed, options = CASES[reason]
    group, (row,) = sealed(turns("a", **{f"c{at}": changed}), **options)
    assert group.dropped == {f"call_{reason}": 1} and group.dropped_tokens == {f"call_{reason}": 2}
    assert row.call_ids == tuple(f"a-c{number}" for number in range(3) if number != at)
    assert row.weights.tolist() == [0.25] * 4 and sum(unit.tokens for unit in group.units) == 4 + 6
    kept = [3 + 3 * number + offset for number in range(3) if number != at for offset in range(2)]
    assert row.targets.tolist() == kept and row.ids[row.targets].tolist() == [
        10 + number + 10 * offset for number in range(3) if number != at for offset in range(2)
    ]
    assert len(row.ids) == (8 if at == 2 else 11), "what comes after the last target is no context of anything"


@pytest.mark.parametrize("reason", ["truncated", "role", "stale"])
def test_what_a_filter_does_not_ask_for_is_trained(reason: str) -> None:
    changed, _ = CASES[reason]
    group, (row,) = sealed(turns("a", c1=changed))
    assert len(row.targets) == 6 and group.dropped == {} and group.dropped_tokens == {}


def test_staleness_is_the_oldest_token_of_the_call() -> None:
    spans = [VersionSpan(4, 0, 1), VersionSpan(1, 1, 2)]
    for bound, masked in ((4, False), (3, True)):
        group, _ = sealed(turns("a", c0={"versions": spans}), max_staleness=bound, lag=lambda version: 5 - version)
        assert (group.dropped == {"call_stale": 1}) is masked
    with pytest.raises(SettingsError, match="max_staleness is 1, and nobody told"):
        sealed(turns("a"), max_staleness=1)


def test_a_failed_call_is_counted_once_by_what_it_is() -> None:
    bad = {"status": CallStatus.FAILED, "finish_reason": "length", "sampling": Sampling(top_p=0.5)}
    group, _ = sealed([*turns("a"), call("a", "x", [7, 8], [9], **bad)], mask_truncated=True)
    assert group.dropped == {"call_failed": 1} and group.dropped_tokens == {"call_failed": 1}


def test_a_run_that_is_masked_whole_leaves_the_denominator_but_not_the_statistics() -> None:
    cut = {f"c{number}": {"finish_reason": "length"} for number in range(3)}
    group, rows = sealed(turns("a", **cut), mask_truncated=True)
    assert rows == [] and sum(unit.runs for unit in group.units) == 1
    assert group.dropped == {"call_truncated": 3, "run_without_targets": 1}
    (other,) = [row for unit in group.units for row in unit.rows]
    assert other.run == "b" and other.advantage == -0.5


def test_masks_come_before_selection() -> None:
    """A branch that is masked whole is not drawn, and does not take a prefix or a place from one that is not."""
    long = [call("a", f"long{n}", [1, 2, 3, 10, 20, 70 + n], [5] * 50, finish_reason="length") for n in range(4)]
    short = call("a", "short", [1, 2, 3, 10, 20, 60], [6])
    first = call("a", "first", [1, 2, 3], [10, 20])
    for seed in range(5):
        group, (row,) = sealed([first, *long, short], mask_truncated=True, j_max=1, seed=seed)
        assert row.call_ids == ("a-first", "a-short") and group.dropped_tokens == {"call_truncated": 200}


def test_what_selection_leaves_is_counted() -> None:
    branches = [call("a", f"x{n}", [1, 40 + n], [50 + n] * (n + 1)) for n in range(4)]
    group, (row,) = sealed(branches, j_max=1)
    assert group.dropped == {"call_unselected": 3}
    assert group.dropped_tokens == {"call_unselected": 10 - len(row.targets)}


def test_roles_weigh_their_tokens() -> None:
    group, (row,) = sealed(turns("a", c1={"role": "critic"}), roles=(Role("main"), Role("critic", weight=3.0)))
    assert row.weights.tolist() == pytest.approx([0.1, 0.1, 0.3, 0.3, 0.1, 0.1])
    assert row.call_roles == ("main", "critic", "main") and group.dropped == {}


def test_temperatures_are_the_calls_own() -> None:
    _, (row,) = sealed(turns("a", c1={"sampling": Sampling(temperature=0.7)}))
    assert row.temperatures.tolist() == [1.0, 1.0, 0.7, 0.7, 1.0, 1.0]
    assert np.array_equal(row.calls, [0, 0, 1, 1, 2, 2])
