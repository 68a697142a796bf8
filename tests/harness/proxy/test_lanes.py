"""Lanes of black boxes: each recording of a real program gives its lanes, in any order that may happen."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes_kit import Line, MemoryRun, Pending, recording, said, structure

from gyre_sdk.errors import SettingsError
from gyre_sdk.harness.proxy.dialects.canonical import Message, ToolCall
from gyre_sdk.harness.proxy.lanes import Asked, Assigned, CallView, Classifier, LaneView
from gyre_sdk.harness.proxy.lanes.loading import load_classifier
from gyre_sdk.records import LaneId

MAIN = ("main", "main", None, None)
EXPECTED = {
    ("claude_code", 0): [
        MAIN,
        ("side", "title", "main", None),
        ("subagent", "subtask one", "main", "c3"),
        ("subagent", "subtask two", "main", "c3"),
        ("main-summary", "main-summary", "main", "c8"),
    ],
    ("claude_code", 1): [
        MAIN,
        ("subagent", "subtask one", "main", "c2"),
        ("subagent", "subtask two", "main", "c2"),
        ("main-summary", "main-summary", "main", "c9"),
    ],
    ("codex", 0): [
        MAIN,
        ("subagent", "subagent", "main", "c2"),
        ("subagent", "subagent", "main", "c2"),
        ("main-summary", "main-summary", "main", "c9"),
    ],
    ("mini_swe_agent", 0): [MAIN],
    ("openai_agents", 0): [MAIN, ("subagent", "review", "main", "c1"), ("subagent", "writer", "main", "c4")],
    ("openai_agents", 1): [MAIN, ("subagent", "review", "main", "c1"), ("subagent", "writer", "main", "c4")],
}
"""Per recording and run: role, name, parent and parent call of each lane; calls are numbered from 1."""
TOOL = ({"type": "function", "function": {"name": "shell"}},)
OTHER_TOOL = ({"type": "function", "function": {"name": "search"}},)
AGENT = Message("system", "You are an agent.")


def lines(name: str, run: int, *, headers: bool = True) -> list[Line]:
    found = [line for line in recording(name) if line.run == run]
    return found if headers else [dataclasses.replace(line, headers={}) for line in found]


def system(text: str) -> Message:
    return Message("system", text)


def user(text: str) -> Message:
    return Message("user", text)


# -- recordings of the real programs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [True, False], ids=["headers", "no-headers"])
@pytest.mark.parametrize("preset", ["auto", "own"])
@pytest.mark.parametrize(("name", "number"), EXPECTED)
def test_a_recording_gives_its_lanes(name: str, number: int, preset: str, headers: bool) -> None:
    """With the program's headers and without them, recognised or named."""
    run = MemoryRun(load_classifier("auto" if preset == "auto" else name.replace("_", "-")))
    for line in lines(name, number, headers=headers):
        run.exchange(line)
    assert structure(run, run.lanes) == EXPECTED[name, number]


@pytest.mark.parametrize(("name", "number"), EXPECTED)
def test_a_lane_goes_on_after_its_compaction(name: str, number: int) -> None:
    """No other lane than the first asks last, also where the history was replaced by a summary."""
    run = MemoryRun(load_classifier("auto"))
    last = [run.exchange(line) for line in lines(name, number)][-1]
    assert run.lanes[last].role == ("subagent" if name == "openai_agents" else "main")


@pytest.mark.parametrize("headers", [True, False], ids=["headers", "no-headers"])
@pytest.mark.parametrize(("name", "number"), [item for item in EXPECTED if item[0] in ("claude_code", "codex")])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_order_of_independent_requests_changes_nothing(name: str, number: int, headers: bool, seed: int) -> None:
    """Requests of different lanes that wait for nothing of each other, in any order, also in flight together."""
    run = MemoryRun(load_classifier("auto"))
    for line in shuffled(lines(name, number, headers=headers), random.Random(seed)):
        run.exchange(line)
    found = structure(run, run.lanes)
    assert sorted(row[:3] for row in found) == sorted(row[:3] for row in EXPECTED[name, number])
    parents = {row[1]: row[3] for row in found if row[0] == "subagent"}
    assert len(set(parents.values())) == 1, "both sub-agents come from one call"


