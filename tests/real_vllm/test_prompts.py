"""Prompts on real vLLM: the tokens that it had cached, and an answer that continues a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gyre_sdk as gyre
from gyre_sdk.journal import Journal

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ASK: list[Any] = [{"role": "user", "content": "Write oak into a.txt. " * 24}]


def test_cached_tokens(service: gyre.ServiceClient) -> None:
    """A prompt that was computed before is told as cached, but for its last block."""
    with gyre.session(gyre.Task(instruction="x"), service=service, workspace="local") as agent:
        client = agent.openai()
        found = [client.chat.completions.create(model="policy", messages=ASK, max_tokens=2).usage for _ in range(2)]
        other = agent.anthropic().messages.create(model="policy", messages=ASK, max_tokens=2).usage
    told = [usage.prompt_tokens_details.cached_tokens for usage in found if usage and usage.prompt_tokens_details]
    assert len(told) == 2 and found[1] is not None
    assert 0 < told[1] < found[1].prompt_tokens and told[1] == other.cache_read_input_tokens
    assert other.input_tokens == found[1].prompt_tokens - told[1]


def test_prefill(service: gyre.ServiceClient, tmp_path: Path) -> None:
    """The text is prompt; sent back with what was sampled behind it, it is the recorded answer."""
    with gyre.session(gyre.Task(instruction="x"), service=service, workspace="local") as agent:
        client = agent.anthropic()
        body: dict[str, Any] = {"model": "policy", "max_tokens": 12, "extra_body": {"temperature": 0}}
        text = "oak"
        begun = [*ASK, {"role": "assistant", "content": text}]
        with client.messages.stream(messages=begun, **body) as events:
            said = "".join(block.text for block in events.get_final_message().content if block.type == "text")
        whole = {"role": "assistant", "content": text + said}
        client.messages.create(messages=[*ASK, whole, {"role": "user", "content": "go on"}], **body)
    with Journal(tmp_path / "s.db", "r") as journal:
        first, second = journal.calls()
    assert (second.parent, second.fork_reason) == (first.call, None)
    assert second.prompt_ids[: len(first.prompt_ids) + len(first.sampled_ids)] == first.prompt_ids + first.sampled_ids
