"""What an engine samples to walk the real programs through their loops, decided by the prompt's text alone.

The model's side of `walks.py`: a play sees the ids of a prompt, so it tells conversations apart and knows how far each
has come by what it said last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy_engine import Finish, Play, Step, Tokens
from tokenizers import Tokenizer

from clients.scripted_provider import Reply
from clients.walks import FOLLOW_UP, LOOKS, REVIEW, SUMMARY, TASK, TITLE

START, END = "<|im_start|>", "<|im_end|>"
LONG = (1_000_000, 2_000_000, 3_000_000)
"""Where long outputs start, each nearly as long as a tool of Claude Code shows."""
REPORT = "The report: all is well."
_PARTS = re.compile(r"(?s)<think>.*?</think>|<tool_call>.*?</tool_call>")
_AGENT_ID = re.compile(r"agent_id\W+([0-9a-f-]{36})")


@dataclass(frozen=True)
class Prompt:
    """A prompt as text, in turns."""

    turns: list[tuple[str, str]]
    """Role and content; without the turn that is to be sampled."""

    @classmethod
    def of(cls, text: str) -> Prompt:
        """Split the text of a prompt."""
        parts = [part.removesuffix("\n").removesuffix(END).partition("\n") for part in text.split(START)[1:-1]]
        return cls([(role, content) for role, _, content in parts])

    @property
    def system(self) -> str:
        """All system messages, tool definitions included."""
        return "\n".join(content for role, content in self.turns if role == "system")

    @property
    def users(self) -> list[str]:
        """What users and tools said."""
        return [content for role, content in self.turns if role == "user"]

    @property
    def tail(self) -> str:
        """What a user or a tool said last; programs add system messages after it."""
        return self.users[-1]

    @property
    def said(self) -> str:
        """What the model said last, without thoughts and tool calls; empty where it said nothing yet."""
        last = next((content for role, content in reversed(self.turns) if role == "assistant"), "")
        return words(last)

    def began_with(self, text: str) -> bool:
        """Tell whether a text stands in what came before the model's first answer."""
        first = next((at for at, turn in enumerate(self.turns) if turn[0] == "assistant"), len(self.turns))
        return any(text in content for role, content in self.turns[:first] if role == "user")


def words(answer: str) -> str:
    """Return what an answer says beside thoughts and tool calls."""
    return _PARTS.sub("", answer).strip()


Walk = Callable[[Prompt], Reply]


def claude_code(prompt: Prompt) -> Reply:
    """A title, two tools at once, two sub-agents at once, a tool, the end; a compaction when told to; goodbye."""
    if "<tool_call>" not in prompt.system:
        return Reply(json.dumps({"title": TITLE}))
    if "Respond with TEXT ONLY" in prompt.tail:
        return Reply(f"<analysis>Looked back.</analysis>\n<summary>\n{SUMMARY}\n</summary>")
    if any(FOLLOW_UP in text for text in prompt.users):
        return Reply("Goodbye.")
    look = next((text for text in LOOKS if prompt.began_with(text)), None)
    if look is not None and not prompt.began_with(TASK):
        return Reply(f"Done: {look}") if prompt.said else Reply("I start.", (("Bash", _bash("echo looking")),))
    if prompt.began_with(SUMMARY):
        return Reply(REPORT) if prompt.said == "I check." else Reply("I check.", (("Bash", _bash("wc a.txt")),))
    if not prompt.said:
        files = ("Read", {"file_path": _folder(prompt) + "/a.txt"})
        return Reply("I look.", (("Bash", _bash("ls")), files))
    if prompt.said == "I look.":
        return Reply("I delegate.", tuple(("Agent", _agent(look)) for look in LOOKS))
    if prompt.said == "I delegate.":
        return Reply("I read.", tuple(("Bash", _bash(f"seq {start} {start + 3600}")) for start in LONG))
    if prompt.said == "I read.":
        return Reply("I look again.", (("Bash", _bash("cat a.txt")),))
    return Reply(REPORT)


