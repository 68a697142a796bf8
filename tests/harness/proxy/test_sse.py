"""Server-sent events at every split, and there and back again."""

from __future__ import annotations

import base64
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_fidelity_cases import case

from gyre_sdk.errors import ReplicaError
from gyre_sdk.harness.proxy.sse import SseDecoder, SseEvent, encode_comment, encode_data, encode_event

OURS = (
    ": warm\r\n\r\n"
    'data: {"a": "naïve 🙂 北\u2028\u0085x"}\n\n'
    "data:no space\r\rdata: two\ndata: lines\n\n"
    "id: 7\nretry: 5\nevent: error\ndata: {}\n\n"
    "event: nothing\n\n"
    "data\n\n"
    "data: [DONE]\r\n\r\n"
).encode()


def decode(*parts: bytes) -> list[SseEvent]:
    decoder = SseDecoder()
    return [event for part in parts for event in decoder.feed(part)] + decoder.close()


def every_cut(data: bytes) -> None:
    whole = decode(data)
    assert decode(*[data[at : at + 1] for at in range(len(data))]) == whole
    for at in range(1, len(data)):
        assert decode(data[:at], data[at:]) == whole


def test_every_split_of_the_case() -> None:
    """proxy-sse-any-byte-split."""
    given_case = case("proxy-sse-any-byte-split")
    data, want = base64.b64decode(given_case["input"]["upstream_bytes_b64"]), given_case["expected"]
    assert len(data) == given_case["input"]["length"]
    every_cut(data)
    events = decode(data)
    assert decode(data[:-2]) == events
    assert events[-1].data == b"[DONE]"
    chunks = [json.loads(event.data) for event in events[:-1]]
    assert len(chunks) == want["events_with_json"]
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    assert text == want["text"]
    assert text.encode().hex() == want["text_utf8_hex"]


def test_every_split_of_ours() -> None:
    """Comments, all three line ends, several lines, events without data, fields without a value."""
    every_cut(OURS)
    data = [event.data for event in decode(OURS)]
    assert data[1:4] == [b"no space", b"two\nlines", b"{}"]
    assert data[4:] == [b"", b"[DONE]"]
    assert [event.event for event in decode(OURS)] == ["message", "message", "message", "error", "message", "message"]


lines = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\r\n")).map(str.encode)
events = st.builds(
    SseEvent,
    st.lists(lines, min_size=1, max_size=3).map(b"\n".join),
    st.sampled_from(["message", "error", "ping"]),
)


@given(st.lists(events, max_size=5), st.lists(st.integers(0, 400)), st.booleans())
def test_there_and_back(sent: list[SseEvent], cuts: list[int], windows: bool) -> None:
    """What is encoded is decoded, cut anywhere, with either line end, with comments in between."""
    data = b"".join(encode_event(event) + encode_comment("ping") for event in sent)
    data = data.replace(b"\n", b"\r\n") if windows else data
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    assert decode(*[data[a:b] for a, b in itertools.pairwise(places)]) == sent


@given(st.binary(max_size=200), st.integers(0, 200))
def test_any_bytes_decode_alike_at_any_split(data: bytes, at: int) -> None:
    """No bytes make it fail, and no split changes what comes out."""
    assert decode(data[:at], data[at:]) == decode(data)


def test_encode_data_is_one_event() -> None:
    assert decode(encode_data(b'{"a":1}')) == [SseEvent(b'{"a":1}')]


def test_an_endless_event_is_refused() -> None:
    decoder = SseDecoder(limit=100)
    with pytest.raises(ReplicaError, match="larger than 100 bytes"):
        for _ in range(200):
            decoder.feed(b"x")
    decoder = SseDecoder(limit=100)
    with pytest.raises(ReplicaError, match="larger than 100 bytes"):
        for _ in range(200):
            decoder.feed(b"data: xx\n")
