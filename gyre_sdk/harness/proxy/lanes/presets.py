"""Presets, each from a recording of the real program (`tests/golden/clients`, made by `tests/clients/record.py`)."""

from __future__ import annotations

import re

from gyre_sdk.harness.proxy.lanes.facts import Preset, SideCall, Sign, Starter, Thread, Where
from gyre_sdk.records import SUBAGENT


def _sign(where: Where, pattern: str, header: str = "", key: str = "") -> Sign:
    return Sign(where, re.compile(pattern), header, key)


_ARGUMENTS = ("prompt", "message", "input", "task", "instructions", "query", "request")

GENERIC = Preset(
    name="generic",
    summaries=(
        _sign(
            Where.LAST_USER,
            r"(?i)\b(summari[sz]e|(write|create|give|provide|produce)\b.{0,40}\bsummary of)\b.{0,40}"
            r"\b(conversation|session|chat|dialog(ue)?|discussion|history|messages above|work so far)",
        ),
    ),
    starters=(
        Starter(
            re.compile(r"(?i)agent|delegate|task|ask|call"),
            _ARGUMENTS,
            ("name", "agent", "agent_name", "agent_type", "description"),
        ),
        Starter(re.compile(""), _ARGUMENTS),
    ),
    handoff=re.compile(r"(?i)(?:transfer|hand_?off)_(?:back_)?to_(.+)"),
    guess=True,
)
"""Rules for programs that nothing is known of."""

CLAUDE_CODE = Preset(
    name="claude-code",
    program=(
        _sign(Where.HEADER, r"^claude-cli/", "user-agent"),
        _sign(Where.HEADER, r".", "x-claude-code-session-id"),
        _sign(
            Where.SYSTEM,
            r"You are (Claude Code|a Claude agent)|interactive (agent|CLI tool) that helps users with soft",
        ),
    ),
    thread=Thread(names=("x-claude-code-session-id", "x-claude-code-agent-id"), child="x-claude-code-agent-id"),
    summaries=(
        _sign(Where.LAST_USER, r"^\s*CRITICAL: Respond with TEXT ONLY\b"),
        _sign(Where.LAST_USER, r"^\s*Your task is to create a detailed summary of\b"),
    ),
    resumes=(_sign(Where.USER, r"This session is being continued from a previous conversation\b"),),
    summary=re.compile(r"(?s)<summary>\s*(.*?)\s*(?:</summary>|$)"),
    sides=(
        SideCall("title", (_sign(Where.SYSTEM, r"(?i)\b(generate|write|create) a\b.{0,40}\btitle\b"),)),
        SideCall("topic", (_sign(Where.SYSTEM, r"(?i)\bindicates a new (conversation )?topic\b|isNewTopic"),)),
        SideCall("quota", (_sign(Where.LAST_USER, r"^quota$"),)),
        SideCall("file-paths", (_sign(Where.SYSTEM, r"(?i)^\s*Extract any file paths\b"),)),
        SideCall("command-prefix", (_sign(Where.SYSTEM, r"(?i)\bprocess (the )?Bash commands\b"),)),
        SideCall(
            "summary-line",
            (_sign(Where.SYSTEM, r"(?i)\bsummari[sz]e this (coding )?(conversation|session) in (under|less)"),),
        ),
    ),
    starters=(
        Starter(re.compile(r"^(Agent|Task)$"), ("prompt",), ("description", "subagent_type")),
        Starter(re.compile(r"^(WebFetch|Skill|SendMessage|Workflow)$"), ("prompt", "message", "args")),
    ),
)
"""Claude Code 2.1: recorded are title, main loop, parallel sub-agents, compaction while working and by command."""

CODEX = Preset(
    name="codex",
    program=(
        _sign(Where.HEADER, r"^codex", "originator"),
        _sign(Where.HEADER, r"^codex", "user-agent"),
        _sign(Where.SYSTEM, r"^You are a coding agent running in the Codex CLI\b"),
    ),
    thread=Thread(names=("thread-id",), child="x-openai-subagent", parent="x-codex-parent-thread-id"),
    summaries=(
        _sign(Where.HEADER, r"^compaction$", "x-codex-turn-metadata", "request_kind"),
        _sign(Where.LAST_USER, r"^You are performing a CONTEXT CHECKPOINT COMPACTION\b"),
    ),
    resumes=(_sign(Where.USER, r"^Another language model started to solve this problem\b"),),
    starters=(Starter(re.compile(r"spawn_agent$"), ("message",), ("name", "agent_type", "role"), SUBAGENT),),
)
"""Codex 0.171: recorded are main loop, parallel sub-agents, compaction while working, a resumed session."""

MINI_SWE_AGENT = Preset(
    name="mini-swe-agent",
    program=(
        _sign(Where.SYSTEM, r"^You are a helpful assistant that can interact (multiple times )?with a computer\b"),
    ),
)
"""mini-swe-agent 2: one loop, nothing beside it."""

OPENAI_AGENTS = Preset(
    name="openai-agents",
    program=(_sign(Where.HEADER, r"^Agents/Python\b", "user-agent"),),
    starters=(Starter(re.compile(""), ("input",)),),
    handoff=re.compile(r"^transfer_to_(.+)$"),
)
"""openai-agents 0.24: recorded are a tool loop, an agent used as a tool, a hand-off."""

PRESETS = (CLAUDE_CODE, CODEX, MINI_SWE_AGENT, OPENAI_AGENTS)
"""What `auto` chooses from, by the signs of each request; `GENERIC` where none fits."""

__all__ = ["CLAUDE_CODE", "CODEX", "GENERIC", "MINI_SWE_AGENT", "OPENAI_AGENTS", "PRESETS"]
