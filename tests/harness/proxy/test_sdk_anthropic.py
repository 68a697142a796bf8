"""The anthropic SDK, unmodified: messages, streams, thinking, tools, counts, the beta endpoints; seen is recorded."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import anthropic
import pytest
from proxy_engine import Error, Finish, Status, Tokens, Wait
from sdk_kit import BASH_CALL, GO, MESSAGE_TOOLS, THINK, TWO_CALLS, Talk, ids_of, talking

from gyre_sdk.records import CallStatus, ForkReason

RESULTS = {"bash": "a.py", "read": "x = 1"}
WAYS = ["sync", "async", "stream", "async stream"]


async def ask(talk: Talk, how: str, messages: list[Any], *, beta: bool = False, **more: Any) -> Any:
    """Ask in one of the SDK's ways; give the whole message."""
    body: dict[str, Any] = {"model": "policy", "max_tokens": 64, "messages": messages, **more}
    with talk.anthropic() as client:
        api: Any = client.beta.messages if beta else client.messages
        if how == "sync":
            return api.create(**body)
        if how == "stream":
            with api.stream(**body) as stream:
                for _ in stream:
                    pass
                return stream.get_final_message()
    async with talk.async_anthropic() as other:
        api = other.beta.messages if beta else other.messages
        if how == "async":
            return await api.create(**body)
        async with api.stream(**body) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_message()


def results_of(message: Any, **more: Any) -> dict[str, Any]:
    """Return the user's turn with the results of a message's calls."""
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": RESULTS[block.name], **more}
        for block in message.content
        if block.type == "tool_use"
    ]
    return {"role": "user", "content": results}


def sent_back(message: Any) -> dict[str, Any]:
    content = [block.model_dump(mode="json", exclude_none=True) for block in message.content]
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("beta", [False, True])
async def test_a_conversation_with_tools(model: Path, tmp_path: Path, how: str, beta: bool) -> None:
    """Thinking, calls in parallel, results, a call, an answer: no fork, and `cache_control` shows nothing."""
    said = (THINK + "I will run." + TWO_CALLS, THINK + BASH_CALL, "The answer is water.")
    system = [{"type": "text", "text": "You are a helpful agent.", "cache_control": {"type": "ephemeral"}}]
    more: dict[str, Any] = {"tools": MESSAGE_TOOLS, "beta": beta}
    if beta:
        more["betas"] = ["interleaved-thinking-2025-05-14"]
    with talking(model, tmp_path, *said) as talk:
        messages, seen = list(GO), []
        forms: list[Any] = [system, "You are a helpful agent.", system]
        for form in forms:
            message = await ask(talk, how, messages, system=form, **more)
            seen.append(message)
            messages += [sent_back(message), results_of(message, cache_control={"type": "ephemeral"})]
        calls = talk.chain(3)
    assert [message.stop_reason for message in seen] == ["tool_use", "tool_use", "end_turn"]
    assert [[block.type for block in message.content] for message in seen] == [
        ["thinking", "text", "tool_use", "tool_use"],
        ["thinking", "tool_use"],
        ["text"],
    ]
    assert seen[0].content[0].thinking == "The agent ran ls." and seen[0].content[0].signature
    assert [block.input for block in seen[0].content[2:]] == [{"command": "ls -la"}, {"path": "naïve 北京"}]
    for message, call in zip(seen, calls, strict=True):
        assert message.usage.input_tokens == len(call.prompt_ids)
        assert message.usage.output_tokens == len(call.sampled_ids)
    assert talk.texts(calls[2].prompt_ids).count("The agent ran ls.") == 2


@pytest.mark.parametrize("how", ["sync", "stream"])
@pytest.mark.parametrize("change", ["as it was", "empty signature", "dropped", "redacted added", "edited"])
async def test_thinking_sent_back(model: Path, tmp_path: Path, how: str, change: str) -> None:
    """proxy-anthropic-envelope over the wire: each form is answered; what the model cannot have said is a fork."""
    with talking(model, tmp_path, THINK + BASH_CALL, "water") as talk:
        first = await ask(talk, how, GO, tools=MESSAGE_TOOLS)
        back = sent_back(first)
        match change:
            case "empty signature":
                back["content"][0]["signature"] = ""
            case "dropped":
                del back["content"][0]
            case "redacted added":
                back["content"].insert(0, {"type": "redacted_thinking", "data": "AAAA"})
            case "edited":
                back["content"][0]["thinking"] = "The agent ran tests."
        await ask(talk, how, [*GO, back, results_of(first)], tools=MESSAGE_TOOLS)
        if change in ("redacted added", "edited"):
            assert talk.calls()[1].fork_reason is ForkReason.CLIENT_EDIT
        else:
            talk.chain(2)


def test_tokens_are_counted_as_they_are_sent(model: Path, tmp_path: Path) -> None:
    """`count_tokens` is the length of the prompt that the same request has, on the first turn and the second."""
    with talking(model, tmp_path, THINK + TWO_CALLS, "water") as talk, talk.anthropic() as client:
        messages, counts = list(GO), []
        for _ in range(2):
            body: dict[str, Any] = {
                "model": "policy",
                "messages": messages,
                "tools": MESSAGE_TOOLS,
                "system": "You use ls.",
            }
            counts.append(client.messages.count_tokens(**body).input_tokens)
            counts.append(client.beta.messages.count_tokens(**body).input_tokens)
            message = client.messages.create(max_tokens=64, **body)
            messages += [sent_back(message), results_of(message)]
        calls = talk.chain(2)
    assert counts == [len(call.prompt_ids) for call in calls for _ in range(2)]


