"""Record the requests of the real programs into `tests/golden/clients`.

Run `python tests/clients/record.py [NAME ...]`. Each line of a recording is one request: run, path, headers that
tell programs and conversations apart, body, and what was answered. Long texts of the programs' own become a
stand-in: their first words, our texts that they hold, and a digest, so that equal texts stay equal.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from clients import programs, walks
from clients.programs import Program
from clients.scripted_provider import Exchanged, Script, scripted_provider

GOLDEN = Path(__file__).parent.parent / "golden" / "clients"
SHOWN, LONG = 72, 160
"""Characters that a stand-in keeps, and from how many on a text gets one."""
HEADERS = re.compile(
    r"user-agent|x-app|x-claude-code-.*|session-id|thread-id|x-codex-.*|x-openai-subagent|originator|anthropic-beta|"
    r"x-stainless-(lang|retry-count|async)"
)
_UUID = re.compile(r"(?<![0-9a-f])[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")
_CLOCK = re.compile(r"(?<=_unix_ms\":)\d+")
_AGENT, _DEVICE = re.compile(r"\ba[0-9a-f]{16}\b"), re.compile(r"\b[0-9a-f]{64}\b")


@dataclass(frozen=True)
class Start:
    """One start of a program within a run."""

    prompt: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Walk:
    """One run of a program: a script, and starts that share a workspace."""

    script: Callable[[], Script]
    starts: Sequence[Start]


_SMALL_WINDOW = {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "50000", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": ""}
_CONTINUE = ("--continue",)
RECORDINGS: dict[str, tuple[Callable[[], Program], list[Walk]]] = {
    "claude_code": (
        programs.claude_code,
        [
            Walk(walks.ClaudeCodeWalk, [Start(walks.TASK, environment=_SMALL_WINDOW)]),
            Walk(
                walks.ClaudeCodeWalk,
                [Start(walks.TASK), Start("/compact", _CONTINUE), Start(walks.FOLLOW_UP, _CONTINUE)],
            ),
        ],
    ),
    "codex": (
        programs.codex,
        [
            Walk(
                walks.CodexWalk,
                [
                    Start(walks.TASK, ("-c", "model_auto_compact_token_limit=50000")),
                    Start(walks.FOLLOW_UP, ("resume", "--last")),
                ],
            )
        ],
    ),
    "mini_swe_agent": (programs.mini_swe_agent, [Walk(walks.MiniSweAgentWalk, [Start(walks.TASK)])]),
    "openai_agents": (
        programs.openai_agents,
        [
            Walk(walks.OpenAIAgentsWalk, [Start(walks.TASK, ("responses",))]),
            Walk(walks.OpenAIAgentsWalk, [Start(walks.TASK, ("chat",))]),
        ],
    ),
}


async def record(name: str) -> list[dict[str, Any]]:
    """Run a program's walks and return the lines of its recording.

    Raises:
        RuntimeError: the program did not end well.
    """
    made, steps = RECORDINGS[name]
    program, lines = made(), []
    for number, walk in enumerate(steps):
        with tempfile.TemporaryDirectory() as folder:
            workspace = Path(folder) / "work"
            workspace.mkdir()
            (workspace / "a.txt").write_text("hello\n")
            async with scripted_provider(walk.script()) as provider:
                for start in walk.starts:
                    options = {"arguments": start.arguments, "environment": start.environment}
                    ended = await program.run(provider.base_url, "key", workspace, start.prompt, **options)
                    if ended.code != 0:
                        raise RuntimeError(f"{name} ended with {ended.code}:\n{ended.output}")
            shorten = Shortener(str(workspace))
            lines += [{"run": number, **shorten.line(item)} for item in provider.exchanged]
    return lines


class Shortener:
    """Makes lines of one run, with stand-ins that are the same for the same text."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._names: dict[str, str] = {}

    def line(self, item: Exchanged) -> dict[str, Any]:
        """Return a line of the recording."""
        heard, reply = item.heard, item.reply
        headers = {key: self.text(value) for key, value in sorted(heard.headers.items()) if HEADERS.fullmatch(key)}
        line = {"method": heard.method, "path": heard.path, "headers": headers, "body": self._body(heard.body)}
        if reply is not None:
            calls = [
                {"id": call, "name": tool, "arguments": self._value(given)}
                for call, (tool, given) in zip(item.ids, reply.calls, strict=True)
            ]
            line["answer"] = {"text": reply.text, "calls": calls}
        return line

    def text(self, text: str) -> str:
        """Return a text without what differs from run to run; long ones as stand-ins."""
        text = text.replace(self._folder, "/work")
        text = _UUID.sub(lambda found: self._named(found[0], "id"), text)
        text = _CLOCK.sub("0", text)
        text = _DEVICE.sub(lambda found: self._named(found[0], "device"), text)
        text = _AGENT.sub(lambda found: self._named(found[0], "agent"), text)
        if len(text) <= LONG or text.startswith("{"):
            return text
        kept = [part for part in sorted(walks.OURS, key=text.find) if part in text]
        kept = [part for part in kept if not text[:SHOWN].startswith(part)]
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return "\n".join([text[:SHOWN], f"[text {digest}]", *kept])

    def _named(self, found: str, kind: str) -> str:
        return self._names.setdefault(found, f"{kind}-{len(self._names) + 1}")

    def _body(self, body: dict[str, Any]) -> dict[str, Any]:
        return {
            key: [_tool(tool) for tool in value] if key == "tools" else self._value(value)
            for key, value in body.items()
        }

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if isinstance(value, dict):
            return {key: self._value(item) for key, item in value.items()}
        return value


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool's definition, its wording and schema replaced by a digest."""
    if isinstance(tool.get("function"), dict):
        return {**tool, "function": _tool(tool["function"])}
    if isinstance(tool.get("tools"), list):
        inner = [_tool(item) for item in tool["tools"]]
        return {**{key: tool[key] for key in ("type", "name")}, "description": _digest(tool), "tools": inner}
    kept = {key: tool[key] for key in ("type", "name") if key in tool}
    schemas = {key: {"type": "object"} for key in ("input_schema", "parameters") if key in tool}
    return {**kept, "description": _digest(tool), **schemas}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def main(names: Sequence[str]) -> None:
    """Write the recordings named, or all."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name in names or RECORDINGS:
        lines = asyncio.run(record(name))
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (GOLDEN / f"{name}.jsonl").write_text(text)
        print(f"{name}: {len(lines)} requests, {len(text)} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
