"""The openai SDK's responses, unmodified: conversations kept by the server or by the agent, and what GET and cancel show."""

from __future__ import annotations

import json
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import openai
import pytest
from proxy_engine import Error, Finish, Status, Tokens, Wait
from proxy_kit import running
from sdk_kit import BASH_CALL, RESPONSE_TOOLS, THINK, TWO_CALLS, Talk, ids_of, talking

from gyre_sdk.records import CallStatus

RESULTS = {"bash": "a.py", "read": "x = 1"}
PATCH = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** begin\\n+x"}}\n</tool_call>'
TERMINAL = ("completed", "incomplete", "failed", "cancelled")


async def ask(talk: Talk, how: str, **more: Any) -> Any:
    """Ask in one of the SDK's ways; give the whole response."""
    body: dict[str, Any] = {"model": "policy", **more}
    match how:
        case "sync":
            with talk.openai() as client:
                return client.responses.create(**body)
        case "async":
            async with talk.async_openai() as other:
                return await other.responses.create(**body)
        case "stream":
            with talk.openai() as client, client.responses.stream(**body) as stream:
                for _ in stream:
                    pass
                return stream.get_final_response()
    async with talk.async_openai() as other, other.responses.stream(**body) as stream:
        async for _ in stream:
            pass
        return await stream.get_final_response()


def results_of(response: Any) -> list[dict[str, Any]]:
    """Return what an agent answers the calls of a response with."""
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": RESULTS[item.name]}
        for item in response.output
        if item.type == "function_call"
    ]


@pytest.mark.parametrize("how", ["sync", "async", "stream", "async stream"])
@pytest.mark.parametrize("kept", ["by the server", "by the agent", "sealed"])
async def test_a_conversation_with_tools(model: Path, tmp_path: Path, how: str, kept: str) -> None:
    """Calls in parallel, their results, one more call, an answer: one path, thinking and all, whoever keeps it."""
    common: dict[str, Any] = {"tools": RESPONSE_TOOLS, "instructions": "You are a helpful agent."}
    if kept == "sealed":
        common |= {"store": False, "include": ["reasoning.encrypted_content"]}
    with talking(model, tmp_path, THINK + TWO_CALLS, THINK + BASH_CALL, "The answer is water.") as talk:
        history: list[Any] = [{"role": "user", "content": "Run ls"}]
        turn: dict[str, Any] = {"input": list(history)}
        seen = []
        for _ in range(3):
            response = await ask(talk, how, **common, **turn)
            seen.append(response)
            results = results_of(response)
            if kept == "by the server":
                turn = {"input": results, "previous_response_id": response.id}
                continue
            items = [item.model_dump(mode="json", exclude_none=True) for item in response.output]
            if kept == "sealed":
                for item in items:
                    if item["type"] == "reasoning":
                        del item["content"]
            history += [*items, *results]
            turn = {"input": list(history)}
        calls = talk.chain(3)
    assert [[item.type for item in response.output] for response in seen] == [
        ["reasoning", "function_call", "function_call"],
        ["reasoning", "function_call"],
        ["message"],
    ]
    assert seen[2].output_text == "The answer is water."
    assert json.loads(seen[0].output[2].arguments) == {"path": "naïve 北京"}
    assert talk.texts(calls[2].prompt_ids).count("The agent ran ls.") == 2
    assert seen[2].usage.input_tokens == len(calls[2].prompt_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_custom_tools(model: Path, tmp_path: Path, stream: bool) -> None:
    """A call of a custom tool has free text; its result continues the path."""
    tools: list[Any] = [{"type": "custom", "name": "patch", "description": "free text"}]
    with talking(model, tmp_path, PATCH, "The tests run.") as talk, talk.openai() as client:
        body: dict[str, Any] = {"model": "policy", "input": "Run ls", "tools": tools}
        if stream:
            with client.responses.stream(**body) as events:
                said = "".join(e.delta for e in events if e.type == "response.custom_tool_call_input.delta")
                first = events.get_final_response()
            assert said == "*** begin\n+x"
        else:
            first = client.responses.create(**body)
        (call,) = first.output
        assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", "*** begin\n+x")
        output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "applied"}
        second = client.responses.create(
            model="policy",
            input=[output],
            tools=tools,
            previous_response_id=first.id,  # type: ignore[list-item]
        )
        assert second.output_text == "The tests run."
        talk.chain(2)


def test_get_shows_what_was_said(model: Path, tmp_path: Path) -> None:
    """Streamed, retrieved, and retrieved by a run that is not its own."""
    with talking(model, tmp_path, THINK + TWO_CALLS) as talk, talk.openai() as client:
        with client.responses.stream(model="policy", input="Run ls", tools=RESPONSE_TOOLS) as events:
            final = events.get_final_response()
        shown = client.responses.retrieve(final.id)
        parsed = {"parsed_arguments"}  # what the SDK adds to a stream
        assert [item.model_dump() for item in shown.output] == [
            item.model_dump(exclude=parsed) for item in final.output
        ]
        assert (shown.status, shown.usage) == (final.status, final.usage)
        other = talk.proxy.run()
        with pytest.raises(openai.NotFoundError):
            openai.OpenAI(base_url=other["base_url"], api_key=other["api_key"]).responses.retrieve(final.id)
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="policy", input="go", previous_response_id="resp_0123456789abcdef")