def shuffled(given: list[Line], chance: random.Random) -> list[Line]:
    """Reorder a run: a request waits for the answer that it repeats last and for the sub-agents' starts only."""
    sub = [
        line
        for line in given
        if any("SUBTASK" in item.content for item in line.request.messages if item.role == "user")
        and not any(item.content.startswith("WALK") for item in line.request.messages)
    ]
    streams: dict[str, list[Line]] = {}
    for line in sub:
        text = "\n".join(item.content for item in line.request.messages if item.role == "user")
        streams.setdefault("one" if "SUBTASK ONE" in text else "two", []).append(line)
    start = min(given.index(line) for line in sub)
    end = max(given.index(line) for line in sub)
    between = [line for line in given[start : end + 1] if line not in sub]
    waiting = [list(stream) for stream in (*streams.values(), between) if stream]
    mixed: list[Line] = []
    while waiting:
        stream = chance.choice(waiting)
        mixed.append(stream.pop(0))
        waiting = [item for item in waiting if item]
    return [*given[:start], *mixed, *given[end + 1 :]]


@pytest.mark.parametrize("headers", [True, False], ids=["headers", "no-headers"])
def test_sub_agents_in_flight_together_get_a_lane_each(headers: bool) -> None:
    """Both first requests are asked before either is answered."""
    run = MemoryRun(load_classifier("auto"))
    given = lines("claude_code", 1, headers=headers)
    for line in given[:2]:
        run.exchange(line)
    open_calls = [ask(run, line) for line in given[2:4]]
    for pending, line in reversed(list(zip(open_calls, given[2:4], strict=True))):
        run.answer(pending, line.answer)
    for line in given[4:]:
        run.exchange(line)
    assert structure(run, run.lanes) == EXPECTED["claude_code", 1]


def ask(run: MemoryRun, line: Line) -> Pending:
    return run.ask(line.request.messages, line.request.tools, line.request.fields, line.headers)


def test_another_session_of_the_program_is_another_main_lane() -> None:
    """The same program started again under the same key: what nothing started is no sub-agent."""
    run = MemoryRun(load_classifier("auto"))
    first = lines("claude_code", 1)[:2]
    other = [dataclasses.replace(line, headers={**line.headers, "x-claude-code-session-id": "id-99"}) for line in first]
    used = [run.exchange(first[0])]
    start = (*other[0].request.messages[:1], user("Something else entirely"))
    pending = run.ask(start, other[0].request.tools, {}, other[0].headers)
    assert (pending.assigned.role, pending.assigned.parent) == ("main", None)
    assert pending.lane not in used


def test_an_unknown_side_call_of_a_known_session_is_no_turn_of_it() -> None:
    run = MemoryRun(load_classifier("auto"))
    first = lines("claude_code", 1)[0]
    run.exchange(first)
    pending = run.ask([system("Rate this."), user("text")], (), {}, first.headers)
    assert pending.assigned.role == "side"


# -- programs that nothing is known of --------------------------------------------------------------------------------


def start(run: MemoryRun, prompt: str = "Fix the parser", *calls: ToolCall) -> tuple[Message, ...]:
    """Open the main lane; return its conversation."""
    opening = (AGENT, user(prompt))
    answer = said("I begin with a long look at things.", *calls)
    run.answer(run.ask(opening, TOOL), answer)
    return (*opening, answer)


def generic() -> MemoryRun:
    return MemoryRun(load_classifier("auto"))


def test_a_prompt_of_a_tool_call_names_lane_parent_and_call() -> None:
    call = ToolCall("t1", "delegate", '{"agent": "searcher", "task": "find the tests"}')
    run = generic()
    start(run, "Fix it", call)
    pending = run.ask([system("You search."), user("find the tests")], OTHER_TOOL)
    assert structure(run, [pending.lane]) == [("subagent", "searcher", "main", "c1")]


def test_equal_prompts_in_parallel_get_a_lane_each_and_each_its_tool_call() -> None:
    calls = [ToolCall(f"t{n}", "delegate", '{"task": "try it once more"}') for n in range(2)]
    run = generic()
    start(run, "Fix it", *calls)
    both = [run.ask([system("You try."), user("try it once more")], OTHER_TOOL) for _ in calls]
    assert [item.assigned.tool_call for item in both] == ["t0", "t1"]
    assert len({item.lane for item in both}) == 2


def test_a_sub_agent_of_a_sub_agent_has_it_as_its_parent() -> None:
    run = generic()
    start(run, "Fix it", ToolCall("t1", "delegate", '{"name": "outer", "task": "the outer task"}'))
    outer = run.ask([system("You work."), user("the outer task")], TOOL)
    run.answer(outer, said("", ToolCall("t2", "delegate", '{"name": "inner", "task": "the inner task"}')))
    inner = run.ask([system("You work."), user("the inner task")], TOOL)
    assert structure(run, [inner.lane]) == [("subagent", "inner", "outer", "c2")]


