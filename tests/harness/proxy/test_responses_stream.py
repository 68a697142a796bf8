"""The Responses protocol's answers: what clients rebuild from the body and from the stream is what was sampled."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import openai
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder
from openai.types.responses import Response
from responses_grammar import check
from test_responses import AGENTS, PATCH, RUN, parse, responses, user, wire

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects import Choice, Delta, Part, TokenText
from gyre_sdk.harness.proxy.dialects.canonical import Answer, Message, ModelRequest, ToolCall, identity
from gyre_sdk.harness.proxy.sse import SseDecoder

TOOLS = [RUN, PATCH, AGENTS, {"type": "local_shell"}]
SEALED = {"store": False, "include": ["reasoning.encrypted_content"]}
DELTAS = (
    Delta(Part.REASONING, "Look"),
    Delta(Part.REASONING, " first."),
    Delta(Part.CONTENT, "I löok"),
    Delta(Part.CONTENT, " 🙂."),
    Delta(Part.CALL, call=ToolCall("call_0", "run")),
    Delta(Part.ARGUMENTS, '{"cmd"'),
    Delta(Part.ARGUMENTS, ': "ls"}'),
    Delta(Part.CALL, call=ToolCall("call_1", "patch")),
    Delta(Part.ARGUMENTS, '{"input": "*** a\\n'),
    Delta(Part.ARGUMENTS, '+\\"x\\""}'),
    Delta(Part.CALL, call=ToolCall("call_2", "agents__spawn")),
    Delta(Part.ARGUMENTS, "{}"),
    Delta(Part.CALL, call=ToolCall("call_3", "local_shell")),
    Delta(Part.ARGUMENTS, '{"command": ["ls"], "timeout_ms": 5}'),
)


def answer_of(deltas: Sequence[Delta]) -> Answer:
    """What all deltas make."""
    texts = {Part.REASONING: "", Part.CONTENT: ""}
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.call is not None:
            calls.append(delta.call)
        elif delta.part is Part.ARGUMENTS:
            calls[-1] = ToolCall(calls[-1].id, calls[-1].name, calls[-1].arguments + delta.text)
        else:
            texts[delta.part] += delta.text
    return Answer(texts[Part.CONTENT], texts[Part.REASONING], tuple(calls))


def streamed(request: ModelRequest, deltas: Sequence[Delta], choice: Choice, name: str = "n1") -> list[bytes]:
    stream = responses.stream(request, name, 5.0)
    parts = [stream.start(3), *(stream.deltas(0, [delta]) for delta in deltas), stream.heartbeat()]
    return [*parts, stream.finish(0, choice), stream.end(3, choice.completion_tokens)]


def events_of(data: bytes) -> list[dict[str, Any]]:
    decoder = SseDecoder()
    found = [*decoder.feed(data), *decoder.close()]
    events = [json.loads(event.data) for event in found]
    assert [event["type"] for event in events] == [event.event for event in found]
    return events


def same(message: Message, answer: Answer) -> bool:
    ids = [call.id for call in message.tool_calls] == [call.id for call in answer.tool_calls]
    return identity(message) == identity(answer.message()) and message.reasoning == answer.reasoning and ids


# -- grammar -----------------------------------------------------------------------------------------------------------


def captured() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for path in [*wire("wire/llm", "*.yaml"), *wire("wire/pydantic-ai", "openai_responses*.yaml")]:
        for place, exchange in enumerate(yaml.safe_load(path.read_text())["interactions"]):
            body = exchange["response"].get("body", {}).get("string", "")
            data = body if isinstance(body, bytes) else body.encode()
            if data.startswith(b"event: response.created"):
                yield f"{path.name}:{place}", events_of(data)
    for path in wire("wire/vercel-ai", "openai*.chunks.txt"):
        events = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        starts = [at for at, event in enumerate(events) if event.get("type") == "response.created"]
        for at, end in pairwise([*starts, len(events)]):
            yield f"{path.name}:{at}", events[at:end]


def test_the_grammar_accepts_real_streams() -> None:
    seen = [name for name, events in captured() if check(events)]
    assert len(seen) >= 12


@pytest.mark.parametrize("fault", ["cut", "twice", "gap", "after", "id", "text"])
def test_the_grammar_can_refuse(fault: str) -> None:
    events = events_of(b"".join(streamed(parse(tools=TOOLS), DELTAS, Choice(answer_of(DELTAS), "tool_calls", 9))))
    check(events)
    done = next(event for event in events if event["type"] == "response.output_item.done")
    text = next(event for event in events if event["type"] == "response.output_text.done")
    if fault == "cut":
        events.pop()
    elif fault == "twice":
        events.append(events[-1])
    elif fault == "gap":
        events.pop(3)
    elif fault == "after":
        events[-1], events[-2] = events[-2], events[-1]
    elif fault == "id":
        done["item"]["id"] = "other"
    else:
        text["text"] += "x"
    with pytest.raises(AssertionError):
        check(events)


# -- any answer --------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
STRINGS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ARGUMENTS = {
    "run": st.fixed_dictionaries({"cmd": STRINGS}),
    "patch": st.fixed_dictionaries({"input": STRINGS}),
    "agents__spawn": st.just({}),
    "local_shell": st.fixed_dictionaries(
        {"command": st.lists(STRINGS, max_size=2)}, optional={"env": st.just({}), "timeout_ms": st.integers(0, 9)}
    ),
    "unheard_of": st.just({"input": "x", "command": ["x"]}),
}


@st.composite
def call_deltas(draw: st.DrawFn) -> list[Delta]:
    name = draw(st.sampled_from(sorted(ARGUMENTS)))
    good = ARGUMENTS[name].map(json.dumps)
    arguments = draw(good | good.map(lambda text: text[:-1]) | STRINGS | st.sampled_from(['{"input": 1}', "[]", "{}"]))
    cut = draw(st.integers(0, len(arguments)))
    call = Delta(Part.CALL, call=ToolCall("", name))
    return [call, *(Delta(Part.ARGUMENTS, text) for text in (arguments[:cut], arguments[cut:]) if text)]


@st.composite
def all_deltas(draw: st.DrawFn) -> list[Delta]:
    texts = st.builds(lambda part, text: [Delta(part, text)], st.sampled_from([Part.REASONING, Part.CONTENT]), TEXT)
    deltas = [delta for group in draw(st.lists(texts | call_deltas(), max_size=8)) for delta in group]
    calls = [delta.call for delta in deltas]
    return [
        replace(delta, call=ToolCall(f"call_{at}", delta.call.name)) if delta.call else delta
        for at, delta in enumerate(deltas)
        if calls
    ]


@given(all_deltas(), st.sampled_from(["stop", "length"]), st.booleans(), st.booleans())
def test_every_answer_comes_back_as_it_was_sampled(
    deltas: list[Delta], finish: str, logprobs: bool, sealed: bool
) -> None:
    """From the body and from the stream, kept by the server, by the agent, and by an agent that keeps no reasoning."""
    include = ["message.output_text.logprobs"] * logprobs + ["reasoning.encrypted_content"] * sealed
    request = parse(tools=TOOLS, include=include, store=not sealed)
    answer = answer_of(deltas)
    choice = Choice(answer, finish, 9)
    events = events_of(b"".join(streamed(request, deltas, choice)))
    final = check(events)
    assert final["output"] == [event["item"] for event in events if event["type"] == "response.output_item.done"]
    body = json.loads(responses.body(request, "n1", 5.0, [choice], 3))
    for response in (final, body):
        assert response["status"] == ("incomplete" if finish == "length" else "completed")
        assert response["output"][-1]["status"] == response["status"]
        items = response["output"]
        if sealed:
            items = [{**item, "content": None} if item["type"] == "reasoning" else item for item in items]
        bare = [{key: value for key, value in item.items() if key not in ("id", "status")} for item in items]
        for kept in (items, bare):
            sent = parse(tools=TOOLS, input=[user("go"), *kept])
            assert len(sent.messages) == 2
            assert same(sent.messages[1], answer)
        assert Response.model_validate(response).id == "resp_n1"
    ordered = [delta.part for delta in deltas if delta.part is not Part.ARGUMENTS]
    if ordered == sorted(ordered, key=[Part.REASONING, Part.CONTENT, Part.CALL].index):
        assert {**final, "usage": None} == {**body, "usage": None}


def test_calls_go_back_in_the_form_of_their_tools() -> None:
    choice = Choice(answer_of(DELTAS), "tool_calls", 9)
    body = json.loads(responses.body(parse(tools=TOOLS), "n1", 5.0, [choice], 3))
    assert [item["type"] for item in body["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "custom_tool_call",
        "function_call",
        "local_shell_call",
    ]
    assert body["output"][3]["input"] == '*** a\n+"x"'
    assert (body["output"][4]["namespace"], body["output"][4]["name"]) == ("agents", "spawn")
    assert body["output"][5]["action"] == {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": 5}
    assert body["usage"]["total_tokens"] == 12


@pytest.mark.parametrize("arguments", ["*** begin", '{"inputs": "x"}', '{"input": "x"', '{"input": "x", "y": 1}'])
def test_a_malformed_call_of_a_custom_tool_stays_one(arguments: str) -> None:
    answer = Answer(tool_calls=(ToolCall("call_0", "patch", arguments),))
    [item] = json.loads(responses.body(parse(tools=TOOLS), "n1", 5.0, [Choice(answer, "tool_calls", 1)], 1))["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", arguments)
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "no"}
    _, message, result = parse(tools=TOOLS, input=[user("go"), item, output]).messages
    assert message == answer.message()
    assert result.tool_call_id == "call_0"


# -- log-probs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_log_probs_are_those_of_the_text(late: bool) -> None:
    texts = ["<think>", "I", " a", "</think>", "I", " löo", "k", "<tool_call>", "{}", "<|im_end|>"]
    tokens = tuple(TokenText(text, text.encode(), -float(at)) for at, text in enumerate(texts))
    deltas = [Delta(Part.REASONING, "I a"), Delta(Part.CONTENT, "I l"), Delta(Part.CONTENT, "öok")]
    request = parse(include=["message.output_text.logprobs"])
    choice = Choice(answer_of(deltas), "stop", len(texts), tokens)
    stream = responses.stream(request, "n1", 5.0)
    parts = [stream.start(3), stream.deltas(0, deltas[:2], () if late else tokens[:6]), stream.deltas(0, deltas[2:])]
    parts += [stream.finish(0, choice, tokens if late else tokens[6:]), stream.end(3, len(texts))]
    events = events_of(b"".join(parts))
    final = check(events)
    body = json.loads(responses.body(request, "n1", 5.0, [choice], 3))
    given_ = [item for event in events if event["type"].endswith("text.delta") for item in event.get("logprobs", ())]
    for shown in (given_, *(response["output"][-1]["content"][0]["logprobs"] for response in (final, body))):
        assert [item["logprob"] for item in shown] == [-4.0, -5.0, -6.0]


# -- failures and snapshots --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize(("status", "code"), [(503, "server_error"), (429, "rate_limit_exceeded"), (403, "run_closed")])
def test_a_failure_never_looks_like_an_end(status: int, code: str, started: bool) -> None:
    stream = responses.stream(parse(), "n1", 5.0)
    data = stream.start(3) + stream.deltas(0, DELTAS[:3]) if started else b""
    data += stream.error(ProtocolError("no luck", status=status, code="run_closed"))
    final = check(events_of(data))
    assert final["status"] == "failed"
    assert final["error"] == {"code": code, "message": "no luck"}
    assert b"[DONE]" not in data


@pytest.mark.parametrize("status", ["queued", "in_progress", "cancelled", "failed"])
def test_a_response_is_shown_before_it_is_done(status: str) -> None:
    error = ProtocolError("no luck", status=503) if status == "failed" else None
    request = parse(background=True, metadata={"a": "b"}, instructions="Be brief.", tools=TOOLS, temperature=0)
    shown = json.loads(responses.snapshot(request, "n1", 5.0, status, None, error, 0))
    assert (shown["status"], shown["output"], shown["usage"]) == (status, [], None)
    assert (shown["error"] is None) == (error is None)
    assert (shown["background"], shown["metadata"], shown["instructions"]) == (True, {"a": "b"}, "Be brief.")
    assert (shown["tools"], shown["temperature"]) == (TOOLS, 0)


# -- the SDK -----------------------------------------------------------------------------------------------------------

BODY = b"".join(streamed(parse(tools=TOOLS, **SEALED), DELTAS, Choice(answer_of(DELTAS), "tool_calls", 9)))


def test_every_split_of_a_stream_is_the_same_stream() -> None:
    expected = [(event["type"], event) for event in events_of(BODY)]
    for cut in range(len(BODY)):
        found = SSEDecoder().iter_bytes(iter([BODY[:cut], BODY[cut:]]))
        assert [(event.event, event.data) for event in found if event.data] == [
            (kind, json.dumps(event, separators=(",", ":"), ensure_ascii=False)) for kind, event in expected
        ]


@contextmanager
def serving(deltas: Sequence[Delta], finish: str, error: ProtocolError | None = None) -> Iterator[openai.OpenAI]:
    """Serve one answer over HTTP, streams one byte a chunk; give a client."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = responses.parse(self.rfile.read(int(self.headers["Content-Length"])))
            choice = Choice(answer_of(deltas), finish, 9)
            if not request.stream:
                self._whole(responses.body(request, "n1", 5.0, [choice], 3))
                return
            data = b"".join(streamed(request, deltas, choice))
            if error is not None:
                stream = responses.stream(request, "n1", 5.0)
                data = stream.start(3) + stream.deltas(0, deltas) + stream.error(error)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"".join(b"1\r\n%c\r\n" % byte for byte in data) + b"0\r\n\r\n")

        def do_GET(self) -> None:
            self._whole(responses.snapshot(parse(), "n1", 5.0, "in_progress", None, None, 0))

        def _whole(self, data: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="k", max_retries=0) as client:
            yield client
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def sdk_arguments() -> dict[str, Any]:
    return {"model": "policy", "input": "go", "tools": [RUN, PATCH, AGENTS, {"type": "local_shell"}], **SEALED}


