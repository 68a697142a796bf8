"""The demo's agent: a plain loop over the `openai` SDK, with a sub-agent and with compaction.

Nothing here knows how the policy is served or trained. The loop, not the policy, decides when one part of a
two-part task goes to a helper and when the history is compacted; the policy writes the commands, the answers and
the summaries.
"""

from __future__ import annotations

import json
from typing import Any

JOIN = " ; "
"""Stands between the two parts of an instruction."""
SYSTEM = "You are an agent with a shell."
SUMMARISE = "Summarise."
SO_FAR = "So far: "
HELPER = "helper: "
DONE = "done"

MODEL = "policy"
COMPACT_AT = 34
"""Prompt tokens above which a conversation is compacted after the tool has answered; once per conversation."""
MAX_TOKENS = 32
"""Sampled tokens per call."""
MAX_TURNS = 4
"""Calls per conversation, summaries not counted."""
TOOL_TIMEOUT_S = 10.0
SHOWN_CHARS = 160
"""Longest tool output or helper answer that is shown to the policy."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]


def solve(agent: Any, *, temperature: float = 1.0) -> None:
    """Work on `agent.task` until the policy answers without a command.

    The first part of a two-part task stays with the main conversation; the second goes to a helper after the
    first command.
    """
    instruction = agent.task.instruction.strip()
    _, _, second = instruction.partition(JOIN)
    _converse(agent, agent.workspace, instruction, temperature, second)


def _converse(lane: Any, workspace: Any, instruction: str, temperature: float, handoff: str) -> str:
    """Hold one conversation; return its final answer."""
    messages = _opening(instruction)
    compacted = False
    for _ in range(MAX_TURNS):
        reply = _ask(lane.openai(), messages, temperature)
        message = reply.choices[0].message
        calls = message.tool_calls or []
        messages.append(_as_input(message))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": _run(workspace, call.function.arguments)}
            for call in calls
        ]
        if handoff:
            with lane.subagent("helper") as helper:
                answer = _converse(helper, workspace, handoff, temperature, "")
            messages.append({"role": "user", "content": HELPER + answer[:SHOWN_CHARS]})
            handoff = ""
        if not calls:
            return message.content or ""
        if reply.usage.prompt_tokens > COMPACT_AT and not compacted:
            with lane.compaction() as compaction:
                asked = [*messages, {"role": "user", "content": SUMMARISE}]
                summary = _ask(compaction.openai(), asked, temperature).choices[0].message.content or ""
            messages = [*_opening(instruction), {"role": "user", "content": SO_FAR + summary}]
            compacted = True
    return ""


def _opening(instruction: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}]


def _ask(client: Any, messages: list[dict[str, Any]], temperature: float) -> Any:
    return client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, temperature=temperature, max_tokens=MAX_TOKENS
    )


def _as_input(message: Any) -> dict[str, Any]:
    """Return an answer in the form in which it is sent back."""
    sent: dict[str, Any] = {"role": "assistant", "content": message.content or ""}
    if message.tool_calls:
        sent["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    return sent


def _run(workspace: Any, arguments: str) -> str:
    """Run one tool call; a malformed one is an error that the policy reads."""
    try:
        parsed = json.loads(arguments)
    except json.JSONDecodeError:
        return "error"
    command = parsed.get("command") if isinstance(parsed, dict) else None
    if not isinstance(command, str):
        return "error"
    done = workspace.exec(command, timeout=TOOL_TIMEOUT_S)
    shown = done.stdout.strip()[:SHOWN_CHARS]
    if done.exit_code != 0:
        return f"{shown}\nerror".strip()
    return shown or "ok"
