"""Anthropic's streams: their grammar held against real captures and against ours, and the SDK that reads them."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from messages_kit import (
    ARGUMENTS,
    BROKEN,
    GrammarError,
    Wire,
    accumulate,
    answers,
    blocks_of,
    check_grammar,
    cut,
    events_of,
    stream_bytes,
)
from proxy_kit import SHARED

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects import Choice
from gyre_sdk.harness.proxy.dialects.canonical import Answer, Delta, ModelRequest, Part, ToolCall, identity
from gyre_sdk.harness.proxy.dialects.messages import AnthropicMessages, signature
from gyre_sdk.harness.proxy.dialects.messages_input import INVALID, ObjectText, arguments_of, input_of

WIRE = SHARED / "data" / "wire"
UNCLOSED = "incomplete_partial_json_response.sse"
"""A stream that ends inside of a block that it never closes."""
DIALECT = AnthropicMessages()
REQUEST: ModelRequest = DIALECT.parse(
    json.dumps({"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}).encode()
)
ANSWER = Answer(
    "Grüße 🌍\n\nfine", "Use ls.", (ToolCall("call_a", "run", '{"cmd": "ls", "n": [1, 2]}'), ToolCall("call_b", "go"))
)
DELTAS = [
    Delta(Part.REASONING, "Use "),
    Delta(Part.REASONING, "ls."),
    Delta(Part.CONTENT, "Grüße 🌍"),
    Delta(Part.CONTENT, "\n\nfine"),
    Delta(Part.CALL, call=ToolCall("call_a", "run")),
    Delta(Part.ARGUMENTS, '{"cmd": "l'),
    Delta(Part.ARGUMENTS, 's", "n": [1, 2]}'),
    Delta(Part.CALL, call=ToolCall("call_b", "go")),
]


def ours(answer: Answer = ANSWER, deltas: list[Delta] = DELTAS, finish: str = "tool_calls") -> list[bytes]:
    return stream_bytes(DIALECT.stream(REQUEST, "x", 0.0), deltas, Choice(answer, finish, 7))


def captures() -> list[Any]:
    """Return every capture of an Anthropic stream that was recorded whole: a name and its bytes."""
    paths = [path for path in sorted((WIRE / "anthropic-sdk").glob("*.sse")) if path.name != UNCLOSED]
    found = [(path.name, path.read_bytes()) for path in paths]
    for path in sorted((WIRE / "vercel-ai").glob("anthropic-*.chunks.txt")):
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        named = [f"event: {json.loads(line)['type']}\ndata: {line}\n\n" for line in lines]
        found.append((path.name, "".join(named).encode()))
    for path in sorted((WIRE / "pydantic-ai").glob("*anthropic*.yaml")):
        for interaction in yaml.safe_load(path.read_text())["interactions"]:
            body = interaction["response"].get("body", {}).get("string", "")
            if "event: message_start" in body:
                found.append((path.name, body.encode()))
    return [pytest.param(data, id=name) for name, data in found]


@pytest.mark.parametrize("data", captures() or [pytest.param(b"", marks=pytest.mark.skip(f"{WIRE} is missing"))])
def test_grammar_accepts_real_captures(data: bytes) -> None:
    """The grammar is Anthropic's: all that was captured whole obeys it. A capture may hold several streams."""
    events = events_of(data)
    starts = [at for at, event in enumerate(events) if event["type"] == "message_start"]
    for start, end in zip(starts, [*starts[1:], len(events)], strict=True):
        check_grammar(events[start:end])


@pytest.mark.parametrize(
    "name",
    [
        "vercel-ai/duplicate-message-start.chunks.txt",
        "vercel-ai/spliced-message-start.chunks.txt",
        f"anthropic-sdk/{UNCLOSED}",
    ],
)
def test_grammar_refuses_broken_captures(name: str) -> None:
    """Streams known to be broken break the grammar."""
    path = WIRE / name
    if not path.is_file():
        pytest.skip(f"{path} is missing")
    lines = [line.removeprefix("data: ") for line in path.read_text().splitlines()]
    with pytest.raises(GrammarError):
        check_grammar([json.loads(line) for line in lines if line.startswith("{")])


