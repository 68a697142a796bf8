"""Bounded selection by role: the drawn rows, their probabilities and who owns what (promise 3)."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_inputs import call, case, recorded_runs

from gyre_sdk.errors import SettingsError
from gyre_sdk.records import ROLE_ORDER, CallStatus
from gyre_sdk.select import RULES, Choices, Role, select
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


@settings(deadline=None)
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
        path, places = row.path, row.positions
        assert path.ids.tolist() == row.ids.tolist() == tree.ids(row.leaf).tolist()
        assert row.targets == len(places) == len(set(places.tolist())) > 0 and (np.diff(places) > 0).all()
        for at, place, logprob, version in zip(places, row.calls, row.logprobs, row.versions, strict=True):
            event = path.owner(at)
            assert event is not None and event[0] in targets and event[0] == row.owned_spans[place].call
            assert logprob == tree.logprobs(event[0])[event[1]]
            assert version == tree.versions(event[0])[event[1]] >= 0
        owners.update(span.call for span in row.owned_spans)
    assert all(count == 1 for count in owners.values())
    if len(taken) < j_max:
        assert set(owners) == {name for name, size in targets.items() if size}, (
            "a bound that did not bind loses nothing"
        )


@settings(deadline=None)
@given(recorded_runs(), st.integers(0, 2**32), st.randoms(use_true_random=False))
def test_the_same_seed_draws_the_same_whatever_the_arrival(calls, seed, shuffler):
    first = {rule: select(RunTree.from_calls(calls), rule=rule, j_max=3, seed=seed) for rule in RULES}
    shuffler.shuffle(calls)
    tree = RunTree.from_calls(calls)
    for rule, taken in first.items():
        assert taken == select(tree, rule=rule, j_max=3, seed=seed), "the same leaves, roles and owned stretches"


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
    assert [row.leaf for row in select(tree, roles=["subagent", "zeta", "main"])] == ["s", "z", "m"]
    renamed = select(tree, classify=lambda tree, leaf: "main" if leaf == "z" else "subagent")
    assert renamed[0].leaf == "z" and renamed[0].role == "main"


def test_a_bound_below_one_is_refused():
    with pytest.raises(SettingsError, match="j_max is 0"):
        select(RunTree(), j_max=0)


def test_an_empty_run_selects_nothing():
    assert select(RunTree()) == []
    assert select(RunTree.from_calls([call("a", [1], [])])) == []


# -- roles as data, and the other rules --------------------------------------------------------------------------------


def branching() -> RunTree:
    """Three ends of the main agent over one prefix, two sub-agents, one summary."""
    calls = [call("p", [1], [2] * 4)]
    calls += [call(f"m{size}", [1, 2, 2, 2, 2, 10 + size], [3] * size) for size in (2, 9, 5)]
    calls += [call(f"s{size}", [50 + size], [6] * size, role="subagent") for size in (20, 7)]
    calls += [call("z", [1, 2, 2, 2, 2, 99], [8] * 30, role="main-summary")]
    return RunTree.from_calls(calls)


def leaves(tree: RunTree, **options: object) -> list[str]:
    return [row.leaf for row in select(tree, **options)]  # type: ignore[arg-type]


def test_longest_takes_what_claims_most():
    tree = branching()
    assert leaves(tree, rule="longest", j_max=None) == ["m9", "m5", "m2", "z", "s20", "s7"]
    assert leaves(tree, rule="longest", j_max=1) == ["m9"]
    owned = [row.targets for row in select(tree, rule="longest", j_max=None)]
    assert owned == [13, 5, 2, 30, 20, 7], "the prefix belongs to the first that was taken"


def test_all_takes_everything_whatever_the_bounds():
    tree = branching()
    roles = [Role("main", j_max=1), Role("subagent", j_max=0)]
    everything = ["m9", "m5", "m2", "s20", "s7", "z"]
    assert leaves(tree, rule="all", j_max=1, roles=roles) == everything
    tree.insert(call("unanswered", [1, 2, 2, 2, 2, 7], []))
    assert "unanswered" in tree.candidates() and leaves(tree, rule="all", roles=roles) == everything, "it owns nothing"


def test_main_only_takes_the_first_role_alone():
    tree = branching()
    for seed in range(5):
        assert sorted(leaves(tree, rule="main_only", j_max=None, seed=seed)) == ["m2", "m5", "m9"]
    assert set(leaves(tree, rule="main_only", roles=["subagent"])) == {"s20", "s7"}
    assert leaves(tree, rule="main_only", roles=["critic"]) == []


@pytest.mark.parametrize("rule", ["paper", "longest"])
def test_a_role_has_a_bound_of_its_own(rule):
    tree = branching()
    roles = [Role("main", j_max=2), Role("main-summary", j_max=0), Role("subagent", j_max=1)]
    for seed in range(5):
        taken = select(tree, rule=rule, j_max=None, seed=seed, roles=roles)
        assert [row.role for row in taken] == ["main", "main", "subagent"]
        assert [row.role for row in select(tree, rule=rule, j_max=2, seed=seed, roles=roles)] == ["main", "main"]


def test_a_rule_of_ones_own_chooses_and_ownership_follows():
    def last_leaves(choices: Choices) -> list[str]:
        assert choices.j_max == 5 and [role.name for role in choices.roles] == list(ROLE_ORDER)
        return [candidate.leaf for candidate in reversed(choices.candidates) if candidate.role == "main"]

    taken = select(branching(), rule=last_leaves)
    assert [(row.leaf, row.targets) for row in taken] == [("m9", 13), ("m5", 5), ("m2", 2)]

    def by_lot(choices: Choices) -> list[str]:
        return [str(choices.generator.choice([candidate.leaf for candidate in choices.candidates]))]

    draws = {seed: leaves(branching(), rule=by_lot, seed=seed) for seed in range(20)}
    assert len({tuple(drawn) for drawn in draws.values()}) > 1
    assert draws == {seed: leaves(branching(), rule=by_lot, seed=seed) for seed in range(20)}


def test_a_path_that_is_not_taken_claims_nothing():
    """Whatever a rule looked at or refused before: the prefix belongs to the first path that was taken."""

    def hesitant(choices: Choices) -> list[str]:
        claims = choices.claims()
        refused, kept = (next(one for one in choices.candidates if one.leaf == name) for name in ("m9", "m2"))
        claims.claim(refused)
        return [kept.leaf]

    (row,) = select(branching(), rule=hesitant)
    assert (row.leaf, row.targets) == ("m2", 6)


def test_wrong_rules_and_roles_are_named():
    tree = branching()
    with pytest.raises(SettingsError, match=r"rule 'best' is unknown; use one of paper, all, longest, main_only"):
        select(tree, rule="best")
    with pytest.raises(SettingsError, match="took 'p' which ends no candidate"):
        select(tree, rule=lambda choices: ["p"])
    with pytest.raises(SettingsError, match="took 'm2' a second time"):
        select(tree, rule=lambda choices: ["m2", "m2"])
    with pytest.raises(SettingsError, match="role 'main' is listed twice"):
        select(tree, roles=["main", Role("main", weight=2.0)])
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(SettingsError, match="weight of role 'main'"):
            Role("main", weight=weight)
    with pytest.raises(SettingsError, match="j_max of role 'main' is -1"):
        Role("main", j_max=-1)


def test_large_selections_cost_what_they_change():
    """400 branches, each behind a chain of its own, without a bound: claims are not counted anew for each draw."""
    calls = []
    for lane in range(400):
        history = [1000 + lane]
        for turn in range(5):
            calls.append(call(f"l{lane}t{turn}", history, [turn + 2]))
            history = [*history, turn + 2, 7]
    taken = select(RunTree.from_calls(calls), j_max=None)
    assert len(taken) == 400 and sum(row.targets for row in taken) == 2000