@pytest.mark.parametrize("arguments", ["", "not json", "[1]", '{"task": 3}', '{"task": ""}', '{"task": {"a": 1}}'])
def test_arguments_of_any_kind_start_nothing(arguments: str) -> None:
    run = generic()
    start(run, "Fix it", ToolCall("t1", "delegate", arguments))
    pending = run.ask([system("You search."), user("find the tests")], OTHER_TOOL)
    assert structure(run, [pending.lane]) == [("subagent", "subagent", "main", None)]


def test_a_short_argument_inside_a_longer_prompt_starts_nothing() -> None:
    run = generic()
    start(run, "Fix it", ToolCall("t1", "delegate", '{"task": "go"}'))
    pending = run.ask([system("You search."), user("let us go now")], OTHER_TOOL)
    assert pending.assigned.parent_call is None


def test_the_same_request_again_is_the_same_lane() -> None:
    run = generic()
    conversation = start(run)
    assert run.ask(conversation[:2], TOOL).lane == LaneId("l0")


def test_an_edited_or_cut_history_is_the_same_lane() -> None:
    run = generic()
    conversation = [*start(run)]
    for number in range(4):
        conversation += [user(f"step {number}")]
        answer = said(f"answer {number}")
        run.answer(run.ask(conversation, TOOL), answer)
        conversation.append(answer)
    edited = [*conversation[:2], said("something else"), *conversation[3:], user("on")]
    cut = [conversation[0], user("(older steps left out)"), conversation[-1], user("on")]
    assert {run.ask(edited, TOOL).lane, run.ask(cut, TOOL).lane} == {LaneId("l0")}


@pytest.mark.parametrize("change", ["tools", "system"])
def test_other_tools_or_another_system_prompt_alone_is_the_same_lane(change: str) -> None:
    run = generic()
    conversation = [*start(run), user("on")]
    if change == "system":
        conversation[0] = system("You are an agent. Today is Tuesday.")
    assert run.ask(conversation, OTHER_TOOL if change == "tools" else TOOL).lane == LaneId("l0")


def test_another_agent_that_takes_the_conversation_over_is_a_lane_below() -> None:
    run = generic()
    conversation = [system("You write."), *start(run)[1:], user("on")]
    pending = run.ask(conversation, OTHER_TOOL)
    assert structure(run, [pending.lane]) == [("subagent", "subagent", "main", "c1")]


def test_a_hand_off_and_back() -> None:
    run = generic()
    call = ToolCall("t1", "transfer_to_writer", "{}")
    conversation = [*start(run, "Fix it", call), Message("tool", "ok", tool_call_id="t1")]
    writer = run.ask([system("You write."), *conversation[1:]], OTHER_TOOL)
    back = said("", ToolCall("t2", "transfer_to_triage", "{}"))
    run.answer(writer, back)
    again = run.ask([*conversation, back, Message("tool", "ok", tool_call_id="t2")], TOOL)
    assert structure(run, [writer.lane]) == [("subagent", "writer", "main", "c1")]
    assert again.lane == LaneId("l0")


@pytest.mark.parametrize("form", ["repeats", "quotes"])
def test_a_summary_and_what_begins_with_it(form: str) -> None:
    """An unknown program drops its tools to sum up, or sends the conversation as text."""
    run = generic()
    conversation = start(run)
    wish = "Summarize the conversation above."
    if form == "quotes":
        text = "\n".join(f"{item.role}: {item.content}" for item in conversation)
        asked = [system("You sum up."), user(f"Write a summary of this conversation:\n{text}")]
    else:
        asked = [*conversation, user(wish)]
    summary = run.ask(asked, ())
    assert structure(run, [summary.lane]) == [("main-summary", "main-summary", "main", "c1")]
    run.answer(summary, said("The parser is half fixed; the tests are next."))
    assert run.ask([AGENT, user("So far: The parser is half fixed; the tests are next.")], TOOL).lane == LaneId("l0")


def test_a_user_who_asks_for_a_summary_within_the_conversation_is_answered_in_it() -> None:
    """With its tools, on the recorded path: a turn like any other."""
    run = generic()
    assert run.ask([*start(run), user("Summarize the conversation so far.")], TOOL).lane == LaneId("l0")