def test_grammar_needs_every_mark() -> None:
    """Without any one event that opens, closes or signs, a stream breaks the grammar."""
    events = [event for event in events_of(b"".join(ours())) if event["type"] != "ping"]
    check_grammar(events)
    for at, event in enumerate(events):
        kind = event.get("delta", {}).get("type", event["type"])
        if kind not in ("text_delta", "thinking_delta") and event.get("delta", {}).get("partial_json") != "{}":
            with pytest.raises(GrammarError):
                check_grammar(events[:at] + events[at + 1 :])
    with pytest.raises(GrammarError):
        check_grammar([*events, events[1]])


def test_order_of_events() -> None:
    """Events come in the order that clients know, with real input tokens in the first and nothing of OpenAI's."""
    data = b"".join(ours())
    assert b"[DONE]" not in data
    events = [event for event in events_of(data) if event["type"] != "ping"]
    assert events[0]["message"]["usage"]["input_tokens"] == 9
    assert events[0]["message"]["content"] == []
    kinds = [
        event.get("content_block", event.get("delta", {})).get("type", event["type"])
        if event["type"] != "content_block_stop"
        else "stop"
        for event in events
    ]
    assert kinds == [
        *("message_start", "thinking", "thinking_delta", "thinking_delta", "signature_delta", "stop"),
        *("text", "text_delta", "text_delta", "stop"),
        *("tool_use", "input_json_delta", "input_json_delta", "input_json_delta", "stop"),
        *("tool_use", "input_json_delta", "stop", "message_delta", "message_stop"),
    ]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 7


def test_deltas_are_passed_on_at_once() -> None:
    """Text, thinking and arguments leave with the delta that brought them, not at the end of their block."""
    for delta, piece in zip(DELTAS, ours()[1::2], strict=False):
        if delta.text:
            shown = [event["delta"] for event in events_of(piece) if event["type"] == "content_block_delta"]
            said = "".join(item.get("text") or item.get("thinking") or item.get("partial_json") or "" for item in shown)
            assert said.removesuffix("}") == delta.text.removesuffix("}")


@settings(deadline=None)
@given(answers(), st.sampled_from(["stop", "length", "tool_calls"]))
def test_our_streams_obey_the_grammar(made: tuple[Answer, list[Delta]], finish: str) -> None:
    """Whatever is sampled, however it is cut, the stream obeys the grammar, inputs of tools included."""
    answer, deltas = made
    events = events_of(b"".join(ours(answer, deltas, finish)))
    check_grammar(events)
    events[-2]["delta"]["stop_reason"] = "end_turn"
    check_grammar([event for event in events if event["type"] != "ping"])


def test_sdk_rebuilds_the_answer_at_every_byte_split() -> None:
    """The SDK makes the same message of a stream wherever the network cuts it: that of the answer in one piece."""
    wire = Wire()
    client = wire.client()
    data = b"".join(ours())
    want = json.loads(DIALECT.body(REQUEST, "x", 0.0, [Choice(ANSWER, "tool_calls", 7)], 9))
    apart = 41  # bytes between the cuts of one stream: over all streams, each byte has been cut behind once
    for first in range(apart):
        wire.chunks = [data[:first], *(data[at : at + apart] for at in range(first, len(data), apart))]
        message = accumulate(client)
        assert blocks_of(message) == want["content"]
        assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("tool_use", 9, 7)
    wire.chunks = [data[at : at + 1] for at in range(len(data))]
    assert blocks_of(accumulate(client)) == want["content"]


