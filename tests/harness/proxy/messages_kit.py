"""The grammar of Anthropic's event streams, answers to stream, and the SDK fed with bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import anthropic
import httpx2
from hypothesis import strategies as st

from gyre_sdk.harness.proxy.dialects import AnswerStream, Choice
from gyre_sdk.harness.proxy.dialects.canonical import Answer, Delta, Part, ToolCall
from gyre_sdk.harness.proxy.sse import SseDecoder

_DELTAS = {
    "text": ("text_delta", "citations_delta"),
    "thinking": ("thinking_delta", "signature_delta"),
    "tool_use": ("input_json_delta",),
    "server_tool_use": ("input_json_delta",),
    "compaction": ("compaction_delta",),
}


class GrammarError(Exception):
    """A stream breaks the grammar."""


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream; each must be named as its type says."""
    decoder = SseDecoder()
    found = []
    for event in [*decoder.feed(data), *decoder.close()]:
        fields = json.loads(event.data)
        _demand(event.event == fields["type"], f"event {event.event} carries type {fields['type']}")
        found.append(fields)
    return found


def check_grammar(events: Sequence[dict[str, Any]]) -> None:
    """Hold a whole stream that ended well against the grammar of Anthropic's streams.

    Raises:
        GrammarError: with the first event that may not stand where it stands.
    """
    stream = [event for event in events if event["type"] != "ping"]
    _demand(bool(stream) and events[0]["type"] == "message_start", "message_start does not come first")
    message = stream[0]["message"]
    _demand(message["role"] == "assistant", "message_start is not the assistant's")
    if message["content"]:  # a step of a program that the provider runs: said at once
        return _demand([event["type"] for event in stream[1:]] == ["message_stop"], "a whole message goes on")
    _demand(message["stop_reason"] is None, "a stop reason at the start")
    _demand(message["usage"]["input_tokens"] > 0, "no input tokens at the start")
    ends = [event for event in stream if event["type"] == "message_delta"]
    at, index = 1, 0
    while stream[at : at + 1] and stream[at]["type"] == "content_block_start":
        at = _block(stream, at, index, ends)
        index += 1
    _demand(bool(ends) and stream[at:-1] == ends, f"event {at} is {stream[at : at + 1]}, not an end of the message")
    _demand(stream[-1]["type"] == "message_stop" and len(events[-1]) == 1, "message_stop does not come last")
    _demand(events[-1]["type"] == "message_stop", "something follows message_stop")
    _demand(isinstance(ends[-1]["delta"]["stop_reason"], str), "the message ends without a reason")
    _demand(ends[-1]["usage"]["output_tokens"] >= 0, "no output tokens")


def _block(stream: Sequence[dict[str, Any]], at: int, index: int, ends: Sequence[dict[str, Any]]) -> int:
    block = stream[at]["content_block"]
    _demand(stream[at]["index"] == index, f"block {index} says index {stream[at]['index']}")
    kinds: list[str] = []
    text = ""
    at += 1
    while stream[at : at + 1] and stream[at]["type"] == "content_block_delta":
        _demand(stream[at]["index"] == index, f"a delta of block {index} says index {stream[at]['index']}")
        delta = stream[at]["delta"]
        _demand(delta["type"] in _DELTAS.get(block["type"], ()), f"{delta['type']} in a block of {block['type']}")
        _demand("signature_delta" not in kinds, "a delta follows the signature")
        kinds.append(delta["type"])
        text += delta.get("partial_json", "")
        at += 1
    _demand(stream[at : at + 1] != [] and stream[at]["type"] == "content_block_stop", f"block {index} does not stop")
    _demand(stream[at]["index"] == index, f"the stop of block {index} says index {stream[at]['index']}")
    if block["type"] == "thinking":
        _demand(kinds[-1:] == ["signature_delta"], "thinking without a signature")
    if text:
        cut = [end for end in ends if end["delta"]["stop_reason"] == "max_tokens"]
        _demand(bool(cut) or _is_object(text), f"the input of block {index} is no object: {text}")
    return at + 1


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _demand(held: bool, why: str) -> None:
    if not held:
        raise GrammarError(why)


