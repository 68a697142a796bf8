"""What usage tells beside prompt and completion, in the fields of the protocols: tokens of the thinking, cached tokens."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from answers_kit import CUTS, RELAXED, vocabulary
from hypothesis import given
from hypothesis import strategies as st
from proxy_engine import Finish, Hangup, ScriptedEngine, Step, Tokens, Told, Wait
from proxy_kit import running, sse
from proxy_toy import toy_template
from sdk_kit import GO, THINK, ids_of, talking

from gyre_sdk.harness.proxy.answers import WAYS, thinking_tokens
from gyre_sdk.records import CallStatus

WORDS = st.text(st.sampled_from("ab é<\n"), max_size=8)


@RELAXED
@given(thought=WORDS, said=WORDS, cuts=CUTS, spelled=st.booleans())
def test_thinking_ends_with_its_tag(thought: str, said: str, cuts: object, spelled: bool) -> None:
    """The tag counts, be it one token or spelled in several."""
    vocab = vocabulary("small")
    text = f"{thought}</think>"
    before = [token for letter in text for token in vocab.encode(letter)] if spelled else vocab.encode(text)
    assert thinking_tokens(vocab, WAYS["hermes"], [*before, *vocab.encode(said)]) == len(before)


def test_thinking_without_an_end() -> None:
    """A tool call ends it, or the answer does."""
    vocab = vocabulary("small")
    thought = vocab.encode("<think>one")
    assert thinking_tokens(vocab, WAYS["hermes"], thought) == len(thought)
    called = [*thought, *vocab.encode("<tool_call>{}</tool_call>")]
    assert thinking_tokens(vocab, WAYS["hermes"], called) == len(thought)
    assert thinking_tokens(vocab, WAYS["llama"], called) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_usage_of_chat_and_responses(model: Path, tmp_path: Path, stream: bool) -> None:
    thought = len(ids_of(model, THINK.rstrip()))
    with talking(model, tmp_path, THINK + "go") as talk, talk.openai() as client:
        if stream:
            options = {"include_usage": True}
            *_, last = client.chat.completions.create(model="policy", messages=GO, stream=True, stream_options=options)
            chat = last.usage
            with client.responses.stream(model="policy", input="go") as events:
                response = events.get_final_response().usage
        else:
            chat = client.chat.completions.create(model="policy", messages=GO).usage
            response = client.responses.create(model="policy", input="go").usage
        calls = talk.calls()
    assert chat is not None and chat.completion_tokens_details is not None and response is not None
    assert chat.completion_tokens_details.reasoning_tokens == thought
    assert response.output_tokens_details.reasoning_tokens == thought
    assert chat.completion_tokens == response.output_tokens == len(calls[0].sampled_ids)


# -- cached tokens ---------------------------------------------------------------------------------------------------

TOLD: list[Step] = [Tokens([302, 260]), Finish(), Told(3)]


def bodies(stream: bool) -> dict[str, dict[str, Any]]:
    """By path."""
    more = {"model": "policy", "stream": stream}
    asked, options = [{"role": "user", "content": "hi"}], {"stream_options": {"include_usage": True}} if stream else {}
    return {
        "chat/completions": {**more, **options, "messages": asked, "n": 2},
        "completions": {**more, **options, "prompt": ["hi there", "ho"], "n": 2},
        "responses": {**more, "input": "hi"},
        "messages": {**more, "max_tokens": 8, "messages": asked},
    }


def usage_of(answer: httpx.Response) -> dict[str, Any]:
    """Return the last usage that an answer tells."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()["usage"]
    events = [event for event in sse(answer.text) if event != "[DONE]"]
    return [found for event in events if (found := event.get("usage") or event.get("response", {}).get("usage"))][-1]


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_of_the_prompt(model: Path, tmp_path: Path, stream: bool) -> None:
    """Every protocol tells what the engine told, once for the choices of one prompt."""
    with ScriptedEngine(lambda request, number: TOLD) as engine:
        with running(model, tmp_path / "store.db", engine.url, template=toy_template({"hi": 300})) as proxy:
            access, found = proxy.run(), {}
            for path, body in bodies(stream).items():
                headers = {"Authorization": f"Bearer {access['api_key']}"}
                answer = proxy.http.post(f"/v1/{path}", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                found[path] = usage_of(answer)
    assert found["chat/completions"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert found["completions"]["prompt_tokens_details"] == {"cached_tokens": 3 + len("ho")}
    assert found["responses"]["input_tokens_details"]["cached_tokens"] == 3
    prompt = found["responses"]["input_tokens"]
    assert (found["messages"]["cache_read_input_tokens"], found["messages"]["input_tokens"]) == (3, prompt - 3)


@pytest.mark.parametrize("end", [[], [Told(None)]])
def test_an_engine_that_does_not_tell_is_not_asked_again(model: Path, tmp_path: Path, end: list[Step]) -> None:
    """Its first answer shows it; usage says nothing of cached tokens where the protocol allows that, else 0."""
    with ScriptedEngine(lambda request, number: [Tokens([302, 260]), Finish(), *end]) as engine:
        with running(model, tmp_path / "store.db", engine.url, template=toy_template({"hi": 300})) as proxy:
            access = proxy.run()
            for _ in range(3):
                chat = proxy.chat(access, {"messages": [{"role": "user", "content": "hi"}]}).json()["usage"]
                assert chat == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
            body = bodies(False)["messages"]
            message = proxy.http.post("/v1/messages", json=body, headers={"x-api-key": access["api_key"]}).json()
        assert [item.request.get("stream_options") for item in engine.log] == [{"include_usage": True}, *[None] * 3]
    assert (message["usage"]["cache_read_input_tokens"], message["usage"]["input_tokens"]) == (0, 5)


def test_an_engine_that_was_started_again_is_asked_again(model: Path, tmp_path: Path) -> None:
    """With other flags it may tell what it did not tell before, or no longer tell it."""
    quiet: list[Step] = [Tokens([302, 260]), Finish()]
    port, found = 0, []
    with running(model, tmp_path / "store.db", template=toy_template({"hi": 300})) as proxy:
        access = proxy.run()
        for play in (quiet, TOLD, quiet):
            with ScriptedEngine(lambda request, number, play=play: play, port=port) as engine:
                port = int(engine.url.rsplit(":", 1)[1])
                proxy.control.put("/replicas", json={"replicas": [{"url": engine.url}]}).raise_for_status()
                for _ in range(2):
                    chat = proxy.chat(access, {"messages": [{"role": "user", "content": "hi"}]}).json()["usage"]
                    found.append(chat.get("prompt_tokens_details"))
    assert found == [None, None, {"cached_tokens": 3}, {"cached_tokens": 3}, None, None]


def test_a_usage_that_does_not_come_is_not_waited_for(model: Path, tmp_path: Path) -> None:
    """The answer is whole without it; also where the connection breaks there."""
    never = threading.Event()
    plays: list[list[Step]] = [[Tokens([302, 260]), Finish(), Hangup()], [Tokens([302, 260]), Finish(), Wait(never)]]
    with ScriptedEngine(lambda request, number: plays[number - 1]) as engine:
        with running(model, tmp_path / "store.db", engine.url, template=toy_template({"hi": 300})) as proxy:
            access = proxy.run()
            for _ in plays:
                answer = proxy.chat(access, {"messages": [{"role": "user", "content": "hi"}]})
                assert answer.json()["choices"][0]["finish_reason"] == "stop"
            assert all(call.status in (CallStatus.COMPLETE, CallStatus.DELIVERED) for call in proxy.calls())
        never.set()
