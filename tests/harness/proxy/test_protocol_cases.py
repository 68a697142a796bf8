"""cases/proxy and cases/fidelity in every protocol that they apply to, over the wire."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from protocols_kit import PATHS, body_of, read, say, send
from proxy_engine import Done, Error, Finish, Hangup, ScriptedEngine, Status, Step, Tokens, Wait
from proxy_engine import say as sampled
from proxy_kit import running
from proxy_toy import toy_template
from test_fidelity_cases import case, check_path, scripted

from gyre_sdk.records import CallStatus, ForkReason

PROTOCOLS = pytest.mark.parametrize("protocol", list(PATHS))
STREAMS = pytest.mark.parametrize("stream", [False, True])
PIECES = {"Let me ": 331, "check": 333, " it.": 334, "I will ": 341, "run": 342, " the": 345, " tests": 346, "go": 304}
HELLO = [{"role": "user", "content": "go"}]


# -- proxy-abort-stays-inside, proxy-done-without-finish ------------------------------------------------------------


@PROTOCOLS
@STREAMS
@pytest.mark.parametrize(
    "ending", [[Finish("abort")], [Error(), Done()], [Done()], [Hangup()]], ids=["abort", "error", "done", "hangup"]
)
def test_a_broken_answer_is_continued(
    model: Path, tmp_path: Path, protocol: str, stream: bool, ending: list[Step]
) -> None:
    """What the engine broke off goes on from its tokens; the agent sees one whole answer with one end."""
    plays: list[list[Step]] = [[Tokens([331]), Tokens([333]), *ending], [Tokens([334, 260]), Finish()]]
    with scripted(model, tmp_path, PIECES, *plays) as (proxy, engine):
        access = proxy.run()
        seen = say(proxy, access, protocol, HELLO, max_tokens=20, stream=stream)
        [call] = proxy.calls()
        with proxy.journal() as journal:
            attempts = journal.attempts(call.call)
    assert (seen.text, seen.finish) == ("Let me check it.", "stop")
    assert engine.log[1].prompt == [*call.prompt_ids, 331, 333]
    assert (call.sampled_ids, len(call.logprobs)) == ([331, 333, 334, 260], 4)
    assert [(item.tokens_from, item.tokens_to) for item in attempts] == [(0, 2), (2, 4)]


@PROTOCOLS
@STREAMS
def test_an_answer_that_cannot_go_on_is_an_error(model: Path, tmp_path: Path, protocol: str, stream: bool) -> None:
    """No engine is left: the protocol's error, never a normal end; the ids stay on record."""
    plays: list[list[Step]] = [[Tokens([331, 333]), Wait(0.1), Error(), Done()], [Status(503)]]
    with scripted(model, tmp_path, PIECES, *plays, patience=0.4, retry_pause=0.002) as (proxy, _engine):
        body = body_of(protocol, HELLO, max_tokens=20, stream=stream)
        answer = send(proxy, proxy.run(), protocol, body)
        [call] = proxy.calls()
    seen = read(protocol, answer)
    assert seen.error and seen.finish is None
    if not stream:
        assert answer.status_code in (503, 529)
        assert 0 < int(answer.headers["retry-after"]) <= 60
    assert (call.status, call.sampled_ids, call.finish_reason) == (CallStatus.FAILED, [331, 333], None)


# -- proxy-parallel-tool-call-deltas --------------------------------------------------------------------------------


@PROTOCOLS
@STREAMS
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_parallel_tool_calls(model: Path, tmp_path: Path, protocol: str, stream: bool, size: int) -> None:
    """proxy-parallel-tool-call-deltas: the same calls for every cut, in the order of the model."""
    given = case("proxy-parallel-tool-call-deltas")
    want, ids = given["expected"], [*given["input"]["model_text"].encode(), 260]
    steps: list[Step] = [Tokens(ids[at : at + size]) for at in range(0, len(ids), size)]
    with scripted(model, tmp_path, {"go": 304}, [*steps, Finish()]) as (proxy, _engine):
        access = proxy.run()
        seen = say(proxy, access, protocol, HELLO, stream=stream)
        with proxy.journal() as journal:
            [exchange] = journal.exchanges(access["run"])
    assert (seen.text, seen.finish) == (want["content"], "tool_calls")
    assert [call["name"] for call in seen.calls] == [call["name"] for call in want["calls"]]
    assert [json.loads(call["arguments"]) for call in seen.calls] == [call["arguments"] for call in want["calls"]]
    assert exchange.answer is not None
    assert [call["id"] for call in seen.calls] == [call["id"] for call in exchange.answer["tool_calls"]]


# -- proxy-retry-or-resample ----------------------------------------------------------------------------------------


