"""A small program on openai-agents: an agent with a tool, an agent used as a tool, and a hand-off.

Run in an environment of its own, see `programs.openai_agents`. Arguments: model, task, `chat` or `responses`.
"""

from __future__ import annotations

import asyncio
import os
import sys

from agents import (  # type: ignore[import-not-found]
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    Runner,
    function_tool,
    set_default_openai_api,
)


@function_tool  # type: ignore[untyped-decorator]
def list_files() -> str:
    """List the files of the folder."""
    return "\n".join(sorted(os.listdir("."))) or "(empty)"


def build(model: str) -> Agent:
    """Return the agent that is asked first."""
    reviewer = Agent(name="Reviewer", instructions="You review what you are given.", model=model, tools=[list_files])
    review = reviewer.as_tool("review", "Have the reviewer look at something.")
    writer = Agent(name="Writer", instructions="You write the report.", model=model, tools=[list_files])
    return Agent(
        name="Triage",
        instructions="You look at the folder, have it reviewed, then hand over to the writer.",
        model=model,
        tools=[list_files, review],
        handoffs=[writer],
    )


async def main() -> None:
    """Ask once, streaming, and print the answer."""
    model, task, *rest = sys.argv[1:]
    set_default_openai_api("chat_completions" if rest[:1] == ["chat"] else "responses")
    try:
        result = Runner.run_streamed(build(model), task, max_turns=8)
        async for _ in result.stream_events():
            pass
        print("answer:", result.final_output)
    except (MaxTurnsExceeded, ModelBehaviorError) as error:
        print("ended by the model:", type(error).__name__)


asyncio.run(main())
