"""Captures of real programs: their streams at every byte split, and their answers as an agent sends them back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from protocols_kit import body_of, read, send
from proxy_engine import Finish, ScriptedEngine, Step, Tokens
from proxy_kit import SHARED, Proxy, running
from proxy_toy import toy_template
from test_sse import decode, every_cut

from gyre_sdk.harness.proxy.sse import SseEvent, encode_data, encode_event

WIRE = SHARED / "data" / "wire"
SMALL = 3_000
"""Bytes of streams that are cut in two at every place; longer ones are cut into single bytes."""
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def framed(file: Path) -> bytes:
    """Return a stream whose events were recorded one by line."""
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    kinds = [json.loads(line).get("type") for line in lines]
    events = [
        encode_event(SseEvent(line.encode(), kind)) if kind else encode_data(line.encode())
        for line, kind in zip(lines, kinds, strict=True)
    ]
    return b"".join(events) + (b"" if kinds[0] else encode_data(b"[DONE]"))


def streams() -> dict[str, bytes]:
    """Return every captured stream by name."""
    found = {file.name: file.read_bytes() for file in sorted(WIRE.glob("*/*.sse"))}
    found |= {file.name: framed(file) for file in sorted(WIRE.glob("vercel-ai/*.chunks.txt"))}
    for file in sorted([*WIRE.glob("llm/*.yaml"), *WIRE.glob("pydantic-ai/*.yaml")]):
        for place, item in enumerate(yaml.safe_load(file.read_text())["interactions"]):
            body = item["response"].get("body") or {}
            text = body.get("string") if isinstance(body, dict) else None
            if isinstance(text, str) and text.startswith(("event:", "data:")):
                found[f"{file.stem}-{place}"] = text.encode()
    return found


def test_every_stream_at_every_byte() -> None:
    if not WIRE.is_dir():
        pytest.skip(f"{WIRE} is missing: wire captures of real programs")
    found = streams()
    assert len(found) > 40
    for name, data in found.items():
        whole = decode(data)
        assert whole, name
        if len(data) <= SMALL:
            every_cut(data)
        assert decode(*[data[at : at + 1] for at in range(len(data))]) == whole, name
        assert all(event.data == b"[DONE]" or json.loads(event.data) for event in whole), name


@pytest.fixture(scope="module")
def stage(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Proxy, ScriptedEngine]]:
    def play(request: dict[str, Any], number: int) -> list[Step]:
        return [Tokens(list(b"ok")), Tokens([260]), Finish()]

    with ScriptedEngine(play) as engine:
        store = tmp_path_factory.mktemp("captures") / "s.db"
        with running(model, store, engine.url, template=toy_template({})) as proxy:
            yield proxy, engine


def answers() -> dict[str, tuple[str, Any]]:
    """Return the protocol and the body of every captured answer that is not a stream, by name."""
    found: dict[str, tuple[str, Any]] = {}
    for file in sorted(WIRE.glob("vercel-ai/*.json")):
        body = json.loads(file.read_text())
        kinds = {"chat.completion": "chat", "response": "responses", None: "messages"}
        if "error" not in body or body.get("output"):
            found[file.stem] = (kinds[body.get("object")], body)
    for file in sorted(WIRE.glob("openhands/*.json")):
        found[file.stem] = ("chat", json.loads(file.read_text())["response"])
    return found


def sent_back(protocol: str, body: Any) -> dict[str, Any]:
    """Return a request whose history holds a captured answer as its program sends it back, and the tools' results."""
    hi, go = {"role": "user", "content": "hi"}, {"role": "user", "content": "go"}
    if protocol == "chat":
        said = body["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in said.get("tool_calls") or ()
        ]
        return {"model": "policy", "messages": [hi, said, *results, go], "tools": TOOLS}
    if protocol == "messages":
        uses = [block["id"] for block in body["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use, "content": "r"} for use in uses]
        said = {"role": "assistant", "content": body["content"]}
        last = {"role": "user", "content": [*results, {"type": "text", "text": "go"}]}
        return {"model": "policy", "max_tokens": 16, "messages": [hi, said, last]}
    kinds = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
    results = [
        {"type": kinds[item["type"]], "call_id": item["call_id"], "output": "r"}
        for item in body["output"]
        if item["type"] in kinds
    ]
    return {"model": "policy", "input": [hi, *body["output"], *results, go]}


def text_of(protocol: str, body: Any) -> list[str]:
    """Return the texts that a captured answer shows its user."""
    if protocol == "chat":
        return [body["choices"][0]["message"].get("content") or ""]
    if protocol == "messages":
        return [block["text"] for block in body["content"] if block["type"] == "text"]
    return [part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"]]


@pytest.mark.parametrize("stream", [False, True])
def test_answers_come_back(stage: tuple[Proxy, ScriptedEngine], stream: bool) -> None:
    """What a provider's answer says is in the prompt; what no model can be shown is left out or refused by name."""
    proxy, engine = stage
    found = answers()
    if not found:
        pytest.skip(f"{WIRE} is missing: wire captures of real programs")
    served = 0
    for name, (protocol, body) in found.items():
        access = proxy.run()
        reply = send(proxy, access, protocol, sent_back(protocol, body) | {"stream": stream})
        if reply.status_code != 200:
            assert reply.status_code == 400, (name, reply.text)
            assert reply.json()["error"]["message"], name
            continue
        served += 1
        assert read(protocol, reply).text == "ok", name
        [call] = proxy.calls(access["run"])
        assert call.prompt_ids == engine.log[-1].prompt
        prompt = bytes(token for token in call.prompt_ids if token < 256).decode()
        for text in text_of(protocol, body):
            assert text in prompt, name
    assert served >= len(found) - 2, (served, len(found))


def test_requests_of_openhands(stage: tuple[Proxy, ScriptedEngine]) -> None:
    """The messages of its gateway, with the model's name that it sends; then the recorded answer as history."""
    proxy, _ = stage
    files = sorted(WIRE.glob("openhands/*.json"))
    if not files:
        pytest.skip(f"{WIRE}/openhands is missing: wire captures of a real gateway")
    for file in files:
        given = json.loads(file.read_text())
        access = proxy.run()
        body = {"model": given["gateway_model"], "messages": given["messages"]}
        first = proxy.chat(access, body)
        assert first.status_code == 200, first.text
        history = [*given["messages"], first.json()["choices"][0]["message"], {"role": "user", "content": "go"}]
        assert proxy.chat(access, {**body, "messages": history}).status_code == 200
        above, below = proxy.calls(access["run"])
        assert (below.parent, below.fork_reason) == (above.call, None)


@pytest.mark.parametrize("name", ["openai-text", "deepseek-tool-call", "deepseek-reasoning", "xai-tool-call"])
def test_streams_of_chat_come_back(stage: tuple[Proxy, ScriptedEngine], name: str) -> None:
    """A stream added up as a client does, sent back in every protocol: the same words for the model."""
    file = WIRE / "vercel-ai" / f"{name}.chunks.txt"
    if not file.is_file():
        pytest.skip(f"{file} is missing: a captured stream")
    proxy, _ = stage
    headers = {"content-type": "text/event-stream"}
    seen = read("chat", httpx.Response(200, headers=headers, content=framed(file)))
    assert seen.text or seen.calls
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in seen.calls]
    history = [{"role": "user", "content": "hi"}, seen.message(), *results, {"role": "user", "content": "go"}]
    prompts = []
    for protocol in ("chat", "messages", "responses"):
        access = proxy.run()
        reply = send(proxy, access, protocol, body_of(protocol, history))
        assert reply.status_code == 200, reply.text
        prompts.append(bytes(token for token in proxy.calls(access["run"])[0].prompt_ids if token < 256).decode())
    for prompt in prompts:
        assert seen.text in prompt and seen.reasoning in prompt
        assert all(call["name"] in prompt for call in seen.calls)
    assert seen.calls or prompts[0] == prompts[1] == prompts[2]
