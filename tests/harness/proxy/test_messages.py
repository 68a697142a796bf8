"""Anthropic's requests, answers, errors and counts: what is taken, what is refused, and what the model is shown."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from messages_kit import JSON, Wire
from proxy_kit import SHARED

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects import Choice
from gyre_sdk.harness.proxy.dialects.canonical import (
    Answer,
    Message,
    ModelRequest,
    ToolCall,
    ToolChoice,
    identity,
    tools_identity,
)
from gyre_sdk.harness.proxy.dialects.messages import AnthropicMessages, count_body, parse_count, signature

WIRE = SHARED / "data" / "wire"
DIALECT = AnthropicMessages()
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
TOOL = {"name": "run", "description": "run a command", "input_schema": SCHEMA}
SHOWN = {"type": "function", "function": {"name": "run", "description": "run a command", "parameters": SCHEMA}}


def parse(*messages: Any, **fields: Any) -> ModelRequest:
    body = {"model": "policy", "max_tokens": 8, "messages": list(messages) or [USER], **fields}
    return DIALECT.parse(json.dumps({key: value for key, value in body.items() if value is not ...}).encode())


def refused(*messages: Any, **fields: Any) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        parse(*messages, **fields)
    assert caught.value.status == 400
    return caught.value


def test_sampling_and_fields() -> None:
    """Sampling is resolved; the rest of the body is on record as sent, messages and system apart."""
    more = {"metadata": {"user_id": "u"}, "context_management": {"edits": []}, "service_tier": "auto", "betas": ["x"]}
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    request = parse(
        *[USER, {"role": "assistant", "content": "yes"}, USER],
        **more,
        system=system,
        temperature=0.5,
        top_p=0.9,
        top_k=20,
        stop_sequences=["END"],
        stream=True,
        x_new={"a": [1]},
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 20, 8)
    assert sampling.stop == ("END",) and request.stream and request.model == "policy"
    assert {**more, "x_new": {"a": [1]}}.items() <= request.fields.items()
    assert not {"messages", "system"} & request.fields.keys()
    assert request.raw == (*system, USER, {"role": "assistant", "content": "yes"}, USER)
    assert parse(system="Be brief.").raw == ("Be brief.", USER)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": ...}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"messages": ...}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "system", "content": []}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "assistant", "content": "Sure "}]}, "messages"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [1]}, "stop_sequences"),
        ({"system": 5}, "system"),
        ({"stream": "yes"}, "stream"),
        ({"thinking": "enabled"}, "thinking"),
        ({"tools": "run"}, "tools"),
        ({"tools": [{"name": "run"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "rm"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format"),
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
    ],
)
def test_refused(fields: dict[str, Any], named: str) -> None:
    """What is wrong is refused in Anthropic's format, with its name in the message."""
    error = refused(**fields)
    assert error.param == named
    body = json.loads(DIALECT.error(error))
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert named.split("[")[0].split(".")[0] in body["error"]["message"]


@pytest.mark.parametrize("kind", ["image", "document", "search_result", "future_block"])
def test_what_the_model_cannot_read(kind: str) -> None:
    """Blocks of a user that cannot be shown are refused, not dropped; a tool's result names them in their place."""
    block = {"type": kind, "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    assert kind in str(refused({"role": "user", "content": [block]}))
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "so:"}, block]}
    [shown] = parse({"role": "user", "content": [result]}).messages
    assert (shown.role, shown.content) == ("tool", f"so:\n[{kind}: left out, the model reads text only]")


PLAIN = {"type": "text", "media_type": "text/plain", "data": "said"}
SAID = [{"type": "text", "text": "said"}]


@pytest.mark.parametrize(
    "block",
    [
        {"type": "document", "source": PLAIN, "title": "t", "citations": {"enabled": True}},
        {"type": "document", "source": {"type": "content", "content": SAID}},
        {"type": "document", "source": {"type": "content", "content": "said"}},
        {"type": "search_result", "source": "https://a.example", "title": "t", "content": SAID},
    ],
)
def test_blocks_that_hold_a_text(block: dict[str, Any]) -> None:
    """A document of plain text and a search result are that text, alone and in a tool's result."""
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    for content in ([block], [result]):
        [shown] = parse({"role": "user", "content": content}).messages
        assert shown.content == "said"