@settings(deadline=None)
@given(answers(), st.data())
def test_sdk_and_round_trip(made: tuple[Answer, list[Delta]], data: st.DataObject) -> None:
    """An answer, streamed to the SDK or sent whole, comes back from the agent as the message that was recorded."""
    answer, deltas = made
    choice = Choice(answer, data.draw(st.sampled_from(["stop", "length", "tool_calls"])), 7)
    wire = Wire()
    wire.chunks = [chunk.encode() for chunk in data.draw(cut(b"".join(ours(answer, deltas, choice.finish)).decode()))]
    streamed = accumulate(wire.client())
    wire.chunks, wire.kind = [DIALECT.body(REQUEST, "x", 0.0, [choice], 9)], "application/json"
    user = {"role": "user", "content": "hi"}
    whole = wire.client().messages.create(model="policy", max_tokens=9, messages=[user])
    assert whole.stop_reason == streamed.stop_reason
    for message in (streamed, whole):
        back = {"role": "assistant", "content": blocks_of(message)}
        sent = {"model": "policy", "max_tokens": 9, "messages": [user, back, user]}
        parsed = DIALECT.parse(json.dumps(sent).encode()).messages[1]
        assert identity(parsed) == identity(answer.message())
        assert parsed.reasoning == answer.reasoning
        assert [call.id for call in parsed.tool_calls] == [call.id for call in answer.tool_calls]


def test_error_in_the_middle() -> None:
    """A stream that breaks off ends with an error event; the SDK raises, and no end is claimed."""
    stream = DIALECT.stream(REQUEST, "x", 0.0)
    data = stream.start(9) + stream.deltas(0, DELTAS[:3])
    data += stream.error(ProtocolError("no replica is left", status=503, retryable=True))
    last = events_of(data)[-1]
    assert last == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "no replica is left"},
        "request_id": None,
    }
    assert b"message_stop" not in data and b"event: error\n" in data
    wire = Wire()
    wire.chunks = [data]
    with pytest.raises(anthropic.APIStatusError, match="no replica is left"):
        accumulate(wire.client())


def test_signature() -> None:
    """A signature is there also for empty thinking, tells texts apart, and is the same in a stream."""
    assert signature("") and signature("a") != signature("b")
    shown = [event["delta"] for event in events_of(b"".join(ours())) if event["type"] == "content_block_delta"]
    assert [item["signature"] for item in shown if "signature" in item] == [signature("Use ls.")]


@given(ARGUMENTS, st.data())
def test_object_text(arguments: str, data: st.DataObject) -> None:
    """However arguments are cut, what is passed is one object: they themselves, or one that holds their text."""
    check = ObjectText()
    passed = "".join(check.feed(piece) for piece in data.draw(cut(arguments))) + check.close()
    value, whole = json.loads(passed), json.loads(bytes(input_of(arguments)))
    assert isinstance(value, dict)
    if check.sound or not arguments.strip():
        assert value == whole == json.loads(arguments.strip() or "{}")
    else:
        assert value[INVALID] == whole[INVALID] == arguments
        assert arguments_of(value) == arguments_of(whole) == arguments


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ("ls -l", {INVALID: "ls -l"}),
        ("[1]", {INVALID: "[1]"}),
        ("{'a': 1}", {INVALID: "{'a': 1}"}),
        ('{"a": "x', {"a": "x", INVALID: '{"a": "x'}),
        ('{"a": [{"b": 1, ', {"a": [{"b": 1, INVALID: ""}], INVALID: '{"a": [{"b": 1, '}),
        ('{"a": 1} and', {"a": 1, INVALID: '{"a": 1} and'}),
        ("{} and", {INVALID: "{} and"}),
        ('{"a": tru', {"a": None, INVALID: '{"a": tru'}),
        ('{"a', {"a": None, INVALID: '{"a'}),
        ('{"a": "\\ud83dx"}', {"a": "", INVALID: '{"a": "\\ud83dx"}'}),
        ('{"a": 1, "a": 2}', {"a": 2}),
        ("", {}),
        (" \n", {}),
    ],
)
def test_arguments_that_are_no_object(arguments: str, want: dict[str, Any]) -> None:
    """Examples of what a stream makes of arguments; a whole answer shows the text of broken ones alone."""
    check = ObjectText()
    assert json.loads(check.feed(arguments) + check.close()) == want
    assert json.loads(bytes(input_of(arguments))) == ({INVALID: arguments} if INVALID in want else want)


@given(BROKEN)
def test_error_bodies_are_objects(text: str) -> None:
    """Any message of an error fits its body."""
    error = json.loads(DIALECT.error(ProtocolError(text)))
    assert error["error"] == {"type": "invalid_request_error", "message": text}