def test_a_one_shot_without_tools_is_a_side_call() -> None:
    run = generic()
    start(run)
    first = run.ask([system("Name it."), user("Fix the parser")], ())
    second = run.ask([system("Name it."), user("Another one")], ())
    assert first.assigned.role == "side"
    assert first.lane == second.lane, "side calls of a kind share a lane"


def test_a_run_without_tools_has_a_side_call_only_where_next_to_nothing_is_wanted() -> None:
    run = generic()
    run.answer(run.ask([AGENT, user("hello")]), said("hi"))
    assert run.ask([system("Is it a topic?"), user("hello?")], (), {"max_tokens": 16}).assigned.role == "side"
    assert run.ask([system("You are a critic."), user("hello??")], (), {"max_tokens": 900}).assigned.role == "subagent"


# -- any inputs -------------------------------------------------------------------------------------------------------

TEXTS = st.sampled_from(
    ["a", "b", "Fix it", "try it once more, with feeling", "Summarize the conversation", "quota", ""]
)
CALLS = st.builds(
    ToolCall,
    st.sampled_from(["t1", "t2", ""]),
    st.sampled_from(["delegate", "transfer_to_x", "ls"]),
    st.sampled_from(["", "{", '{"task": "try it once more, with feeling"}']),
)
MESSAGES = st.lists(
    st.one_of(
        st.builds(Message, st.sampled_from(["system", "user", "tool"]), TEXTS),
        st.builds(Message, st.just("assistant"), TEXTS, tool_calls=st.lists(CALLS, max_size=2).map(tuple)),
    ),
    max_size=6,
)
HEADERS = st.dictionaries(
    st.sampled_from(
        [
            "user-agent",
            "x-claude-code-session-id",
            "x-claude-code-agent-id",
            "thread-id",
            "originator",
            "x-openai-subagent",
            "x-codex-turn-metadata",
        ]
    ),
    st.sampled_from(
        [
            "",
            "x",
            "codex",
            "claude-cli/2",
            "Agents/Python 1",
            '{"request_kind": "compaction"}',
            '{"request_kind": 3}',
            "[1]",
        ]
    ),
    max_size=3,
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(MESSAGES, st.sampled_from([(), TOOL]), HEADERS, TEXTS, st.lists(CALLS, max_size=2), st.booleans()),
        max_size=8,
    )
)
def test_every_request_gets_a_lane_that_fits_the_run(
    script: list[tuple[list[Message], tuple[dict[str, object], ...], dict[str, str], str, list[ToolCall], bool]],
) -> None:
    """Whatever is sent: an existing lane, or a new one below existing ones; and the same again from the same inputs."""
    run, twin = generic(), generic()
    for messages, tools, headers, text, calls, finished in script:
        pending = run.ask(messages, tools, {}, headers)
        other = twin.ask(messages, tools, {}, headers)
        assert pending.assigned == other.assigned
        lane = run.lanes[pending.lane]
        assert lane.parent is None or (lane.parent in run.lanes and lane.parent != lane.lane)
        assert lane.role.removesuffix("-summary") in ("main", "subagent", "side")
        assert run.parent_calls[lane.lane] in (None, *(f"c{number}" for number in range(1, 10)))
        if finished:
            run.answer(pending, said(text, *calls))
            twin.answer(other, said(text, *calls))


# -- loading ----------------------------------------------------------------------------------------------------------


class OneLane(Classifier):
    """A user's own: everything is the first lane."""

    def assign(self, asked: Asked, lanes: Mapping[int, LaneView], calls: list[CallView]) -> Assigned:  # type: ignore[override]
        return Assigned(lanes[0].lane, lanes[0].role, lanes[0].name)


ONE_LANE = OneLane()
NOT_ONE = 3


@pytest.mark.parametrize("name", ["test_lanes:OneLane", "test_lanes:ONE_LANE"])
def test_a_user_gives_a_classifier_by_import_path(name: str) -> None:
    run = MemoryRun(load_classifier(name))
    for line in lines("claude_code", 0):
        run.exchange(line)
    assert structure(run, run.lanes) == [MAIN]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("claude", "use one of auto, claude-code, codex"),
        ("no_such_module:x", "cannot be imported"),
        ("test_lanes:Nothing", "has no Nothing"),
        ("test_lanes:NOT_ONE", "is a int"),
        ("test_lanes:", "unknown"),
    ],
)
def test_a_name_that_gives_none_is_refused(name: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_classifier(name)
