"""A model provider that answers from a script, in four protocols, and keeps what it was asked.

It speaks as much of `/v1/messages`, `/v1/responses` and `/v1/chat/completions` as agents need to walk through their
loops, streaming and not. It stands in for a hosted model where the programs themselves are what is examined.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from aiohttp import web
from aiohttp.web_runner import AppRunner, TCPSite

Json = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What the model says."""

    text: str = ""
    calls: tuple[tuple[str, Json | str], ...] = ()
    """Tool calls: name and arguments; a string is the input of a custom (free form) tool."""
    input_tokens: int = 100
    """What is reported as the prompt's size: large values make agents compact."""


@dataclass(frozen=True)
class Heard:
    """One request as it came."""

    method: str
    path: str
    """With the query."""
    headers: dict[str, str]
    """Names in lower case."""
    body: Json


@dataclass(frozen=True)
class Exchanged:
    """A request and what was answered."""

    heard: Heard
    reply: Reply | None
    """None where no model is asked: probes, token counts."""
    ids: tuple[str, ...] = ()
    """Ids of the reply's tool calls."""


Script = Callable[[Heard], Reply]


@dataclass
class ScriptedProvider:
    """The running server."""

    base_url: str
    """Without `/v1`."""
    exchanged: list[Exchanged] = field(default_factory=list)


@asynccontextmanager
async def scripted_provider(script: Script) -> AsyncIterator[ScriptedProvider]:
    """Serve on a free port until the block ends."""
    served = ScriptedProvider("")
    names = count(1)

    async def handle(request: web.Request) -> web.StreamResponse:
        heard = await _hear(request)
        speak, prefix = _SPEAKERS.get(request.path.removeprefix("/v1"), (None, ""))
        if speak is not None:
            reply, name = script(heard), f"{next(names):04d}"
            ids = tuple(f"{prefix}{name}{at}" for at in range(len(reply.calls)))
            served.exchanged.append(Exchanged(heard, reply, ids))
            return await _answer(request, heard, speak(reply, name, ids, heard.body))
        served.exchanged.append(Exchanged(heard, None))
        if request.method in ("HEAD", "GET"):
            return web.json_response({"object": "list", "data": [{"id": "scripted", "object": "model"}]})
        if request.path.endswith("/count_tokens"):
            return web.json_response({"input_tokens": 100})
        return web.json_response({"error": {"message": "no such path"}}, status=404)

    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{rest:.*}", handle)
    runner = AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        served.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield served
    finally:
        await asyncio.shield(runner.cleanup())


async def _answer(request: web.Request, heard: Heard, events: Iterator[Any]) -> web.StreamResponse:
    whole = next(events)
    if not heard.body.get("stream"):
        return web.json_response(whole)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(event)
    await response.write_eof()
    return response


async def _hear(request: web.Request) -> Heard:
    raw = await request.read()
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.decompress(raw)
    try:
        body = json.loads(raw) if raw else {}
    except ValueError:
        body = {"unreadable": len(raw)}
    headers = {key.lower(): value for key, value in request.headers.items()}
    return Heard(request.method, request.path_qs, headers, body if isinstance(body, dict) else {"body": body})


def _event(data: Json, *, named: bool = True) -> bytes:
    head = f"event: {data['type']}\n" if named else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


# -- the protocols: each yields the whole body, then the events of the stream -----------------------------------------


