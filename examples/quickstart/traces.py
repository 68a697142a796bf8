"""Noisy traces for the warm start: the demo's agent loop, played by a script instead of a policy.

The script knows the right commands and one bad habit per kind, and picks the habit with the odds of `HABITS`. Where a
habit is more likely than the right way, a policy that imitates the traces is wrong even when it is greedy, so there is
something to learn from reward. The shell's answers are the ones that the tasks state (a test runs them for real).

A row is one path of a run's tree, as token ids, with a mask over the tokens that the policy would have sampled. Ids come
from the same renderer calls that the proxy makes: a full render to open a conversation, then bridges.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import agent
from renderers.qwen3 import Qwen3Renderer
from tasks import Part, Step, Task
from tokenizers import Tokenizer

HABITS: dict[str, float] = {
    "set": 0.22,
    "rename": 0.60,
    "count": 0.25,
    "sort": 0.22,
    "append": 0.60,
    "delete": 0.22,
    "lookup": 0.20,
    "copy": 0.22,
    "repair": 0.60,
}
"""Chance of the bad habit, by kind of part."""
STOPS_EARLY = 0.03
"""Chance, before each command, of saying that the job is done."""
FORGETS = 0.25
"""Chance that a summary after a look leaves out what was seen."""


@dataclass(frozen=True, slots=True)
class Row:
    """One training row."""

    ids: tuple[int, ...]
    """Tokens of a path."""
    mask: tuple[int, ...]
    """1 where the token was sampled by the script and has no earlier row."""
    roles: frozenset[str]
    """Roles of the calls on this row that it trains."""


@dataclass(slots=True)
class Conversation:
    """The recorded ids of one lane, extended by bridging as the proxy does it."""

    renderer: Qwen3Renderer
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages that `prompt` and `sampled` stand for, the last answer included."""
    prompt: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)

    def open(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Return the prompt ids for a request that repeats or replaces the history."""
        known = len(self.messages)
        if known and list(messages[:known]) == self.messages:
            bridged = self.renderer.bridge_to_next_turn(
                self.prompt, self.sampled, list(messages[known:]), tools=agent.TOOLS
            )
            if bridged is not None:
                return list(bridged.token_ids)
        return list(self.renderer.render_ids(list(messages), tools=agent.TOOLS, add_generation_prompt=True))

    def close(
        self, messages: Sequence[dict[str, Any]], answer: dict[str, Any], prompt: list[int], ids: list[int]
    ) -> None:
        """Note an answer."""
        self.messages, self.prompt, self.sampled = [*messages, answer], prompt, ids


def answer_of(text: str, command: str | None, call: int) -> SimpleNamespace:
    """Return an answer in the shape of the `openai` SDK."""
    calls = None
    if command is not None:
        function = SimpleNamespace(name="bash", arguments=json.dumps({"command": command}))
        calls = [SimpleNamespace(id=f"call-{call}", type="function", function=function)]
    return SimpleNamespace(content=text, tool_calls=calls)


class ScriptedAgent:
    """Stands in for gyre's agent: same interface, a script for the policy and stated answers for the shell."""

    def __init__(self, task: Task, tokenizer: Tokenizer, renderer: Qwen3Renderer, rng: random.Random | None) -> None:
        """Play `task`; without `rng` the script makes no mistake."""
        self.task = task
        self.rows: list[Row] = []
        self.calls: list[tuple[str, int, int]] = []
        """Role, prompt tokens and sampled tokens of each call."""
        self._tokenizer, self._renderer, self._rng = tokenizer, renderer, rng
        self._outputs: dict[str, str] = {}
        self._lane = _Lane(self, "main", task.parts[0])
        self.workspace = self

    def openai(self) -> Any:
        """Return the client of the main lane."""
        return self._lane.openai()

    @contextmanager
    def subagent(self, name: str) -> Iterator[_Lane]:
        """Open the helper's lane; it has the last part of the task."""
        lane = _Lane(self, "subagent", self.task.parts[-1])
        yield lane
        lane.flush()

    def compaction(self) -> Any:
        """Open the summary role of the main lane."""
        return self._lane.compaction()

    def exec(self, command: str, timeout: float) -> SimpleNamespace:
        """Answer as the shell would."""
        return SimpleNamespace(exit_code=0, stdout=self._outputs.get(command, ""), stderr="")

    def play(self) -> list[Row]:
        """Run the loop and return its rows."""
        agent.solve(self, temperature=1.0)
        self._lane.flush()
        return self.rows

    def chance(self, odds: float) -> bool:
        """Toss the script's coin."""
        return self._rng is not None and self._rng.random() < odds


class _Lane:
    def __init__(self, owner: ScriptedAgent, role: str, part: Part) -> None:
        self._owner, self._role, self._part = owner, role, part
        self._steps: list[Step] = list(part.wrong if owner.chance(HABITS[part.kind]) else part.right)
        self._all = len(self._steps)
        self._conversation = Conversation(owner._renderer)
        self._spans: list[tuple[int, int]] = []
        self._roles: set[str] = set()
        self._summing = False
        for step in self._steps:
            owner._outputs[step.command] = step.output

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
        conversation = self._conversation
        ids = [*conversation.prompt, *conversation.sampled]
        mask = [0] * len(ids)
        for start, stop in self._spans:
            mask[start:stop] = [1] * (stop - start)
        if self._spans:
            self._owner.rows.append(Row(tuple(ids), tuple(mask), frozenset(self._roles)))
        self._conversation = Conversation(self._owner._renderer)
        self._spans, self._roles = [], set()

    def _create(self, *, messages: list[dict[str, Any]], **_: Any) -> SimpleNamespace:
        owner, role = self._owner, self._role + ("-summary" if self._summing else "")
        text, command = self._say(messages)
        prompt = self._conversation.open(messages)
        call = (
            "" if command is None else '<tool_call>\n{"name": "bash", "arguments": ' + json.dumps({"command": command})
        )
        ids = list(owner._tokenizer.encode(text + (call and call + "}\n</tool_call>") + "<|im_end|>").ids)
        answer = answer_of(text, command, len(owner.calls))
        self._conversation.close(messages, agent._as_input(answer), prompt, ids)
        self._spans.append((len(prompt), len(prompt) + len(ids)))
        self._roles.add(role)
        owner.calls.append((role, len(prompt), len(ids)))
        usage = SimpleNamespace(prompt_tokens=len(prompt), completion_tokens=len(ids))
        return SimpleNamespace(choices=[SimpleNamespace(message=answer)], usage=usage)

    def _say(self, messages: Sequence[dict[str, Any]]) -> tuple[str, str | None]:
        """Return the script's next text and command."""
        if self._summing:
            seen = next(m["content"] for m in reversed(messages) if m["role"] == "tool")
            if self._steps and len(self._steps) < self._all and not self._owner.chance(FORGETS):
                return f"found: {seen}", None
            self._steps = []
            return f"done: {self._part.text}", None
        if not self._steps or self._owner.chance(STOPS_EARLY):
            return agent.DONE, None
        return "", self._steps.pop(0).command


def make_rows(tasks: Sequence[Task], tokenizer: Tokenizer, renderer: Qwen3Renderer, seed: int) -> list[Row]:
    """Return the rows of one noisy trace per task."""
    rng = random.Random(seed)
    return [row for task in tasks for row in ScriptedAgent(task, tokenizer, renderer, rng).play()]


def in_batches(rows: Sequence[Row], batch: int, seed: int) -> list[Row]:
    """Order rows so that each `batch` of them has about one length, and the batches come in random order.

    (The trainer's own grouping by length hands out long rows first, over and over; this policy does not learn so.)
    """
    rng = random.Random(seed)
    shuffled = list(rows)
    rng.shuffle(shuffled)
    pool = 50 * batch
    ordered: list[list[Row]] = []
    for start in range(0, len(shuffled), pool):
        alike = sorted(shuffled[start : start + pool], key=lambda row: len(row.ids))
        batches = [alike[i : i + batch] for i in range(0, len(alike), batch)]
        rng.shuffle(batches)
        ordered += batches
    ordered.sort(key=lambda rows: len(rows) < batch)
    return [row for rows in ordered for row in rows]
