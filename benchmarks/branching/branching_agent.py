"""An agent whose runs branch: it leaves out old tool outputs at every turn, delegates one part, and compacts once.

The parts of a task come one after the other in the one conversation, as from a user. Before each call, every tool
output but the newest is replaced by a mark, as SWE-agent does it, so each turn forks from the recorded path at the
output before.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "quickstart"))

from agent import (
    HELPER,
    JOIN,
    MAX_TURNS,
    SHOWN_CHARS,
    SO_FAR,
    SUMMARISE,
    _as_input,
    _ask,
    _opening,
    _run,
)

OMITTED = "(omitted)"
COMPACT_AT = 140
"""Prompt tokens above which the history is compacted after a tool has answered; once per conversation."""


def solve(agent: Any, *, temperature: float = 1.0) -> None:
    """Work on all parts of `agent.task`; the last one goes to a helper after the first command."""
    *own, last = agent.task.instruction.strip().split(JOIN)
    _converse(agent, agent.workspace, own, temperature, last)


def _converse(lane: Any, workspace: Any, parts: list[str], temperature: float, handoff: str = "") -> str:
    """Hold one conversation about parts that come one by one; return the last answer."""
    messages: list[dict[str, Any]] = []
    compacted = False
    answer = ""
    for part in parts:
        messages = [*messages, {"role": "user", "content": part}] if messages else _opening(part)
        for _ in range(MAX_TURNS):
            reply = _ask(lane.openai(), elided(messages), temperature)
            message = reply.choices[0].message
            answer, calls = message.content or "", message.tool_calls or []
            messages.append(_as_input(message))
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": _run(workspace, call.function.arguments)}
                for call in calls
            ]
            if handoff:
                with lane.subagent("helper") as helper:
                    said = _converse(helper, workspace, [handoff], temperature)
                messages.append({"role": "user", "content": HELPER + said[:SHOWN_CHARS]})
                handoff = ""
            if not calls:
                break
            if reply.usage.prompt_tokens > COMPACT_AT and not compacted:
                with lane.compaction() as compaction:
                    asked = [*elided(messages), {"role": "user", "content": SUMMARISE}]
                    summary = _ask(compaction.openai(), asked, temperature).choices[0].message.content or ""
                messages = [*_opening(part), {"role": "user", "content": SO_FAR + summary}]
                compacted = True
    return answer


def elided(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a history with every tool output but the newest left out."""
    newest = max((place for place, message in enumerate(messages) if message["role"] == "tool"), default=-1)
    return [
        {**message, "content": OMITTED} if message["role"] == "tool" and place < newest else message
        for place, message in enumerate(messages)
    ]
