"""The index of what a run has recorded: promises over random conversations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_sdk.errors import TreeError
from gyre_sdk.harness.proxy.dialects.canonical import Message
from gyre_sdk.harness.proxy.dialects.history import History

TEXT = st.sampled_from(["a", "b", "c"])


def tokens(messages: list[Message]) -> list[int]:
    """A template: role, letter, end."""
    return [token for item in messages for token in (ord(item.role[0]), ord((item.content or "-")[0]), 1)]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), TEXT, TEXT, st.booleans()), min_size=1, max_size=25))
def test_longest_recorded_path_is_found(script: list[tuple[int, str, str, bool]]) -> None:
    """Against a list of all recorded paths: the match is the longest, its tokens are a prefix, origins hold."""
    history = History()
    recorded: list[tuple[list[Message], list[int], str]] = []
    for number, (back, ask, say, drop) in enumerate(script):
        past = recorded[back % len(recorded)][0] if recorded and back % 3 else []
        messages = [*past, Message("user", ask)]
        if drop:
            messages = messages[-3:]
        match = history.match("l", [], messages)
        prefixes = [(len(path), order) for order, (path, _, _) in enumerate(recorded) if messages[: len(path)] == path]
        want = max(prefixes, default=None)
        assert (match.recorded is None) == (want is None)
        if want is not None and match.recorded is not None:
            assert (match.consumed, match.recorded.call) == (want[0], recorded[want[1]][2])
        prompt = tokens(messages)
        origin = history.origin("l", [], messages, match, prompt)
        if origin.parent is not None:
            above = origin.parent.whole.tolist()
            assert prompt[: origin.shared] == above[: origin.shared]
            assert (origin.fork is None) == (origin.shared == len(above))
        answer = Message("assistant", say)
        sampled = tokens([answer])
        name = f"c{number}"
        parent = origin.parent.call if origin.parent else None
        history.add(name, "l", [], match.messages, answer, prompt, sampled, parent, origin.shared)
        recorded.append(([*messages, answer], prompt + sampled, name))
    for _, whole, name in recorded:
        found = history.get(name)
        assert found is not None and found.whole.tolist() == whole


def test_a_chain_shares_one_buffer() -> None:
    """200 calls over 20,000 tokens keep 20,000 ids, not 2 million."""
    history, messages, whole = History(), [], []
    parent, shared = None, 0
    for number in range(200):
        messages.append(Message("user", str(number)))
        prompt, sampled = whole + [1] * 60, [2] * 40
        answer = Message("assistant", str(number))
        history.add(str(number), "l", [], messages, answer, prompt, sampled, parent, shared)
        messages.append(answer)
        whole, parent = prompt + sampled, str(number)
        shared = len(whole)
    arrays = [history.get(str(number)) for number in range(200)]
    assert all(item is not None and np.shares_memory(item.whole, arrays[-1].whole) for item in arrays)  # type: ignore[union-attr]


def test_a_parent_that_does_not_fit_is_refused() -> None:
    history = History()
    with pytest.raises(TreeError, match="does not have them"):
        history.add("c", "l", [], [], Message("assistant", "x"), [1], [2], "nobody", 1)


def test_equal_answers_go_to_the_lane_then_the_newest() -> None:
    """The fixed rule for siblings with equal text."""
    history, user, answer = History(), [Message("user", "x")], Message("assistant", "y")
    for name, lane in (("a", "one"), ("b", "two"), ("c", "one"), ("d", "two")):
        history.add(name, lane, [], user, answer, [1], [2], None, 0)
    request = [*user, answer, Message("user", "z")]
    found = [history.match(lane, [], request).recorded for lane in ("one", "two", "three")]
    assert [item.call for item in found if item] == ["c", "d", "d"]
