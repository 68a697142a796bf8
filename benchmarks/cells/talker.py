"""An agent that talks and waits as for commands: the tail of its runs is long, and the same under every arrangement of cells.

The policy knows nothing; rewards differ within a group whatever it says, and it learns to use some letters more.
"""

from __future__ import annotations

import random
import time
from typing import Any

from gyre_sdk.harness.task import Task

_GOOD = frozenset("abcdefghijklm")


def load(count: int = 256) -> list[Task]:
    """Return tasks that differ by name alone."""
    return [Task(name=f"talk-{number}", instruction=f"Say {number}.") for number in range(count)]


def solve(
    agent: Any,
    *,
    turns: int = 4,
    tokens: int = 64,
    output: int | None = None,
    median_s: float = 0.5,
    sigma: float = 1.2,
    longest_s: float = 8.0,
) -> None:
    """Talk for some turns, with a wait after each, as long as the task's own random numbers say.

    Args:
        tokens: sampled by each turn, at most.
        output: characters that a command prints, which is what is waited for; None: there is no command.
        median_s: of a task's scale, seconds, lognormal over tasks.
        sigma: of its logarithm.
        longest_s: bound of it.
    """
    draw = random.Random(agent.task.name)
    scale = min(longest_s, median_s * draw.lognormvariate(0.0, sigma))
    client = agent.openai()
    messages: list[Any] = [{"role": "user", "content": agent.task.instruction}]
    text = ""
    for turn in range(turns):
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=tokens, temperature=1.0)
        said = answer.choices[0].message.content or ""
        text += said
        seconds, more = scale * draw.uniform(0.5, 1.5), f"More, {turn}."
        if output is None:
            time.sleep(seconds)
        else:
            command = f"sleep {seconds:.3f}; seq {turn} 9999 | head -c {output}"
            more = f"More. {agent.workspace.exec(command, check=True).stdout}"
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": more}]
    agent.score(sum(letter in _GOOD for letter in text.lower()) / max(1, len(text)))