def codex(prompt: Prompt) -> Reply:
    """Two tools at once, two sub-agents, a wait for each, a long output that makes it compact, the end; goodbye."""
    if "CONTEXT CHECKPOINT COMPACTION" in prompt.tail:
        return Reply(SUMMARY)
    if FOLLOW_UP in prompt.tail:
        return Reply("Goodbye.")
    look = next((text for text in LOOKS if prompt.began_with(text)), None)
    if look is not None and not prompt.began_with(TASK):
        return (
            Reply(f"Done: {look}") if prompt.said else Reply("I start.", (("exec_command", {"cmd": "echo looking"}),))
        )
    if prompt.began_with(SUMMARY):
        return (
            Reply(REPORT) if prompt.said == "I check." else Reply("I check.", (("exec_command", {"cmd": "wc a.txt"}),))
        )
    agents = _AGENT_ID.findall("\n".join(prompt.users))
    if not prompt.said:
        return Reply("I look.", (("exec_command", {"cmd": "ls"}), ("exec_command", {"cmd": "cat a.txt"})))
    if prompt.said == "I look.":
        return Reply("I delegate.", tuple(("multi_agent_v1__spawn_agent", {"message": look}) for look in LOOKS))
    if prompt.said == "I delegate.":
        return Reply("I wait.", (("multi_agent_v1__wait_agent", {"targets": agents[:1]}),))
    if prompt.said == "I wait.":
        return Reply("I wait for the other.", (("multi_agent_v1__wait_agent", {"targets": agents[1:2]}),))
    return Reply("I read.", (("exec_command", {"cmd": "seq 20000", "max_output_tokens": 10_000}),))


def mini_swe_agent(prompt: Prompt) -> Reply:
    """A tool loop that hands in."""
    if not prompt.said:
        return Reply("I look.", (("bash", {"command": "ls"}),))
    if prompt.said == "I look.":
        return Reply("I look closer.", (("bash", {"command": "cat a.txt"}), ("bash", {"command": "wc a.txt"})))
    return Reply("I hand in.", (("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),))


def openai_agents(prompt: Prompt) -> Reply:
    """A tool and an agent as a tool at once, a hand-off, a tool of the other agent, the end under it."""
    if "You review" in prompt.system:
        return Reply("Reviewed.") if prompt.said else Reply("I list.", (("list_files", {}),))
    if "You write" in prompt.system:
        return Reply(REPORT) if prompt.said == "I list." else Reply("I list.", (("list_files", {}),))
    if prompt.said:
        return Reply("I hand over.", (("transfer_to_writer", {}),))
    return Reply("I look.", (("list_files", {}), ("review", {"input": REVIEW})))


WALKS: dict[str, Walk] = {
    "claude_code": claude_code,
    "codex": codex,
    "mini_swe_agent": mini_swe_agent,
    "openai_agents": openai_agents,
}


def play(walk: Walk, model: Path) -> Play:
    """Return the play of a walk for a model folder's tokenizer."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def sample(request: dict[str, Any], number: int) -> list[Step]:
        text = tokenizer.decode(request["token_ids"], skip_special_tokens=False)
        ids = tokenizer.encode(written(walk(Prompt.of(text)))).ids
        return [*(Tokens(ids[at : at + 16]) for at in range(0, len(ids), 16)), Finish()]

    return sample


def written(reply: Reply) -> str:
    """Return a reply as the model writes it: thoughts, text, tool calls."""
    calls = [json.dumps({"name": name, "arguments": given}) for name, given in reply.calls]
    blocks = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    return "\n".join([f"<think>\nI think.\n</think>\n\n{reply.text}", *blocks]) + END


def _bash(command: str) -> dict[str, str]:
    return {"command": command, "description": "look"}


def _agent(look: str) -> dict[str, str]:
    return {"description": look.partition(":")[0].lower(), "prompt": look, "subagent_type": "general-purpose"}


def _folder(prompt: Prompt) -> str:
    """Return the working folder that Claude Code names."""
    found = re.search(r"working directory: (\S+)", "\n".join(content for _, content in prompt.turns))
    return found[1] if found else "."