def _messages(reply: Reply, name: str, ids: tuple[str, ...], body: Json) -> Iterator[Any]:
    blocks: list[Json] = [{"type": "text", "text": reply.text}] if reply.text else []
    for call, (tool, arguments) in zip(ids, reply.calls, strict=True):
        blocks.append({"type": "tool_use", "id": call, "name": tool, "input": arguments})
    head: Json = {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": body.get("model", "scripted")}
    usage = {"input_tokens": reply.input_tokens, "output_tokens": 10}
    reason = "tool_use" if reply.calls else "end_turn"
    yield {**head, "content": blocks, "stop_reason": reason, "stop_sequence": None, "usage": usage}
    start = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": {**usage, "output_tokens": 1}}
    yield _event({"type": "message_start", "message": start})
    for index, block in enumerate(blocks):
        if block["type"] == "text":
            empty, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield _event({"type": "content_block_start", "index": index, "content_block": empty})
        yield _event({"type": "content_block_delta", "index": index, "delta": delta})
        yield _event({"type": "content_block_stop", "index": index})
    yield _event({"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage})
    yield _event({"type": "message_stop"})


def _responses(reply: Reply, name: str, ids: tuple[str, ...], body: Json) -> Iterator[Any]:
    items: list[Json] = []
    if reply.text:
        part = {"type": "output_text", "text": reply.text, "annotations": []}
        head = {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": "completed"}
        items.append({**head, "content": [part]})
    for call_id, (tool, given) in zip(ids, reply.calls, strict=True):
        call: Json = {"id": call_id.replace("call", "fc"), "call_id": call_id, "name": tool, "status": "completed"}
        if isinstance(given, str):
            items.append({**call, "type": "custom_tool_call", "input": given})
        else:
            items.append({**call, "type": "function_call", "arguments": json.dumps(given)})
            space, _, bare = tool.rpartition("/")
            if space:
                items[-1].update(name=bare, namespace=space)
    size = reply.input_tokens
    usage = {
        "input_tokens": size,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 10,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": size + 10,
    }
    head = {"id": f"resp_{name}", "object": "response", "created_at": 0, "model": body.get("model", "scripted")}
    head |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "error": None, "metadata": {}}
    whole = {**head, "status": "completed", "output": items, "usage": usage}
    yield whole
    number = count()

    def event(data: Json) -> bytes:
        return _event({**data, "sequence_number": next(number)})

    yield event({"type": "response.created", "response": {**head, "status": "in_progress", "output": []}})
    for index, item in enumerate(items):
        yield event({"type": "response.output_item.added", "output_index": index, "item": item})
        if item["type"] == "message":
            yield event(
                {
                    "type": "response.output_text.delta",
                    "item_id": item["id"],
                    "output_index": index,
                    "content_index": 0,
                    "delta": reply.text,
                }
            )
        yield event({"type": "response.output_item.done", "output_index": index, "item": item})
    yield event({"type": "response.completed", "response": whole})


def _chat(reply: Reply, name: str, ids: tuple[str, ...], body: Json) -> Iterator[Any]:
    calls = [
        {"id": call, "type": "function", "function": {"name": tool, "arguments": json.dumps(given)}}
        for call, (tool, given) in zip(ids, reply.calls, strict=True)
    ]
    head = {"id": f"chatcmpl-{name}", "created": 0, "model": body.get("model", "scripted")}
    message: Json = {"role": "assistant", "content": reply.text or None}
    if calls:
        message["tool_calls"] = calls
    finish = "tool_calls" if calls else "stop"
    size = reply.input_tokens
    usage = {"prompt_tokens": size, "completion_tokens": 10, "total_tokens": size + 10}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    yield {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
    chunk = {**head, "object": "chat.completion.chunk"}
    delta: Json = {"role": "assistant", "content": reply.text}
    if calls:
        delta["tool_calls"] = [{**call, "index": at} for at, call in enumerate(calls)]
    yield _event({**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}, named=False)
    yield _event({**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}, named=False)
    yield _event({**chunk, "choices": [], "usage": usage}, named=False)
    yield b"data: [DONE]\n\n"


_SPEAKERS: dict[str, tuple[Callable[[Reply, str, tuple[str, ...], Json], Iterator[Any]], str]] = {
    "/messages": (_messages, "toolu_"),
    "/responses": (_responses, "call_"),
    "/chat/completions": (_chat, "call_"),
}