def test_a_silent_engine_is_covered_by_pings(model: Path, tmp_path: Path) -> None:
    """While nothing is sampled the stream carries `ping` events of the protocol's own form."""
    gate, begun = threading.Event(), ids_of(model, "The answer")
    said = [Tokens(begun), Wait(gate), Tokens(ids_of(model, " is water<|im_end|>")), Finish()]
    with talking(model, tmp_path, said, heartbeat=0.05) as talk:
        body = {"model": "policy", "max_tokens": 9, "messages": GO, "stream": True}
        pings, lines = 0, []
        with talk.proxy.http.stream(
            "POST", "/v1/messages", json=body, headers={"x-api-key": talk.access["api_key"]}
        ) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                pings += line == "event: ping"
                if pings == 3:
                    gate.set()
        assert pings >= 3
        assert lines.count("event: message_stop") == 1
        with (
            talk.anthropic() as client,
            client.messages.stream(**{k: v for k, v in body.items() if k != "stream"}) as s,
        ):  # type: ignore[arg-type]
            assert s.get_final_text() == "The answer is water"
        talk.calls()


def test_stop_sequences_and_limits(model: Path, tmp_path: Path) -> None:
    ids = ids_of(model, "The answer is water and wine")
    said: list[Any] = [[Tokens(ids), Finish("stop", " and")], [Tokens(ids), Finish("length")]]
    with talking(model, tmp_path, *said) as talk, talk.anthropic() as client:
        body: dict[str, Any] = {"model": "policy", "max_tokens": 64, "messages": GO}
        stopped = client.messages.create(stop_sequences=[" and"], **body)
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " and")
        assert stopped.content[0].text == "The answer is water"  # type: ignore[union-attr]
        assert client.messages.create(**body).stop_reason == "max_tokens"
        assert talk.calls()[0].sampled_ids == ids


def test_errors_are_the_sdks_own(model: Path, tmp_path: Path) -> None:
    with talking(model, tmp_path, "x") as talk, talk.anthropic() as client:
        body: dict[str, Any] = {"model": "policy", "max_tokens": 64, "messages": GO}
        with pytest.raises(anthropic.BadRequestError, match="max_tokens") as bad:
            client.messages.create(**{**body, "max_tokens": -1})
        assert bad.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
        with pytest.raises(anthropic.AuthenticationError):
            talk.anthropic(api_key="wrong").messages.create(**body)
        with pytest.raises(anthropic.BadRequestError):
            client.messages.create(**{**body, "messages": [{"role": "user", "content": "water " * 9000}]})
        with pytest.raises(anthropic.NotFoundError):
            client.messages.batches.retrieve("b")
        talk.proxy.control.post(f"/runs/{talk.access['run']}/finish", json={"status": "completed"})
        with pytest.raises(anthropic.PermissionDeniedError):
            client.messages.create(**body)
    assert talk.engine.log == []


def test_a_stream_that_breaks_is_an_error_and_no_end(model: Path, tmp_path: Path) -> None:
    """The engine dies for good in the middle: the SDK raises, and no stop reason was given before."""
    broken = [Tokens(ids_of(model, "The answer")), Wait(0.1), Error()]
    kinds: list[str] = []
    with (
        talking(model, tmp_path, broken, [Status(503)], patience=0.5, retry_pause=0.002) as talk,
        talk.anthropic() as client,
    ):
        body: dict[str, Any] = {"model": "policy", "max_tokens": 64, "messages": GO}
        with pytest.raises(anthropic.APIStatusError) as failed:
            for event in client.messages.create(stream=True, **body):
                kinds.append(event.type)
        assert kinds and not {"message_delta", "message_stop"} & set(kinds)
        assert failed.value.body["error"]["type"] in ("overloaded_error", "api_error")  # type: ignore[index]
        with pytest.raises(anthropic.InternalServerError):
            client.messages.create(**body)
        assert [call.status for call in talk.proxy.calls()] == [CallStatus.FAILED] * 2


def test_the_sdk_retries_and_gets_the_answer_once(model: Path, tmp_path: Path) -> None:
    gate = threading.Event()
    said = [Wait(gate), Tokens(ids_of(model, "water<|im_end|>")), Finish()]
    with talking(model, tmp_path, said) as talk:
        with talk.anthropic(max_retries=20, timeout=1.0) as client:
            threading.Timer(1.5, gate.set).start()
            message = client.messages.create(model="policy", max_tokens=8, messages=GO)
        assert message.content[0].text == "water"  # type: ignore[union-attr]
        assert len(talk.calls()) == 1


def test_arguments_that_are_no_json_come_and_go(model: Path, tmp_path: Path) -> None:
    """A malformed call is text to the agent or a call whose input says so; sent back, nothing forks."""
    bad = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}{"command": "pwd"}}\n</tool_call>'
    with talking(model, tmp_path, bad, "water") as talk, talk.anthropic() as client:
        body: dict[str, Any] = {"model": "policy", "max_tokens": 64, "tools": MESSAGE_TOOLS}
        with client.messages.stream(messages=GO, **body) as stream:
            first = stream.get_final_message()
        result = results_of(first)
        reply = result if result["content"] else {"role": "user", "content": "That is no call."}
        client.messages.create(messages=[*GO, sent_back(first), reply], **body)
        talk.chain(2)
    assert json.dumps([block.model_dump(mode="json") for block in first.content]).count("pwd") == 1


def test_models(model: Path, tmp_path: Path) -> None:
    with talking(model, tmp_path, "x") as talk, talk.anthropic() as client:
        (served,) = client.models.list().data
        assert client.models.retrieve(served.id).id == served.id
