"""The cases of Anthropic's protocol, at the level of the dialect: what a later turn is to the recorded one."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from messages_kit import Wire, accumulate, blocks_of, events_of, stream_bytes
from proxy_kit import SHARED

from gyre_sdk.harness.proxy.dialects import Choice
from gyre_sdk.harness.proxy.dialects.canonical import Answer, Delta, Message, ModelRequest, Part, ToolCall, identity
from gyre_sdk.harness.proxy.dialects.history import History
from gyre_sdk.harness.proxy.dialects.messages import AnthropicMessages
from gyre_sdk.records import ForkReason

DIALECT = AnthropicMessages()
USER = {"role": "user", "content": "hi"}


def case(name: str) -> dict[str, Any]:
    path = SHARED / "cases" / name.split("-")[0] / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"{path} is missing")
    return json.loads(path.read_text())


def parse(body: dict[str, Any]) -> ModelRequest:
    return DIALECT.parse(json.dumps({"model": "policy", "max_tokens": 8, **body}).encode())


def rendered(messages: tuple[Message, ...]) -> list[int]:
    """A template that shows everything but reasoning."""
    text = "".join(
        f"<{item.role}>{item.content}{[(c.name, c.arguments) for c in item.tool_calls]}" for item in messages
    )
    return list(text.encode())


def turn_2(given: dict[str, Any], variant: str, sent: list[dict[str, Any]]) -> ModelRequest:
    """Return the second turn, in which the agent sends back the blocks that it got."""
    body = copy.deepcopy(given["input"]["turn_2"])
    blocks = body["messages"][1]["content"]
    blocks[0]["signature"], blocks[1]["id"] = sent[0]["signature"], sent[1]["id"]
    body["messages"][2]["content"][0]["tool_use_id"] = sent[1]["id"]
    assert blocks == sent
    if variant.startswith("signature"):
        blocks[0]["signature"] = ""
    elif variant.startswith("thinking"):
        del blocks[0]
    elif variant.startswith("redacted"):
        blocks.insert(0, {"type": "redacted_thinking", "data": "AAAA"})
    return parse(body)


@pytest.mark.parametrize("variant", ["as given", "signature empty", "thinking dropped", "redacted added"])
def test_envelope(variant: str) -> None:
    """proxy-anthropic-envelope: the order of events, the counts, and what each second turn continues."""
    given = case("proxy-anthropic-envelope")
    assert len(given["input"]["turn_2_variants"]) == 4
    first = parse(given["input"]["turn_1"])
    assert (first.stream, first.thinking) == (True, True)
    made = given["input"]["model_output_turn_1"]
    arguments = json.dumps(made["tool_call"]["arguments"])
    call = ToolCall("call_1", made["tool_call"]["name"], arguments)
    deltas = [Delta(Part.REASONING, made["thinking"]), Delta(Part.CALL, call=ToolCall(call.id, call.name))]
    deltas.append(Delta(Part.ARGUMENTS, arguments))
    choice = Choice(Answer("", made["thinking"], (call,)), "tool_calls", 21)
    wire = Wire()
    wire.chunks = stream_bytes(DIALECT.stream(first, "x", 0.0), deltas, choice, 33)
    data = b"".join(wire.chunks)
    assert b"data: [DONE]" not in data
    events = [event for event in events_of(data) if event["type"] != "ping"]
    assert events[0]["message"]["usage"]["input_tokens"] == 33
    order = [line.split(" ")[0] for line in given["expected"]["event_order_turn_1"]]
    kinds = [event["type"] for event in events]
    assert [kind for at, kind in enumerate(kinds) if at == 0 or kind != kinds[at - 1] or "delta" not in kind] == [
        kind for at, kind in enumerate(order) if at == 0 or kind != order[at - 1] or "delta" not in kind
    ]

    history = History()
    prompt = rendered(first.messages)
    sampled = rendered((choice.answer.message(),))
    history.add("c1", "l", first.tools, first.messages, choice.answer.message(), prompt, sampled, None, 0)
    second = turn_2(given, variant, blocks_of(accumulate(wire.client())))
    assert second.messages[0] == first.messages[0] and second.tools == first.tools
    match = history.match("l", second.tools, second.messages)
    if variant.startswith("redacted"):
        assert (match.recorded, match.found) == (None, 2)
        edited = [*rendered(second.messages[:2]), 0]
        assert history.origin("l", second.tools, second.messages, match, edited).fork is ForkReason.CLIENT_EDIT
    else:
        assert match.recorded is not None and match.consumed == 3
        assert match.messages[2] == choice.answer.message()
        strict = history.match("l", second.tools, second.messages, lenient=False)
        assert (strict.recorded is None) == variant.startswith("thinking")


def test_system_in_the_middle() -> None:
    """proxy-developer-role-and-unknown-fields: the reminder reaches the model once, in its place."""
    variants = case("proxy-developer-role-and-unknown-fields")["input"]["variants"]
    (body,) = [item["body"] for item in variants if "body" in item]
    assert [(item.role, item.content) for item in parse(body).messages] == [
        ("system", "Be brief."),
        ("user", "hi"),
        ("system", "Reminder: be brief."),
        ("user", "go"),
    ]


def test_billing_nonce() -> None:
    """fidelity-billing-nonce-in-system: never shown, always on record; what users write about it stays."""
    given = case("fidelity-billing-nonce-in-system")["input"]
    one, two = parse(given["turn_1"]), parse(given["turn_2"])
    inside = parse({**given["turn_1"], **given["turn_1_header_inside_first_block"]})
    want = (Message("system", "You are a coding agent."), Message("user", "The header is cch=11111; keep it"))
    assert one.messages == want == two.messages[:2] == inside.messages
    assert one.raw == (*given["turn_1"]["system"], *given["turn_1"]["messages"])
    assert inside.raw[0] == given["turn_1_header_inside_first_block"]["system"]


@pytest.mark.parametrize(
    ("system", "shown"),
    [
        ("x-anthropic-billing-header: cch=1;", ()),
        ([{"type": "text", "text": "x-anthropic-billing-header: cch=1;\n\nA"}], ("\nA",)),
        ("A\nx-anthropic-billing-header: cch=1;", ("A\nx-anthropic-billing-header: cch=1;",)),
        ("About x-anthropic-billing-header: it is", ("About x-anthropic-billing-header: it is",)),
    ],
)
def test_billing_header_stands_first_or_is_text(system: Any, shown: tuple[str, ...]) -> None:
    """Only a header at the very start is one."""
    messages = parse({"system": system, "messages": [USER]}).messages
    assert tuple(item.content for item in messages if item.role == "system") == shown


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("split", [False, True])
def test_results_in_other_order(order: str, split: bool) -> None:
    """fidelity-parallel-results-in-other-order: results stand in the order of their calls, in one message or two."""
    calls = [{"type": "tool_use", "id": f"c_{name}", "name": "read", "input": {"p": name}} for name in "ab"]
    results = [{"type": "tool_result", "tool_use_id": f"c_{name}", "content": name.upper()} for name in order]
    users = [[item] for item in results] if split else [results]
    body = {
        "messages": [USER, {"role": "assistant", "content": calls}, *({"role": "user", "content": u} for u in users)]
    }
    shown = [(item.role, item.content, item.tool_call_id) for item in parse(body).messages[2:]]
    assert shown == [("tool", "A", "c_a"), ("tool", "B", "c_b")]


def test_arguments_rewritten() -> None:
    """fidelity-tool-arguments-rewritten: equal values are the same call in Anthropic's form too, others are not."""
    given = case("fidelity-tool-arguments-rewritten")["input"]
    written = given["turn_1"]["text"].removeprefix("<call>grep ").removesuffix("</call>")
    recorded = Message("assistant", tool_calls=(ToolCall("call_1", "grep", written),))

    def sent(message: dict[str, Any]) -> Message:
        blocks = [
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}
            for call in message["tool_calls"]
            for function in [call["function"]]
        ]
        return parse({"messages": [USER, {"role": "assistant", "content": blocks}, USER]}).messages[1]

    for message in [*given["same_call"], given["id_changed"]]:
        assert identity(sent(message)) == identity(recorded), message
    for message in given["edited_call"]:
        assert identity(sent(message)) != identity(recorded), message


