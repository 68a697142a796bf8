"""The Responses protocol's requests: histories of every kind become the messages that the model reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from proxy_kit import SHARED
from test_fidelity_cases import case

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects.canonical import Answer, Message, ModelRequest, ToolCall, ToolChoice
from gyre_sdk.harness.proxy.dialects.responses import Choice, Earlier, Responses, complete, from_fields, needs
from gyre_sdk.harness.proxy.dialects.responses.sealed import seal, unseal

responses = Responses()
RUN = {"type": "function", "name": "run", "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}}
PATCH = {"type": "custom", "name": "patch", "description": "free text patch"}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "spawn", "strict": False}],
}


def parse(**body: Any) -> ModelRequest:
    return responses.parse(json.dumps({"model": "policy", "input": "go", **body}).encode())


def wire(folder: str, pattern: str) -> list[Path]:
    root = SHARED / "data" / folder
    if not root.is_dir():
        pytest.skip(f"{root} is not here")
    return sorted(root.glob(pattern))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


# -- the whole request -------------------------------------------------------------------------------------------------


def test_a_request_becomes_canonical() -> None:
    request = parse(
        instructions="Be brief.",
        stream=True,
        tools=[RUN, PATCH, {"type": "web_search"}, {"type": "local_shell"}, AGENTS],
        tool_choice={"type": "custom", "name": "patch"},
        text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        reasoning={"effort": "none"},
        parallel_tool_calls=False,
        include=["message.output_text.logprobs"],
        previous_response_id="resp_1",
        metadata={"a": "b"},
        client_metadata={"session": "s"},
    )
    assert request.messages == (Message("system", "Be brief."), Message("user", "go"))
    names = [tool["function"]["name"] for tool in request.tools]
    assert names == ["run", "patch", "local_shell", "agents__spawn"]
    assert request.tools[0] == {"type": "function", "function": {"name": "run", "parameters": RUN["parameters"]}}
    assert request.tools[1]["function"]["parameters"]["required"] == ["input"]
    assert (request.tool_choice, request.forced_tool) == (ToolChoice.NAMED, "patch")
    assert request.structured == {"json": {"type": "object"}}
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.top_p) == (7, 0.5, 0.9)
    assert request.thinking is False
    assert request.logprobs
    assert request.stream
    assert not request.parallel_tool_calls
    assert request.continues == "resp_1"
    assert request.fields["client_metadata"] == {"session": "s"}
    assert "input" not in request.fields


def test_a_request_is_rebuilt_from_its_record() -> None:
    request = parse(instructions="Be brief.", tools=[RUN], input=[user("go"), {"type": "unheard_of", "x": 1}])
    assert from_fields(request.fields, request.raw) == request
    assert from_fields(request.fields).messages == ()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": 3}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "unheard_of"}]}, "input"),
        ({"input": ["go"]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "go"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0].name"),
        ({"tools": [{"name": "run"}]}, "tools[0]"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "function", "name": "gone"}}, "tool_choice"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True, "store": False}, "background"),
        ({"stream": "yes"}, "stream"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse(**body)
    assert (caught.value.status, caught.value.param) == (400, param)
    shown = json.loads(responses.error(caught.value))["error"]
    assert shown["type"] == "invalid_request_error"
    assert shown["param"] == param


def test_allowed_tools_are_the_tools() -> None:
    chosen = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "run"}]}
    request = parse(tools=[RUN, PATCH], tool_choice=chosen)
    assert [tool["function"]["name"] for tool in request.tools] == ["run"]
    assert request.tool_choice is ToolChoice.REQUIRED


# -- items -------------------------------------------------------------------------------------------------------------


def test_assistant_items_that_follow_each_other_are_one_message() -> None:
    request = parse(
        input=[
            user("go"),
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "web_search_call", "status": "completed"},
            {"type": "function_call", "call_id": "a", "name": "spawn", "namespace": "agents", "arguments": {"x": 1}},
            {"type": "local_shell_call", "call_id": "b", "action": {"type": "exec", "command": ["ls"], "env": {}}},
            {"type": "local_shell_call_output", "id": "b", "output": "a.txt"},
            {"type": "function_call_output", "call_id": "a", "output": {"content": "ok", "success": True}},
        ]
    )
    calls = (ToolCall("a", "agents__spawn", '{"x":1}'), ToolCall("b", "local_shell", '{"command":["ls"]}'))
    assert request.messages == (
        Message("user", "go"),
        Message("assistant", "I look.", "hm", calls),
        Message("tool", "ok", tool_call_id="a"),
        Message("tool", "a.txt", tool_call_id="b"),
    )


VARIANTS = ["as given", "foreign blob", "bare assistant message", "unknown call"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_broken_history_reaches_the_model_as_it_is(variant: str) -> None:
    """proxy-responses-broken-history: history."""
    body = case("proxy-responses-broken-history")["input"]["request"]
    items = body["input"]
    items[2]["encrypted_content"] = "gAAAAAB-not-ours" if variant == "foreign blob" else seal("I look first.")
    if variant == "as given":
        items[3] |= {"id": "msg_1", "status": "completed"}
    if variant == "unknown call":
        items.append({"type": "function_call_output", "call_id": "call_x", "output": "late"})
    request = responses.parse(json.dumps(body).encode())
    calls = {call.id: call.arguments for message in request.messages for call in message.tool_calls}
    assert calls["call_a"] == '{"cmd": "ls'
    assert calls["call_b"] == '{"cmd":"ls"}{"cmd":"pwd"}'
    assert calls["call_c"] == ""
    assert json.loads(calls["call_d"]) == {"input": "*** begin\n+x\n*** end"}
    assert request.messages[3].reasoning == ("" if variant == "foreign blob" else "I look first.")
    results = [message.tool_call_id for message in request.messages if message.role == "tool"]
    assert results == ["call_a", "call_b", "call_c", "call_d"] + ["call_x"] * (variant == "unknown call")


@given(st.text())
def test_sealed_reasoning_comes_back(text: str) -> None:
    assert unseal(seal(text)) == text


@given(st.text() | st.binary().map(lambda data: "gyre-r1-" + data.hex()) | st.none() | st.integers())
@example("gyre-r1-")
def test_what_was_not_sealed_here_is_not_read(blob: object) -> None:
    assert unseal(blob) is None


# -- real requests -----------------------------------------------------------------------------------------------------


def test_captured_requests_parse() -> None:
    seen = 0
    for path in [*wire("wire/llm", "*.yaml"), *wire("wire/pydantic-ai", "openai_responses*.yaml")]:
        for exchange in yaml.safe_load(path.read_text())["interactions"]:
            sent = exchange["request"]
            if not sent["uri"].endswith("/v1/responses"):
                continue
            body = sent.get("body") or json.dumps(sent["parsed_body"])
            request = responses.parse(body.encode() if isinstance(body, str) else body)
            fields = json.loads(body)
            assert len(request.tools) == sum(tool["type"] == "function" for tool in fields.get("tools", ()))
            assert request.messages[-1].role in ("user", "tool")
            seen += 1
    assert seen > 20


def test_recorded_codex_sessions_parse() -> None:
    for path in wire("histories/codex", "*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        items = [line["payload"] for line in lines if line["type"] == "response_item"]
        messages = parse(input=items).messages
        calls = [call for message in messages for call in message.tool_calls]
        assert len(calls) == sum(item["type"] in ("function_call", "custom_tool_call") for item in items)
        assert {message.tool_call_id for message in messages if message.role == "tool"} <= {call.id for call in calls}
        assert "MUST_NOT_RENDER" not in str(messages)


def test_requests_of_the_codex_cli_parse() -> None:
    """Every later request of a lane begins with the messages of an earlier one, the answer after them."""
    lines = (Path(__file__).parents[2] / "golden" / "clients" / "codex.jsonl").read_text().splitlines()
    bodies = [json.loads(line)["body"] for line in lines]
    first, second = (responses.parse(json.dumps(body).encode()) for body in bodies[:2])
    assert second.messages[: len(first.messages)] == first.messages
    assert [message.role for message in second.messages[len(first.messages) :]] == ["assistant", "tool", "tool"]
    assert "multi_agent_v1__spawn_agent" in [tool["function"]["name"] for tool in first.tools]


# -- conversations that the server keeps -------------------------------------------------------------------------------


def test_a_conversation_is_continued_without_its_instructions() -> None:
    first = parse(instructions="Old.", input=[{"role": "developer", "content": "Kept."}, user("one")])
    earlier = {"n1": Earlier(first, Choice(Answer("hi", "hm"), "stop", 2))}
    second = parse(instructions="New.", input="two", previous_response_id="resp_n1")
    assert needs(second) == {"n1"}
    whole = complete(second, earlier)
    assert whole.continues is None
    assert whole.messages == (
        Message("system", "New."),
        Message("system", "Kept."),
        Message("user", "one"),
        Message("assistant", "hi", "hm"),
        Message("user", "two"),
    )
    third = parse(input="three", previous_response_id="resp_n2")
    again = complete(third, {"n2": Earlier(whole, Choice(Answer("ho"), "stop", 1))})
    assert [message.content for message in again.messages] == ["Kept.", "one", "hi", "two", "ho", "three"]


def test_items_are_found_by_reference() -> None:
    answer = Answer("hi", "hm", (ToolCall("call_1", "run", "{}"),))
    earlier = {"n1": Earlier(parse(tools=[RUN]), Choice(answer, "tool_calls", 2))}
    names = [{"type": "item_reference", "id": "rs_n1_0"}, {"id": "msg_n1_0"}, {"id": "fc_n1_0"}]
    request = parse(input=[user("go"), *names, {"type": "function_call_output", "call_id": "call_1", "output": "x"}])
    assert needs(request) == {"n1"}
    assert complete(request, earlier).messages[1] == answer.message()


@pytest.mark.parametrize(
    "body",
    [
        {"previous_response_id": "resp_gone"},
        {"previous_response_id": "other"},
        {"input": [{"type": "item_reference", "id": "rs_gone_0"}]},
        {"input": [{"type": "item_reference", "id": "rs_n1_9"}]},
        {"input": [{"type": "item_reference", "id": "what"}]},
    ],
)
def test_what_no_answer_gave_out_is_refused(body: dict[str, Any]) -> None:
    request = parse(**body)
    with pytest.raises(ProtocolError) as caught:
        complete(request, {"n1": Earlier(parse(), Choice(Answer("hi", "hm"), "stop", 2))})
    assert caught.value.status == 400


# -- anything ----------------------------------------------------------------------------------------------------------

KINDS = [
    *("message", "reasoning", "item_reference", "function_call", "function_call_output", "custom_tool_call"),
    *("custom_tool_call_output", "local_shell_call", "local_shell_call_output"),
    *("function", "custom", "namespace", "allowed_tools", "json_schema", "grammar", "auto", "required", "resp_n1"),
]
KEYS = [
    "type",
    "role",
    "content",
    "text",
    "summary",
    "encrypted_content",
    "name",
    "namespace",
    "arguments",
    "input",
    "output",
    "call_id",
    "id",
    "action",
    "command",
    "env",
    "tools",
    "tool_choice",
    "parameters",
    "format",
    "schema",
    "effort",
    "mode",
    "include",
    "reasoning",
    "instructions",
    "previous_response_id",
    "stream",
    "store",
    "background",
    "model",
    "metadata",
    "temperature",
    "refusal",
    "function",
    "strict",
    "description",
]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
JSON = st.recursive(
    LEAVES | st.sampled_from(KINDS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(), inner, max_size=6),
    max_leaves=24,
)
NAMES = st.sampled_from(["run", "patch", "n1", "rs_n1_0", "msg_n1_0", "resp_n1", "call_0-raw"])
PARTS = st.lists(st.fixed_dictionaries({"type": st.sampled_from(["input_text", "output_text"]), "text": st.text()}))
ROLES = st.sampled_from(["user", "assistant", "developer", "system"])
ITEM = st.fixed_dictionaries(
    {
        "type": st.sampled_from(KINDS[:9]),
        "role": ROLES | JSON,
        "name": NAMES | JSON,
        "content": st.text() | PARTS | JSON,
        "output": PARTS | JSON,
    },
    optional=dict.fromkeys(("id", "call_id", "arguments", "input", "action", "namespace", "summary"), NAMES | JSON),
)
TOOL = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "custom", "namespace", "local_shell", "web_search"]), "name": NAMES},
    optional=dict.fromkeys(("parameters", "format", "description", "tools", "function", "strict"), JSON),
)
FIELDS = st.sampled_from([key for key in KEYS if key not in ("input", "tools")])
BODY = st.builds(
    lambda items, tools, more: {"input": items, "tools": tools, **more},
    st.lists(ITEM, min_size=1, max_size=4),
    st.lists(TOOL, max_size=3),
    st.just({}) | st.dictionaries(FIELDS, NAMES | JSON, max_size=3),
)


@given(BODY | JSON)
def test_any_json_is_a_request_or_a_protocol_error(body: Any) -> None:
    try:
        request = responses.parse(json.dumps(body).encode())
        needs(request)
    except ProtocolError as error:
        assert error.status == 400
        return
    choice = Choice(Answer("a", "b", (ToolCall("c", "run", "{"),)), "stop", 1)
    shown = json.loads(responses.body(request, "n1", 1.0, [choice], 1))
    assert shown["output"][-1]["call_id"]
    stream = responses.stream(request, "n1", 1.0)
    assert stream.start(1) + stream.finish(0, choice) + stream.end(1, 1)


@given(st.binary() | st.text().map(str.encode))
@example(b"[" * 100_000)
@example(b'{"input":' + b"[" * 5_000 + b"]" * 5_000 + b"}")
def test_any_bytes_are_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        responses.parse(body)
