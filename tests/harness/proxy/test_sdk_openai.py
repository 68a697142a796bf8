"""The openai SDK, unmodified: chat and completions, sync, async and streaming; what it sees is what is recorded."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import openai
import pytest
from proxy_engine import Error, Finish, Hangup, Status, Tokens, Wait
from sdk_kit import BASH_CALL, CHAT_TOOLS, GO, THINK, TWO_CALLS, Talk, ids_of, talking

from gyre_sdk.records import CallStatus

RESULTS = {"bash": "a.py", "read": "x = 1"}


async def ask(talk: Talk, how: str, messages: list[Any], **more: Any) -> Any:
    """Ask in one of the SDK's ways; give the whole completion."""
    body: dict[str, Any] = {"model": "policy", "messages": messages, **more}
    match how:
        case "sync":
            with talk.openai() as client:
                return client.chat.completions.create(**body)
        case "async":
            async with talk.async_openai() as other:
                return await other.chat.completions.create(**body)
        case "stream":
            with talk.openai() as client, client.chat.completions.stream(**body) as stream:
                for _ in stream:
                    pass
                return stream.get_final_completion()
    async with talk.async_openai() as other, other.chat.completions.stream(**body) as stream:
        async for _ in stream:
            pass
        return await stream.get_final_completion()


@pytest.mark.parametrize("how", ["sync", "async", "stream", "async stream"])
async def test_chat_with_tools(model: Path, tmp_path: Path, how: str) -> None:
    """Call, result, call, result, answer: no fork, and the agent sees what the model said."""
    with talking(model, tmp_path, THINK + "I will run." + TWO_CALLS, BASH_CALL, "The answer is water.") as talk:
        messages = list(GO)
        seen = []
        for _ in range(3):
            completion = await ask(talk, how, messages, tools=CHAT_TOOLS)
            message = completion.choices[0].message
            seen.append(completion.choices[0])
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                result = RESULTS[call.function.name]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        calls = talk.chain(3)
    assert [choice.finish_reason for choice in seen] == ["tool_calls", "tool_calls", "stop"]
    first, second, last = (choice.message for choice in seen)
    assert [(call.function.name, json.loads(call.function.arguments)) for call in first.tool_calls] == [
        ("bash", {"command": "ls -la"}),
        ("read", {"path": "naïve 北京"}),
    ]
    assert first.content.strip() == "I will run."
    assert first.model_extra["reasoning_content"] == "The agent ran ls."
    assert [call.function.name for call in second.tool_calls] == ["bash"]
    assert (last.content, last.tool_calls) == ("The answer is water.", None)
    assert "<think>\nThe agent ran ls." in talk.texts(calls[2].prompt_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_three_choices(model: Path, tmp_path: Path, stream: bool) -> None:
    """n=3: three sampling events under one prompt, told apart by index; the agent goes on with one of them."""
    with talking(model, tmp_path, "a", "b", "c", "d", size=1) as talk:
        with talk.openai() as client:
            if stream:
                texts = ["", "", ""]
                for chunk in client.chat.completions.create(model="policy", messages=GO, n=3, stream=True):
                    for choice in chunk.choices:
                        texts[choice.index] += choice.delta.content or ""
            else:
                whole = client.chat.completions.create(model="policy", messages=GO, n=3)
                assert [choice.index for choice in whole.choices] == [0, 1, 2]
                texts = [choice.message.content or "" for choice in whole.choices]
            assert sorted(texts) == ["a", "b", "c"]
            messages = [*GO, {"role": "assistant", "content": texts[1]}, {"role": "user", "content": "go"}]
            client.chat.completions.create(model="policy", messages=messages)
        calls = talk.calls()
    assert [call.prompt_ids for call in calls[:3]] == [calls[0].prompt_ids] * 3
    assert [call.parent for call in calls] == [None, None, None, calls[1].call]
    assert [talk.texts(call.sampled_ids)[0] for call in calls[:3]] == texts


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(model: Path, tmp_path: Path, stream: bool) -> None:
    """One entry per sampled token, in order, with the recorded log-prob; their bytes make the text."""
    with talking(model, tmp_path, "naïve 北京 🙂", size=1) as talk, talk.openai() as client:
        entries: list[Any] = []
        if stream:
            for chunk in client.chat.completions.create(model="policy", messages=GO, logprobs=True, stream=True):
                for choice in chunk.choices:
                    entries += (choice.logprobs.content or []) if choice.logprobs else []
        else:
            logprobs = client.chat.completions.create(model="policy", messages=GO, logprobs=True).choices[0].logprobs
            assert logprobs is not None
            entries = list(logprobs.content or ())
        (call,) = talk.calls()
    assert [entry.logprob for entry in entries] == pytest.approx(call.logprobs)
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == "naïve 北京 🙂<|im_end|>"


def test_stop_strings(model: Path, tmp_path: Path) -> None:
    """The text ends before the stop string; the ids are whole; the next turn continues them."""
    ids = ids_of(model, "The answer is water and wine")
    said = [Tokens(ids), Finish("stop", " and")]
    with talking(model, tmp_path, said, "go") as talk, talk.openai() as client:
        message = client.chat.completions.create(model="policy", messages=GO, stop=[" and"]).choices[0].message
        assert message.content == "The answer is water"
        stream = client.chat.completions.create(model="policy", messages=[*GO, message], stream=True)  # type: ignore[list-item]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "go"
        first, _ = talk.calls()
    assert first.sampled_ids == ids
    assert talk.engine.log[0].request["sampling_params"]["stop"] == [" and"]


def test_usage_and_max_tokens(model: Path, tmp_path: Path) -> None:
    """Usage counts ids; `max_completion_tokens` reaches the engine; a cut answer says so."""
    ids = ids_of(model, "The answer is water")
    with talking(model, tmp_path, [Tokens(ids), Finish("length")]) as talk, talk.openai() as client:
        whole = client.chat.completions.create(model="policy", messages=GO, max_completion_tokens=len(ids))
        *_, last = client.chat.completions.create(
            model="policy", messages=GO, max_tokens=len(ids), stream=True, stream_options={"include_usage": True}
        )
        first, second = talk.calls()
    assert whole.choices[0].finish_reason == "length"
    for usage, call in ((whole.usage, first), (last.usage, second)):
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(call.prompt_ids), len(ids))
        assert call.sampling.max_tokens == len(ids)


