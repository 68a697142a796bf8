"""cases/fidelity through the wire: what a request continues, and the exact ids that are sent for it.

Each case's input is a fixed example; around it stand inputs of our own of the same kind.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from proxy_engine import Finish, ScriptedEngine, Step, Tokens, say
from proxy_kit import SHARED, Proxy, running
from proxy_toy import toy_template

from gyre_sdk.harness.proxy.server import HistoryPolicy
from gyre_sdk.records import CallRecord, ForkReason


def case(name: str) -> dict[str, Any]:
    """Return a case, or skip where the cases are not at hand."""
    path = SHARED / "cases" / name.split("-")[0] / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"{path} is missing")
    return json.loads(path.read_text())


@contextmanager
def scripted(
    model: Path, tmp_path: Path, pieces: dict[str, int], *answers: list[Step], **more: Any
) -> Iterator[tuple[Proxy, ScriptedEngine]]:
    """Run a proxy with the toy template over an engine that gives these answers in turn, the last one for ever."""
    with ScriptedEngine(lambda request, number: answers[min(number, len(answers)) - 1]) as engine:
        with running(model, tmp_path / "store.db", engine.url, template=toy_template(pieces), **more) as proxy:
            yield proxy, engine


def ask(proxy: Proxy, access: dict[str, Any], *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Ask; give the answer's JSON."""
    answer = proxy.chat(access, {"messages": list(messages), **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def check_path(calls: list[CallRecord], engine: ScriptedEngine) -> None:
    """Hold promise 2 against what the engine saw, and every sampled token on record once."""
    assert [call.prompt_ids for call in calls] == [generation.prompt for generation in engine.log]
    assert [call.sampled_ids for call in calls] == [generation.sampled for generation in engine.log]
    whole = {call.call: call.prompt_ids + call.sampled_ids for call in calls}
    for call in calls:
        assert len(call.logprobs) == len(call.sampled_ids)
        if call.parent is None:
            assert call.shared == 0
            continue
        above = whole[call.parent]
        assert call.prompt_ids[: call.shared] == above[: call.shared]
        assert (call.fork_reason is None) == (call.shared == len(above))


USER = {"role": "user", "content": "hi"}
GO = {"role": "user", "content": "go"}


def test_retokenised_answer(model: Path, tmp_path: Path) -> None:
    """fidelity-retokenised-answer."""
    given = case("fidelity-retokenised-answer")
    toy, one, two, want = given["input"]["toy"], given["input"]["turn_1"], given["input"]["turn_2"], given["expected"]
    script = [say(*one["sampled_ids"]), say(*two["sampled_ids"])]
    with scripted(model, tmp_path, toy["pieces"], *script) as (proxy, engine):
        access = proxy.run()
        first = ask(proxy, access, *one["messages"])
        assert first["choices"][0]["message"]["content"] == want["text_shown_to_agent"]
        ask(proxy, access, *two["messages"])
        calls = proxy.calls()
    check_path(calls, engine)
    assert calls[0].prompt_ids == want["turn_1_prompt_ids"]
    assert calls[1].prompt_ids == want["turn_2_prompt_ids"] != want["wrong_prompt_ids"]
    assert calls[1].prompt_ids + calls[1].sampled_ids == want["path"]
    assert (calls[1].parent, calls[1].fork_reason) == (calls[0].call, None)


def added_keys() -> list[tuple[dict[str, Any], bool]]:
    ours: list[tuple[dict[str, Any], bool]] = [
        ({"role": "assistant", "content": "water", "x_new": {"deep": [1]}}, True),
        ({"role": "assistant", "content": ["water"]}, True),
        ({"role": "assistant", "content": [{"type": "text", "text": "water", "x": 1}], "function_call": None}, True),
        ({"role": "assistant", "content": "wa\nter"}, False),
        ({"role": "assistant", "content": "\nwater"}, False),
        ({"role": "assistant", "content": None}, False),
    ]
    path = SHARED / "cases" / "fidelity" / "fidelity-added-keys-and-content-parts.json"
    if path.is_file():
        given = json.loads(path.read_text())["input"]
        ours += [(message, True) for message in given["same_message"]]
        ours += [(message, False) for message in given["different_message"]]
    return ours


@pytest.mark.parametrize("form", ["string", "parts"])
def test_added_keys_and_content_parts(model: Path, tmp_path: Path, form: str) -> None:
    """fidelity-added-keys-and-content-parts: what the model cannot see does not decide, what it can see does."""
    pieces = {"hi": 300, "wa": 301, "ter": 302, "water": 303, "go": 304}
    want = [257, 300, 260, 10, 258, 301, 302, 260, 10, 257, 304, 260, 10, 258]

    def user(text: str) -> dict[str, Any]:
        return {"role": "user", "content": text if form == "string" else [{"type": "text", "text": text}]}

    with scripted(model, tmp_path, pieces, say(301, 302, 260)) as (proxy, engine):
        for message, same in added_keys():
            access = proxy.run()
            ask(proxy, access, user("hi"))
            ask(proxy, access, user("hi"), message, user("go"))
            last = proxy.calls(access["run"])[1]
            if same:
                assert (last.prompt_ids, last.fork_reason) == (want, None), message
            elif message["role"] == "assistant":
                assert last.fork_reason is ForkReason.CLIENT_EDIT, message
                assert last.prompt_ids != want
            else:
                assert last.fork_reason is not None
        check_all(proxy, engine)


def check_all(proxy: Proxy, engine: ScriptedEngine) -> None:
    """Compare by request: runs may interleave."""
    calls = {call.call: call for call in proxy.calls()}
    assert len(engine.log) == len(calls)
    for generation in engine.log:
        call = calls[generation.request["request_id"].rsplit("-", 2)[0]]
        assert (call.prompt_ids, call.sampled_ids) == (generation.prompt, generation.sampled)


def test_parallel_results_in_other_order(model: Path, tmp_path: Path) -> None:
    """fidelity-parallel-results-in-other-order."""
    given = case("fidelity-parallel-results-in-other-order")
    one, want, source = given["input"]["turn_1"], given["expected"], given["input"]
    script = [say(*one["sampled_ids"]), say(*source["turn_2_sampled_ids"]), say(304, 260)]
    with scripted(model, tmp_path, source["toy"]["pieces"], *script) as (proxy, engine):
        access = proxy.run()
        said = ask(proxy, access, *one["messages"])["choices"][0]["message"]
        ids = dict(zip(one["returned_ids"], [call["id"] for call in said["tool_calls"]], strict=True))

        def tail(name: str) -> list[dict[str, Any]]:
            return [
                {**message, "tool_call_id": ids[message["tool_call_id"]]} if "tool_call_id" in message else message
                for message in source[name]
            ]

        ask(proxy, access, *one["messages"], said, *tail("turn_2_messages_tail"))
        ask(proxy, access, *one["messages"], said, *tail("turn_3_messages_tail"))
        calls = proxy.calls()
    check_path(calls, engine)
    assert calls[1].prompt_ids == want["turn_2_prompt_ids"]
    assert calls[2].prompt_ids == want["turn_3_prompt_ids"]
    assert [call.fork_reason for call in calls] == [None, None, None]


def test_stop_string_ids(model: Path, tmp_path: Path) -> None:
    """fidelity-stop-string-ids: ids and log-probs stay whole, the text ends before the stop string."""
    given = case("fidelity-stop-string-ids")
    source, want = given["input"], given["expected"]
    for place, output in enumerate(source["engine_outputs"]):
        steps: list[Step] = [
            Tokens(output["output_ids"], output["logprobs"]),
            Finish(output["finish_reason"], output["stop_reason"]),
        ]
        folder = tmp_path / str(place)
        last = say(*source["turn_2"]["sampled_ids"])
        with scripted(model, folder, source["toy"]["pieces"], steps, last) as (proxy, engine):
            access = proxy.run()
            said = ask(proxy, access, *source["request"]["messages"], stop=source["request"]["stop"], max_tokens=8)
            ask(proxy, access, *source["turn_2"]["messages"])
            calls = proxy.calls()
        check_path(calls, engine)
        recorded = want["recorded"][place]
        assert calls[0].prompt_ids == want["prompt_ids"]
        assert calls[0].sampled_ids == recorded["ids"]
        assert calls[0].logprobs == pytest.approx(output["logprobs"])
        assert said["choices"][0]["message"]["content"] == recorded["agent_text"]
        assert said["usage"]["completion_tokens"] == recorded["completion_tokens"]
        allowed = want["turn_2_prompt"]["own tokens" if place == 0 else "inside a token"]["allowed"]
        assert calls[1].prompt_ids in allowed
        assert engine.log[0].request["sampling_params"]["stop"] == source["request"]["stop"]


@pytest.mark.parametrize("policy", list(HistoryPolicy))
def test_thinking_dropped_from_history(model: Path, tmp_path: Path, policy: HistoryPolicy) -> None:
    """fidelity-thinking-dropped-from-history, under both policies."""
    given = case("fidelity-thinking-dropped-from-history")
    source, want = given["input"], given["expected"]
    kept = want["fields and inline tags"]["turn_2_prompt_ids"]
    for place, form in enumerate(source["turn_2_forms"]):
        script = [say(*source["turn_1"]["sampled_ids"]), say(*source["turn_2_sampled_ids"])]
        with scripted(model, tmp_path / str(place), source["toy"]["pieces"], *script, history=policy) as (
            proxy,
            engine,
        ):
            access = proxy.run()
            said = ask(proxy, access, *source["turn_1"]["messages"])["choices"][0]["message"]
            seen = source["turn_1"]["agent_sees"]
            assert (said["reasoning_content"], said["content"]) == (seen["reasoning"], seen["content"])
            ask(proxy, access, *source["turn_1"]["messages"], form["assistant"], source["turn_2_last_message"])
            calls = proxy.calls()
            with proxy.journal() as journal:
                policies = [item.request["history"] for item in journal.exchanges(access["run"])]
        check_path(calls, engine)
        assert policies == [policy, policy]
        last = calls[1]
        if form["name"] == "reasoning missing":
            rule = want["reasoning missing"][f"history = {policy}"]
            assert last.prompt_ids == rule["turn_2_prompt_ids"]
            assert (last.fork_reason is None) == (rule["leaves"] == 1)
            assert last.shared == rule.get("shared_prefix_length", 10)
        elif form["name"] == "reasoning edited":
            assert last.fork_reason is ForkReason.CLIENT_EDIT
            assert "other" in toy_template(source["toy"]["pieces"]).text(last.prompt_ids)
        else:
            assert (last.prompt_ids, last.fork_reason) == (kept, None), form["name"]


def test_history_policies_go_by_role(model: Path, tmp_path: Path) -> None:
    """One service, one conversation, two policies: each lane's role decides, and what applied is on record."""
    given = case("fidelity-thinking-dropped-from-history")
    source, want = given["input"], given["expected"]["reasoning missing"]
    script = [say(*source["turn_1"]["sampled_ids"]), say(*source["turn_2_sampled_ids"])] * 2
    by_role = {"reviewer": HistoryPolicy.AS_TEMPLATE}
    with scripted(model, tmp_path, source["toy"]["pieces"], *script, histories=by_role) as (proxy, engine):
        for role, policy in (("subagent", HistoryPolicy.BRIDGE), ("reviewer", HistoryPolicy.AS_TEMPLATE)):
            run = proxy.run()["run"]
            lane = proxy.lane(run, role=role)
            ask(proxy, lane, *source["turn_1"]["messages"])
            last = [source["turn_2_forms"][0]["assistant"], source["turn_2_last_message"]]
            ask(proxy, lane, *source["turn_1"]["messages"], *last)
            assert proxy.calls(run)[1].prompt_ids == want[f"history = {policy}"]["turn_2_prompt_ids"]
            with proxy.journal() as journal:
                assert [item.request["history"] for item in journal.exchanges(run)] == [policy, policy]
        check_path(proxy.calls(), engine)


def test_tool_arguments_rewritten(model: Path, tmp_path: Path) -> None:
    """fidelity-tool-arguments-rewritten: equal JSON is the same call, anything else is the agent's own."""
    given = case("fidelity-tool-arguments-rewritten")
    source, want = given["input"], given["expected"]
    toy = toy_template(source["toy"]["pieces"])
    same = [*source["same_call"], source["id_changed"]]
    script = say(*source["turn_1"]["sampled_ids"])
    with scripted(model, tmp_path, source["toy"]["pieces"], script) as (proxy, engine):
        for message in [*same, *source["edited_call"]]:
            access = proxy.run()
            said = ask(proxy, access, *source["turn_1"]["messages"])["choices"][0]["message"]
            assert said["tool_calls"][0]["function"]["arguments"] == '{"pattern":"café","all":true,"n":1}'
            sent = copy.deepcopy(message)
            if sent["tool_calls"][0]["id"] == source["turn_1"]["returned_call_id"]:
                sent["tool_calls"][0]["id"] = said["tool_calls"][0]["id"]
            result = {"role": "tool", "tool_call_id": sent["tool_calls"][0]["id"], "content": "no match"}
            ask(proxy, access, *source["turn_1"]["messages"], sent, result)
            first, last = proxy.calls(access["run"])
            assert first.prompt_ids == want["turn_1_prompt_ids"]
            assert len(first.sampled_ids) == 55
            if message in same:
                assert (last.prompt_ids, last.fork_reason) == (want["for_every_same_call"]["turn_2_prompt_ids"], None)
            else:
                assert last.fork_reason is ForkReason.CLIENT_EDIT
                assert last.shared >= 5
                assert sent["tool_calls"][0]["function"]["arguments"] in toy.text(last.prompt_ids)
        check_all(proxy, engine)


def test_longest_prefix_after_rollback(model: Path, tmp_path: Path) -> None:
    """Two recorded prefixes match: the longest one is continued (prime-rl#2634's kind), and a rollback the shorter."""
    with scripted(model, tmp_path, {"hi": 300, "go": 304, "a": 305}, say(305, 260)) as (proxy, engine):
        access, said = proxy.run(), {"role": "assistant", "content": "a"}
        history: list[dict[str, Any]] = [USER]
        for _ in range(3):
            ask(proxy, access, *history)
            history += [said, GO]
        ask(proxy, access, *history)
        ask(proxy, access, *history[:3], USER)
        calls = proxy.calls()
    check_path(calls, engine)
    names = [call.call for call in calls]
    assert [call.parent for call in calls] == [None, names[0], names[1], names[2], names[0]]
    assert {call.fork_reason for call in calls} == {None}


def test_forks_are_named(model: Path, tmp_path: Path) -> None:
    """Each way to leave the recorded path has its reason."""
    system = {"role": "system", "content": "You fix bugs."}
    tool = {"type": "function", "function": {"name": "ls", "parameters": {}}}
    said = {"role": "assistant", "content": "a"}
    base = [system, USER, said, GO, said, USER]
    changed = [{"role": "system", "content": "You write poems."}, *base[1:]]
    forks = [
        ("compaction", [system, {"role": "user", "content": "so far: all is well"}], {}),
        ("client_edit", [system, USER, {"role": "assistant", "content": "b"}, GO, said, USER, said, USER], {}),
        ("tools_changed", [*base, said, GO], {"tools": [tool]}),
        ("system_changed", [*changed, said, GO], {}),
        ("retry", [system, USER], {}),
    ]
    with scripted(model, tmp_path, {"hi": 300, "go": 304, "a": 305}, say(305, 260)) as (proxy, engine):
        for reason, messages, more in forks:
            access = proxy.run()
            for end in (2, 4, 6):
                ask(proxy, access, *base[:end])
            ask(proxy, access, *messages, **more)
            last = proxy.calls(access["run"])[-1]
            assert last.fork_reason == reason, (reason, last)
        check_all(proxy, engine)


def test_other_lane_is_matched_when_the_own_has_nothing(model: Path, tmp_path: Path) -> None:
    """A summary lane continues the main lane's path; a sub-agent with its own system prompt is a root."""
    with scripted(model, tmp_path, {"hi": 300, "go": 304, "a": 305}, say(305, 260)) as (proxy, engine):
        access = proxy.run()
        ask(proxy, access, USER)
        summary = proxy.lane(access["run"], role="main-summary", parent=access["lane"])
        agent = proxy.lane(access["run"], role="subagent", parent=access["lane"])
        ask(proxy, summary, USER, {"role": "assistant", "content": "a"}, {"role": "user", "content": "sum up"})
        ask(proxy, agent, {"role": "system", "content": "You review."}, USER)
        calls = proxy.calls()
    check_path(calls, engine)
    assert [call.role for call in calls] == ["main", "main-summary", "subagent"]
    assert [(call.parent, call.fork_reason) for call in calls] == [(None, None), (calls[0].call, None), (None, None)]
