"""Why calls fork, which attempts at a compaction were rejected, and what becomes of calls after they are inserted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_inputs import call, case, from_case, recorded_runs

from gyre_sdk.errors import TreeError
from gyre_sdk.records import CallId, CallStatus, ForkReason
from gyre_sdk.select import select
from gyre_sdk.tree import Fork, RunTree, SampledCall, Untrained

SUMMARY = "main-summary"


def summary(name: str, prompt: list[int], answer: list[int], **others: Any) -> SampledCall:
    return call(name, prompt, answer, role=SUMMARY, **others)


def reasons(calls: list[SampledCall]) -> dict[str, Untrained | None]:
    """Return why each call is no target; the same for every order of arrival."""
    found = [
        {name: tree.untrained(name) for name in tree.calls()}
        for tree in map(RunTree.from_calls, itertools.islice(itertools.permutations(calls), 50))
    ]
    assert all(other == found[0] for other in found)
    return dict(found[0])


def test_recorded_reasons_are_kept_beside_what_the_tokens_say():
    calls = [
        call("a", [1, 2, 3], [4]),
        call("b", [1, 2, 3, 4, 5], [6], parent="a", shared=4),
        call("c", [1, 2, 9], [7], parent="b", fork_reason=ForkReason.COMPACTION, shared=2),
        call("d", [1, 2, 3, 4, 5], [8], parent="b", fork_reason=ForkReason.RETRY, shared=5),
    ]
    tree = RunTree.from_calls(calls)
    assert tree.fork(CallId("a")) is None and tree.fork(CallId("b")) is None
    assert tree.fork(CallId("c")) == Fork(ForkReason.COMPACTION, CallId("b"), 2)
    assert tree.fork(CallId("d")) == Fork(ForkReason.RETRY, CallId("b"), 5)
    assert tree.parent(CallId("d")) == "a", "a second answer to a prompt continues what the prompt continues"


def test_a_recorded_parent_that_the_tokens_do_not_extend_is_a_fork_of_unknown_reason():
    tree = RunTree.from_calls([call("a", [1, 2], [3]), call("b", [1, 2, 9], [4], parent="a")])
    assert tree.fork(CallId("b")) == Fork(ForkReason.UNKNOWN, CallId("a"), 2)
    assert RunTree.from_calls([call("b", [1, 2, 9], [4], parent="gone")]).fork(CallId("b")) is None


@settings(max_examples=50, deadline=None)
@given(recorded_runs(max_calls=6))
def test_shared_is_the_longest_common_prefix(calls):
    tree = RunTree.from_calls(calls)
    for one, other in itertools.product(calls, repeat=2):
        a, b = (tree.ids(made.call).tolist() for made in (one, other))
        common = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert tree.shared(one.call, other.call) == common


def test_an_attempt_at_a_compaction_is_rejected_when_another_one_was_taken_up():
    """The kind of PrimeIntellect-ai/prime-rl#3478: the rejected attempt is kept, and claims nothing."""
    history = call("a", [1, 2, 3], [4, 5])
    first = summary("s1", [1, 2, 3, 4, 5, 10], [30, 31, 32, 33])
    second = summary("s2", [1, 2, 3, 4, 5, 10], [40, 41, 42, 43])
    resumed = call("b", [1, 2, 20, 40, 41, 42, 21], [22, 23])
    tree = RunTree.from_calls([history, first, second, resumed])
    assert reasons([history, first, second, resumed]) == {
        "a": None,
        "s1": Untrained.REJECTED,
        "s2": None,
        "b": None,
    }
    assert tree.leaves() == ["b", "s1", "s2"] and tree.candidates() == ["b", "s2"]
    taken = select(tree, j_max=None)
    assert sorted((row.leaf, row.targets) for row in taken) == [("b", 2), ("s2", 2 + 4)]
    assert tree.untrained_counts() == {Untrained.REJECTED: 1}


def test_a_summary_of_which_nothing_is_known_stays_a_target():
    """One attempt alone, or several of which none came back: the agent may have rewritten it, or the run ended."""
    history = call("a", [1, 2, 3], [4, 5])
    first = summary("s1", [1, 2, 3, 4, 5, 10], [30, 31, 32, 33])
    other = summary("s2", [1, 2, 3, 4, 5, 10], [40, 41, 42, 43])
    unrelated = call("b", [1, 2, 20, 21], [22])
    assert reasons([history, first, unrelated])["s1"] is None
    assert {reasons([history, first, other, unrelated])[name] for name in ("s1", "s2")} == {None}


def test_an_attempt_that_a_call_continues_was_taken_up():
    history = call("a", [1, 2, 3], [4, 5])
    first = summary("s1", [1, 2, 3, 4, 5, 10], [30, 31])
    second = summary("s2", [1, 2, 3, 4, 5, 11], [40, 41])
    goes_on = call("b", [1, 2, 3, 4, 5, 11, 40, 41, 12], [50])
    assert reasons([history, first, second, goes_on]) == {
        "a": None,
        "s1": Untrained.REJECTED,
        "s2": None,
        "b": None,
    }


def test_attempts_without_a_parent_are_known_by_their_prompt():
    first = summary("s1", [7, 8], [30, 31, 32])
    second = summary("s2", [7, 8], [40, 41, 42])
    elsewhere = summary("s3", [7, 9], [50, 51, 52])
    resumed = call("b", [1, 2, 20, 40, 41, 21], [22])
    assert reasons([first, second, elsewhere, resumed])["s1"] is Untrained.REJECTED
    assert reasons([first, second, elsewhere, resumed])["s3"] is None, "a summary of something else"