def test_completions(model: Path, tmp_path: Path) -> None:
    """Texts and ids are continued as they are, several at once, with several samples, streamed or not."""
    with talking(model, tmp_path, "a", "b", "c", "d") as talk, talk.openai() as client:
        ids = ids_of(model, "The answer")
        whole = client.completions.create(
            model="policy", prompt=["The answer", "Let me"], n=2, logprobs=0, max_tokens=8
        )
        assert sorted(choice.text for choice in whole.choices) == ["a", "b", "c", "d"]
        stream = client.completions.create(model="policy", prompt=ids, stream=True, max_tokens=8)
        assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == "d"
        calls = talk.calls()
    assert [call.prompt_ids for call in calls] == [ids, ids, *([ids_of(model, "Let me")] * 2), ids]
    assert [talk.texts(call.sampled_ids)[0] for call in calls[:4]] == [choice.text for choice in whole.choices]
    assert whole.usage is not None and whole.usage.prompt_tokens == 2 * len(ids) // 2 + len(ids_of(model, "Let me"))


async def test_async_completions(model: Path, tmp_path: Path) -> None:
    with talking(model, tmp_path, "water") as talk:
        async with talk.async_openai() as client:
            whole = await client.completions.create(model="policy", prompt="The answer is ", max_tokens=8)
            stream = await client.completions.create(model="policy", prompt="The answer is ", max_tokens=8, stream=True)
            text = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
        assert (whole.choices[0].text, text) == ("water", "water")
        assert len(talk.calls()) == 2


def test_errors_are_the_sdks_own(model: Path, tmp_path: Path) -> None:
    """Each kind of refusal is the class that the SDK has for it, with code and param."""
    with talking(model, tmp_path, "x") as talk, talk.openai() as client:
        chat = client.chat.completions
        with pytest.raises(openai.BadRequestError) as bad:
            chat.create(model="policy", messages=GO, temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as bad:
            chat.create(model="policy", messages=GO, extra_body={"use_beam_search": True})
        assert bad.value.param == "use_beam_search"
        with pytest.raises(openai.BadRequestError) as bad:
            chat.create(model="policy", messages=[{"role": "user", "content": "water " * 9000}])
        assert bad.value.code == "context_length_exceeded"
        with pytest.raises(openai.AuthenticationError):
            talk.openai(api_key="wrong").chat.completions.create(model="policy", messages=GO)
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="policy", input="x")
        talk.proxy.control.post(f"/runs/{talk.access['run']}/finish", json={"status": "completed"})
        with pytest.raises(openai.PermissionDeniedError):
            chat.create(model="policy", messages=GO)
    assert talk.engine.log == []


def test_an_answer_that_breaks_is_an_error_and_no_end(model: Path, tmp_path: Path) -> None:
    """The engine dies for good in the middle: APIError while streaming, InternalServerError else."""
    broken = [Tokens(ids_of(model, "The answer")), Wait(0.1), Error()]
    said: list[Any] = [broken, [Status(503)]]
    with talking(model, tmp_path, *said, patience=0.5, retry_pause=0.002) as talk, talk.openai() as client:
        stream = client.chat.completions.create(model="policy", messages=GO, stream=True)
        finishes: list[Any] = []
        with pytest.raises(openai.APIError):
            for chunk in stream:
                finishes += [choice.finish_reason for choice in chunk.choices]
        assert set(finishes) == {None}
        with pytest.raises(openai.InternalServerError) as failed:
            client.chat.completions.create(model="policy", messages=GO)
        assert failed.value.response.headers["retry-after"]
        assert [call.status for call in talk.proxy.calls()] == [CallStatus.FAILED] * 2


def test_a_broken_engine_is_not_seen(model: Path, tmp_path: Path) -> None:
    """A connection that the engine drops is taken up again from the tokens there are."""
    start, rest = ids_of(model, "The answer "), ids_of(model, "is water<|im_end|>")
    with talking(model, tmp_path, [Tokens(start), Hangup()], [Tokens(rest), Finish()]) as talk, talk.openai() as client:
        stream = client.chat.completions.create(model="policy", messages=GO, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "The answer is water"
        (call,) = talk.proxy.calls()
    assert call.sampled_ids == start + rest


def test_the_sdk_retries_and_gets_the_answer_once(model: Path, tmp_path: Path) -> None:
    """A time-out of the SDK's own, then its retry: one sampling event."""
    gate = threading.Event()
    said = [Wait(gate), Tokens(ids_of(model, "water<|im_end|>")), Finish()]
    with talking(model, tmp_path, said) as talk:
        with talk.openai(max_retries=20, timeout=1.0) as client:
            threading.Timer(1.5, gate.set).start()
            message = client.chat.completions.create(model="policy", messages=GO).choices[0].message
        assert message.content == "water"
        (call,) = talk.calls()
    assert call.status in (CallStatus.COMPLETE, CallStatus.DELIVERED)


def test_models(model: Path, tmp_path: Path) -> None:
    with talking(model, tmp_path, "x") as talk, talk.openai() as client:
        (served,) = client.models.list().data
        assert client.models.retrieve(served.id).id == served.id
