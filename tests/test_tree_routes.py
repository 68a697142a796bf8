"""Expert routes: equal tokens that other experts computed are not merged, whatever the order of arrival."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_inputs import call, routed_runs, tokens

from gyre_sdk.errors import TreeError
from gyre_sdk.records import CallId, CallStatus, ForkReason
from gyre_sdk.select import select
from gyre_sdk.tree import RunTree, SampledCall

Symbols = tuple[tuple[int, Any], ...]


def symbols(made: SampledCall) -> Symbols:
    """Return each token with the routes of the token before it: what it takes to arrive at the token."""
    ids = [*made.prompt_ids.tolist(), *made.sampled_ids.tolist()]
    if made.routes is None:
        return tuple((token, "unknown") for token in ids)
    before = [(), *map(tuple, made.routes.tolist())]
    return tuple((token, before[at]) for at, token in enumerate(ids))


def computed(calls: list[SampledCall]) -> int:
    """Count what forward passes would compute: a token once for all that arrive at it and leave it alike."""
    ahead: dict[Symbols, set[Any]] = {}
    for made in calls:
        whole = symbols(made)
        for depth in range(1, len(whole) + 1):
            onward = ahead.setdefault(whole[:depth], set())
            if depth < len(whole):
                onward.add(whole[depth][1])
    return sum(max(1, len(onward)) for onward in ahead.values())


@settings(max_examples=60, deadline=None)
@given(routed_runs(), st.randoms(use_true_random=False))
def test_routes_part_what_tokens_do_not(calls, shuffler):
    """Paths are exact, tokens are merged where routes agree and only there, and arrival changes nothing."""
    tree = RunTree.from_calls(calls)
    assert tree.unique_tokens == computed(calls)
    for made in calls:
        assert tokens(tree, made.call) == [*made.prompt_ids.tolist(), *made.sampled_ids.tolist()]
        rows = tree.routes(made.call)
        if made.routes is None:
            assert rows is None
        else:
            assert rows is not None
            size = len(made.prompt_ids) + len(made.sampled_ids)
            assert rows.tolist() == made.routes[: size - 1].tolist()
        fits = [
            other
            for other in calls
            if other is not made
            and len(other.sampled_ids)
            and symbols(made)[: len(made.prompt_ids)][: len(symbols(other))] == symbols(other)
        ]
        longest = max((len(symbols(other)) for other in fits), default=None)
        best = [other.call for other in fits if len(symbols(other)) == longest]
        parent = tree.parent(made.call)
        assert parent in best if best else parent is None
    shuffler.shuffle(calls)
    other = RunTree.from_calls(calls)
    assert other.unique_tokens == tree.unique_tokens
    for name in tree.calls():
        assert (other.parent(name), other.spans(name)) == (tree.parent(name), tree.spans(name))
    assert other.candidates() == tree.candidates()


def routed(name: str, prompt: list[int], output: list[int], routes: list[int], **others: Any) -> SampledCall:
    return call(name, prompt, output, routes=np.array(routes, np.uint8)[:, None], **others)


def test_a_prompt_on_other_routes_is_a_branch_of_its_own():
    first = routed("a", [1, 2], [3], [5, 6])
    again = routed("b", [1, 2, 3, 4], [7], [5, 6, 8, 8], parent="a")
    other = routed("c", [1, 2, 3, 4], [7], [5, 9, 8, 8], parent="a")
    tree = RunTree.from_calls([first, again, other])
    assert tree.parent(CallId("b")) == "a" and tree.fork(CallId("b")) is None
    assert tree.parent(CallId("c")) is None
    fork = tree.fork(CallId("c"))
    assert fork is not None
    assert (fork.reason, fork.origin, fork.shared) == (ForkReason.ROUTES, "a", 2)
    assert tree.unique_tokens == 5 + 4, "token 2 counts twice: two routes lead through it"
    assert tree.leaves() == ["b", "c"]
    assert [row.targets for row in select(tree, j_max=None)] in ([2, 1], [1, 2]), "the 3 in c's prompt is context"


def test_the_last_token_of_an_answer_is_routed_by_whoever_goes_on():
    first = routed("a", [1, 2], [3], [5, 6])
    tree = RunTree.from_calls(
        [first, routed("b", [1, 2, 3, 4], [7], [5, 6, 1, 1]), routed("c", [1, 2, 3, 4], [7], [5, 6, 2, 1])]
    )
    assert tree.parent(CallId("b")) == tree.parent(CallId("c")) == "a"
    assert tree.shared(CallId("b"), CallId("c")) == 3 and tree.unique_tokens == 3 + 1 + 2 * 2


def test_calls_with_and_without_routes_are_kept_apart():
    """One without routes could join two that contradict each other, and none of their paths could be replayed whole."""
    bare = call("a", [1, 2], [3])
    tree = RunTree.from_calls([bare, routed("b", [1, 2, 3, 4], [7], [5, 6, 1, 1], parent="a")])
    assert tree.parent(CallId("b")) is None and tree.leaves() == ["a", "b"]
    fork = tree.fork(CallId("b"))
    assert fork is not None and (fork.reason, fork.shared) == (ForkReason.ROUTES, 0)


def test_layers_and_experts_come_in_one_row_or_two_axes_and_any_type():
    shaped = np.arange(3 * 2 * 4, dtype=np.int32).reshape(3, 2, 4)
    flat = shaped.reshape(3, 8).astype(np.uint8)
    tree = RunTree.from_calls([call("a", [1, 2], [3, 4], routes=shaped), call("b", [1, 2], [3, 4], routes=flat)])
    assert tree.unique_tokens == 4
    wide = np.vstack([flat, flat[:1].astype(np.uint16) + 300])
    tree.insert(call("c", [1, 2, 3, 4], [5], routes=wide))
    assert tree.parent(CallId("c")) in ("a", "b") and tree.unique_tokens == 5
    found = tree.routes(CallId("c"))
    assert found is not None and found.tolist() == wide.tolist()


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (np.zeros((1, 2), np.uint8), r"routes of shape \(1, 2\) for 3 tokens"),
        (np.zeros((4, 2), np.uint8), r"routes of shape \(4, 2\) for 3 tokens"),
        (np.zeros((3, 0), np.uint8), r"routes of shape \(3, 0\)"),
        (np.zeros(3, np.uint8), r"routes of shape \(3,\)"),
        (np.full((3, 2), -1), "not expert ids"),
        (np.full((3, 2), 1 << 16), "not expert ids"),
        (np.zeros((3, 2)), "not expert ids"),
    ],
)
def test_malformed_routes_leave_the_tree_as_it_was(routes, message):
    tree = RunTree.from_calls([call("x", [1], [2])])
    with pytest.raises(TreeError, match=message):
        tree.insert(call("a", [1, 2], [3], routes=routes))
    assert len(tree) == 1 and tree.unique_tokens == 2


def test_routes_take_memory_only_where_they_are_given_and_new():
    history = np.arange(60_000, dtype=np.int32)
    rows = np.random.default_rng(0).integers(0, 64, (60_000, 16), dtype=np.uint8)

    def held(with_routes: bool) -> int:
        calls = [
            call(
                f"c{end:06}",
                history[: end - 10].tolist(),
                history[end - 10 : end].tolist(),
                routes=rows[: end - 1] if with_routes else None,
            )
            for end in range(1_000, 60_001, 1_000)
        ]
        tracemalloc.start()
        tree = RunTree.from_calls(calls)
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert tree.unique_tokens == 60_000
        return size

    bare = held(False)
    assert bare < 60_000 * 8
    assert held(True) - bare < 60_000 * 16 * 1.4


def test_a_failed_try_on_other_routes_does_not_give_way():
    """Its retry computed the prompt with other experts: they share nothing that a replay could share."""
    cut = routed("b", [1, 2, 3], [], [1, 1], status=CallStatus.ABORTED)
    assert RunTree.from_calls([cut, routed("c", [1, 2, 3], [4], [1, 1, 1])]).candidates() == ["c"]
    assert RunTree.from_calls([cut, routed("c", [1, 2, 3], [4], [2, 1, 1])]).candidates() == ["b", "c"]
