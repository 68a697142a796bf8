"""Processes that start in a tenth of a second, to be killed again and again: the proxy, and an engine that can be checked.

The engine's next token is a hash of the whole prefix: whoever continues an answer, from whatever token, on whatever
replica, must arrive at the same answer, and the test can compute it. The engine logs each token before it sends it.

Both are forked from a server process (multiprocessing's `forkserver`) that has imported everything already.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from aiohttp import web

SERVICE_KEY = "the-service-key"
_PACE = 0.001
"""Seconds between tokens."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["gyre_sdk.harness.proxy.server", "renderers.base", "tokenizers", "pydantic"])


def next_token(prefix: Sequence[int], letters: Sequence[int], end: int) -> int:
    """Return what follows a prefix: a letter, or the end of the turn once in twelve times."""
    number = int.from_bytes(blake2b(array("i", prefix).tobytes(), digest_size=4).digest(), "little")
    return end if number % 12 == 0 else letters[number // 12 % len(letters)]


def answer(prompt: Sequence[int], limit: int, letters: Sequence[int], end: int) -> list[int]:
    """Return the one answer to a prompt."""
    ids: list[int] = []
    while len(ids) < limit and (not ids or ids[-1] != end):
        ids.append(next_token([*prompt, *ids], letters, end))
    return ids


class Killable:
    """A process of ours on a port that it keeps when it is started again."""

    def __init__(self) -> None:
        self.port = 0
        self.url = ""
        self._process: Any = None

    def start(self) -> None:
        """Start; return when it listens."""
        receive, send = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_child, args=(send, *self._work()), daemon=True)
        self._process.start()
        send.close()
        assert receive.poll(30), "the process did not become ready"
        self.url = receive.recv()
        self.port = int(self.url.rsplit(":", 1)[1])

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.join()

    def _work(self) -> tuple[str, tuple[Any, ...]]:
        raise NotImplementedError


class KillableProxy(Killable):
    """`gyre serve`."""

    def __init__(self, arguments: list[str]) -> None:
        super().__init__()
        self._arguments = arguments

    def _work(self) -> tuple[str, tuple[Any, ...]]:
        return "proxy", (self._arguments, self.port)


class KillableEngine(Killable):
    """An engine that hashes; `log` is a file that survives it."""

    def __init__(self, log: Path, letters: Sequence[int], end: int) -> None:
        super().__init__()
        self.log = log
        self._facts = (str(log), tuple(letters), end)

    def _work(self) -> tuple[str, tuple[Any, ...]]:
        return "engine", (*self._facts, self.port)


@dataclass
class Logged:
    """One request as an engine logged it."""

    prompt: list[int]
    sampled: list[int] = field(default_factory=list)


def read_log(*logs: Path) -> dict[str, Logged]:
    """Return what engines logged, by request id."""
    found: dict[str, Logged] = {}
    for log in logs:
        for line in log.read_text().splitlines():
            name, value = line.split(" ", 1)
            if name in found:
                found[name].sampled.append(int(value))
            else:
                found[name] = Logged(json.loads(value))
    return found


# -- inside the processes -----------------------------------------------------------------------------------------


class _Announcing:
    """Standard output of a proxy: its ready line goes to the parent."""

    def __init__(self, parent: Connection) -> None:
        self._parent = parent

    def write(self, text: str) -> int:
        if text.startswith("ready http://"):
            self._parent.send(text.split()[1])
        return len(text)

    def flush(self) -> None:
        pass


def _child(parent: Connection, kind: str, facts: tuple[Any, ...]) -> None:
    if kind == "engine":
        asyncio.run(_Engine(*facts).serve(parent))
        return
    from gyre_sdk.harness.proxy.server import main

    arguments, port = facts
    os.environ["GYRE_SERVICE_KEY"] = SERVICE_KEY
    sys.stdout = _Announcing(parent)  # type: ignore[assignment]
    sys.exit(main([*arguments, "--port", str(port)]))


class _Engine:
    def __init__(self, log: str, letters: tuple[int, ...], end: int, port: int) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._letters, self._end, self._port = letters, end, port
        self._aborted: dict[str, bool] = defaultdict(bool)

    async def serve(self, parent: Connection) -> None:
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
        parent.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
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
