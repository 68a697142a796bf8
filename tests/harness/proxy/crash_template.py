"""The process that forks what crash tests kill: it has imported everything, and has run nothing.

    python crash_template.py FD

On the socket FD it is told what to start, and answers with the process id and the address; told a process id, it waits
for that process to be gone. A fork begins with no event loop, no thread, no connection and no store of anybody's.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import os
import pkgutil
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import renderers
from aiohttp import web
from crash_kit import next_token

from gyre_sdk.harness.proxy.server.main import main as serve

_LATER = ("openai_harmony", "pydantic", "tokenizers", "uvloop", "encodings.idna", "concurrent.futures.thread")
"""Imported when a proxy starts, where they are installed."""
_PACE = 0.001
"""Seconds between tokens of an engine."""


def template(orders: Connection) -> Callable[[], int | None]:
    """Fork until the socket closes. Returns in each fork, with its work; in the template, with nothing left to do."""
    for name in (*_LATER, *(item.name for item in pkgutil.iter_modules(renderers.__path__, "renderers."))):
        if importlib.util.find_spec(name):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    outputs: dict[int, int] = {}
    while True:
        try:
            order = orders.recv()
        except EOFError:
            for pid in outputs:
                os.kill(pid, signal.SIGKILL)
            return lambda: 0
        if isinstance(order, int):
            os.waitpid(order, 0)
            os.close(outputs.pop(order))
            orders.send(None)
            continue
        assert threading.active_count() == 1
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            orders.close()
            os.dup2(writing, 1)
            for number in (reading, writing, *outputs.values()):
                os.close(number)
            return _work(*order)
        os.close(writing)
        outputs[pid] = reading
        orders.send((pid, _line(reading)))


def _line(file: int) -> str:
    """Read a line; what there is of it when the other side ends."""
    found = b""
    while not found.endswith(b"\n") and (more := os.read(file, 1)):
        found += more
    return found.decode()


def _work(kind: str, facts: tuple[Any, ...]) -> Callable[[], int | None]:
    if kind == "proxy":
        return lambda: serve(*facts)
    return lambda: asyncio.run(_Engine(*facts).serve())


class _Engine:
    def __init__(self, log: str, letters: Sequence[int], end: int, port: int) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._letters, self._end, self._port = letters, end, port
        self._aborted: dict[str, bool] = defaultdict(bool)

    async def serve(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.post("/inference/v1/generate", self._generate),
                web.post("/inference/v1/abort_requests", self._abort),
            ]
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self._port)
        await site.start()
        print(f"ready http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _abort(self, request: web.Request) -> web.Response:
        for name in (await request.json())["request_ids"]:
            self._aborted[name.removeprefix("generate-tokens-")] = True
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        name, ids = body["request_id"], list(body["token_ids"])
        self._write(name, json.dumps(ids, separators=(",", ":")))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            await self._sample(response, name, ids, body["sampling_params"]["max_tokens"])
        except ConnectionError:
            pass  # the proxy was killed
        return response

    async def _sample(self, response: web.StreamResponse, name: str, ids: list[int], left: int) -> None:
        reason = None
        while reason is None:
            token = next_token(ids, self._letters, self._end)
            ids.append(token)
            left -= 1
            reason = "stop" if token == self._end else "length" if not left else None
            reason = "abort" if self._aborted[name] else reason
            self._write(name, str(token))
            await response.write(_event(token, reason))
            await asyncio.sleep(_PACE)
        await response.write(b"data: [DONE]\n\n")

    def _write(self, name: str, value: str) -> None:
        os.write(self._log, f"{name} {value}\n".encode())


def _event(token: int, reason: str | None) -> bytes:
    choice = {
        "index": 0,
        "token_ids": [token],
        "logprobs": {"content": [{"token_id": token, "logprob": -0.5}]},
        "finish_reason": reason,
    }
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


if __name__ == "__main__":
    _todo = template(Connection(int(sys.argv[1])))
    sys.exit(_todo())
