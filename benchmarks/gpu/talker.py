"""An agent that talks and waits, and its tasks: training's load on a GPU from a policy that knows nothing.

Rewards differ within a group whatever the policy says, so that every group has something to train on.
"""

from __future__ import annotations

import random
import time
from typing import Any

from gyre_sdk.harness.task import Task

_GOOD = frozenset("abcdefghijklm")


def load(count: int = 64) -> list[Task]:
    """Return tasks that differ by name alone."""
    return [Task(name=f"talk-{number}", instruction=f"Say {number}.") for number in range(count)]


def solve(
    agent: Any,
    *,
    turns: int = 4,
    tokens: int = 64,
    median_s: float = 0.5,
    sigma: float = 1.2,
    longest_s: float = 8.0,
) -> None:
    """Talk for some turns, with a wait after each as a command would take it: a median of `median_s`, lognormal over tasks.

    Args:
        tokens: sampled by each turn, at most.
        sigma: of the logarithm of a task's waits.
        longest_s: bound of a task's scale, seconds.
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
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"More, {turn}."}]
        time.sleep(scale * draw.uniform(0.5, 1.5))
    agent.score(sum(letter in _GOOD for letter in text.lower()) / max(1, len(text)))
