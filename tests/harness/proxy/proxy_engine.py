"""A scripted engine: a real HTTP server that speaks `/inference/v1/generate` and plays what it is told.

A play decides what one request samples. It sees the request and the number of generations asked for so far, and
yields steps; the engine keeps a log of what it was sent and what it sampled.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Tokens:
    """Sample these, at once in one chunk."""

    ids: list[int]
    logprobs: list[float | None] | None = None
    top: list[list[tuple[int, float]]] | None = None
    """Likeliest tokens at each place, as many as were asked for."""


@dataclass
class Finish:
    """End with a finish reason."""

    reason: str = "stop"
    stop_reason: str | int | None = None
    versions: list[tuple[Any, int, int]] | None = None
    """Spans; None labels all tokens with the engine's version, an empty list gives none."""


@dataclass
class Told:
    """Tell the usage, with this many cached tokens of the prompt, if it is asked for."""

    cached: int | None


@dataclass
class Wait:
    """Wait for an event, or some seconds."""

    until: threading.Event | float


@dataclass
class Error:
    """Report an error in the stream, then end it with the marker: what a dying vLLM does."""

    message: str = "engine dead"


class Hangup:
    """Close the connection without a word."""


class Done:
    """End the stream with the marker and no finish reason."""


@dataclass
class Status:
    """Answer with an HTTP status instead of a stream (first step only)."""

    status: int
    message: str = "no"


Step = Tokens | Finish | Told | Wait | Error | Hangup | Done | Status
Play = Callable[[dict[str, Any], int], list[Step]]


@dataclass
class Generation:
    """One request and what came of it."""

    request: dict[str, Any]
    sampled: list[int] = field(default_factory=list)
    ended: bool = False
    dropped: bool = False
    """The proxy closed the connection first."""

    @property
    def prompt(self) -> list[int]:
        return self.request["token_ids"]


class ScriptedEngine:
    """Runs in a thread of its own; `log` holds every generation in the order asked for."""

    def __init__(self, play: Play, version: int | str = 0, port: int = 0) -> None:
        self.play = play
        self.version = version
        self.port = port
        """0 takes a free one."""
        self.log: list[Generation] = []
        self.aborts: list[str] = []
        self.healthy = True
        self.checks = 0
        self.mute = threading.Event()
        """While set, health checks get no answer."""
        self.paused: bool | None = None
        """What `/is_paused` says; None for an engine that has no such route."""
        self.url = ""
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> ScriptedEngine:
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close the listening socket and every connection: connection refused from now on."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=1 << 30)
        app.add_routes(
            [
                web.post("/inference/v1/generate", self._generate),
                web.post("/inference/v1/abort_requests", self._abort),
                web.get("/health", self._health),
                web.get("/is_paused", self._is_paused),
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        await self._stopped.wait()
        await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        self.checks += 1
        while self.mute.is_set():  # noqa: ASYNC110  set by another thread
            await asyncio.sleep(0.01)
        return web.Response(status=200 if self.healthy else 503)

    async def _is_paused(self, request: web.Request) -> web.Response:
        if self.paused is None:
            return web.Response(status=404)
        return web.json_response({"is_paused": self.paused})

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborts += (await request.json())["request_ids"]
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        generation = Generation(json.loads(await request.read()))
        assert "content-encoding" not in request.headers
        self.log.append(generation)
        steps = self.play(generation.request, len(self.log))
        if steps and isinstance(steps[0], Status):
            status = steps[0]
            return web.json_response({"error": {"message": status.message}}, status=status.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            async for data in self._stream(generation, steps):
                if data is None:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                await response.write(data)
        except (ConnectionError, asyncio.CancelledError):
            generation.dropped = True
            raise
        generation.ended = True
        return response

    async def _stream(self, generation: Generation, steps: list[Step]) -> AsyncIterator[bytes | None]:
        for step in steps:
            match step:
                case Tokens(ids, logprobs, top):
                    generation.sampled += ids
                    count = generation.request["sampling_params"]["logprobs"]
                    yield _event(ids, logprobs, top=[place[: max(count, 1)] for place in top] if top else None)
                case Finish(reason, stop_reason, versions):
                    spans = [(self.version, 0, len(generation.sampled))] if versions is None else versions
                    yield _event([], None, finish_reason=reason, stop_reason=stop_reason, spans=spans)
                case Told(cached):
                    if (generation.request.get("stream_options") or {}).get("include_usage"):
                        details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
                        counts = {"prompt_tokens": len(generation.prompt), "completion_tokens": len(generation.sampled)}
                        told = {"request_id": "x", "choices": [], "usage": {**counts, **details}}
                        yield b"data: " + json.dumps(told).encode() + b"\n\n"
                case Wait(until):
                    if isinstance(until, float | int):
                        await asyncio.sleep(until)
                    else:
                        async with asyncio.timeout(30):
                            while not until.is_set():  # noqa: ASYNC110  set by another thread
                                await asyncio.sleep(0.005)
                case Error(message):
                    yield b"data: " + json.dumps({"error": {"message": message, "code": 500}}).encode() + b"\n\n"
                case Hangup():
                    yield None
                case Done():
                    pass
        yield b"data: [DONE]\n\n"


def _event(ids: list[int], logprobs: list[float | None] | None, spans: Any = (), top: Any = None, **rest: Any) -> bytes:
    values = logprobs if logprobs is not None else [-0.5] * len(ids)
    content: list[dict[str, Any]] = [{"token_id": i, "logprob": v} for i, v in zip(ids, values, strict=True)]
    for place, best in zip(content, top or (), strict=bool(top)):
        place["top_logprobs"] = [{"token_id": i, "logprob": v, "rank": None} for i, v in best]
    choice: dict[str, Any] = {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": content},
        "finish_reason": None,
        "stop_reason": None,
        **rest,
    }
    if spans:
        choice["weight_versions"] = [{"version": str(v), "start": a, "end": b} for v, a, b in spans]
    return b"data: " + json.dumps({"request_id": "x", "choices": [choice]}).encode() + b"\n\n"


def say(*ids: int) -> list[Step]:
    """Sample these ids and stop."""
    return [Tokens(list(ids)), Finish()]
