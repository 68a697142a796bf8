"""The demo's agent, whose commands take time: the tail of its runs is long, and the same under every arrangement of cells."""

from __future__ import annotations

import random
import time
from typing import Any

import agent as demo_agent


class SlowWorkspace:
    """A workspace whose commands wait before they run, each as long as its task's own random numbers say."""

    def __init__(self, workspace: Any, name: str, median_s: float, sigma: float, longest_s: float) -> None:
        self._workspace = workspace
        draw = random.Random(name)
        self._scale = min(longest_s, median_s * draw.lognormvariate(0.0, sigma))
        self._draw = draw

    def exec(self, command: str, **more: Any) -> Any:
        """Wait, then run the command."""
        time.sleep(self._scale * self._draw.uniform(0.5, 1.5))
        return self._workspace.exec(command, **more)


def solve(
    agent: Any, *, temperature: float = 1.0, median_s: float = 0.1, sigma: float = 1.2, longest_s: float = 2.0
) -> None:
    """Work on `agent.task` as the demo's agent does, with commands of a median of `median_s` seconds, lognormal over tasks."""
    workspace = SlowWorkspace(agent.workspace, agent.task.name, median_s, sigma, longest_s)
    instruction = agent.task.instruction.strip()
    _, _, second = instruction.partition(demo_agent.JOIN)
    demo_agent._converse(agent, workspace, instruction, temperature, second)
