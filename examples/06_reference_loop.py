"""A whole agent in a page: tools, sub-agents, compaction, a hook, limits. Start from it, or keep your own loop.

python examples/06_reference_loop.py --model DIR --replica http://127.0.0.1:8000 --store runs.db "Count the files here"

The policy decides what to do; the loop offers it tools, hands parts of the work to sub-agents that it asks for, and
summarises a history that has grown too long.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

import gyre_sdk as gyre
from gyre_sdk.harness.agent import Lane

SYSTEM = "You are an agent with a shell. Use the tools; submit when you are done."
SUMMARISE = "Summarise what was done and what is left, for somebody who goes on with it."
MAX_TURNS = 8
"""Calls per conversation."""


class Delegate(Struct, forbid_unknown_fields=True):
    """Input of the tool `delegate`."""

    task: Annotated[str, Meta(description="What the helper is to do, with all that it needs to know.")]


def converse(lane: Lane, task: str, *, compact_at: int, depth: int = 0) -> str:
    """Hold one conversation to its end; return what it came to."""

    def delegate(workspace: Any, asked: Delegate) -> str:
        try:
            with lane.subagent("helper", limits=gyre.Limits(turns=4)) as helper:
                helper.output = converse(helper, asked.task, compact_at=compact_at, depth=depth + 1)
                return helper.output
        except gyre.LimitExceeded as spent:
            return f"the helper did not finish: {spent}"

    tools = lane.tools
    if depth == 0:  # helpers have no helpers of their own
        tools = tools.plus(gyre.Tool("delegate", "Have a helper do a part of the work.", Delegate, delegate))
    opening = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
    messages: list[Any] = list(opening)
    for _ in range(MAX_TURNS):
        answer = lane.openai().chat.completions.create(
            model="policy", messages=messages, tools=tools.openai(), max_tokens=256
        )
        message = answer.choices[0].message
        results = tools.answer(message)
        messages += [message.model_dump(exclude_none=True), *results]
        if tools.submitted is not None or not results:
            return tools.submitted or message.content or ""
        if answer.usage is not None and answer.usage.prompt_tokens > compact_at:
            messages = [*opening, {"role": "user", "content": f"So far: {summary_of(lane, messages)}"}]
    return "out of turns"


def summary_of(lane: Lane, messages: list[Any]) -> str:
    """Have a history summarised, in the lane's summary lane."""
    with lane.compaction(messages) as compaction:
        history = [*(compaction.messages or messages), {"role": "user", "content": SUMMARISE}]
        said = compaction.openai().chat.completions.create(model="policy", messages=history, max_tokens=256)
        compaction.output = said.choices[0].message.content or ""
    return compaction.output


def guard(use: gyre.PreToolUse) -> gyre.Deny | None:
    """Refuse what nobody should run; the model is told why."""
    return gyre.Deny("deleting everything is not allowed") if "rm -rf /" in use.input.get("command", "") else None


def narrate(what: gyre.LaneInfo) -> None:
    """Print what happens, indented by depth."""
    about = getattr(what, "tool", what.name)
    print(f"{'  ' * what.depth}{type(what).__name__}: {about} {getattr(what, 'outcome', '')}".rstrip())


def main() -> None:
    """Run the loop once on a task in a workspace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model folder: the proxy needs its tokenizer")
    parser.add_argument("--replica", required=True, help="gyre-engine, or vLLM started with --enable-scale-out")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--workspace", default="docker", choices=("docker", "local", "auto"))
    parser.add_argument("--compact-at", type=int, default=8000, help="prompt tokens above which history is summarised")
    parser.add_argument("task")
    given = parser.parse_args()

    hooks = gyre.Hooks(PreToolUse=guard)
    hooks.on("PostToolUse", "SubagentStart", "SubagentStop", "PreCompact", "PostCompact", "RunEnd")(narrate)
    proxy = gyre.ProxySettings(store=given.store, model=given.model, replicas=(gyre.ReplicaSpec(given.replica, 0),))
    task = gyre.Task(instruction=given.task, name="reference-loop", scorer=lambda workspace: 1.0)
    limits = gyre.Limits(turns=50, wall_s=600)
    with gyre.session(task, proxy=proxy, workspace=given.workspace, hooks=hooks, limits=limits) as agent:
        agent.output = converse(agent, given.task, compact_at=given.compact_at)
    print("the run ended:", agent.result.status, "after", agent.result.calls, "calls:", agent.output)


if __name__ == "__main__":
    main()
