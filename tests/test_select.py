"""Bounded selection by role: the drawn rows, their probabilities and who owns what (promise 3)."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_inputs import call, case, recorded_runs

from gyre_sdk.errors import SettingsError
from gyre_sdk.records import ROLE_ORDER, CallStatus
from gyre_sdk.select import select
from gyre_sdk.tree import RunTree

Leaves = dict[str, tuple[str, frozenset[str]]]
"""Leaf -> its role and the segments on its path."""


def outcomes(leaves: Leaves, sizes: dict[str, int], order: list[str], j_max: int) -> dict[tuple[str, ...], Fraction]:
    """Work out the exact probability of every set of taken leaves, straight from the rule."""
    found: Counter[tuple[str, ...]] = Counter()

    def walk(taken: tuple[str, ...], claimed: frozenset[str], probability: Fraction) -> None:
        if len(taken) < j_max:
            for role in order:
                left = {
                    name: sum(sizes[part] for part in path - claimed)
                    for name, (of, path) in leaves.items()
                    if of == role
                }
                total = sum(left.values())
                if total:
                    for name, size in left.items():
                        if size:
                            walk((*taken, name), claimed | leaves[name][1], probability * Fraction(size, total))
                    return
        found[tuple(sorted(taken))] += probability

    walk((), frozenset(), Fraction(1))
    return dict(found)


def case_tree(found: dict) -> RunTree:
    """Build the case's tree: one call per segment, whose role is that of the leaf that it ends."""
    sizes, calls, whole = found["input"]["segments"]["tokens"], {}, {}
    role_of = {leaf["path"][-1]: leaf["role"] for name, leaf in found["input"]["leaves"].items() if name != "X"}
    for leaf in found["input"]["leaves"].values():
        history: list[int] = []
        for segment in leaf["path"]:
            prompt = [*history, 1000 + ord(segment)]
            sampled = [ord(segment)] * sizes[segment]
            calls[segment] = call(segment, prompt, sampled, role=role_of.get(segment, "main"))
            history = whole[segment] = prompt + sampled
    calls["X"] = call("X", [*whole["a"], 999], [], status=CallStatus.ABORTED)
    return RunTree.from_calls(calls.values())


LEAF_NAMES = {"b": "M1", "c": "M2", "X": "X", "d": "MS", "h": "S1", "f": "S2", "g": "SS"}


@pytest.mark.parametrize("j_max", [1, 2, 3, 4, 99])
def test_case_probabilities(j_max):
    """selection-roles-first-then-unclaimed-tokens: support, probabilities and trained tokens."""
    found = case("selection", "selection-roles-first-then-unclaimed-tokens")
    tree, draws = case_tree(found), 1500
    expected = {tuple(sorted(row["leaves"])): row for row in found["expected"][f"J_max={j_max}"]}
    leaves = {name: (leaf["role"], frozenset(leaf["path"])) for name, leaf in found["input"]["leaves"].items()}
    exact = outcomes(leaves, found["input"]["segments"]["tokens"], found["input"]["role_order"], j_max)
    assert {key: str(value) for key, value in exact.items()} == {
        key: row["probability"]["exact"] for key, row in expected.items()
    }
    seen: Counter[tuple[str, ...]] = Counter()
    for seed in range(draws):
        taken = select(tree, j_max=j_max, seed=seed)
        names = tuple(sorted(LEAF_NAMES[row.leaf] for row in taken))
        seen[names] += 1
        assert sum(row.targets for row in taken) == expected[names]["trained_tokens"]
    for names, probability in exact.items():
        p = float(probability)
        assert abs(seen[names] / draws - p) < 4.5 * sqrt(p * (1 - p) / draws), names


@given(recorded_runs(), st.integers(1, 6), st.integers(0, 2**32))
def test_selection_follows_the_rule(calls, j_max, seed):
    """On any tree: roles in order, nothing empty is taken, each event has one owner, the rest of the row is context."""
    tree = RunTree.from_calls(calls)
    taken = select(tree, j_max=j_max, seed=seed)
    targets = {made.call: len(made.sampled_ids) for made in calls if tree.untrained(made.call) is None}
    leaves = {
        leaf: (tree.role(leaf), frozenset(span.call for span in tree.spans(leaf) if span.call in targets))
        for leaf in tree.candidates()
    }
    order = [*ROLE_ORDER, "critic"]
    assert tuple(sorted(row.leaf for row in taken)) in outcomes(leaves, targets, order, j_max)
    owners: Counter[str] = Counter()
    for row in taken:
        assert row.targets == row.owned.sum() > 0
        assert row.path.ids.tolist() == tree.ids(row.leaf).tolist()
        for at, owned in enumerate(row.owned):
            event = row.path.owner(at)
            if owned:
                assert event is not None and event[0] in targets
                assert row.logprobs[at] == tree.logprobs(event[0])[event[1]]
                assert row.versions[at] == tree.versions(event[0])[event[1]] >= 0
            else:
                assert row.logprobs[at] == 0 and row.versions[at] == -1
        owners.update(span.call for span in row.owned_spans)
    assert all(count == 1 for count in owners.values())
    if len(taken) < j_max:
        assert set(owners) == {name for name, size in targets.items() if size}, (
            "a bound that did not bind loses nothing"
        )


@given(recorded_runs(), st.integers(0, 2**32), st.randoms(use_true_random=False))
def test_the_same_seed_draws_the_same_whatever_the_arrival(calls, seed, shuffler):
    first = select(RunTree.from_calls(calls), j_max=3, seed=seed)
    shuffler.shuffle(calls)
    second = select(RunTree.from_calls(calls), j_max=3, seed=seed)
    assert [(row.leaf, row.owned.tolist()) for row in first] == [(row.leaf, row.owned.tolist()) for row in second]


def test_no_bound_takes_everything():
    calls = [call("root", [1], [2])] + [call(f"c{number}", [1, 2, 10 + number], [3]) for number in range(9)]
    tree = RunTree.from_calls(calls)
    assert len(select(tree, j_max=None)) == 9
    assert len(select(tree)) == 5


def test_roles_are_data_with_a_hook():
    tree = RunTree.from_calls(
        [call("m", [1], [2, 2, 2]), call("s", [5], [6], role="subagent"), call("z", [7], [8], role="zeta")]
    )
    assert [row.leaf for row in select(tree)] == ["m", "s", "z"], "unknown roles come last"
    assert [row.leaf for row in select(tree, role_order=["subagent", "zeta", "main"])] == ["s", "z", "m"]
    renamed = select(tree, classify=lambda tree, leaf: "main" if leaf == "z" else "subagent")
    assert renamed[0].leaf == "z" and renamed[0].role == "main"


def test_a_bound_below_one_is_refused():
    with pytest.raises(SettingsError, match="j_max is 0"):
        select(RunTree(), j_max=0)


def test_an_empty_run_selects_nothing():
    assert select(RunTree()) == []
    assert select(RunTree.from_calls([call("a", [1], [])])) == []
