"""A tree as plain values and as few lines: nothing is lost, nothing is told twice, and large runs stay short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import log2

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from tree_inputs import call, case, from_case, recorded_runs, routed_runs

from gyre_sdk.records import CallId, CallStatus, ForkReason
from gyre_sdk.select import select
from gyre_sdk.tree import RunTree, SampledCall
from gyre_sdk.tree.lines import Line, lines
from gyre_sdk.tree.outline import NOT_SELECTED, TreeOutline, outline


def told(calls: Sequence[SampledCall], *, j_max: int | None = 2, with_ids: bool = True) -> tuple[RunTree, TreeOutline]:
    tree = RunTree.from_calls(calls)
    chosen = [(row.leaf, row.role, row.owned_spans) for row in select(tree, j_max=j_max)]
    return tree, outline(tree, chosen, with_ids=with_ids)


def everywhere(found: Sequence[Line]) -> Iterator[tuple[int, Line]]:
    """Yield every line with its depth."""
    pending = [(0, line) for line in found]
    while pending:
        depth, line = pending.pop()
        yield depth, line
        pending += [(depth + 1, below) for below in line.below]


@settings(max_examples=50, deadline=None)
@given(routed_runs())
def test_an_outline_holds_the_whole_tree(calls):
    tree, found = told(calls)
    assert msgspec.json.decode(msgspec.json.encode(found), type=TreeOutline) == found
    assert [node.node for node in found.nodes] == list(range(len(found.nodes)))
    whole: dict[int | None, list[int]] = {None: []}
    for node in found.nodes:
        assert node.above is None or node.above < node.node
        assert node.ids is not None and len(node.ids) == node.stop - node.start
        assert len(whole[node.above]) == node.start
        whole[node.node] = whole[node.above] + node.ids
    by_name = {made.call: made for made in found.calls}
    for made in calls:
        entry = by_name[made.call]
        assert whole[entry.node] == tree.ids(made.call).tolist()
        assert (entry.prompt_tokens, entry.sampled_tokens) == (len(made.prompt_ids), len(made.sampled_ids))
        assert (entry.role, entry.lane, entry.status) == (made.role, made.lane, made.status)
        assert entry.parent == tree.parent(made.call)
    assert sum(node.stop - node.start for node in found.nodes) <= found.unique_tokens
    assert found.sampled_tokens == sum(len(made.sampled_ids) for made in calls)


@settings(max_examples=50, deadline=None)
@given(recorded_runs())
def test_an_outline_says_of_every_call_where_it_is_trained_or_why_not(calls):
    tree, found = told(calls)
    for entry in found.calls:
        reason = tree.untrained(entry.call)
        if entry.trained_in is not None:
            assert entry.untrained is None and reason is None and entry.sampled_tokens
        elif reason is not None:
            assert entry.untrained == str(reason)
        else:
            assert entry.untrained == (NOT_SELECTED if entry.sampled_tokens else None)
    assert found.untrained == Counter(entry.untrained for entry in found.calls if entry.untrained)
    by_name = {entry.call: entry for entry in found.calls}
    for chosen in found.trajectories:
        assert chosen.owned == sum(part.stop - part.start for part in chosen.stretches if part.owned)
        for part in chosen.stretches:
            assert part.owned == (by_name[part.call].trained_in == chosen.leaf)
    assert found.trained_tokens == sum(chosen.owned for chosen in found.trajectories)


@settings(max_examples=50, deadline=None)
@given(recorded_runs())
def test_nodes_do_not_depend_on_arrival(calls):
    nodes = [
        [(node.above, node.ids, sorted(node.calls)) for node in told(order)[1].nodes] for order in (calls, calls[::-1])
    ]
    assert nodes[0] == nodes[1]


@settings(max_examples=80, deadline=None)
@given(recorded_runs(max_calls=12))
def test_every_call_is_in_one_line_and_lines_are_not_deep(calls):
    _, found = told(calls)
    drawn = list(everywhere(lines(found)))
    assert Counter(made.call for _, line in drawn for made in line.calls) == Counter(made.call for made in calls)
    assert max((depth for depth, _ in drawn), default=0) <= log2(len(calls)) + 1
    for _, line in drawn:
        if line.calls:
            assert {made.role for made in line.calls} == {line.role}
            assert line.fate and line.sampled == sum(made.sampled_tokens for made in line.calls)
        else:
            assert line.shared_by > 1, "a stretch where no call ends is shared"
        if line.nodes and not line.branches:
            assert (line.nodes[0].start, line.nodes[-1].stop) == (line.start, line.stop)
    stretches = [node.node for _, line in drawn if not line.branches for node in line.nodes]
    assert len(stretches) == len(set(stretches))


def grown(turns: int, *, side: int = 0) -> list[SampledCall]:
    """Make a run that grows turn by turn; from each turn so many sub-agents set off."""
    made, history, rng = [], [1, 2], np.random.default_rng(0)
    for turn in range(turns):
        answer = rng.integers(3, 100_000, 3).tolist()
        made.append(call(f"m{turn:03}", history, answer))
        history = [*history, *answer, int(rng.integers(3, 100_000))]
        for number in range(side):
            words = rng.integers(3, 100_000, 5).tolist()
            made.append(call(f"s{turn:03}-{number}", [*history, *words[:3]], words[3:], role="subagent"))
    return made


def test_a_chain_of_three_hundred_calls_is_one_line():
    _, found = told(grown(300), j_max=5)
    (line,) = lines(found)
    assert (len(line.calls), line.sampled, line.fate, line.below) == (300, 900, "trained", [])
    assert line.start == 0 and line.stop == 2 + 4 * 299 + 3


def test_small_branches_of_a_long_run_are_told_together():
    _, found = told(grown(100, side=2), j_max=5)
    drawn = list(everywhere(lines(found)))
    assert len(found.calls) == 300 and len(drawn) < 20
    told_together = [line for _, line in drawn if line.branches]
    assert sum(line.branches for line in told_together) > 180
    assert all(line.role == "subagent" and line.branches == len(line.calls) for line in told_together)


def test_a_line_ends_where_role_or_fate_changes_and_tells_forks():
    calls = [
        call("a", [1], [2]),
        call("b", [1, 2, 3], [4]),
        call("s", [1, 2, 3, 4, 5], [6], role="main-summary"),
        call("c", [1, 9], [7], parent="s", fork_reason=ForkReason.COMPACTION, shared=1),
        call("x", [1, 9, 7, 8], [5], status=CallStatus.COMPLETE, parent="c", shared=3),
    ]
    _, found = told(calls, j_max=None)
    drawn = [
        (line.role, line.fate, [made.call for made in line.calls], dict(line.forks))
        for _, line in everywhere(lines(found))
    ]
    assert sorted(drawn) == [
        ("", "", [], {}),
        ("main", "orphan", ["x"], {}),
        ("main", "trained", ["a", "b"], {}),
        ("main", "trained", ["c"], {"compaction": 1}),
        ("main-summary", "trained", ["s"], {}),
    ]


@pytest.mark.parametrize(
    "name",
    [
        "tree-chain-becomes-one-row",
        "tree-compaction-replaces-history",
        "tree-rollback-longest-prefix",
        "tree-sibling-samples-equal-tokens",
        "tree-subagent-shares-system-prompt",
    ],
)
def test_cases_are_told_as_they_are(name):
    found = case("tree", name)
    calls = [from_case(entry) for entry in found["input"]["calls"]]
    tree, seen = told(calls, j_max=None)
    assert seen.raw_tokens == sum(len(entry["prompt"]) + len(entry["output"]) for entry in found["input"]["calls"])
    assert seen.unique_tokens == tree.unique_tokens and seen.trained_tokens == seen.sampled_tokens
    assert seen.untrained == {}
    for key in ("raw_tokens", "raw_tokens_of_all_calls"):
        assert seen.raw_tokens == found["expected"].get(key, seen.raw_tokens)
    assert seen.unique_tokens == found["expected"].get("unique_tokens", seen.unique_tokens)


def test_given_up_attempts_are_told_and_in_no_path():
    tree = RunTree.from_calls([call("a", [1], [2])])
    found = outline(tree, given_up={CallId("a"): [20, 3]})
    (line,) = lines(found)
    assert line.given_up == (2, 23) and found.sampled_tokens == 1 and found.nodes[0].ids is None


def test_a_call_without_tokens_has_a_line():
    _, found = told([call("a", [], []), call("b", [1], [2])])
    assert sorted(line.fate for line in lines(found)) == ["hosted", "trained"]
