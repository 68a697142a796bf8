"""Streams are live in every protocol: each kind of part is seen, and durable, before the engine samples what follows.

Between two parts the engine waits until the agent has seen the first one and then a sign of life.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from protocols_kit import PATHS, body_of
from proxy_engine import Finish, Step, Tokens, Wait
from sdk_kit import CHAT_TOOLS, GO, ids_of, talking

PARTS = [
    ("thinking", "<think>\nThe agent", "The agent"),
    ("text", " ran ls.\n</think>\n\nI will", "I will"),
    ("arguments", ' run.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls', '{"command": "ls'),
    ("arguments", ' -la"}}\n</tool_call>\n<tool_call>\n{"name": "read", "arguments": {"path": "x', '{"path": "x'),
]
"""Kind, what is sampled, and what of it the agent must see then."""
REST = '"}}\n</tool_call><|im_end|>'
KINDS = {
    "reasoning_content": "thinking", "content": "text",
    "thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "arguments",
    "response.reasoning_text.delta": "thinking", "response.output_text.delta": "text",
    "response.function_call_arguments.delta": "arguments",
}  # fmt: skip


def said(event: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what an event of any protocol adds: kind and text."""
    if event.get("type") == "content_block_delta":
        delta = event["delta"]
        texts = [delta.get(name, "") for name in ("thinking", "text", "partial_json")]
        return [(KINDS[delta["type"]], "".join(texts))] if delta["type"] in KINDS else []
    if event.get("type") in KINDS:
        return [(KINDS[event["type"]], event["delta"])]
    found = []
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {"content": choice.get("text")})
        found += [(kind, delta[name]) for name, kind in KINDS.items() if delta.get(name)]
        found += [("arguments", call["function"].get("arguments") or "") for call in delta.get("tool_calls") or ()]
    return found


def follow(lines: Any, parts: list[tuple[str, str]], seen: Any) -> tuple[int, str]:
    """Read a stream; call `seen` when a part and a sign of life after it have come. Give the parts seen and the end."""
    passed, texts, alive, last = 0, dict.fromkeys(KINDS.values(), ""), False, ""
    for line in lines:
        alive = line in (": ping", "event: ping")
        last = line or last
        if line.startswith("data: {"):
            for kind, text in said(json.loads(line[6:])):
                texts[kind] += text
        elif alive and passed < len(parts) and parts[passed][1] in texts[parts[passed][0]]:
            seen(passed)
            passed += 1
    return passed, last


def gated(model: Path, texts: list[str], rest: str) -> tuple[list[threading.Event], list[list[int]], list[Step]]:
    """Return gates, the ids before each, and steps that wait at them."""
    gates, ids = [threading.Event() for _ in texts], [ids_of(model, text) for text in texts]
    steps: list[Step] = []
    for gate, some in zip(gates, ids, strict=True):
        steps += [Tokens(some), Wait(gate)]
    return gates, ids, [*steps, Tokens(ids_of(model, rest)), Finish()]


@pytest.mark.parametrize("protocol", list(PATHS))
def test_every_part_is_seen_while_the_answer_is_sampled(model: Path, tmp_path: Path, protocol: str) -> None:
    gates, ids, steps = gated(model, [text for _, text, _ in PARTS], REST)
    with talking(model, tmp_path, steps, heartbeat=0.05) as talk:
        tools = [{"function": tool["function"]} for tool in CHAT_TOOLS]
        body = body_of(protocol, GO, tools=tools, stream=True)

        def seen(part: int) -> None:
            [call] = talk.proxy.calls()
            assert call.sampled_ids == [token for some in ids[: part + 1] for token in some], (
                "durable before it is seen"
            )
            gates[part].set()

        key = {"Authorization": f"Bearer {talk.access['api_key']}"}
        with talk.proxy.http.stream("POST", PATHS[protocol], json=body, headers=key) as answer:
            passed, last = follow(answer.iter_lines(), [(kind, text) for kind, _, text in PARTS], seen)
        assert passed == len(PARTS)
        end = {"chat": "[DONE]", "messages": '"message_stop"', "responses": '"response.completed"'}[protocol]
        assert end in last
        talk.calls()


def test_completions_too(model: Path, tmp_path: Path) -> None:
    gates, _, steps = gated(model, ["The answer", " is"], " water<|im_end|>")
    with talking(model, tmp_path, steps, heartbeat=0.05) as talk:
        body = {"model": "policy", "prompt": "Let me", "max_tokens": 64, "stream": True}
        key = {"Authorization": f"Bearer {talk.access['api_key']}"}
        with talk.proxy.http.stream("POST", "/v1/completions", json=body, headers=key) as answer:
            parts = [("text", "The answer"), ("text", "The answer is")]
            passed, last = follow(answer.iter_lines(), parts, lambda part: gates[part].set())
        assert (passed, last) == (2, "data: [DONE]")
