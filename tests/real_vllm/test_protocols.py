"""The SDKs, and programs that speak chat, through the proxy to real vLLM; every recorded log-prob is the model's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import agent as demo_agent
import pytest
from clients import programs
from clients.record import Start
from clients.touring import tour
from test_sessions import same_as_the_model

import gyre_sdk as gyre
from gyre_sdk.journal import Journal
from gyre_sdk.records import CallStatus, ForkReason

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

GO: list[Any] = [{"role": "system", "content": demo_agent.SYSTEM}, {"role": "user", "content": "Write oak into a.txt"}]
(TOOL,) = (tool["function"] for tool in demo_agent.TOOLS)

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
"""The first two are good ends: 24 tokens may be too few for the answer."""


def streamed(chat: Any, **more: Any) -> dict[str, Any]:
    """Ask and stream; give the message, which may be cut short."""
    content, calls = "", []
    for chunk in chat.create(model="policy", messages=GO, max_tokens=24, stream=True, **more):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for call in delta.tool_calls or ():
            if call.id:
                calls.append(
                    {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": ""}}
                )
            calls[call.index]["function"]["arguments"] += call.function.arguments or ""
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


def test_every_protocol(service: gyre.ServiceClient, tmp_path: Path, demo_policy: Path) -> None:
    """Chat with tools, streamed; completions; messages and responses with their next turns: paths without a fork."""
    with gyre.session(gyre.Task(instruction="x"), service=service, workspace="local") as agent:
        client = agent.openai()
        message = streamed(client.chat.completions, tools=demo_agent.TOOLS)
        answers: list[Any] = [
            {"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in message.get("tool_calls", ())
        ] or [{"role": "user", "content": "go on"}]
        client.chat.completions.create(
            model="policy",
            messages=[*GO, message, *answers],  # type: ignore[list-item]
            tools=demo_agent.TOOLS,  # type: ignore[arg-type]
            max_tokens=24,
        )
        with agent.subagent("completions") as lane:
            plain = lane.openai().completions.create(model="policy", prompt="oak ", max_tokens=8, logprobs=0)
        assert plain.choices[0].logprobs is not None
        tools: Any = [{"name": TOOL["name"], "input_schema": TOOL["parameters"]}]
        with agent.subagent("messages") as lane, lane.anthropic() as other:
            body: dict[str, Any] = {"model": "policy", "max_tokens": 24, "tools": tools, "system": demo_agent.SYSTEM}
            with other.messages.stream(messages=GO[1:], **body) as events:
                first = events.get_final_message()
            content = [block.model_dump(mode="json", exclude_none=True) for block in first.content]
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": "ok"}
                for block in content
                if block["type"] == "tool_use"
            ]
            turns = [{"role": "assistant", "content": content}, {"role": "user", "content": results or "go on"}]
            other.messages.create(messages=[*GO[1:], *turns], **body)
        with agent.subagent("responses") as lane:
            said = lane.openai().responses.create(
                model="policy", instructions=demo_agent.SYSTEM, input="Write oak into a.txt", max_output_tokens=24
            )
            with lane.openai().responses.stream(
                model="policy",
                instructions=demo_agent.SYSTEM,
                input="go on",
                previous_response_id=said.id,
                max_output_tokens=24,
            ) as more:
                ends = [event.type for event in more if event.type in ENDS]
            assert len(ends) == 1 and ends[0] in ENDS[:2]
    with Journal(tmp_path / "s.db", "r") as journal:
        calls = list(journal.calls())
    assert len(calls) == 7
    assert [call.fork_reason for call in calls] == [None] * 7
    for above, below in ((0, 1), (3, 4), (5, 6)):
        whole = calls[above].prompt_ids + calls[above].sampled_ids
        assert calls[below].parent == calls[above].call
        assert calls[below].prompt_ids[: len(whole)] == whole
    assert all(len(call.sampled_ids) == len(call.logprobs) > 0 for call in calls)
    same_as_the_model(demo_policy, calls)


_SHORT = [
    "mini.yaml",
    "agent.system_template=You use the shell.",
    "agent.instance_template={{task}}",
    "agent.step_limit=2",
    "model.format_error_template=Call bash.",
    "model.model_kwargs.temperature=1.0",
]
"""mini-swe-agent's own texts are longer than the context of the demo's policy."""
STARTS = {
    "mini_swe_agent": (programs.mini_swe_agent, [part for text in _SHORT for part in ("-c", text)]),
    "openai_agents": (programs.openai_agents, ["chat"]),
}


@pytest.mark.parametrize("name", STARTS)
async def test_a_program_ends_cleanly(name: str, vllm: str, demo_policy: Path, tmp_path: Path) -> None:
    """mini-swe-agent speaks through LiteLLM."""
    program, arguments = STARTS[name]
    start = Start("Write oak into a.txt", tuple(arguments))
    more: dict[str, Any] = {"renderer_options": {"enable_thinking": True, "thinking_retention": "all"}}
    toured = await tour(program(), [start], tmp_path, demo_policy, vllm, max_tokens=24, **more)
    assert [end.code for end in toured.ended] == [0], toured.ended
    assert toured.refusals == []
    assert (toured.lanes[0].role, toured.lanes[0].name) == ("main", "main")
    whole = {call.call: call.prompt_ids + call.sampled_ids for call in toured.calls}
    assert whole
    for call in toured.calls:
        assert (call.status, len(call.logprobs)) == (CallStatus.DELIVERED, len(call.sampled_ids))
        if call.parent is not None:
            assert call.prompt_ids[: call.shared] == whole[call.parent][: call.shared]
            assert call.fork_reason in (None, ForkReason.CLIENT_EDIT)  # an answer without a call is left out
    same_as_the_model(demo_policy, toured.calls)