@pytest.mark.parametrize("restarted", [False, True])
def test_what_is_not_to_be_stored_opens_nothing(model: Path, tmp_path: Path, restarted: bool) -> None:
    """`store: false`: no GET, no cancel, nothing goes on from it or names its items; the call is on record all the same."""
    with talking(model, tmp_path, "water", "The answer is") as talk:
        with talk.openai() as client:
            first = client.responses.create(model="policy", input="Run ls", store=False)
        assert (first.store, first.output_text) == (False, "water")
        assert [call.call for call in talk.calls()] == [f"c-{first.id.removeprefix('resp_')}"]
        with running(model, tmp_path / "store.db", talk.engine.url) if restarted else nullcontext(talk.proxy) as proxy:
            with talk.openai(base_url=f"{proxy.url}/v1") as client:
                for refer in (client.responses.retrieve, client.responses.cancel):
                    with pytest.raises(openai.NotFoundError, match="no response"):
                        refer(first.id)
                with pytest.raises(openai.BadRequestError) as refused:
                    client.responses.create(model="policy", input="go", previous_response_id=first.id)
                assert (refused.value.code, refused.value.param) == (
                    "previous_response_not_found",
                    "previous_response_id",
                )
                item: Any = {"type": "item_reference", "id": first.output[0].id}
                with pytest.raises(openai.BadRequestError) as refused:
                    client.responses.create(model="policy", input=[item, {"role": "user", "content": "go"}])
                assert refused.value.code == "item_not_found"


def test_background_and_cancel(model: Path, tmp_path: Path) -> None:
    """A response in the background is answered at once, polled, and cancelled while its engine is at work."""
    gate, begun = threading.Event(), ids_of(model, "The answer")
    slow = [Tokens(begun), Wait(gate), Tokens(ids_of(model, " is<|im_end|>")), Finish()]
    with talking(model, tmp_path, slow, slow, "water") as talk, talk.openai() as client:
        first = client.responses.create(model="policy", input="Run ls", background=True)
        assert first.status in ("queued", "in_progress")
        second = client.responses.create(model="policy", input="Run ls again", background=True)
        while len(talk.engine.log) < 2:
            time.sleep(0.005)
        assert client.responses.cancel(second.id).status == "cancelled"
        assert client.responses.retrieve(second.id).status == "cancelled"
        gate.set()
        while (shown := client.responses.retrieve(first.id)).status not in TERMINAL:
            time.sleep(0.005)
        assert (shown.status, shown.output_text) == ("completed", "The answer is")
        third = client.responses.create(model="policy", input="go", previous_response_id=first.id)
        assert third.output_text == "water"
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="policy", input="go", previous_response_id=second.id)
        calls = {call.call.removeprefix("c-"): call for call in talk.proxy.calls()}
    assert calls[second.id.removeprefix("resp_")].status is CallStatus.ABORTED
    assert calls[third.id.removeprefix("resp_")].parent == f"c-{first.id.removeprefix('resp_')}"
    assert calls[third.id.removeprefix("resp_")].fork_reason is None


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(model: Path, tmp_path: Path, stream: bool) -> None:
    include: list[Any] = ["message.output_text.logprobs"]
    with talking(model, tmp_path, "The answer is water", size=1) as talk, talk.openai() as client:
        body: dict[str, Any] = {"model": "policy", "input": "go", "include": include}
        if stream:
            with client.responses.stream(**body) as events:
                response = events.get_final_response()
        else:
            response = client.responses.create(**body)
        (call,) = talk.calls()
    part = response.output[0].content[0]  # type: ignore[union-attr]
    tokens = part.logprobs  # type: ignore[union-attr]
    assert "".join(token.token for token in tokens) == "The answer is water"  # type: ignore[union-attr]
    assert [token.logprob for token in tokens] == pytest.approx(call.logprobs[: len(tokens)])  # type: ignore[union-attr]


def test_limits_and_errors(model: Path, tmp_path: Path) -> None:
    """A cut answer is incomplete; refusals are the SDK's own classes."""
    ids = ids_of(model, "The answer")
    with talking(model, tmp_path, [Tokens(ids), Finish("length")]) as talk, talk.openai() as client:
        cut = client.responses.create(model="policy", input="go", max_output_tokens=16)
        assert (cut.status, cut.output_text) == ("incomplete", "The answer")
        assert cut.incomplete_details is not None and cut.incomplete_details.reason == "max_output_tokens"
        with pytest.raises(openai.BadRequestError) as bad:
            client.responses.create(model="policy", input="go", temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.AuthenticationError):
            talk.openai(api_key="wrong").responses.create(model="policy", input="go")


def test_a_stream_that_breaks_is_an_error_and_no_end(model: Path, tmp_path: Path) -> None:
    broken = [Tokens(ids_of(model, "The answer")), Wait(0.1), Error()]
    kinds: list[str] = []
    with (
        talking(model, tmp_path, broken, [Status(503)], patience=0.5, retry_pause=0.002) as talk,
        talk.openai() as client,
    ):
        try:
            for event in client.responses.create(model="policy", input="go", stream=True):
                kinds.append(event.type)
        except openai.APIError:
            kinds.append("error")
        assert kinds[-1] in ("response.failed", "error")
        assert not {"response.completed", "response.incomplete"} & set(kinds)
        (call,) = talk.proxy.calls()
        shown = client.responses.retrieve(f"resp_{call.call.removeprefix('c-')}")
        assert (shown.status, call.status) == ("failed", CallStatus.FAILED)