@PROTOCOLS
@STREAMS
def test_retry_or_resample(model: Path, tmp_path: Path, protocol: str, stream: bool) -> None:
    """proxy-retry-or-resample, delivered: what says that it repeats is served once more, what does not is sampled."""
    pieces = {f"S{number}": 400 + number for number in range(1, 9)}
    plays = [sampled(400 + number, 260) for number in range(1, 9)]
    with scripted(model, tmp_path, pieces, *plays) as (proxy, engine):
        access = proxy.run()

        def ask(**headers: str) -> str:
            answer = send(proxy, access, protocol, body_of(protocol, HELLO, max_tokens=64, stream=stream), **headers)
            return read(protocol, answer).text

        first = {"x-stainless-retry-count": "0"}
        again = {"x-stainless-retry-count": "1"}
        assert [ask(**first), ask(**again), ask(**first), ask(), ask(**again)] == ["S1", "S1", "S2", "S3", "S3"]
        assert [ask(**{"Idempotency-Key": "k"}), ask(**{"Idempotency-Key": "k"})] == ["S4", "S4"]
        calls = proxy.calls()
    check_path(calls, engine)
    assert [call.prompt_ids for call in calls] == [calls[0].prompt_ids] * 4
    for call in calls[1:]:  # siblings: they part where the prompt ends
        assert (call.fork_reason, call.shared) == (ForkReason.RETRY, len(call.prompt_ids))


