"""A provider of hosted models, scripted: speaks OpenAI's chat completions, keeps what it was sent."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from proxy_kit import Proxy
from test_retries import wait_for

USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 5,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 4},
}


class Scripted:
    """The provider. `plays` are taken one per request; without one, it says `Hello.`"""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.plays: list[dict[str, Any]] = []
        self.on_request: Callable[[], None] = lambda: None
        """Called before anything is answered."""
        self.go_on = threading.Event()
        """What plays with `hold` wait for after their first delta."""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.on_request()
        play = self.plays.pop(0) if self.plays else {"deltas": [{"content": "Hel"}, {"content": "lo."}]}
        if "status" in play:
            error = {"message": play["message"], "type": "error", "code": play.get("code")}
            return web.json_response({"error": error}, status=play["status"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for delta in play["deltas"]:
            await response.write(_chunk(choices=[{"index": 0, "delta": delta, "finish_reason": None}]))
            if play.get("hold"):
                await asyncio.to_thread(self.go_on.wait, 60)
        if "report" in play:
            await response.write(b"data: " + json.dumps({"error": play["report"]}).encode() + b"\n\n")
        if play.get("die"):
            assert request.transport is not None
            request.transport.abort()
            return response
        finish = play.get("finish", "stop")
        await response.write(_chunk(choices=[{"index": 0, "delta": {}, "finish_reason": finish}]))
        await response.write(_chunk(choices=[], usage=play.get("usage", USAGE)))
        await response.write(b"data: [DONE]\n\n")
        return response


@contextmanager
def provider() -> Iterator[Scripted]:
    """Run the provider in a thread."""
    scripted, ready, loop = Scripted(), threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", scripted.chat)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        scripted.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield scripted
    finally:
        scripted.go_on.set()
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


@contextmanager
def logged(store: Path, model: str, output: Path) -> Iterator[Proxy]:
    """Run `gyre serve` for a hosted model as a process that logs all that there is; `output` gets all that it writes."""
    code = (
        "import logging, sys; logging.basicConfig(level=logging.DEBUG);"
        "from gyre_sdk.harness.proxy.server import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "--model", f"litellm:{model}", "--store", str(store)]
    environment = {**os.environ, "GYRE_SERVICE_KEY": "the-service-key", "LITELLM_LOG": "DEBUG"}
    with output.open("w") as written:
        process = subprocess.Popen(command, env=environment, stdout=written, stderr=subprocess.STDOUT)

    def ready() -> list[str]:
        assert process.poll() is None, output.read_text()
        lines = output.read_text().splitlines()
        return [line.split()[1] for line in lines if line.startswith("ready http://")]

    try:
        wait_for(ready, 120)
        yield Proxy(ready()[0], "the-service-key", store)
    finally:
        process.terminate()
        process.wait(60)


def _chunk(**fields: Any) -> bytes:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "gpt-4o-mini"}
    return b"data: " + json.dumps({**head, **fields}).encode() + b"\n\n"
