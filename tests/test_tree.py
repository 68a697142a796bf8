"""Promise 2 and 3: paths are exact, do not depend on arrival, and every sampling event is there once."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_inputs import call, case, from_case, recorded_runs, tokens

from gyre_sdk.errors import TreeError
from gyre_sdk.records import CallId, CallRecord, CallStatus, LaneId, RunId, Sampling, VersionSpan
from gyre_sdk.tree import RunTree, SampledCall, Untrained


def whole(made: SampledCall) -> list[int]:
    return made.prompt_ids.tolist() + made.sampled_ids.tolist()


def shape(tree: RunTree) -> set[tuple[str, tuple[int, ...], tuple[tuple[str, int, int], ...]]]:
    return {
        (path.leaf, tuple(path.ids.tolist()), tuple((span.call, span.start, span.stop) for span in path.spans))
        for path in tree.paths()
    }


@settings(deadline=None)
@given(recorded_runs())
def test_the_path_of_every_call_is_its_prompt_and_sampled_ids(calls):
    tree = RunTree.from_calls(calls)
    for made in calls:
        assert tokens(tree, made.call) == whole(made)
    assert tree.raw_tokens == sum(len(whole(made)) for made in calls)


@settings(deadline=None)
@given(recorded_runs())
def test_every_sampling_event_lies_on_some_path_under_its_own_call(calls):
    tree = RunTree.from_calls(calls)
    owned: set[tuple[str, int]] = set()
    for path in tree.paths():
        last = 0
        for span in path.spans:
            made = next(made for made in calls if made.call == span.call)
            assert span.start >= last
            assert path.ids[span.start : span.stop].tolist() == made.sampled_ids.tolist()
            assert path.ids[: span.start].tolist() == made.prompt_ids.tolist()
            owned |= {(span.call, offset) for offset in range(span.stop - span.start)}
            assert path.owner(span.start) == (span.call, 0)
            last = span.stop
    assert len(owned) == sum(len(made.sampled_ids) for made in calls)


@settings(deadline=None)
@given(recorded_runs(max_calls=6), st.randoms(use_true_random=False))
def test_arrival_order_changes_no_path(calls, shuffler):
    reference = RunTree.from_calls(calls)
    shuffled = list(calls)
    shuffler.shuffle(shuffled)
    other = RunTree.from_calls(shuffled)
    assert shape(other) == shape(reference)
    assert other.candidates() == reference.candidates()
    assert other.untrained_counts() == reference.untrained_counts()
    assert [other.parent(made) for made in other.calls()] == [reference.parent(made) for made in reference.calls()]


@settings(deadline=None)
@given(recorded_runs())
def test_a_parent_is_the_longest_whole_call_that_the_prompt_starts_with(calls):
    tree = RunTree.from_calls(calls)
    for made in calls:
        prompt = made.prompt_ids.tolist()
        fits = [
            other
            for other in calls
            if other is not made and len(other.sampled_ids) and prompt[: len(whole(other))] == whole(other)
        ]
        longest = max((len(whole(other)) for other in fits), default=None)
        best = [other.call for other in fits if len(whole(other)) == longest]
        parent = tree.parent(made.call)
        assert parent in best if best else parent is None
        if made.parent in best:
            assert parent == made.parent


@settings(deadline=None)
@given(recorded_runs())
def test_the_tree_is_a_radix_tree(calls):
    tree = RunTree.from_calls(calls)
    prefixes = {tuple(whole(made)[: depth + 1]) for made in calls for depth in range(len(whole(made)))}
    assert tree.unique_tokens == len(prefixes)
    root = tree._radixes[0].root
    pending, seen = [root], 0
    while pending:
        node = pending.pop()
        seen += len(node.tokens)
        for first, child in node.children.items():
            assert len(child.tokens) > 0 and int(child.tokens[0]) == first
            assert child.parent is node and child.start == node.depth
        if node.next is not None:
            assert node.next in node.children.values() and node.next.block is node.block
            assert node.next.offset == node.offset + len(node.tokens)
        if node is not root:
            assert node.ends or len(node.children) > 1
        pending += node.children.values()
    assert seen == tree.unique_tokens


@settings(deadline=None)
@given(recorded_runs())
def test_candidates_lose_no_target(calls):
    """Cutting off rejected branches leaves every target on some candidate path, and keeps no rejected answer as leaf."""
    tree = RunTree.from_calls(calls)
    reachable = {span.call for leaf in tree.candidates() for span in tree.spans(leaf)}
    for made in calls:
        if len(made.sampled_ids) and tree.untrained(made.call) is None:
            assert made.call in reachable
    for leaf in tree.candidates():
        assert tree.untrained(leaf) is None or not tree.sampled_tokens(leaf)


@settings(deadline=None)
@given(recorded_runs())
def test_an_insertion_reports_what_was_new(calls):
    tree, before = RunTree(), 0
    for made in calls:
        placement = tree.insert(made)
        assert placement.new == tree.unique_tokens - before
        assert placement.known + placement.new == len(whole(made))
        before = tree.unique_tokens


def test_insertion_allocates_for_new_tokens_only():
    """150 growing prompts of up to 300k tokens (22M raw): the tree holds unique tokens, not raw ones."""
    history = np.arange(300_000, dtype=np.int32)
    calls = [
        SampledCall(
            CallId(f"c{end}"), history[: end - 100], history[end - 100 : end], [-1.0] * 100, [VersionSpan(0, 0, 100)]
        )
        for end in range(2_000, 300_001, 2_000)
    ]
    tracemalloc.start()
    tree = RunTree.from_calls(calls)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tree.unique_tokens == 300_000 and tree.raw_tokens == 22_650_000
    assert held < 4_000_000, "300k int32 ids are 1.2 MB, blocks grow by doubling"
    assert peak - held < 1_000_000


def test_chain_becomes_one_row():
    found = case("tree", "tree-chain-becomes-one-row")
    calls = [from_case(entry, logprobs=found["input"]["logprobs"][entry["call"]]) for entry in found["input"]["calls"]]
    expected = found["expected"]
    for order in itertools.permutations(calls):
        tree = RunTree.from_calls(order)
        (path,) = tree.paths()
        assert path.ids.tolist() == expected["input_ids"]
        assert [int(path.owner(at) is not None) for at in range(len(path.ids))] == expected["mask"]
        logprobs = np.concatenate([tree.logprobs(span.call) for span in path.spans])
        assert logprobs.tolist() == expected["logprobs_at_masked_positions"]
        assert (tree.raw_tokens, tree.unique_tokens) == (expected["raw_tokens"], expected["unique_tokens"])


def test_broken_chain_forks_and_context_stays_context():
    found = case("tree", "tree-chain-becomes-one-row")
    entries = {entry["call"]: dict(entry) for entry in found["input"]["calls"]}
    entries["c3"]["prompt"] = found["input"]["broken_chain"]["replace_c3_prompt"]
    entries["c4"]["prompt"] = found["input"]["broken_chain"]["then_c4_prompt"]
    tree = RunTree.from_calls(from_case(entry) for entry in entries.values())
    expected = found["expected"]["broken_chain"]
    assert [path.ids.tolist() for path in tree.paths()] == expected["leaves"]
    assert tree.path(CallId("c4")).owner(4) is None, "the 5 was re-sent after an edit"
    assert sum(tree.sampled_tokens(made) for made in tree.calls()) == expected["trainable_total"]


def test_compaction_makes_a_leaf_and_its_summary_is_context_there():
    found = case("tree", "tree-compaction-replaces-history")
    tree = RunTree.from_calls(map(from_case, found["input"]["calls"]))
    expected = found["expected"]
    assert {path.leaf: path.ids.tolist() for path in tree.paths()} == expected["leaves"]
    for path in tree.paths():
        owned = [int(path.ids[at]) for at in range(len(path.ids)) if path.owner(at)]
        assert owned == expected["trainable"][f"{path.leaf} path"]
    assert (tree.unique_tokens, tree.raw_tokens) == (expected["unique_tokens"], expected["raw_tokens_of_all_calls"])


def test_rollback_extends_the_longest_history():
    found = case("tree", "tree-rollback-longest-prefix")
    expected = found["expected"]
    for order in itertools.permutations(map(from_case, found["input"]["calls"])):
        tree = RunTree.from_calls(order)
        assert tree.parent(CallId("c4")) == "c3"
        assert tokens(tree, "c4") == expected["path_of_c4"]
        events = {made: tree.ids(made)[-tree.sampled_tokens(made) :].tolist() for made in tree.calls()}
        assert events == expected["events"]
        terms = Counter(
            str(at) for made in tree.calls() for span in tree.spans(made)[-1:] for at in range(span.start, span.stop)
        )
        assert terms == expected["loss_terms_by_position"]
    tree = RunTree.from_calls(map(from_case, found["input"]["variant_calls"]))
    assert tree.parent(CallId("c4")) == "c2" and tree.leaves() == expected["variant"]["leaves"]


def test_equal_samples_are_siblings_and_never_merged():
    found = case("tree", "tree-sibling-samples-equal-tokens")
    calls = [from_case(entry) for entry in found["input"]["calls"]]
    tree = RunTree.from_calls(calls)
    assert tree.leaves() == ["a", "b", "c"] and tree.unique_tokens == 5
    tree.insert(from_case(found["input"]["resent"]))
    assert tree.leaves() == ["b", "c", "d"] and tree.parent(CallId("d")) == "a"
    hinted = RunTree.from_calls([*calls, from_case(found["input"]["resent"], parent="b")])
    assert hinted.leaves() == ["a", "c", "d"]


def test_interleaved_subagent_keeps_its_own_chain():
    found = case("tree", "tree-subagent-shares-system-prompt")
    calls = [from_case(entry) for entry in found["input"]["calls"]]
    for order in itertools.permutations(calls):
        tree = RunTree.from_calls(order)
        assert {path.leaf: path.ids.tolist() for path in tree.paths()} == found["expected"]["leaves"]
        for path in tree.paths():
            owned = [int(path.ids[at]) for at in range(len(path.ids)) if path.owner(at)]
            assert owned == found["expected"]["trainable"][f"{path.leaf} path"]


def test_why_a_call_is_no_target():
    made = [
        call("failed", [1], [2], status=CallStatus.FAILED),
        call("aborted", [1], [3], status=CallStatus.ABORTED),
        call("orphan", [1], [4], status=CallStatus.COMPLETE),
        call("continued", [1], [5], status=CallStatus.COMPLETE),
        call("next", [1, 5, 9], [6]),
        call("nologp", [1], [7, 8], logprobs=[-1.0, None]),
        call("nan", [1], [7, 9], logprobs=[-1.0, float("nan")]),
        call("short", [1], [7, 9, 9], logprobs=[-1.0]),
    ]
    gap = SampledCall(CallId("gap"), made[0].prompt_ids, made[0].sampled_ids, [-1.0], [])
    tree = RunTree.from_calls([*made, gap])
    reasons = {name: tree.untrained(name) for name in tree.calls()}
    assert reasons == {
        "failed": Untrained.FAILED,
        "aborted": Untrained.ABORTED,
        "orphan": Untrained.ORPHAN,
        "continued": None,
        "next": None,
        "nologp": Untrained.NO_LOGPROBS,
        "nan": Untrained.NO_LOGPROBS,
        "short": Untrained.NO_LOGPROBS,
        "gap": Untrained.NO_VERSION,
    }
    assert tree.untrained_counts() == Counter(reason for reason in reasons.values() if reason)
    assert tree.candidates() == ["next"]


def test_a_rejected_branch_is_recorded_but_no_candidate():
    history = call("a", [1], [2])
    rejected = call("b", [1, 2, 3], [4], status=CallStatus.COMPLETE, role="main-summary")
    accepted = call("c", [1, 2, 5], [6])
    tree = RunTree.from_calls([history, rejected, accepted])
    assert tree.leaves() == ["b", "c"] and tree.candidates() == ["c"]
    assert RunTree.from_calls([history, rejected]).candidates() == ["a"], "its prefix is still to be trained"
    assert RunTree.from_calls([rejected]).candidates() == []


@pytest.mark.parametrize("status", [CallStatus.FAILED, CallStatus.ABORTED, CallStatus.RECEIVED])
def test_a_failed_try_without_tokens_gives_way_to_its_retry(status):
    history, cut = call("a", [1], [2]), call("b", [1, 2, 3], [], status=status)
    assert RunTree.from_calls([history, cut]).candidates() == ["b"]
    assert RunTree.from_calls([history, cut, call("c", [1, 2, 3], [4])]).candidates() == ["c"]
    assert RunTree.from_calls([history, cut, call("c", [1, 2, 4], [4])]).candidates() == ["b", "c"]
    twice = [history, cut, call("c", [1, 2, 3], [], status=status)]
    assert len(RunTree.from_calls(twice).candidates()) == 1


def test_of_many_tries_without_an_answer_the_longest_prompt_stands():
    tries = [call(name, prompt, [], status=CallStatus.FAILED) for name, prompt in [("d", [1, 2]), ("c", [1, 2, 3])]]
    tries += [call(f"b{number}", [1, 2, 3], [], status=CallStatus.FAILED) for number in range(3)]
    apart = [call(f"e{number}", [1, 2, 4, number], [], status=CallStatus.FAILED) for number in range(3)]
    assert RunTree.from_calls([*tries, *apart]).candidates() == ["b0", "e0", "e1", "e2"]
    dead = call("f", [1, 2, 3], [5], status=CallStatus.FAILED)
    assert RunTree.from_calls([*tries, dead]).candidates() == ["b0"], "an answer that is no target stands for nothing"
    assert RunTree.from_calls([*tries, dead, call("g", [1, 2, 3, 6], [7])]).candidates() == ["g"]


def test_between_equal_events_the_same_lane_and_a_delivered_answer_win():
    a, b = call("a", [1], [2], lane="x"), call("b", [1], [2], lane="y")
    assert RunTree.from_calls([a, b, call("c", [1, 2], [3], lane="y")]).parent(CallId("c")) == "b"
    lost = call("a", [1], [2], status=CallStatus.COMPLETE)
    tree = RunTree.from_calls([lost, call("b", [1], [2]), call("c", [1, 2], [3])])
    assert tree.parent(CallId("c")) == "b" and tree.untrained(CallId("a")) is Untrained.ORPHAN


def test_a_late_write_becomes_the_parent():
    tree = RunTree()
    assert tree.insert(call("b", [1, 2, 3], [4])).parent is None
    tree.insert(call("a", [1], [2]))
    assert tree.parent(CallId("b")) == "a" and tree.leaves() == ["b"]


def test_versions_per_token():
    made = SampledCall(
        CallId("a"),
        np.array([1], np.int32),
        np.array([2, 3, 4], np.int32),
        [-1.0] * 3,
        [VersionSpan(7, 0, 1), VersionSpan(8, 1, 3)],
    )
    assert RunTree.from_calls([made]).versions(CallId("a")).tolist() == [7, 8, 8]


def test_recorded_calls_are_taken_as_they_are():
    record = CallRecord(
        call=CallId("a"),
        run=RunId("r"),
        lane=LaneId("l"),
        role="subagent",
        status=CallStatus.DELIVERED,
        prompt_ids=[1, 2],
        sampled_ids=[3],
        logprobs=[-0.5],
        versions=[VersionSpan(1, 0, 1)],
        parent=None,
        fork_reason=None,
        shared=0,
        sampling=Sampling(),
        finish_reason="stop",
        received_at=0.0,
    )
    tree = RunTree.from_calls([record])
    assert tokens(tree, "a") == [1, 2, 3] and tree.role(CallId("a")) == "subagent"


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (call("a", [1], [-2]), "token id -2 is negative"),
        (call("a", [1], [2], logprobs=[-1.0, -1.0]), "2 log-probs for 1 sampled ids"),
        (call("x", [1], [2]), "call x is in the tree already"),
    ],
)
def test_malformed_calls_leave_the_tree_as_it_was(made, message):
    tree = RunTree.from_calls([call("x", [1], [2])])
    with pytest.raises(TreeError, match=message):
        tree.insert(made)
    assert len(tree) == 1 and tree.unique_tokens == 2 and shape(tree) == {("x", (1, 2), (("x", 1, 2),))}
