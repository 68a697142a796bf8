"""Lanes of real Claude Code sessions, replayed from their transcripts as the requests that they were."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lanes_kit import MemoryRun, structure
from proxy_kit import SHARED

from gyre_sdk.harness.proxy.dialects.canonical import Message
from gyre_sdk.harness.proxy.dialects.messages import AnthropicMessages
from gyre_sdk.harness.proxy.lanes.loading import load_classifier

HISTORIES = SHARED / "data" / "histories" / "claude-code"
TOOLS = [{"name": "Task", "input_schema": {"type": "object"}}]
MAIN_PROMPT = "You are an interactive CLI tool that helps users with software engineering tasks."
SUB_PROMPT = "You are an agent for Claude Code."
TURN = {"role": "user", "content": "Go on."}


def entries(name: str) -> list[dict[str, Any]]:
    """Return a transcript's messages; skips where the data is not there."""
    path = HISTORIES / name
    if not path.exists():
        pytest.skip(f"{path} is missing: real histories are not part of the repository")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line.get("type") in ("user", "assistant")]


def conversation(lines: list[dict[str, Any]], system: str) -> tuple[Message, ...]:
    """Return a transcript's messages as the proxy reads them; one begins with a user's."""
    given: list[dict[str, Any]] = [] if lines[0]["message"]["role"] == "user" else [TURN]
    for line in lines:
        message = line["message"]
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        if given and given[-1]["role"] == message["role"] and isinstance(given[-1]["content"], list):
            given[-1]["content"] += blocks
        else:
            given.append({"role": message["role"], "content": blocks})
    body = {"model": "m", "max_tokens": 9, "system": system, "messages": [*given, TURN], "tools": TOOLS}
    return AnthropicMessages().parse(json.dumps(body).encode()).messages[:-1]


def replay(run: MemoryRun, messages: tuple[Message, ...], first: int = 0) -> list[str]:
    """Ask for each assistant message from the `first` on; return the lanes."""
    tools = (
        AnthropicMessages()
        .parse(json.dumps({"model": "m", "max_tokens": 9, "messages": [TURN], "tools": TOOLS}).encode())
        .tools
    )
    lanes: list[str] = []
    answers = [at for at, item in enumerate(messages) if item.role == "assistant"]
    for at in answers[first:]:
        pending = run.ask(messages[:at], tools)
        run.answer(pending, messages[at])
        lanes.append(pending.lane)
    return lanes


SESSIONS = [
    (
        "real_claude_p/29ccd257-68b1-427f-ae5f-6524b7cb6f20.jsonl",
        "real_claude_p/29ccd257-68b1-427f-ae5f-6524b7cb6f20/subagents/agent-a2271d1.jsonl",
        "Explore codebase structure",
    ),
    (
        "async_agents/eb000000-0000-4000-8000-000000000001.jsonl",
        "async_agents/eb000000-0000-4000-8000-000000000001/subagents/agent-cccc333.jsonl",
        "Coverage analysis",
    ),
]


@pytest.mark.parametrize(("main", "agent", "name"), SESSIONS, ids=["foreground", "background"])
def test_a_sidechain_is_a_sub_agent_of_the_call_that_started_it(main: str, agent: str, name: str) -> None:
    run = MemoryRun(load_classifier("auto"))
    whole, side = conversation(entries(main), MAIN_PROMPT), conversation(entries(agent), SUB_PROMPT)
    started = next(at for at, item in enumerate(whole) if any(call.name == "Task" for call in item.tool_calls))
    before = replay(run, whole[: started + 1])
    inside = replay(run, side)
    after = replay(run, whole, first=len(before))
    assert set(before + after) == {"l0"}
    assert set(inside) == {"l1"}
    assert structure(run, ["l1"]) == [("subagent", name, "main", f"c{len(before)}")]


def test_a_sidechain_in_the_main_transcript_is_one_lane_as_well() -> None:
    lines = entries("sidechain.jsonl")
    run = MemoryRun(load_classifier("auto"))
    main = [line for line in lines if not line.get("isSidechain")]
    side = [line for line in lines if line.get("isSidechain")]
    replay(run, conversation(main[:1], MAIN_PROMPT))
    inside = replay(run, conversation(side, SUB_PROMPT))
    assert set(inside) == {"l1"}
    assert structure(run, ["l1"]) == [("subagent", "Debug failing test output", "main", "c1")]


def test_a_rewound_session_goes_on_in_its_lane_after_its_compaction() -> None:
    """Two attempts from one point, then a summary that was made where the proxy did not see it."""
    lines = {line["uuid"]: line for line in entries("dag_compact_after_rewind.jsonl")}

    def path(names: str) -> tuple[Message, ...]:
        return conversation([lines[name] for name in names.split()], MAIN_PROMPT)

    run = MemoryRun(load_classifier("auto"))
    first = replay(run, path("u1 a1 b1u b1a"))
    second = replay(run, path("u1 a1 b2u b2a b2u2 b2a2"), first=1)
    resumed = replay(run, path("cs p1u p1a"))
    assert set(first + second + resumed) == {"l0"}