def stream_bytes(stream: AnswerStream, deltas: Sequence[Delta], choice: Choice, prompt_tokens: int = 9) -> list[bytes]:
    """Return the pieces of a stream, one per delta, with a heartbeat between any two."""
    pieces = [stream.start(prompt_tokens)]
    for delta in deltas:
        pieces += [stream.deltas(0, [delta]), stream.heartbeat()]
    return [*pieces, stream.finish(0, choice), stream.end(prompt_tokens, choice.completion_tokens)]


class _Chunks(httpx2.SyncByteStream):
    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[bytes]:
        yield from self._chunks


class Wire(httpx2.BaseTransport):
    """Answers every request with the chunks it holds."""

    chunks: Sequence[bytes] = ()
    status = 200
    kind = "text/event-stream"

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """See `httpx2.BaseTransport.handle_request`."""
        return httpx2.Response(self.status, headers={"content-type": self.kind}, stream=_Chunks(self.chunks))

    def client(self) -> anthropic.Anthropic:
        """Return the SDK over this wire."""
        http = httpx2.Client(transport=self)
        return anthropic.Anthropic(api_key="k", base_url="http://wire", http_client=http, max_retries=0)


def accumulate(client: anthropic.Anthropic) -> anthropic.types.Message:
    """Return the message that the SDK makes of a stream."""
    with client.messages.stream(model="policy", max_tokens=9, messages=[{"role": "user", "content": "hi"}]) as stream:
        return stream.get_final_message()


def blocks_of(message: anthropic.types.Message) -> list[dict[str, Any]]:
    """Return a message's blocks as an agent sends them back."""
    return [block.model_dump(mode="json", exclude_none=True) for block in message.content]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
_WHOLE = st.builds(
    lambda value, indent, ascii_only: json.dumps(value, indent=indent, ensure_ascii=ascii_only),
    st.dictionaries(TEXT, JSON, max_size=3),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
)
_PIECES = st.sampled_from([*'{}[]",:\\u0d8e1.-+tn \n', "true", "null", "\\ud83d", "\\ude00", '"a"', '{"a":', "\u00e9"])
BROKEN = (
    st.builds(lambda text, cut: text[:cut], _WHOLE, st.integers(0, 20))
    | st.builds(lambda text, more: text + more, _WHOLE, TEXT)
    | st.lists(_PIECES, max_size=20).map("".join)
    | TEXT
)
ARGUMENTS = _WHOLE | BROKEN
"""Arguments as models write them: objects in any spelling, objects cut short or followed by more, and anything."""


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    """Cut a text into pieces."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@st.composite
def answers(draw: st.DrawFn, arguments: st.SearchStrategy[str] = ARGUMENTS) -> tuple[Answer, list[Delta]]:
    """Return an answer and deltas that make it: reasoning, content and calls in any order, in any pieces."""
    deltas: list[Delta] = []
    said: dict[Part, str] = {Part.REASONING: "", Part.CONTENT: ""}
    calls: list[ToolCall] = []
    for part in draw(st.lists(st.sampled_from([Part.REASONING, Part.CONTENT, Part.CALL]), max_size=5)):
        if part is Part.CALL:
            call = ToolCall(f"call_{len(calls)}", draw(st.sampled_from(["run", "read"])), draw(arguments))
            calls.append(call)
            deltas.append(Delta(part, call=ToolCall(call.id, call.name)))
            deltas += [Delta(Part.ARGUMENTS, piece) for piece in draw(cut(call.arguments))]
        else:
            text = draw(TEXT)
            said[part] += text
            deltas += [Delta(part, piece) for piece in draw(cut(text))]
    return Answer(said[Part.CONTENT], said[Part.REASONING], tuple(calls)), deltas