@PROTOCOLS
@STREAMS
@pytest.mark.parametrize("finished", [False, True])
def test_an_answer_that_nobody_got(model: Path, tmp_path: Path, protocol: str, stream: bool, finished: bool) -> None:
    """proxy-retry-or-resample, lost: the connection breaks; the same body gets that generation, done or not."""
    gate = threading.Event()
    plays: list[list[Step]] = [[Tokens([401]), Wait(gate), Tokens([260]), Finish()], sampled(402, 260)]
    with scripted(model, tmp_path, {"S1": 401, "S2": 402}, *plays) as (proxy, engine):
        access = proxy.run()
        body = body_of(protocol, HELLO, max_tokens=64, stream=stream)
        data = proxy.http.build_request("POST", PATHS[protocol], json=body).content
        with socket.create_connection(("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))) as lost:
            head = f"POST {PATHS[protocol]} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {access['api_key']}\r\n"
            lost.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            while not engine.log:
                pass
        if finished:
            gate.set()
            while [call.status for call in proxy.calls()] != [CallStatus.COMPLETE]:
                pass
        else:
            threading.Timer(0.2, gate.set).start()
        answer = send(proxy, access, protocol, body, **{"x-stainless-retry-count": "1"})
        assert read(protocol, answer).text == "S1"
        assert len(engine.log) == len(proxy.calls()) == 1


# -- fidelity -------------------------------------------------------------------------------------------------------


@PROTOCOLS
@STREAMS
def test_retokenised_answer(model: Path, tmp_path: Path, protocol: str, stream: bool) -> None:
    """fidelity-retokenised-answer: the sampled ids come back, not what the text would be encoded to."""
    given = case("fidelity-retokenised-answer")
    toy, one, two, want = given["input"]["toy"], given["input"]["turn_1"], given["input"]["turn_2"], given["expected"]
    with scripted(model, tmp_path, toy["pieces"], sampled(*one["sampled_ids"]), sampled(*two["sampled_ids"])) as (
        proxy,
        engine,
    ):
        access = proxy.run()
        assert say(proxy, access, protocol, one["messages"], stream=stream).text == want["text_shown_to_agent"]
        say(proxy, access, protocol, two["messages"], stream=stream)
        calls = proxy.calls()
    check_path(calls, engine)
    assert [calls[0].prompt_ids, calls[1].prompt_ids] == [want["turn_1_prompt_ids"], want["turn_2_prompt_ids"]]
    assert calls[1].fork_reason is None


@PROTOCOLS
def test_parallel_results_in_other_order(model: Path, tmp_path: Path, protocol: str) -> None:
    """fidelity-parallel-results-in-other-order."""
    given = case("fidelity-parallel-results-in-other-order")
    one, want, source = given["input"]["turn_1"], given["expected"], given["input"]
    script = [sampled(*one["sampled_ids"]), sampled(*source["turn_2_sampled_ids"]), sampled(304, 260)]
    with scripted(model, tmp_path, source["toy"]["pieces"], *script) as (proxy, engine):
        access = proxy.run()
        seen = say(proxy, access, protocol, one["messages"])
        ids = dict(zip(one["returned_ids"], [call["id"] for call in seen.calls], strict=True))
        for name in ("turn_2_messages_tail", "turn_3_messages_tail"):
            tail = [
                {**message, "tool_call_id": ids[message["tool_call_id"]]} if "tool_call_id" in message else message
                for message in source[name]
            ]
            say(proxy, access, protocol, [*one["messages"], seen.message(), *tail])
        calls = proxy.calls()
    check_path(calls, engine)
    assert [call.prompt_ids for call in calls[1:]] == [want["turn_2_prompt_ids"], want["turn_3_prompt_ids"]]
    assert [call.fork_reason for call in calls] == [None, None, None]


@pytest.mark.parametrize("protocol", ["chat", "messages"])
def test_stop_string_ids(model: Path, tmp_path: Path, protocol: str) -> None:
    """fidelity-stop-string-ids, in the protocols that have stop strings."""
    given = case("fidelity-stop-string-ids")
    source, want = given["input"], given["expected"]
    for place, output in enumerate(source["engine_outputs"]):
        steps: list[Step] = [
            Tokens(output["output_ids"], output["logprobs"]),
            Finish(output["finish_reason"], output["stop_reason"]),
        ]
        last = sampled(*source["turn_2"]["sampled_ids"])
        with scripted(model, tmp_path / str(place), source["toy"]["pieces"], steps, last) as (proxy, engine):
            access, request = proxy.run(), source["request"]
            seen = say(proxy, access, protocol, request["messages"], stop=request["stop"], max_tokens=8)
            say(proxy, access, protocol, source["turn_2"]["messages"])
            calls = proxy.calls()
        check_path(calls, engine)
        assert (calls[0].sampled_ids, seen.text) == (
            want["recorded"][place]["ids"],
            want["recorded"][place]["agent_text"],
        )
        assert calls[1].prompt_ids in want["turn_2_prompt"]["own tokens" if place == 0 else "inside a token"]["allowed"]


@PROTOCOLS
@pytest.mark.parametrize("change", ["kept", "dropped", "edited"])
def test_thinking_in_history(model: Path, tmp_path: Path, protocol: str, change: str) -> None:
    """fidelity-thinking-dropped-from-history: thinking that was dropped is bridged, thinking that was edited is shown."""
    source = case("fidelity-thinking-dropped-from-history")["input"]
    script = [sampled(*source["turn_1"]["sampled_ids"]), sampled(*source["turn_2_sampled_ids"])]
    with scripted(model, tmp_path, source["toy"]["pieces"], *script) as (proxy, engine):
        access = proxy.run()
        seen = say(proxy, access, protocol, source["turn_1"]["messages"])
        assert (seen.reasoning, seen.text) == tuple(
            source["turn_1"]["agent_sees"][key] for key in ("reasoning", "content")
        )
        seen.reasoning = {"kept": seen.reasoning, "dropped": "", "edited": "other"}[change]
        say(proxy, access, protocol, [*source["turn_1"]["messages"], seen.message(), source["turn_2_last_message"]])
        calls = proxy.calls()
    check_path(calls, engine)
    if change == "edited":
        assert calls[1].fork_reason is ForkReason.CLIENT_EDIT
    else:
        whole = calls[0].prompt_ids + calls[0].sampled_ids
        assert (calls[1].prompt_ids[: len(whole)], calls[1].fork_reason) == (whole, None)


@PROTOCOLS
def test_tool_arguments_rewritten(model: Path, tmp_path: Path, protocol: str) -> None:
    """fidelity-tool-arguments-rewritten: equal JSON is the same call, anything else is the agent's own."""
    given = case("fidelity-tool-arguments-rewritten")
    source, want = given["input"], given["expected"]
    with scripted(model, tmp_path, source["toy"]["pieces"], sampled(*source["turn_1"]["sampled_ids"])) as (proxy, _):
        for place, message in enumerate([*source["same_call"], *source["edited_call"]]):
            try:
                json.loads(message["tool_calls"][0]["function"]["arguments"])
            except ValueError:
                if protocol == "messages":
                    continue  # its input is an object
            access = proxy.run()
            seen = say(proxy, access, protocol, source["turn_1"]["messages"])
            sent = json.loads(json.dumps(message))
            sent["tool_calls"][0]["id"] = seen.calls[0]["id"]
            result = {"role": "tool", "tool_call_id": seen.calls[0]["id"], "content": "no match"}
            say(proxy, access, protocol, [*source["turn_1"]["messages"], sent, result])
            last = proxy.calls(access["run"])[1]
            if place < len(source["same_call"]):
                assert (last.prompt_ids, last.fork_reason) == (want["for_every_same_call"]["turn_2_prompt_ids"], None)
            else:
                assert last.fork_reason is ForkReason.CLIENT_EDIT


# -- proxy-anthropic-envelope, proxy-responses-broken-history, developer roles --------------------------------------


@pytest.mark.parametrize("place", range(4))
def test_responses_broken_history(model: Path, tmp_path: Path, place: int) -> None:
    """proxy-responses-broken-history: what the model got wrong reaches it as it was, and a turn is sampled."""
    given = case("proxy-responses-broken-history")["input"]
    body = json.loads(json.dumps(given["request"]))
    items = body["input"]
    if place == 0:
        del items[2]["encrypted_content"]
    elif place == 3:
        items.append({"type": "function_call_output", "call_id": "call_zz", "output": "?"})
    with scripted(model, tmp_path, {"go": 304}, sampled(104, 105, 260)) as (proxy, engine):
        answer = send(proxy, proxy.run(), "responses", body)
        if place == 3 and answer.status_code == 400:
            assert answer.json()["error"]["message"]
            return
        assert answer.status_code == 200, answer.text
        assert read("responses", answer).text == "hi"
        text = toy_template({"go": 304}).text(engine.log[0].prompt)
        check_path(proxy.calls(), engine)
    for item in items:
        if item.get("type") == "function_call":
            assert item["arguments"] in text


@PROTOCOLS
def test_unknown_fields_pass(model: Path, tmp_path: Path, protocol: str) -> None:
    """proxy-developer-role-and-unknown-fields: they are recorded, and no prompt token depends on them."""
    extras: list[dict[str, Any]] = [
        {},
        {"zz_new": None},
        {"zz_new": [1, {"a": 2}]},
        {"metadata": {"user_id": "b"}},
        {"service_tier": "auto"},
    ]
    with scripted(model, tmp_path, {"go": 304}, sampled(104, 260)) as (proxy, engine):
        prompts = []
        for extra in extras:
            access = proxy.run()
            say(proxy, access, protocol, HELLO, **extra)
            prompts.append(proxy.calls(access["run"])[0].prompt_ids)
            with proxy.journal() as journal:
                [exchange] = journal.exchanges(access["run"])
            assert exchange.request["body"].items() >= extra.items()
    assert prompts == [prompts[0]] * len(extras)
    assert len(engine.log) == len(extras)


@pytest.mark.parametrize("protocol", ["messages", "responses"])
@pytest.mark.parametrize("size", [1, 2, 9])
def test_characters_are_whole_in_every_cut(model: Path, tmp_path: Path, protocol: str, size: int) -> None:
    """proxy-sse-any-byte-split, what the agent gets: no half character, no line end inside an event."""
    text = "naïve 🙂 北\u2028x\r\ny"
    ids = [*text.encode(), 260]
    steps: list[Step] = [Tokens(ids[at : at + size]) for at in range(0, len(ids), size)]
    with scripted(model, tmp_path, {"go": 304}, [*steps, Finish()]) as (proxy, _):
        assert say(proxy, proxy.run(), protocol, HELLO, stream=True).text == text


@PROTOCOLS
def test_refusals_of_the_engine_name_the_field(model: Path, tmp_path: Path, protocol: str) -> None:
    """An engine that knows no grammars: 400 at once or in its stream, not worth a retry, and the field is named."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    more: dict[str, Any] = {
        "chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
        "messages": {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        "responses": {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}},
    }[protocol]
    field = next(iter(more))
    message = "sampling_params.structured_outputs is not supported by the embedded engine; use vLLM for it"
    with scripted(model, tmp_path, {"go": 304}, [Status(400, message)]) as (proxy, engine):
        answer = send(proxy, proxy.run(), protocol, body_of(protocol, HELLO, **more))
        assert engine.log[0].request["sampling_params"]["structured_outputs"] == {"json": schema}
        assert engine.log[0].request["reasoning_ended"] is True
    assert (answer.status_code, answer.headers["x-should-retry"]) == (400, "false")
    assert answer.json()["error"]["message"].startswith(f"{field}: ")
    assert message in answer.json()["error"]["message"]


@PROTOCOLS
def test_a_tool_cannot_be_forced_where_the_format_is_unknown(model: Path, tmp_path: Path, protocol: str) -> None:
    choice: Any = {"type": "any"} if protocol == "messages" else "required"
    tools = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]
    with ScriptedEngine(lambda request, number: sampled(260)) as engine:
        with running(model, tmp_path / "s.db", engine.url, template=toy_template({})) as proxy:
            body = body_of(protocol, HELLO, tools=tools, tool_choice=choice)
            answer = send(proxy, proxy.run(), protocol, body)
            assert answer.status_code == 400
            assert "tool_choice" in answer.json()["error"]["message"]
        assert engine.log == []
