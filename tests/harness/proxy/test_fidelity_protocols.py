"""Cases of fidelity that speak of one protocol's form, over the wire in the others: added keys, the billing nonce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from protocols_kit import read, send
from proxy_engine import say
from test_fidelity_cases import case, check_path, scripted

from gyre_sdk.records import ForkReason

PIECES = {"hi": 300, "wa": 301, "ter": 302, "water": 303, "go": 304}
WANT = [257, 300, 260, 10, 258, 301, 302, 260, 10, 257, 304, 260, 10, 258]
STREAMS = pytest.mark.parametrize("stream", [False, True])


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def part(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "output_text", "text": said, **more}


SAME: dict[str, list[Any]] = {
    "messages": [
        "water",
        [text("water")],
        [text("water", citations=None)],
        [text("water", cache_control={"type": "ephemeral"}, x_new={"deep": [1]})],
        [text("water"), text("")],
        [{"type": "thinking", "thinking": "", "signature": "s"}, text("water")],
    ],
    "responses": [
        "water",
        [part("water")],
        [part("water", annotations=[], logprobs=[])],
        [part("water", x_new={"deep": [1]})],
        [part("water"), part("")],
        [{"type": "input_text", "text": "water"}],
    ],
}
OTHER: dict[str, list[Any]] = {
    "messages": [
        "water ",
        "Water",
        [text("wa"), text("ter")],
        [text("water"), {"type": "tool_use", "id": "t9", "name": "ls", "input": {}}],
        [{"type": "redacted_thinking", "data": "abc"}, text("water")],
    ],
    "responses": [
        "water ",
        "Water",
        [part("wa"), part("ter")],
        [part("water"), {"type": "refusal", "refusal": "no"}],
    ],
}
ADDED: dict[str, list[dict[str, Any]]] = {
    "messages": [{}, {"id": "msg_9", "type": "message", "model": "m", "stop_reason": "end_turn", "usage": None}],
    "responses": [{}, {"id": "msg_9", "type": "message", "status": "completed", "phase": None, "x_new": [1]}],
}


def body_of(protocol: str, items: list[dict[str, Any]], stream: bool) -> dict[str, Any]:
    if protocol == "messages":
        return {"model": "policy", "max_tokens": 16, "messages": items, "stream": stream}
    return {"model": "policy", "input": items, "stream": stream}


@STREAMS
@pytest.mark.parametrize("form", ["string", "parts"])
@pytest.mark.parametrize("protocol", ["messages", "responses"])
def test_added_keys_and_content_parts(model: Path, tmp_path: Path, protocol: str, form: str, stream: bool) -> None:
    """fidelity-added-keys-and-content-parts: what the model cannot see does not decide, what it can see does."""
    kind = "text" if protocol == "messages" else "input_text"

    def user(said: str) -> dict[str, Any]:
        return {"role": "user", "content": said if form == "string" else [{"type": kind, "text": said}]}

    with scripted(model, tmp_path, PIECES, say(301, 302, 260)) as (proxy, engine):

        def follow(content: Any, **added: Any) -> Any:
            access = proxy.run()
            assert read(protocol, send(proxy, access, protocol, body_of(protocol, [user("hi")], stream))).text
            said = {"role": "assistant", "content": content, **added}
            body = body_of(protocol, [user("hi"), said, user("go")], stream)
            answer = send(proxy, access, protocol, body)
            assert answer.status_code == 200, answer.text
            return proxy.calls(access["run"])[1]

        for added in ADDED[protocol]:
            for content in SAME[protocol]:
                last = follow(content, **added)
                assert (last.prompt_ids, last.fork_reason) == (WANT, None), (content, added)
        for content in OTHER[protocol]:
            last = follow(content)
            assert last.fork_reason is ForkReason.CLIENT_EDIT, content
            assert last.prompt_ids != WANT or content == OTHER["messages"][-1]
        assert len(engine.log) == len(proxy.calls())


@STREAMS
def test_billing_nonce(model: Path, tmp_path: Path, stream: bool) -> None:
    """fidelity-billing-nonce-in-system: one path for all nonces; the request stays on record as it was sent."""
    given = case("fidelity-billing-nonce-in-system")
    source, want = given["input"], given["expected"]
    with scripted(model, tmp_path, source["toy"]["pieces"], say(*source["turn_1"]["sampled_ids"])) as (proxy, engine):
        access = proxy.run()
        for name in ("turn_1", "turn_2"):
            turn = source[name]
            body = {**body_of("messages", turn["messages"], stream), "system": turn["system"]}
            assert send(proxy, access, "messages", body).status_code == 200
        other = proxy.lane(access["run"])
        system = source["turn_1_header_inside_first_block"]["system"]
        body = {**body_of("messages", source["turn_1"]["messages"], stream), "system": system}
        assert send(proxy, other, "messages", body).status_code == 200
        calls = proxy.calls()
        with proxy.journal() as journal:
            raw = {item.call: item.raw for item in journal.exchanges(access["run"])}
    check_path(calls, engine)
    prompts = [call.prompt_ids for call in calls]
    assert prompts == [want["turn_1_prompt_ids"], want["turn_2_prompt_ids"], want["turn_1_prompt_ids"]]
    assert (calls[1].parent, calls[1].fork_reason) == (calls[0].call, None)
    assert raw[calls[0].call][:2] == source["turn_1"]["system"]
    assert raw[calls[1].call][:2] == source["turn_2"]["system"]
    assert raw[calls[2].call][0] == system or system in str(raw[calls[2].call][0])


@STREAMS
@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_a_billing_nonce_that_a_gateway_passes_on(model: Path, tmp_path: Path, protocol: str, stream: bool) -> None:
    """At the head of a system text it is not shown in any protocol; anywhere else, and in a user's words, it is text."""
    nonce = "x-anthropic-billing-header: cc_version=2; cch={};"

    def system(number: int) -> list[dict[str, Any]]:
        head = nonce.format(number)
        parts = [{"type": "text", "text": text} for text in (head, "hi")]
        return [
            {"role": "system", "content": head},
            {"role": "system", "content": f"{head}\nhi"},
            {"role": "developer", "content": parts},
            {"role": "system", "content": f"hi\n{nonce.format(0)}"},
        ]

    user, name = {"role": "user", "content": nonce.format(1)}, "messages" if protocol == "chat" else "input"
    with scripted(model, tmp_path, PIECES, say(301, 302, 260)) as (proxy, engine):
        access = proxy.run()
        for number in (1, 2):
            tail = [{"role": "assistant", "content": "water"}, {"role": "user", "content": "go"}][: 2 * number - 2]
            body: dict[str, Any] = {"model": "policy", "stream": stream, name: [*system(number), user, *tail]}
            if protocol == "responses":
                body |= {"instructions": f"{nonce.format(number)}\ngo"}
            assert send(proxy, access, protocol, body).status_code == 200
        calls = proxy.calls()
        with proxy.journal() as journal:
            raw = [item.raw for item in journal.exchanges(access["run"])]
    check_path(calls, engine)
    assert (calls[1].parent, calls[1].fork_reason) == (calls[0].call, None)
    prompt = bytes(token for token in calls[0].prompt_ids if token < 256).decode()
    shown = f"\n\n\n{nonce.format(0)}\n{nonce.format(1)}\n"
    assert prompt == (f"\n{shown}" if protocol == "responses" else shown)
    assert nonce.format(2) in str(raw[1])
