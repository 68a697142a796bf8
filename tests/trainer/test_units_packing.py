"""Units keep together what shares prefixes, stay in their budget, and come out the same in any process."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_inputs import recorded_runs
from units_kit import call, run_record, seal, two_runs

from gyre_sdk.records import CallRecord
from gyre_sdk.select import RULES, Role
from gyre_sdk.trainer.units import Row, SealedGroup, Sealer, unique_tokens
from gyre_sdk.tree import SampledCall


def shared(one: Row, other: Row) -> int:
    size = min(len(one.ids), len(other.ids))
    differs = np.flatnonzero(one.ids[:size] != other.ids[:size])
    return int(differs[0]) if len(differs) else size


def recorded(run: str, made: SampledCall) -> CallRecord:
    fields = {"status": made.status, "logprobs": list(made.logprobs), "versions": list(made.versions)}
    return call(run, made.call, made.prompt_ids.tolist(), made.sampled_ids.tolist(), role=made.role, **fields)


@settings(max_examples=25, deadline=None)
@given(st.lists(recorded_runs(6), min_size=2, max_size=3), st.integers(0, 25))
def test_units_hold_every_row_once_within_their_budget(made: list[list[SampledCall]], budget: int) -> None:
    runs = [run_record(f"r{n}", float(n), member=n) for n in range(len(made))]
    calls = {f"r{n}": [recorded(f"r{n}", one) for one in some] for n, some in enumerate(made)}
    whole = [row for unit in seal(runs, calls, j_max=None).units for row in unit.rows]
    group = seal(runs, calls, j_max=None, unit_tokens=budget)
    assert [row.leaf for unit in group.units for row in unit.rows] == [row.leaf for row in whole]
    assert sum(unit.runs for unit in group.units) == len({row.run for row in whole})
    assert sum(unit.tokens for unit in group.units) == sum(len(row.targets) for row in whole)
    for unit in group.units:
        assert not budget or len(unit.rows) == 1 or unique_tokens(unit.rows) <= budget
    for unit, after in pairwise(group.units):
        assert unique_tokens([*unit.rows, after.rows[0]]) > budget, "a unit that has room takes the next row"
    assert [row.run for row in whole] == sorted(row.run for row in whole), "rows of a run lie together"


@settings(max_examples=25, deadline=None)
@given(recorded_runs())
def test_rows_of_a_run_come_depth_first(made: list[SampledCall]) -> None:
    """Whatever two rows share, all rows between them share too: a walk through the tree meets each stretch once."""
    runs = [run_record("r0", 0.0), run_record("r1", 1.0, member=1)]
    calls = {"r0": [recorded("r0", one) for one in made], "r1": [call("r1", "c", [1], [2])]}
    rows = [row for unit in seal(runs, calls, j_max=None).units for row in unit.rows if row.run == "r0"]
    for first in range(len(rows)):
        for last in range(first + 2, len(rows)):
            least = min(shared(one, other) for one, other in pairwise(rows[first : last + 1]))
            assert least == shared(rows[first], rows[last])
    tree = {tuple(row.ids[: depth + 1]) for row in rows for depth in range(len(row.ids))}
    assert unique_tokens(rows) == len(tree)


def test_a_budget_counts_a_shared_prefix_once() -> None:
    """4 branches of 10 tokens behind 100: all fit into 140 tokens, and two units of two into 120."""
    runs, calls = two_runs()
    prefix = list(range(100, 200))
    calls["a"] = [call("a", "p", [1], prefix[1:])]
    calls["a"] += [call("a", f"b{n}", [1, *prefix[1:], 7 + n], [9] * 9) for n in range(4)]
    for budget, sizes in ((149, [4]), (120, [2, 2]), (110, [1] * 4), (5, [1] * 4)):
        units = [[row for row in unit.rows if row.run == "a"] for unit in seal(runs, calls, unit_tokens=budget).units]
        assert [len(rows) for rows in units if rows] == sizes


def _ids(group: SealedGroup) -> list[str]:
    return [unit.id for unit in group.units]


_AGAIN = """
import json, pickle, sys
sealer, runs, calls, seeds = pickle.load(sys.stdin.buffer)
sealed = sealer.seal_records("g", runs, lambda run: calls[run], lag=lambda version: 0)
print(json.dumps([[unit.id for unit in sealed.units], sealer.settings]))
"""


def test_the_same_record_rule_and_seed_give_the_same_rows_in_any_process() -> None:
    runs, calls = two_runs()
    calls["a"] = [call("a", f"x{n}", [1, 40 + n % 3], [50 + n] * (n + 1)) for n in range(9)]
    sealer = Sealer(seed=5, rule="paper", roles=(Role("main", 2.0, 4),), max_staleness=3, unit_tokens=40)
    mine = sealer.seal_records("g", runs, lambda run: calls[run], lag=lambda version: 0)
    turned = {run: made[::-1] for run, made in calls.items()}
    done = subprocess.run(
        [sys.executable, "-c", _AGAIN],
        input=pickle.dumps((sealer, runs[::-1], turned, None)),
        capture_output=True,
        env={"PYTHONHASHSEED": "77"},
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == [_ids(mine), json.loads(json.dumps(dict(mine.settings)))]
    others = [Sealer(seed=5, rule=rule) for rule in RULES] + [Sealer(seed=6)]
    found = {tuple(_ids(other.seal_records("g", runs, lambda run: calls[run]))) for other in others}
    assert len(found) >= 3, "rules and seeds matter"
    assert len({json.dumps(other.settings) for other in others}) == 5, "and are told apart by the settings"
