"""Forced tools and structured output on real vLLM, from a model that is all but random: the grammar holds, not luck."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

import gyre_sdk as gyre
from gyre_sdk.journal import Journal
from gyre_sdk.records import CallRecord, CallStatus
from gyre_sdk.trainer.units import reproducible

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PICK = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
NONE = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = [("pick", "Pick.", PICK), ("leave", "Leave.", NONE)]
CHAT = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}
    for name, text, schema in FUNCTIONS
]
RESPONSES = [
    {"type": "function", "name": name, "description": text, "parameters": schema, "strict": True}
    for name, text, schema in FUNCTIONS
]
MESSAGES = [{"name": name, "description": text, "input_schema": schema} for name, text, schema in FUNCTIONS]
GO: list[Any] = [{"role": "user", "content": "go"}]
HOT = 2.0
"""The highest temperature that vLLM takes."""
LONGEST = 400


@pytest.fixture
def agent(service: gyre.ServiceClient) -> Any:
    with gyre.session(gyre.Task(instruction="x"), service=service, workspace="local") as agent:
        yield agent


def recorded(tmp_path: Path) -> list[CallRecord]:
    """Return the calls; each must be whole, and of no use to a trainer."""
    with Journal(tmp_path / "s.db", "r") as journal:
        calls = list(journal.calls())
    assert calls
    for call in calls:
        assert call.status in (CallStatus.COMPLETE, CallStatus.DELIVERED)
        assert len(call.sampled_ids) == len(call.logprobs) > 0
        assert all(value is not None and value <= 0 for value in call.logprobs)
        assert call.sampled_ids[-1] in call.sampling.stop_token_ids
        assert call.sampling.extra["structured_outputs"]
        assert not reproducible(call.sampling)
    return calls


def fits(name: str, arguments: Any) -> bool:
    """Tell whether a call is of a tool, with arguments as its schema has them."""
    if name == "leave":
        return arguments == {}
    return (
        name == "pick"
        and arguments.keys() == {"colour", "count"}
        and arguments["colour"] in ("red", "green")
        and type(arguments["count"]) is int
        and 0 <= arguments["count"] <= 99
    )


@pytest.mark.parametrize("parallel", [True, False])
def test_required_in_chat(agent: Any, tmp_path: Path, parallel: bool) -> None:
    answer = agent.openai().chat.completions.create(
        model="policy",
        messages=GO,
        tools=CHAT,
        tool_choice="required",
        parallel_tool_calls=parallel,
        n=6,
        temperature=HOT,
        max_tokens=LONGEST,
    )
    assert len(answer.choices) == 6
    for choice in answer.choices:
        calls = choice.message.tool_calls
        assert calls and all(fits(call.function.name, json.loads(call.function.arguments)) for call in calls)
        assert parallel or len(calls) == 1
        if choice.finish_reason == "tool_calls":
            assert not choice.message.content
    with Journal(tmp_path / "s.db", "r") as journal:
        ends = [call.finish_reason for call in journal.calls()]
    assert ends.count("tool_calls") >= 3, ends


@pytest.mark.parametrize("thinking", [None, "disabled"])
def test_named_in_messages(agent: Any, tmp_path: Path, thinking: str | None) -> None:
    """A tool by name, streamed; with thinking left free, and with thinking that the prompt has closed."""
    with anthropic.Anthropic(base_url=agent.environment["ANTHROPIC_BASE_URL"], api_key=agent.api_key) as client:
        for _ in range(4):
            with client.messages.stream(
                model="policy",
                max_tokens=LONGEST,
                messages=GO,
                tools=MESSAGES,
                tool_choice={"type": "tool", "name": "pick"},
                extra_body={"thinking": {"type": thinking}, "temperature": 1.0} if thinking else {"temperature": 1.0},
            ) as stream:
                message = stream.get_final_message()
            assert message.stop_reason == "tool_use"
            (call,) = [block for block in message.content if block.type == "tool_use"]
            assert call.name == "pick" and fits(call.name, call.input)
            assert {block.type for block in message.content} <= ({"tool_use"} if thinking else {"tool_use", "thinking"})
    assert len(recorded(tmp_path)) == 4


def test_named_in_responses(agent: Any, tmp_path: Path) -> None:
    for _ in range(3):
        answer = agent.openai().responses.create(
            model="policy",
            input="go",
            tools=RESPONSES,
            tool_choice={"type": "function", "name": "pick"},
            temperature=2.0,
            max_output_tokens=LONGEST,
        )
        assert answer.status == "completed"
        (call,) = [item for item in answer.output if item.type == "function_call"]
        assert fits(call.name, json.loads(call.arguments)) and call.name == "pick"
    recorded(tmp_path)


def test_schemas_in_every_protocol(agent: Any, tmp_path: Path) -> None:
    client: openai.OpenAI = agent.openai()
    whole = client.chat.completions.create(
        model="policy",
        messages=GO,
        response_format={"type": "json_schema", "json_schema": {"name": "pick", "schema": PICK}},
        temperature=HOT,
        max_tokens=LONGEST,
        n=3,
    )
    texts = [choice.message.content for choice in whole.choices]
    answer = client.responses.create(
        model="policy",
        input="go",
        text={"format": {"type": "json_schema", "name": "pick", "schema": PICK}},
        temperature=2.0,
        max_output_tokens=LONGEST,
    )
    texts.append(answer.output_text)
    with anthropic.Anthropic(base_url=agent.environment["ANTHROPIC_BASE_URL"], api_key=agent.api_key) as other:
        message = other.messages.create(
            model="policy",
            max_tokens=LONGEST,
            messages=GO,
            extra_body={"output_config": {"format": {"type": "json_schema", "schema": PICK}}},
        )
    texts += [block.text for block in message.content if block.type == "text"]
    assert len(texts) == 5
    assert all(fits("pick", json.loads(text or "")) for text in texts)
    recorded(tmp_path)


def test_choices(agent: Any, tmp_path: Path) -> None:
    """vLLM's own field, around thinking as the rest; as it is for a text to continue."""
    client: openai.OpenAI = agent.openai()
    wanted = {"structured_outputs": {"choice": ["yes", "no"]}}
    whole = client.chat.completions.create(
        model="policy", messages=GO, temperature=HOT, max_tokens=LONGEST, n=4, extra_body=wanted
    )
    assert {choice.message.content for choice in whole.choices} <= {"yes", "no"}
    plain = client.completions.create(model="policy", prompt="go", temperature=HOT, max_tokens=16, extra_body=wanted)
    assert plain.choices[0].text in ("yes", "no")
    recorded(tmp_path)


def test_what_the_engine_refuses_names_the_field(agent: Any, tmp_path: Path) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        agent.openai().chat.completions.create(
            model="policy", messages=GO, max_tokens=8, extra_body={"structured_outputs": {"regex": "("}}
        )
    assert refused.value.param == "structured_outputs"