def test_tools() -> None:
    """Tools with a schema are shown in OpenAI's form; a provider's own are recorded; cache marks do not count."""
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    request = parse(tools=[{**TOOL, "cache_control": {"type": "ephemeral"}}, search, {**TOOL, "type": "custom"}])
    assert request.tools == (SHOWN, SHOWN)
    assert request.fields["tools"][1] == search
    assert tools_identity(parse(tools=[TOOL]).tools) == tools_identity(request.tools[:1])


@pytest.mark.parametrize(
    ("choice", "want"),
    [
        ({"type": "auto"}, (ToolChoice.AUTO, "", True)),
        ({"type": "any"}, (ToolChoice.REQUIRED, "", True)),
        ({"type": "any", "disable_parallel_tool_use": True}, (ToolChoice.REQUIRED, "", False)),
        ({"type": "tool", "name": "run"}, (ToolChoice.NAMED, "run", True)),
        ({"type": "none"}, (ToolChoice.NONE, "", True)),
        (None, (ToolChoice.AUTO, "", True)),
    ],
)
def test_tool_choice(choice: Any, want: tuple[ToolChoice, str, bool]) -> None:
    """Each choice is the canonical one."""
    request = parse(tools=[TOOL], tool_choice=choice)
    assert (request.tool_choice, request.forced_tool, request.parallel_tool_calls) == want


def test_thinking_and_structured_output() -> None:
    """Thinking is on, off or the service's; a schema of the answer is found in both of its places."""
    assert parse(thinking={"type": "enabled", "budget_tokens": 1024}).thinking is True
    assert parse(thinking={"type": "disabled"}).thinking is False
    assert parse(thinking={"type": "adaptive"}).thinking is None is parse().thinking
    form = {"type": "json_schema", "schema": SCHEMA}
    assert parse(output_config={"format": form, "effort": "low"}).structured == {"json": SCHEMA}
    assert parse(output_format=form).structured == {"json": SCHEMA}
    assert parse(output_config={"effort": "low"}).structured is None


def test_blocks_of_an_assistant() -> None:
    """Texts in a row are joined as templates join parts; texts around another block as a stream splits them."""
    call = {"type": "tool_use", "id": "t", "name": "run", "input": {"cmd": "ls"}}

    def said(*blocks: dict[str, Any]) -> Message:
        return parse(USER, {"role": "assistant", "content": list(blocks), "id": "msg_1"}, USER).messages[1]

    def text(content: str) -> dict[str, Any]:
        return {"type": "text", "text": content}

    assert said(text("wa"), text(""), text("ter")).content == "wa\nter"
    assert said(text("wa"), call, text("ter")).content == "water"
    whole = said({"type": "thinking", "thinking": "Use ls.", "signature": "?"}, text("I look."), call)
    assert whole == Message(
        "assistant", "I look.", "Use ls.", (ToolCall("t", "run", '{"cmd":"ls"}'),), extra={"id": "msg_1"}
    )
    parts = [{"role": "assistant", "content": [block]} for block in (text("I look."), call)]
    merged = parse(USER, *parts, USER).messages
    assert [item.role for item in merged] == ["user", "assistant", "user"]
    assert identity(merged[1]) == identity(whole)


def test_what_cannot_be_shown_makes_another_message() -> None:
    """Redacted thinking and the work of a provider's tools change identity, each in its own way, and show nothing."""
    text = {"type": "text", "text": "done"}

    def said(*blocks: dict[str, Any]) -> Message:
        return parse(USER, {"role": "assistant", "content": [*blocks, text]}, USER).messages[1]

    plain = said()
    redacted, other = (said({"type": "redacted_thinking", "data": data}) for data in ("AAAA", "BBBB"))
    server = said({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}})
    assert len({identity(item) for item in (plain, redacted, other, server)}) == 4
    assert {(item.content, item.reasoning) for item in (plain, redacted, other, server)} == {("done", "")}
    marked = said({"type": "redacted_thinking", "data": "AAAA", "cache_control": {"type": "ephemeral"}})
    assert identity(marked) == identity(redacted)


