"""The index of what a run has recorded: promises over random conversations."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_sdk.errors import TreeError
from gyre_sdk.harness.proxy.dialects import history as history_module
from gyre_sdk.harness.proxy.dialects.canonical import Message, ToolCall
from gyre_sdk.harness.proxy.dialects.history import History, Ids, Match, Origin, ids_text
from gyre_sdk.records import ForkReason

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


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.integers(0, 3)), min_size=1, max_size=12))
def test_the_json_of_a_prompt_is_that_of_its_ids(script: list[tuple[int, bool, int]]) -> None:
    """However calls extend, fork from and follow each other: what is copied from a parent is what would be written."""
    history = History()
    for number, (back, extends, new) in enumerate(script):
        above = history.get(f"c{back % number}") if number else None
        shared = 0 if above is None else len(above.whole) if extends else len(above.whole) // 2
        start = np.arange(5000, dtype=np.int32) if above is None else above.whole[:shared]
        prompt = np.concatenate([start, np.arange(new + (not extends), dtype=np.int32)])
        text = ids_text(prompt, above if extends else None)
        assert json.loads(b"[" + text + b"]") == prompt.tolist()
        parent = above.call if above is not None else None
        history.add(
            f"c{number}", "l", [], [Message("user", str(number))], Message("assistant", "x"), prompt, [7] * new, parent,
            shared, text,
        )  # fmt: skip
        held = [found for at in range(number + 1) if (found := history.get(f"c{at}")) is not None and found.text]
        assert all(json.loads(b"[" + found.text + b"]") == found.whole.tolist() for found in held)
        assert not any(found.extended for found in held), "an extended call's text is its child's"


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


def say(role: str, text: str) -> Message:
    return Message(role, text)


def record(
    history: History, lane: str, request: list[Message], answer: str, tools: list[dict[str, object]] | None = None
) -> Origin:
    """Record a call whose prompt the toy template renders."""
    match = history.match(lane, tools or [], request)
    prompt = [9 + len(tools or ()), *tokens(request)]
    origin = history.origin(lane, tools or [], request, match, prompt)
    reply = Message("assistant", answer)
    parent = origin.parent.call if origin.parent else None
    name = f"c{len(history)}"
    history.add(name, lane, tools or [], match.messages, reply, prompt, tokens([reply]), parent, origin.shared)
    return origin


def test_an_edited_answer_forks_from_the_call_that_gave_it() -> None:
    """The match is the last unedited answer; the origin shares everything up to the edit."""
    history, system = History(), say("system", "s")
    base = [system, say("user", "a")]
    record(history, "l", base, "b")
    record(history, "l", [*base, say("assistant", "b"), say("user", "c")], "d")
    request = [*base, say("assistant", "b"), say("user", "c"), say("assistant", "x"), say("user", "e")]
    match = history.match("l", [], request)
    assert match.recorded is not None and (match.recorded.call, match.consumed) == ("c0", 3)
    origin = record(history, "l", request, "f")
    assert origin.parent is not None and origin.parent.call == "c1"
    assert origin.fork is ForkReason.CLIENT_EDIT
    assert origin.shared == 1 + len(tokens(request[:4])) + 1  # the edit's first token opens the model's turn


def test_a_prompt_without_messages_has_no_reason_of_its_own() -> None:
    """A plain completion in a lane that has spoken before."""
    history = History()
    history.add("c1", "l", [], [say("user", "a")], say("assistant", "b"), [1, 2], [3], None, 0)
    origin = history.origin("l", [], [], Match(None, 0, (), 0), np.asarray([1, 9], np.int32))
    assert (origin.shared, origin.fork) == (1, ForkReason.UNKNOWN)


def test_a_dropped_middle_is_compaction() -> None:
    """Old turns left out and later ones kept: not an edit of the model's words."""
    history, request = History(), [say("user", "a")]
    for letter in "bcde":
        record(history, "l", request, letter)
        request = [*request, say("assistant", letter), say("user", letter)]
    kept = [request[0], *request[5:]]
    assert record(history, "l", kept, "x").fork is ForkReason.COMPACTION


def test_a_summary_without_tools_does_not_hide_the_compaction() -> None:
    """Requests are compared with the last one of their lane that had the same tools."""
    history, tools = History(), [{"type": "function", "function": {"name": "ls"}}]
    request = [say("system", "s"), say("user", "a")]
    for letter in "bc":
        record(history, "l", request, letter, tools)
        request = [*request, say("assistant", letter), say("user", letter)]
    assert record(history, "l", [*request, say("user", "sum up")], "d").fork is ForkReason.TOOLS_CHANGED
    assert record(history, "l", [request[0], say("user", "so far")], "e", tools).fork is ForkReason.COMPACTION


def test_results_follow_the_recorded_ids_of_their_calls() -> None:
    """An agent that renames tool calls is answered under the recorded names: templates may show them."""
    history, ask = History(), [say("user", "a")]
    answer = Message("assistant", tool_calls=(ToolCall("ours0", "ls", '{"a":1}'), ToolCall("ours1", "ls", '{"a":2}')))
    history.add("c", "l", [], ask, answer, [1], [2], None, 0)
    renamed = Message("assistant", tool_calls=(ToolCall("x", "ls", '{ "a": 1.0 }'), ToolCall("y", "ls", '{"a": 2}')))
    results = [Message("tool", "r", tool_call_id=name) for name in ("x", "y", "stranger")]
    match = history.match("l", [], [*ask, renamed, *results])
    assert match.messages[1] == answer
    assert [message.tool_call_id for message in match.messages[2:]] == ["ours0", "ours1", "stranger"]


def test_the_last_of_many_calls_costs_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million tokens in 200 calls: nothing sent again is hashed, and the prompt is compared with the path once."""
    history, messages = History(), [say("system", "s" * 4000)]
    whole = np.zeros(0, np.int32)
    hashed: list[Message] = []
    compared = 0
    identity, common = history_module.identity, history_module._common

    def counted(left: Ids, right: Ids) -> int:
        nonlocal compared
        compared += min(len(left), len(right))
        return common(left, right)

    monkeypatch.setattr(history_module, "identity", lambda message: hashed.append(message) or identity(message))
    monkeypatch.setattr(history_module, "_common", counted)
    for number in range(200):
        messages = [*(copy.deepcopy(message) for message in messages), Message("user", f"{number} " + "x" * 9000)]
        prompt = np.concatenate([whole, np.full(4000, number, np.int32)])
        hashed.clear()
        compared = 0
        match = history.match("l", [], messages)
        origin = history.origin("l", [], messages, match, prompt)
        answer = Message("assistant", f"{number} " + "y" * 9000)
        parent = origin.parent.call if origin.parent else None
        history.add(
            str(number),
            "l",
            [],
            match.messages,
            answer,
            prompt,
            np.full(1000, -number, np.int32),
            parent,
            origin.shared,
        )
        assert origin.fork is None
        assert len({message.content for message in hashed}) <= 3  # the new question and answer, the system's at first
        assert compared <= len(prompt)
        found = history.get(str(number))
        assert found is not None
        whole = found.whole
        messages = [*messages, answer]
    assert len(whole) == 1_000_000
    edited = [*messages[:201], Message("assistant", "edited"), *messages[202:]]
    compared = 0
    prompt = whole.copy()
    prompt[504_500:] = 7
    origin = history.origin("l", [], edited, history.match("l", [], edited), prompt)
    assert origin.shared == 504_500 and origin.fork is ForkReason.CLIENT_EDIT
    assert compared <= 2 * len(prompt)
