"""LiteLLM as a client: its three ways to ask, through the proxy; what it sees is what is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from proxy_engine import Status
from sdk_kit import BASH_CALL, CHAT_TOOLS, GO, RESPONSE_TOOLS, THINK, TWO_CALLS, talking

from gyre_sdk.records import ForkReason

litellm = pytest.importorskip("litellm")

RESULTS = {"bash": "a.py", "read": "x = 1"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
async def test_completion_with_tools(model: Path, tmp_path: Path, provider: str, stream: bool) -> None:
    """Calls in parallel, their results, an answer: over chat and over messages, one path."""
    with talking(model, tmp_path, THINK + TWO_CALLS, BASH_CALL, "The answer is water.") as talk:
        base = talk.access["base_url"] if provider == "openai" else talk.proxy.url
        common: dict[str, Any] = {
            "model": f"{provider}/policy",
            "api_base": base,
            "api_key": talk.access["api_key"],
            "tools": CHAT_TOOLS,
            "max_tokens": 64,
        }
        messages, seen = list(GO), []
        for turn in range(3):
            if stream:
                chunks = list(litellm.completion(messages=messages, stream=True, **common))
                answer = litellm.stream_chunk_builder(chunks)
            elif turn == 1:
                answer = await litellm.acompletion(messages=messages, **common)
            else:
                answer = litellm.completion(messages=messages, **common)
            message = answer.choices[0].message
            seen.append(message)
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULTS[call.function.name]})
        talk.chain(3)
    assert [(call.function.name, json.loads(call.function.arguments)) for call in seen[0].tool_calls] == [
        ("bash", {"command": "ls -la"}),
        ("read", {"path": "naïve 北京"}),
    ]
    assert seen[0].reasoning_content == "The agent ran ls."
    assert seen[2].content == "The answer is water."


def test_responses(model: Path, tmp_path: Path) -> None:
    with talking(model, tmp_path, THINK + BASH_CALL, "The answer is water.") as talk:
        common: dict[str, Any] = {
            "model": "openai/policy",
            "api_base": talk.access["base_url"],
            "api_key": talk.access["api_key"],
            "tools": RESPONSE_TOOLS,
        }
        first = litellm.responses(input="Run ls", **common)
        (call,) = [item for item in first.output if item.type == "function_call"]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "a.py"}
        items = [item.model_dump(exclude_none=True) for item in first.output]
        second = litellm.responses(input=[{"role": "user", "content": "Run ls"}, *items, result], **common)
        assert [part.text for item in second.output for part in item.content] == ["The answer is water."]
        talk.chain(2)


def test_errors_are_litellms_own(model: Path, tmp_path: Path) -> None:
    with talking(model, tmp_path, [Status(400, "no")]) as talk:
        for provider, base in (("openai", talk.access["base_url"]), ("anthropic", talk.proxy.url)):
            common: dict[str, Any] = {"model": f"{provider}/policy", "api_base": base, "messages": GO, "max_tokens": 8}
            with pytest.raises(litellm.AuthenticationError):
                litellm.completion(api_key="wrong", **common)
            with pytest.raises(litellm.BadRequestError):
                litellm.completion(api_key=talk.access["api_key"], **common)
    assert ForkReason.RETRY not in {call.fork_reason for call in talk.proxy.calls()}
