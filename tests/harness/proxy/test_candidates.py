"""The likeliest tokens at each place, for agents that ask for them: every protocol that has them, streamed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from proxy_engine import Error, Finish, ScriptedEngine, Status, Step, Tokens
from proxy_kit import Proxy, running, sse
from proxy_toy import toy_template
from test_fidelity_cases import scripted

PIECES = {"so": 331, "ab": 333, "cd": 334}
TOP = [[(331, -0.25), (333, -2.0), (334, -3.0)], [(334, -4.0), (331, -0.125), (333, -0.5)]]
SAID: list[Step] = [Tokens([331], [-0.25], TOP[:1]), Tokens([334], [-4.0], TOP[1:]), Finish()]
SHOWN = [("so", -0.25, [("so", -0.25), ("ab", -2.0)]), ("cd", -4.0, [("so", -0.125), ("ab", -0.5)])]
STREAMS = pytest.mark.parametrize("stream", [False, True])


def ask(proxy: Proxy, access: dict[str, Any], path: str, body: dict[str, Any]) -> Any:
    answer = proxy.http.post(path, json={"model": "policy", **body}, headers=key(access))
    assert answer.status_code == 200, answer.text
    return [event for event in sse(answer.text) if event != "[DONE]"] if body["stream"] else answer.json()


def key(access: dict[str, Any]) -> dict[str, str]:
    return {"Authorization": f"Bearer {access['api_key']}"}


def chat(answer: Any, stream: bool) -> list[dict[str, Any]]:
    if not stream:
        return list(answer["choices"][0]["logprobs"]["content"])
    found = [choice["logprobs"]["content"] for event in answer for choice in event["choices"] if "logprobs" in choice]
    return [item for content in found for item in content]


def response(answer: Any, stream: bool) -> list[dict[str, Any]]:
    whole = answer[-1]["response"] if stream else answer
    assert whole["top_logprobs"] == 2
    if stream:
        deltas = [event["logprobs"] for event in answer if event["type"] == "response.output_text.delta"]
        assert [item for part in deltas for item in part] == whole["output"][0]["content"][0]["logprobs"]
    return list(whole["output"][0]["content"][0]["logprobs"])


def seen(tokens: list[dict[str, Any]]) -> list[Any]:
    for token in tokens:
        assert all(bytes(other["bytes"]).decode() == other["token"] for other in token["top_logprobs"])
    return [
        (token["token"], token["logprob"], [(other["token"], other["logprob"]) for other in token["top_logprobs"]])
        for token in tokens
    ]


@STREAMS
def test_chat_and_responses(model: Path, tmp_path: Path, stream: bool) -> None:
    """The likeliest first; one more is asked for than shown, as the sampled one may be another."""
    with scripted(model, tmp_path, PIECES, SAID) as (proxy, engine):
        access = proxy.run()
        body = {"messages": [{"role": "user", "content": "go"}], "logprobs": True, "top_logprobs": 2, "stream": stream}
        assert seen(chat(ask(proxy, access, "/v1/chat/completions", body), stream)) == SHOWN
        include = ["message.output_text.logprobs"]
        body = {"input": "go", "include": include, "top_logprobs": 2, "stream": stream}
        assert seen(response(ask(proxy, access, "/v1/responses", body), stream)) == SHOWN
        assert [item.request["sampling_params"]["logprobs"] for item in engine.log] == [3, 3]
        assert [call.logprobs for call in proxy.calls()] == [[-0.25, -4.0]] * 2


@STREAMS
def test_completions(model: Path, tmp_path: Path, stream: bool) -> None:
    with scripted(model, tmp_path, PIECES, SAID) as (proxy, _):
        answer = ask(proxy, proxy.run(), "/v1/completions", {"prompt": "go", "logprobs": 2, "stream": stream})
        parts = [event["choices"][0]["logprobs"] for event in (answer if stream else [answer])]
        top = [place for part in parts if part for place in part["top_logprobs"]]
    assert top == [{"so": -0.25, "ab": -2.0}, {"so": -0.125, "ab": -0.5, "cd": -4.0}]


TWINS = [[(331, -0.25), (400, -1.0), (401, -2.0)]]
"""Two of them have no bytes of their own to show: one text, as that of broken characters in real vocabularies."""


@STREAMS
def test_tokens_of_one_text(model: Path, tmp_path: Path, stream: bool) -> None:
    """By text the likelier stays, whichever was sampled; by id all are there, and the text's offsets stay the text's."""
    pieces = {**PIECES, "\ufffd": 400}
    template = toy_template(pieces)
    template.tokenizer.names[401] = "\ufffd"
    play: list[Step] = [Tokens([401], [-2.0], TWINS), Tokens([331], [-0.5], [[(331, -0.5)]]), Finish()]
    with ScriptedEngine(lambda request, number: play) as engine:
        with running(model, tmp_path / "store.db", engine.url, template=template) as proxy:
            access, found, offsets = proxy.run(), [], []
            for named in (False, True):
                body = {"prompt": "go", "logprobs": 3, "stream": stream, "return_tokens_as_token_ids": named}
                answer = ask(proxy, access, "/v1/completions", body)
                parts = [event["choices"][0]["logprobs"] for event in (answer if stream else [answer])]
                parts = [part for part in parts if part]
                tokens = [token for part in parts for token in part["tokens"]]
                found.append((tokens, parts[0]["top_logprobs"][0]))
                offsets.append([offset for part in parts for offset in part["text_offset"]])
            body = {"messages": [{"role": "user", "content": "go"}], "logprobs": True, "top_logprobs": 3}
            body |= {"stream": stream, "return_tokens_as_token_ids": True}
            named_chat = chat(ask(proxy, access, "/v1/chat/completions", body), stream)
            wrong = proxy.chat(access, {**body, "return_tokens_as_token_ids": "yes"})
    assert found[0] == (["\ufffd", "so"], {"so": -0.25, "\ufffd": -1.0})
    assert found[1] == (
        ["token_id:401", "token_id:331"],
        {"token_id:331": -0.25, "token_id:400": -1.0, "token_id:401": -2.0},
    )
    assert offsets == [[0, 1]] * 2
    assert [token["token"] for token in named_chat] == ["token_id:401", "token_id:331"]
    assert [other["token"] for other in named_chat[0]["top_logprobs"]] == [f"token_id:{at}" for at in (331, 400, 401)]
    assert bytes(named_chat[1]["bytes"]) == b"so"
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "return_tokens_as_token_ids")


def test_the_most_that_can_be_asked_for(model: Path, tmp_path: Path) -> None:
    with scripted(model, tmp_path, PIECES, SAID) as (proxy, engine):
        proxy.chat(proxy.run(), {"messages": [{"role": "user", "content": "go"}], "logprobs": True, "top_logprobs": 20})
        assert engine.log[0].request["sampling_params"]["logprobs"] == 20


def test_an_answer_that_was_continued(model: Path, tmp_path: Path) -> None:
    """Both replicas tell the candidates of what they sampled."""
    plays = [[SAID[0], Error()], SAID[1:]]
    with scripted(model, tmp_path, PIECES, *plays) as (proxy, _):
        body = {"messages": [{"role": "user", "content": "go"}], "logprobs": True, "top_logprobs": 2, "stream": False}
        assert seen(chat(ask(proxy, proxy.run(), "/v1/chat/completions", body), False)) == SHOWN


def test_after_a_restart_only_what_is_recorded_is_shown(model: Path, tmp_path: Path) -> None:
    """A retry of an answer that another process sampled: the same tokens and log-probs, no candidates."""
    body = {"messages": [{"role": "user", "content": "go"}], "logprobs": True, "top_logprobs": 2}
    with scripted(model, tmp_path, PIECES, SAID) as (proxy, _):
        access = proxy.run()
        first = proxy.chat(access, body).json()["choices"][0]
    with running(model, tmp_path / "store.db", template=toy_template(PIECES)) as proxy:
        again = proxy.chat(access, body, **{"x-stainless-retry-count": "1"}).json()["choices"][0]
    assert again["message"] == first["message"]
    tokens = again["logprobs"]["content"]
    assert [(token["token"], token["logprob"]) for token in tokens] == [item[:2] for item in SHOWN]
    assert [token["top_logprobs"] for token in tokens] == [[], []]


def test_what_cannot_be_served_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    refusal = Status(400, "Requested sample logprobs of 3, which is greater than max allowed: 0")
    with scripted(model, tmp_path, PIECES, [refusal]) as (proxy, _):
        access = proxy.run()
        go = {"messages": [{"role": "user", "content": "go"}]}
        for body, named, said in (
            ({**go, "logprobs": True, "top_logprobs": 2}, "top_logprobs", "max allowed"),
            ({**go, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
            ({**go, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ):
            answer = proxy.chat(access, body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, named)
            assert said in error["message"]
        answer = proxy.http.post(
            "/v1/responses", json={"model": "policy", "input": "go", "top_logprobs": 2}, headers=key(access)
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_logprobs")
        assert "message.output_text.logprobs" in answer.json()["error"]["message"]
