"""Scripts that walk the real programs through what a recording must hold.

Each walk has a tool loop; those of programs that can have sub-agents and compactions have these too. The texts are
ours alone, so a recording may keep them where it replaces the programs' own.
"""

from __future__ import annotations

import json
from typing import Any

from clients.scripted_provider import Heard, Reply

TASK = "WALK: look at the folder, have it looked at twice, then report"
FOLLOW_UP = "WALK AGAIN: and now say goodbye"
LOOKS = ("SUBTASK ONE: count the files of the folder", "SUBTASK TWO: read every file of the folder")
SUMMARY = "The folder holds one file, a.txt; two looks at it were taken."
TITLE = "Look at the folder"
REVIEW = "SUBTASK REVIEW: look at the files"
OURS = (TASK, FOLLOW_UP, *LOOKS, SUMMARY, TITLE, REVIEW)
"""Texts that a recording keeps wherever they stand."""

_LARGE, _GROWING = 90_000, 20_000


class ClaudeCodeWalk:
    """A title, two tools at once, two sub-agents at once, a compaction while it works, the end."""

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, heard: Heard) -> Reply:
        """Answer one request."""
        body = heard.body
        said = "\n".join(_texts(body["messages"]))
        if not body.get("tools"):
            return Reply(json.dumps({"title": TITLE}))
        if "Respond with TEXT ONLY" in said:
            return Reply(f"<analysis>Looked back.</analysis>\n<summary>\n{SUMMARY}\n</summary>")
        look = next((text for text in LOOKS if text in said), None)
        if look is not None and TASK not in said and SUMMARY not in said:
            answered = any(message["role"] == "assistant" for message in body["messages"])
            return Reply(f"Done: {look}") if answered else Reply("", (("Bash", _bash("echo looking")),))
        self._turn += 1
        if self._turn == 1:
            files = ("Read", {"file_path": _folder(body) + "/a.txt"})
            return Reply("I look.", (("Bash", _bash("ls")), files))
        if self._turn == 2:
            return Reply("I delegate.", tuple(("Agent", _agent(look)) for look in LOOKS), _GROWING)
        if self._turn == 3:
            return Reply("I look again.", (("Bash", _bash("cat a.txt")),), _LARGE)
        if self._turn == 4:
            return Reply("I check.", (("Bash", _bash("wc a.txt")),))
        return Reply("The report: all is well.")


class CodexWalk:
    """A tool, two sub-agents, a compaction while it works, the end."""

    def __init__(self) -> None:
        self._turn = 0
        self._agents: list[str] = []

    def __call__(self, heard: Heard) -> Reply:
        """Answer one request."""
        items = heard.body["input"]
        said = "\n".join(_texts(items))
        kind = json.loads(heard.headers.get("x-codex-turn-metadata", "{}"))
        if kind.get("request_kind") == "compaction":
            return Reply(SUMMARY)
        if kind.get("thread_source") == "subagent":
            look = next(text for text in LOOKS if text in said)
            answered = any(item["type"] == "function_call" for item in items)
            return Reply(f"Done: {look}") if answered else Reply("", (("exec_command", {"cmd": "echo looking"}),))
        self._turn += 1
        if self._turn == 1:
            return Reply("I look.", (("exec_command", {"cmd": "ls"}), ("exec_command", {"cmd": "cat a.txt"})))
        if self._turn == 2:
            return Reply("I delegate.", tuple(("multi_agent_v1/spawn_agent", {"message": look}) for look in LOOKS))
        if self._turn == 3:
            outputs = [item["output"] for item in items if item["type"] == "function_call_output"]
            self._agents = [json.loads(output)["agent_id"] for output in outputs[-2:]]
            return Reply("", (("multi_agent_v1/wait_agent", {"targets": self._agents[:1]}),))
        if self._turn == 4:
            return Reply("", (("multi_agent_v1/wait_agent", {"targets": self._agents[1:]}),))
        if self._turn == 5:
            return Reply("I look again.", (("exec_command", {"cmd": "cat a.txt"}),), _LARGE)
        if self._turn == 6:
            return Reply("I check.", (("exec_command", {"cmd": "wc a.txt"}),))
        return Reply("The report: all is well.")


class MiniSweAgentWalk:
    """A tool loop that hands in."""

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, heard: Heard) -> Reply:
        """Answer one request."""
        self._turn += 1
        if self._turn == 1:
            return Reply("I look.", (("bash", {"command": "ls"}),))
        if self._turn == 2:
            return Reply("I look closer.", (("bash", {"command": "cat a.txt"}), ("bash", {"command": "wc a.txt"})))
        return Reply("I hand in.", (("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),))


class OpenAIAgentsWalk:
    """A tool and an agent as a tool at once, a hand-off, the end under the other agent."""

    def __call__(self, heard: Heard) -> Reply:
        """Answer one request."""
        body = heard.body
        said = "\n".join(_texts(body.get("input") or body["messages"]))
        tools = [tool.get("name") or tool["function"]["name"] for tool in body.get("tools", [])]
        done = said.count("a.txt")
        if "review" in tools:
            if done:
                return Reply("", (("transfer_to_writer", {}),))
            return Reply("", (("list_files", {}), ("review", {"input": REVIEW})))
        if TASK in said:
            return Reply("The report: all is well.") if done > 1 else Reply("", (("list_files", {}),))
        return Reply("Reviewed.") if done else Reply("", (("list_files", {}),))


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    if isinstance(value, dict):
        return [text for key, item in value.items() if key not in ("id", "role", "type") for text in _texts(item)]
    return []


def _bash(command: str) -> dict[str, str]:
    return {"command": command, "description": "look"}


def _agent(look: str) -> dict[str, str]:
    return {"description": look.partition(":")[0].lower(), "prompt": look, "subagent_type": "general-purpose"}


def _folder(body: dict[str, Any]) -> str:
    """Return the working folder that Claude Code names in its system prompt."""
    for line in "\n".join(_texts(body["system"])).splitlines():
        head, found, folder = line.partition("working directory: ")
        if found and len(head) < 20:
            return folder.strip()
    return "."