@pytest.mark.parametrize("kept", [slice(0, 60), slice(40, 100), slice(20, 90)])
def test_an_answer_is_known_again_by_a_part_of_it(kept):
    """Agents cut thoughts and tags off a summary, and its ends are tokenised anew in their new place."""
    answers = [list(range(start, start + 100)) for start in (1000, 2000)]
    attempts = [summary(f"s{number}", [1, 2], answer) for number, answer in enumerate(answers)]
    resumed = call("b", [3, 4, *answers[1][kept], 5], [6])
    assert reasons([*attempts, resumed]) == {"s0": Untrained.REJECTED, "s1": None, "b": None}
    wrong = call("b", [3, 4, *answers[1][:5], 5], [6])
    assert reasons([*attempts, wrong])["s0"] is None, "five tokens say nothing"


def test_what_only_the_attempts_themselves_say_was_not_taken_up():
    """An attempt that repeats its history, or the other attempt, is not evidence of itself."""
    words = list(range(100, 130))
    first = summary("s1", [1, *words, 2], [*words, 3])
    second = summary("s2", [1, *words, 2], [*words, 4])
    resumed = call("b", [1, 9], [10])
    assert set(reasons([first, second, resumed]).values()) == {None}


def test_the_order_of_arrival_rejects_nothing():
    """Calls that part and join in such ways that edges lie elsewhere in memory for every order."""
    complete, summary = CallStatus.COMPLETE, "main-summary"
    calls = [
        call("c0", [], [1, 1, 0, 1], role=summary, lane="y"),
        call("c1", [1, 1, 0, 1, 2, 0], [2, 1, 0, 1], role="critic", lane="x", status=complete, parent="c0"),
        call("c2", [2, 2, 1, 1], [0, 1, 0], role=summary, lane="x", status=complete, parent="c0"),
        call("c3", [0, 2, 1, 1], [2, 1, 2, 2], lane="x", parent="c1"),
        call("c4", [1, 1, 0, 1, 2, 0, 2, 1], [2], role=summary, lane="y", parent="c1"),
        call("c5", [2, 2, 1, 1], [2, 1, 0, 1], role=summary, lane="y"),
    ]
    fates = {
        tuple((name, tree.untrained(name)) for name in tree.calls())
        for tree in (RunTree.from_calls(order) for order in itertools.permutations(calls))
    }
    assert len(fates) == 1


def test_a_rejection_can_be_told():
    history = call("a", [1, 2, 3], [4, 5])
    told = summary("s1", [1, 2, 3, 4, 5, 10], [30], rejected=True)
    tree = RunTree.from_calls([history, told])
    assert tree.untrained(CallId("s1")) is Untrained.REJECTED
    assert tree.candidates() == ["a"] and tree.sampled_tokens(CallId("s1")) == 1


def test_the_accepted_summary_of_the_compaction_case_is_trained_once():
    """tree-compaction-replaces-history, with a rejected attempt before the one that was taken up."""
    found = case("tree", "tree-compaction-replaces-history")
    calls = [from_case(entry) for entry in found["input"]["calls"]]
    rejected = summary("c0", found["input"]["calls"][2]["prompt"], [14, 15, 16])
    for made in ([*calls, rejected], [rejected, *calls]):
        tree = RunTree.from_calls(made)
        assert tree.untrained(CallId("c0")) is Untrained.REJECTED
        assert sum(row.targets for row in select(tree)) == found["expected"]["trainable_total"]
        assert {row.leaf for row in select(tree)} == set(found["expected"]["leaves"])


def test_the_undelivered_sample_is_kept_as_an_orphan():
    """tree-sibling-samples-equal-tokens: an answer that nobody got has weight 0 and stays on record."""
    found = case("tree", "tree-sibling-samples-equal-tokens")
    entries = found["input"]["calls"]
    statuses = {"b": CallStatus.COMPLETE}
    tree = RunTree.from_calls(
        from_case(entry, status=statuses.get(entry["call"], CallStatus.DELIVERED)) for entry in entries
    )
    assert tree.untrained(CallId("b")) is Untrained.ORPHAN and tree.ids(CallId("b")).tolist() == [1, 2, 7, 8]
    assert sum(row.targets for row in select(tree)) == found["expected"]["undelivered_variant"]["loss_terms"]


@settings(max_examples=40, deadline=None)
@given(recorded_runs(max_calls=6), st.data())
def test_settled_calls_are_as_if_they_had_come_so(calls, data):
    """Calls are inserted when their answer is complete; what became of them is told later, in any order."""
    early = RunTree()
    for made in calls:
        early.insert(
            SampledCall(
                made.call, made.prompt_ids, made.sampled_ids, made.logprobs, made.versions, made.role, made.lane,
                CallStatus.COMPLETE, made.parent,
            )
        )  # fmt: skip
    early.candidates()
    for made in data.draw(st.permutations(calls)):
        early.settle(made.call, made.status)
    late = RunTree.from_calls(calls)
    assert early.candidates() == late.candidates()
    for name in late.calls():
        assert (early.parent(name), early.untrained(name)) == (late.parent(name), late.untrained(name))


def test_only_what_is_in_the_tree_can_be_settled():
    with pytest.raises(TreeError, match="call x is not in this run's tree"):
        RunTree().settle(CallId("x"), CallStatus.DELIVERED)


def test_an_answer_is_known_again_across_a_fork():
    """Another prompt leaves the path in the middle of what came back: no edge holds all of it."""
    taken, other = list(range(40, 50)), list(range(60, 70))
    tree = RunTree.from_calls(
        [
            call("a", [1, 2], taken, role="main-summary"),
            call("b", [1, 2], other, role="main-summary"),
            call("c", [1, 20, *taken, 30], [4]),
            call("d", [1, 20, *taken[:5], 99], [4]),
        ]
    )
    assert [tree.untrained(CallId(name)) for name in "ab"] == [None, Untrained.REJECTED]