def test_tool_results() -> None:
    """Results become tool messages before what the user says; a failure's text is shown, and that it failed kept."""
    content = [
        {"type": "text", "text": "and?"},
        {"type": "tool_result", "tool_use_id": "a", "content": "A"},
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "B"}, {"type": "text", "text": "b"}]},
        {"type": "tool_result", "tool_use_id": "c", "content": "no such file", "is_error": True},
        {"type": "tool_result", "tool_use_id": "d", "is_error": True},
        {"type": "tool_result", "tool_use_id": "e"},
    ]  # fmt: skip
    assert parse({"role": "user", "content": content}).messages == (
        Message("tool", "A", tool_call_id="a"),
        Message("tool", "B\nb", tool_call_id="b"),
        Message("tool", "no such file", tool_call_id="c", extra={"is_error": True}),
        Message("tool", "Error", tool_call_id="d", extra={"is_error": True}),
        Message("tool", "", tool_call_id="e"),
        Message("user", "and?"),
    )


def test_answer() -> None:
    """An answer holds thinking, text and calls in that order, why it ended, and real counts."""
    answer = Answer("I look.", "Use ls.", (ToolCall("t", "run", '{"cmd": "ls"}'), ToolCall("u", "run", "ls")))
    body = json.loads(DIALECT.body(parse(), "x", 1.0, [Choice(answer, "tool_calls", 7)], 9))
    assert body == {
        "id": "msg_x",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [
            {"type": "thinking", "thinking": "Use ls.", "signature": signature("Use ls.")},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t", "name": "run", "input": {"cmd": "ls"}},
            {"type": "tool_use", "id": "u", "name": "run", "input": {"INVALID_JSON": "ls"}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 9,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 7,
        },
    }


@pytest.mark.parametrize(
    ("choice", "want"),
    [
        (Choice(Answer("a"), "stop", 1), ("end_turn", None)),
        (Choice(Answer("a"), "length", 1), ("max_tokens", None)),
        (Choice(Answer("a"), "tool_calls", 1), ("tool_use", None)),
        (Choice(Answer("a"), "stop", 1, stop_sequence="END"), ("stop_sequence", "END")),
    ],
)
def test_stop_reasons(choice: Choice, want: tuple[str, str | None]) -> None:
    """Why an answer ended is said in Anthropic's words, the same in both forms."""
    body = json.loads(DIALECT.body(parse(), "x", 1.0, [choice], 9))
    assert (body["stop_reason"], body["stop_sequence"]) == want
    delta = json.loads(DIALECT.stream(parse(), "x", 1.0).finish(0, choice).split(b"data: ")[1])["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == want


@pytest.mark.parametrize(
    ("status", "sent", "kind", "raised"),
    [
        (400, 400, "invalid_request_error", anthropic.BadRequestError),
        (401, 401, "authentication_error", anthropic.AuthenticationError),
        (403, 403, "permission_error", anthropic.PermissionDeniedError),
        (404, 404, "not_found_error", anthropic.NotFoundError),
        (413, 413, "request_too_large", anthropic.APIStatusError),
        (422, 422, "invalid_request_error", anthropic.UnprocessableEntityError),
        (429, 429, "rate_limit_error", anthropic.RateLimitError),
        (500, 500, "api_error", anthropic.InternalServerError),
        (502, 502, "api_error", anthropic.InternalServerError),
        (503, 529, "overloaded_error", anthropic.InternalServerError),
    ],
)
def test_errors(status: int, sent: int, kind: str, raised: type[anthropic.APIStatusError]) -> None:
    """Each status has Anthropic's type, and the SDK raises the error that it has for it."""
    error = ProtocolError("it failed", status=status)
    wire = Wire()
    wire.chunks, wire.kind, wire.status = [DIALECT.error(error)], "application/json", DIALECT.status(error)
    assert wire.status == sent
    with pytest.raises(raised) as caught:
        wire.client().messages.create(model="policy", max_tokens=1, messages=[{"role": "user", "content": "hi"}])
    assert caught.value.status_code == sent
    assert caught.value.body == {"type": "error", "error": {"type": kind, "message": "it failed"}, "request_id": None}


def test_count_tokens() -> None:
    """A count has the messages of its request, without a limit, and the text that an answer would continue."""
    body = {"model": "policy", "system": "Be brief.", "messages": [USER, {"role": "assistant", "content": "Sure"}]}
    request = parse_count(json.dumps(body).encode())
    assert ([item.role for item in request.messages], request.prefill) == (["system", "user"], "Sure")
    wire = Wire()
    wire.chunks, wire.kind = [count_body(12)], "application/json"
    assert wire.client().messages.count_tokens(model="policy", messages=[]).input_tokens == 12


def requests() -> list[Any]:
    """Return every request body that was recorded on its way to Anthropic."""
    found = []
    for path in sorted((WIRE / "anthropic-sdk").glob("tool_runner_*.json")):
        found += [(path.name, item["request"]["body"]) for item in json.loads(path.read_text())]
    for path in sorted((WIRE / "pydantic-ai").glob("*anthropic*.yaml")):
        for item in yaml.safe_load(path.read_text())["interactions"]:
            if "/v1/messages" in item["request"]["uri"] and "parsed_body" in item["request"]:
                found.append((path.name, item["request"]["parsed_body"]))
    return [pytest.param(body, id=f"{name}-{at}") for at, (name, body) in enumerate(found)]


@pytest.mark.parametrize("body", requests() or [pytest.param({}, marks=pytest.mark.skip(f"{WIRE} is missing"))])
def test_recorded_requests_are_taken(body: dict[str, Any]) -> None:
    """What real clients sent is taken: every text that they sent is in a message, every call and result."""
    request = DIALECT.parse(json.dumps(body).encode())
    shown = "\n".join(item.content for item in request.messages)
    blocks = [block for item in body["messages"] if isinstance(item["content"], list) for block in item["content"]]
    assert all(block["text"] in shown for block in blocks if block["type"] == "text")
    calls = [call.id for item in request.messages for call in item.tool_calls]
    assert calls == [block["id"] for block in blocks if block["type"] == "tool_use"]
    results = [item.tool_call_id for item in request.messages if item.role == "tool"]
    assert sorted(results) == sorted(block["tool_use_id"] for block in blocks if block["type"] == "tool_result")


_KEYS = st.sampled_from(
    [
        "role",
        "content",
        "type",
        "text",
        "thinking",
        "input",
        "id",
        "name",
        "tool_use_id",
        "is_error",
        "system",
        "tools",
        "tool_choice",
        "messages",
        "max_tokens",
        "model",
        "format",
        "output_config",
        "stop_sequences",
        "input_schema",
    ]
)
_WORDS = st.sampled_from(
    ["user", "assistant", "system", "text", "tool_use", "tool_result", "thinking", "redacted_thinking", "image", "any"]
)
_NEAR = st.recursive(JSON | _WORDS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner))
_MESSAGES = st.lists(st.fixed_dictionaries({"role": _WORDS, "content": _NEAR}), min_size=1, max_size=3)


@settings(deadline=None)
@given(_NEAR | st.dictionaries(_KEYS, _NEAR) | st.fixed_dictionaries({"max_tokens": st.just(1), "messages": _MESSAGES}))
def test_any_json_is_parsed_or_refused(body: Any) -> None:
    """No JSON makes the parser fail in any way but its own."""
    for take in (DIALECT.parse, parse_count):
        try:
            request = take(json.dumps(body).encode())
        except ProtocolError as error:
            assert error.status == 400 and str(error)
        else:
            assert request.messages and all(identity(item) for item in request.messages)


@given(st.binary())
def test_any_bytes_are_parsed_or_refused(body: bytes) -> None:
    """Nor do bytes that are no JSON."""
    with pytest.raises(ProtocolError):
        DIALECT.parse(body)