def test_added_keys_and_parts() -> None:
    """fidelity-added-keys-and-content-parts: the messages that exist in Anthropic's form, the same and the others."""
    given = case("fidelity-added-keys-and-content-parts")["input"]
    recorded = identity(Message("assistant", "water"))

    def sent(message: dict[str, Any]) -> bytes:
        plain = json.loads(json.dumps(message).replace("output_text", "text"))
        return identity(parse({"messages": [USER, plain, USER]}).messages[1])

    assert all(sent(message) == recorded for message in given["same_message"])
    others = [item for item in given["different_message"] if not {"refusal", "tool_calls"} & item.keys()]
    assert len(others) == 4 and all(sent(message) != recorded for message in others)


@pytest.mark.parametrize(
    ("blocks", "lenient", "strict"),
    [
        ([], True, False),
        ([{"type": "thinking", "thinking": "plan", "signature": "x"}], True, True),
        ([{"type": "thinking", "thinking": "other", "signature": "x"}], False, False),
        ([{"type": "thinking", "thinking": "", "signature": "x"}], True, False),
    ],
)
def test_thinking_sent_back(blocks: list[dict[str, Any]], lenient: bool, strict: bool) -> None:
    """fidelity-thinking-dropped-from-history: kept, dropped and edited thinking, under both policies."""
    history = History()
    history.add(
        "c1", "l", [], parse({"messages": [USER]}).messages, Message("assistant", "done", "plan"), [1], [2], None, 0
    )
    message = {"role": "assistant", "content": [*blocks, {"type": "text", "text": "done"}]}
    messages = parse({"messages": [USER, message, USER]}).messages
    assert (history.match("l", [], messages).recorded is not None) == lenient
    assert (history.match("l", [], messages, lenient=False).recorded is not None) == strict
