"""Sessions against real vLLM (its CPU build) serving the demo's policy as the replica."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import agent as demo_agent
import openai
import pytest
from tasks import Split, generate

import gyre_sdk as gyre
from gyre_sdk.journal import Journal
from gyre_sdk.records import CallStatus, RunStatus

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def demo_tasks(count: int) -> list[gyre.Task]:
    return [
        gyre.Task(name=task.name, instruction=task.instruction, files=task.files, tests={"test.sh": task.test_script})
        for task in generate(Split.TRAIN, count, 5)
    ]


def test_the_demo_agent_runs_on_vllm(
    service: gyre.ServiceClient, tmp_path: Path, base_image: str, demo_policy: Path
) -> None:
    """Runs in Docker workspaces complete, are scored, and every call has its ids and log-probs on record."""

    def run(task: gyre.Task) -> gyre.RunResult:
        with gyre.session(task, service=service, workspace="docker") as agent:
            demo_agent.solve(agent, temperature=1.0)
        return agent.result

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, demo_tasks(12)))
    assert {result.status for result in results} == {RunStatus.COMPLETED}
    assert all(result.reward is not None for result in results)
    with Journal(tmp_path / "s.db", "r") as journal:
        calls = list(journal.calls())
    assert {call.role for call in calls} >= {"main", "subagent"}
    assert len(calls) == sum(result.calls for result in results)
    for call in calls:
        assert call.status is CallStatus.DELIVERED
        assert len(call.sampled_ids) == len(call.logprobs) > 0
        assert [(span.version, span.start, span.end) for span in call.versions] == [(0, 0, len(call.sampled_ids))]
        assert all(value is not None and value <= 0 for value in call.logprobs)
    same_as_the_model(demo_policy, calls[:24])


def same_as_the_model(policy: Path, calls: list) -> None:  # type: ignore[type-arg]
    """The recorded log-probs are the model's own, given the recorded prompt ids: nothing was shifted or re-tokenised."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    for call in calls:
        ids = torch.tensor([call.prompt_ids + call.sampled_ids])
        with torch.no_grad():
            logp = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        mine = logp[len(call.prompt_ids) - 1 :].tolist()
        assert mine == pytest.approx(call.logprobs, abs=2e-3)


def test_streaming_and_tools_on_vllm(service: gyre.ServiceClient, tmp_path: Path) -> None:
    (task,) = demo_tasks(1)
    with gyre.session(task, service=service, workspace="local") as agent:
        messages = [
            {"role": "system", "content": demo_agent.SYSTEM},
            {"role": "user", "content": task.instruction},
        ]
        request = {"model": "policy", "messages": messages, "tools": demo_agent.TOOLS, "temperature": 0.0}
        whole = agent.openai().chat.completions.create(**request, max_tokens=32)  # type: ignore[call-overload]
        arguments, content, finish = "", "", None
        for chunk in agent.openai().chat.completions.create(**request, max_tokens=32, stream=True):  # type: ignore[call-overload]
            for choice in chunk.choices:
                content += choice.delta.content or ""
                arguments += "".join(call.function.arguments or "" for call in choice.delta.tool_calls or [])
                finish = choice.finish_reason or finish
        message = whole.choices[0].message
        assert finish == whole.choices[0].finish_reason
        assert content == (message.content or "")
        assert arguments == "".join(call.function.arguments for call in message.tool_calls or [])
        if arguments:
            assert "command" in json.loads(arguments)
    with Journal(tmp_path / "s.db", "r") as journal:
        first, second = journal.calls()
    assert first.prompt_ids == second.prompt_ids and first.sampled_ids == second.sampled_ids
    assert first.logprobs == pytest.approx(second.logprobs, abs=1e-4)
    assert math.isfinite(sum(value for value in first.logprobs if value is not None))


def test_prompt_that_is_too_long_is_the_agents_error(service: gyre.ServiceClient) -> None:
    (task,) = demo_tasks(1)
    with gyre.session(task, service=service, workspace="local") as agent, pytest.raises(openai.BadRequestError):
        agent.openai().chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "oak " * 4000}], max_tokens=8
        )
