"""OpenAI's older completions: prompts of every form, choices by number, log-probs, streams, refusals."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages_kit import JSON, TEXT, Wire, cut

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects import Choice, TokenText
from gyre_sdk.harness.proxy.dialects.canonical import Answer, Delta, ModelRequest, Part
from gyre_sdk.harness.proxy.dialects.completions import Completions
from gyre_sdk.harness.proxy.sse import SseDecoder

DIALECT = Completions()


def parse(**fields: Any) -> ModelRequest:
    return DIALECT.parse(json.dumps({"model": "policy", "prompt": "hi", **fields}).encode())


def tokens(*texts: str) -> tuple[TokenText, ...]:
    return tuple(TokenText(text, text.encode(), -0.5 * at) for at, text in enumerate(texts))


@pytest.mark.parametrize(
    ("prompt", "want"),
    [
        ("hi", ("hi",)),
        (["hi", "go"], ("hi", "go")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["hi", [3]], ("hi", (3,))),
    ],
)
def test_prompts(prompt: Any, want: tuple[Any, ...]) -> None:
    """A prompt is a text or ids; a list holds several; no messages are made of them."""
    request = parse(prompt=prompt)
    assert request.prompts == want == request.raw
    assert (request.messages, request.tools, request.n) == ((), (), 1)
    assert "prompt" not in request.fields


def test_sampling() -> None:
    """The limit is 16 where none is given, and everything is on record as sent."""
    assert parse().sampling.max_tokens == 16 and "max_tokens" not in parse().fields
    request = parse(max_tokens=3, temperature=0, stop=["a", "b"], seed=4, n=2, best_of=2, user="u", min_p=0.1)
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.stop, sampling.seed) == (3, 0.0, ("a", "b"), 4)
    assert sampling.extra == {"min_p": 0.1} and request.n == 2 and request.fields["user"] == "u"


def test_logprobs() -> None:
    """The sampled token's log-prob may be asked for, and the likeliest tokens beside it."""
    requests = [parse(logprobs=given) for given in (None, 0, 1, 20, True)]
    assert [request.logprobs for request in requests] == [False, True, True, True, True]
    assert [request.candidates for request in requests] == [0, 0, 1, 20, 0]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": 1}, "stream_options"),
    ],
)
def test_refused(fields: dict[str, Any], named: str) -> None:
    """What is wrong or cannot be honoured is refused in OpenAI's format."""
    with pytest.raises(ProtocolError) as caught:
        parse(**fields)
    error = json.loads(DIALECT.error(caught.value))["error"]
    assert (caught.value.status, error["param"], error["type"]) == (400, named, "invalid_request_error")


def test_answer() -> None:
    """Choices are numbered by prompt, then sample; log-probs come in the older form, offsets in characters."""
    request = parse(prompt=["hi", "go"], n=2, logprobs=1)
    answers = [Answer("Grüße!"), Answer("b"), Answer("c"), Answer("d")]
    choices = [
        Choice(answer, "stop", 2, tokens("Grü", "ße", "!") if at == 0 else ()) for at, answer in enumerate(answers)
    ]
    choices[3] = Choice(answers[3], "length", 2, None)
    body = json.loads(DIALECT.body(request, "x", 5.5, choices, 4))
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == ["Grüße!", "b", "c", "d"]
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["Grü", "ße", "!"],
        "token_logprobs": [0.0, -0.5, -1.0],
        "top_logprobs": None,
        "text_offset": [0, 3, 5],
    }
    assert body["choices"][3]["logprobs"] is None and body["choices"][3]["finish_reason"] == "length"
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 8, "total_tokens": 12}
    assert (body["id"], body["object"], body["created"], body["model"]) == ("cmpl-x", "text_completion", 5, "policy")


class Sdk(Wire):
    """The OpenAI SDK over a wire."""

    def openai(self) -> openai.OpenAI:
        """Return it."""
        http = httpx2.Client(transport=self)
        return openai.OpenAI(api_key="k", base_url="http://wire", http_client=http, max_retries=0)


@settings(deadline=None)
@given(st.lists(TEXT, min_size=4, max_size=4), st.booleans(), st.data())
def test_sdk_rebuilds_streams(texts: list[str], usage: bool, data: st.DataObject) -> None:
    """The SDK gets every choice's text, tokens and finish from a stream, however it is cut and interleaved."""
    request = parse(prompt=["hi", "go"], n=2, logprobs=1, stream=True, stream_options={"include_usage": usage})
    stream = DIALECT.stream(request, "x", 5.5)
    pieces = [data.draw(cut(text)) for text in texts]
    out = [stream.start(4)]
    for at in range(max(map(len, pieces))):
        for index, piece in enumerate(pieces):
            if at < len(piece):
                out += [stream.deltas(index, [Delta(Part.CONTENT, piece[at])], tokens(piece[at])), stream.heartbeat()]
    for index, text in enumerate(texts):
        out.append(stream.finish(index, Choice(Answer(text), "stop", 2)))
    whole = b"".join([*out, stream.end(4, 8)])
    wire = Sdk()
    place = data.draw(st.integers(0, len(whole)))
    wire.chunks = [whole[:place], whole[place:]]
    said, shown, ends, counts = [""] * 4, [""] * 4, [""] * 4, []
    for chunk in wire.openai().completions.create(model="policy", prompt="hi", stream=True):
        counts += [chunk.usage.total_tokens] if chunk.usage else []
        for choice in chunk.choices:
            said[choice.index] += choice.text
            ends[choice.index] += choice.finish_reason or ""
            if choice.logprobs:
                assert choice.logprobs.text_offset == [len(shown[choice.index])]
                shown[choice.index] += "".join(choice.logprobs.tokens or [])
    assert said == shown == texts
    assert ends == ["stop"] * 4 and counts == ([12] if usage else [])


def test_error_in_the_middle() -> None:
    """A stream that breaks off ends with an error and no end marker; the SDK raises."""
    stream = DIALECT.stream(parse(stream=True), "x", 5.5)
    data = stream.start(4) + stream.deltas(0, [Delta(Part.CONTENT, "a")])
    data += stream.error(ProtocolError("no replica is left", status=503))
    assert b"[DONE]" not in data and len(SseDecoder().feed(data)) == 2
    wire = Sdk()
    wire.chunks = [data]
    with pytest.raises(openai.APIError, match="no replica is left"):
        list(wire.openai().completions.create(model="policy", prompt="hi", stream=True))


_KEYS = st.sampled_from(
    ["prompt", "n", "max_tokens", "stop", "logprobs", "stream", "best_of", "stream_options", "model", "seed"]
)


@settings(deadline=None)
@given(JSON | st.dictionaries(_KEYS, JSON) | st.fixed_dictionaries({"prompt": JSON}))
def test_any_json_is_parsed_or_refused(body: Any) -> None:
    """No JSON makes the parser fail in any way but its own."""
    try:
        request = DIALECT.parse(json.dumps(body).encode())
    except ProtocolError as error:
        assert error.status == 400
    else:
        assert request.prompts and all(request.prompts)