@pytest.mark.parametrize("finish", ["tool_calls", "length"])
def test_the_sdk_rebuilds_the_answer(finish: str) -> None:
    answer = answer_of(DELTAS)
    with serving(DELTAS, finish) as client:
        whole = client.responses.create(**sdk_arguments())
        events = list(client.responses.create(**sdk_arguments(), stream=True))
        shown = client.responses.retrieve("resp_n1")
    final = events[-1].response
    assert shown.status == "in_progress"
    assert whole.output_text == final.output_text == answer.content
    assert whole.output == final.output
    for kind, text in (
        ("response.output_text.delta", answer.content),
        ("response.reasoning_text.delta", "Look first."),
    ):
        assert "".join(event.delta for event in events if event.type == kind) == text
    items = [item.to_dict() for item in final.output]
    assert same(parse(tools=TOOLS, input=[user("go"), *items]).messages[1], answer)


def test_the_sdk_s_own_accumulator_agrees() -> None:
    with serving(DELTAS, "tool_calls") as client, client.responses.stream(**sdk_arguments()) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert snapshots[1] == '{"cmd": "ls"}'
    assert final.output_text == answer_of(DELTAS).content


def test_the_sdk_sees_a_failure() -> None:
    with serving(DELTAS[:3], "stop", ProtocolError("no luck", status=503)) as client:
        with pytest.raises(openai.APIError, match="no luck"):
            list(client.responses.create(**sdk_arguments(), stream=True))
