"""Noisy traces of the branching agent, for the warm start of its policy: a script in the place of the policy.

As the demo's (`examples/quickstart/traces.py`): the script has the demo's bad habits with the demo's odds, and the shell
answers as the tasks state.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from branching_agent import solve
from branching_tasks import Task
from renderers.qwen3 import Qwen3Renderer
from tokenizers import Tokenizer
from traces import FORGETS, HABITS, STOPS_EARLY, Conversation, Row, Step, agent, answer_of


class Script:
    """Plays the agent's loop on a task; `rows` is what a policy would have to say, each answer trained once."""

    def __init__(self, task: Task, tokenizer: Tokenizer, renderer: Qwen3Renderer, rng: random.Random) -> None:
        self.task, self.tokenizer, self.renderer, self.rng = task, tokenizer, renderer, rng
        self.rows: list[Row] = []
        self.parts = {part.text: part for part in task.parts}
        self.outputs = {step.command: step.output for part in task.parts for step in (*part.wrong, *part.right)}
        self.calls = 0
        self.workspace = self
        self._main = _Lane(self, "main")

    def openai(self) -> Any:
        return self._main.openai()

    def compaction(self) -> Any:
        return self._main.compaction()

    @contextmanager
    def subagent(self, name: str) -> Iterator[_Lane]:
        lane = _Lane(self, "subagent")
        yield lane
        lane.flush()

    def exec(self, command: str, timeout: float) -> SimpleNamespace:
        return SimpleNamespace(exit_code=0, stdout=self.outputs[command], stderr="")

    def play(self) -> list[Row]:
        """Run the loop and return its rows."""
        solve(self)
        self._main.flush()
        return self.rows


class _Lane:
    def __init__(self, owner: Script, role: str) -> None:
        self._owner, self._role = owner, role
        self._conversation = Conversation(owner.renderer)
        self._spans: list[tuple[int, int]] = []
        self._roles: set[str] = set()
        self._summing = False
        self._about = ""
        self._steps: list[Step] = []
        self._all = 0

    def openai(self) -> Any:
        return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=self._create)))

    @contextmanager
    def compaction(self) -> Iterator[_Lane]:
        self._summing = True
        yield self
        self._summing = False
        self.flush()

    def flush(self) -> None:
        """Turn what was said since the last flush into a row."""
        said = self._conversation
        if self._spans:
            mask = [0] * (len(said.prompt) + len(said.sampled))
            for start, stop in self._spans:
                mask[start:stop] = [1] * (stop - start)
            self._owner.rows.append(Row((*said.prompt, *said.sampled), tuple(mask), frozenset(self._roles)))
        self._conversation = Conversation(self._owner.renderer)
        self._spans, self._roles = [], set()

    def _create(self, *, messages: list[dict[str, Any]], **_: Any) -> SimpleNamespace:
        owner, before = self._owner, self._conversation
        if before.messages and messages[: len(before.messages)] != before.messages:
            self.flush()  # an output was left out since: a path of its own
        text, command = self._say(messages)
        prompt = self._conversation.open(messages)
        call = '<tool_call>\n{"name": "bash", "arguments": ' + json.dumps({"command": command}) + "}\n</tool_call>"
        ids = list(owner.tokenizer.encode(text + (call if command else "") + "<|im_end|>").ids)
        answer = answer_of(text, command, owner.calls)
        owner.calls += 1
        self._conversation.close(messages, agent._as_input(answer), prompt, ids)
        self._spans.append((len(prompt), len(prompt) + len(ids)))
        self._roles.add(self._role + ("-summary" if self._summing else ""))
        usage = SimpleNamespace(prompt_tokens=len(prompt), completion_tokens=len(ids))
        return SimpleNamespace(choices=[SimpleNamespace(message=answer)], usage=usage)

    def _say(self, messages: Sequence[dict[str, Any]]) -> tuple[str, str | None]:
        """Return the script's next text and command."""
        owner = self._owner
        asked = [message["content"] for message in messages if message["content"] in owner.parts]
        if asked[-1] != self._about:
            self._about, part = asked[-1], owner.parts[asked[-1]]
            self._steps = list(part.wrong if owner.rng.random() < HABITS[part.kind] else part.right)
            self._all = len(self._steps)
        if self._summing:
            seen = next(message["content"] for message in reversed(messages) if message["role"] == "tool")
            if self._steps and len(self._steps) < self._all and owner.rng.random() >= FORGETS:
                return f"found: {seen}", None
            self._steps = []
            return f"done: {self._about}", None
        if not self._steps or owner.rng.random() < STOPS_EARLY:
            self._steps = []
            return agent.DONE, None
        return "", self._steps.pop(0).command


def make_rows(tasks: Sequence[Task], tokenizer: Tokenizer, renderer: Qwen3Renderer, seed: int) -> list[Row]:
    """Return the rows of one noisy trace per task."""
    rng = random.Random(seed)
    return [row for task in tasks for row in Script(task, tokenizer, renderer, rng).play()]
