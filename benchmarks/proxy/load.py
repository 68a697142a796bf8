"""The load: agents that work through conversations of some turns, over keep-alive connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import uvloop

from proxy.wires import Answer, Client, Post

_OPENING = [
    {"role": "system", "content": "You repair small programs. Answer with one command."},
    {"role": "user", "content": "The test in tests/test_parser.py fails. Find out why and repair it."},
]


@dataclass(frozen=True)
class Lane:
    """Where the calls of one conversation go."""

    base_url: str
    key: str
    run: str = ""
    """Id of the run at the proxy, where there is one."""


@dataclass
class Load:
    """What came of a load."""

    times: list[float] = field(default_factory=list)
    """Seconds per answered call."""
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Answered calls per second."""
        return len(self.times) / self.seconds if self.seconds else 0.0


def headers_of(lane: Lane) -> dict[str, str]:
    """Return the headers of a call."""
    return {"Authorization": f"Bearer {lane.key}", "Content-Type": "application/json"}


def driven(lanes: Sequence[Lane], connections: int, turns: int, brief: str = "") -> Load:
    """Have `connections` agents work off the lanes, `turns` calls in each; `brief` lengthens the system message.

    Each agent has a connection of its own. A call that fails is an error; its agent goes on with the next lane.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_drive(lanes, connections, turns, brief))


async def _drive(lanes: Sequence[Lane], connections: int, turns: int, brief: str) -> Load:
    load, waiting = Load(), list(lanes)

    async def agent() -> None:
        client = Client()
        while waiting:
            await converse(client.post, waiting.pop(), turns, load, brief)
        client.close()

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(agent())
    load.seconds = time.perf_counter() - began
    return load


def over(session: aiohttp.ClientSession) -> Post:
    """Return a `Post` over the connections of a session."""

    async def post(url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        async with session.post(url, data=body, headers=headers) as answer:
            return answer.status, await answer.read()

    return post


async def converse(post: Post, lane: Lane, turns: int, load: Load, brief: str = "") -> None:
    """Make the calls of one conversation, each with the history of those before."""
    system, user = _OPENING
    messages: list[dict[str, Any]] = [{"role": "system", "content": system["content"] + brief}, user]
    headers = headers_of(lane)
    for turn in range(turns):
        body = msgspec.json.encode({"model": "policy", "messages": messages, "temperature": 1.0})
        began = time.perf_counter()
        try:
            status, said = await post(f"{lane.base_url}/chat/completions", body, headers)
        except (aiohttp.ClientError, OSError) as error:
            load.errors.append(f"{type(error).__name__}: {error}")
            return
        if status != 200:
            load.errors.append(f"HTTP {status}: {said[:200].decode(errors='replace')}")
            return
        load.times.append(time.perf_counter() - began)
        message = msgspec.json.decode(said)["choices"][0]["message"]
        messages.append({"role": "assistant", "content": message["content"]})
        messages.append({"role": "user", "content": f"Result {turn}: 3 passed, 1 failed in tests/test_parser.py"})


async def pause_engine(session: aiohttp.ClientSession, engine: str, milliseconds: int) -> None:
    """Have the stub engine wait between the chunks of streamed answers."""
    async with session.put(f"{engine}/pause/{milliseconds}") as answer:
        answer.raise_for_status()


def ask_streamed(session: aiohttp.ClientSession, lane: Lane, salt: int) -> AbstractAsyncContextManager[Any]:
    """Ask for a streamed answer of 64 chunks.

    `salt` makes the request different from others, so that no answer is replayed.
    """
    content = f"Look at case {salt} again."
    messages = [_OPENING[0], {"role": "user", "content": content}]
    body = msgspec.json.encode({"model": "policy", "messages": messages, "stream": True, "max_tokens": 64})
    return session.post(f"{lane.base_url}/chat/completions", data=body, headers=headers_of(lane))


async def stream_gaps(session: aiohttp.ClientSession, lane: Lane, salt: int) -> list[float]:
    """Ask for a streamed answer of 64 chunks; return the seconds to its first text and between the reads that follow."""
    gaps: list[float] = []
    last = time.perf_counter()
    async with ask_streamed(session, lane, salt) as answer:
        if answer.status != 200:
            raise RuntimeError(f"HTTP {answer.status}: {(await answer.read())[:200]!r}")
        seen = b""
        async for data in answer.content.iter_any():
            if not gaps:
                seen += data
                if not any(said(event) for event in seen.split(b"\n\n")[:-1]):
                    continue
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
    return gaps


def said(event: bytes) -> str:
    """Return the text that an event of a streamed answer brings."""
    if not event.startswith(b"data: {"):
        return ""
    choices = msgspec.json.decode(event[6:]).get("choices")
    return ((choices[0].get("delta") or {}).get("content") or "") if choices else ""
