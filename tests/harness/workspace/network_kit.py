"""Containers connected in each way, and a server outside that shows what reaches it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import docker
from aiohttp import web
from docker.types import LogConfig

from gyre_sdk.harness.workspace import owner
from gyre_sdk.harness.workspace.network import Network, Plan, Wire

WAYS: dict[str, tuple[Plan, bool]] = {
    "joined": (Plan(Wire.NOTHING), True),
    "relayed": (Plan(Wire.NOTHING), False),
    "internal": (Plan(Wire.INTERNAL, apart=True), False),
}
"""How a listener gets inside: by joining the namespace, by a container that shares it, by one on a bridge beside it."""


class Box:
    """A container of the base sandbox with a network of ours."""

    def __init__(self, client: docker.DockerClient, network: Network) -> None:
        self.client, self.network = client, network
        name = owner.container_name()
        settings = {**network.settings, "init": True, "cap_drop": ["ALL"], "auto_remove": True}
        self.id = client.api.create_container(
            "gyre/base",
            ["sleep", "600"],
            name=name,
            user="1000:1000",
            network_disabled=network.disabled,
            host_config=client.api.create_host_config(log_config=LogConfig(type="none"), **settings),
            labels=owner.labels(owner.me(), run="test", deadline=time.time() + 600, name=name),
        )["Id"]
        network.prepare(self.id)
        client.api.start(self.id)
        network.attach(self.id)

    def sh(self, command: str, *, detach: bool = False) -> str:
        """Run a command and return what it writes, errors too; nothing when it is left running."""
        made = self.client.api.exec_create(self.id, ["sh", "-c", command], user="1000:1000")["Id"]
        said = self.client.api.exec_start(made, detach=detach)
        return "" if detach else said.decode(errors="replace")

    def raw(self, base: str, *writing: str) -> str:
        """Connect to a lane, run commands whose output is sent, and return what comes until the other side ends."""
        host, port = base.removeprefix("http://").removesuffix("/v1").split(":")
        send = "; ".join(writing)
        return self.sh(f"rm -f /tmp/q; mkfifo /tmp/q; exec 3<>/tmp/q; ({send}) >&3 & timeout 20 nc {host} {port} <&3")

    @property
    def pid(self) -> int:
        return int(self.client.api.inspect_container(self.id)["State"]["Pid"])

    def kill(self) -> None:
        self.client.api.kill(self.id)


@contextmanager
def box(client: docker.DockerClient, plan: Plan = Plan(Wire.NOTHING), *, enter: bool = True) -> Iterator[Box]:  # noqa: B008
    """Open a container and remove it with everything beside it."""
    network = Network(client, plan, run="test", ttl_s=600, enter=enter)
    made: Box | None = None
    try:
        made = Box(client, network)
        yield made
    finally:
        network.disconnect()
        if made is not None:
            try:
                client.api.remove_container(made.id, force=True)
            except docker.errors.APIError:
                pass  # it was killed
        network.close()


class Server:
    """An HTTP server in a thread. `log` holds what reached it: method, path with query, headers, bytes of body."""

    def __init__(self, host: str = "127.0.0.1", tls: Any = None) -> None:
        self.host, self.port, self._tls = host, 0, tls
        self.log: list[tuple[str, str, Any, int]] = []
        self.go = threading.Event()
        """Lets `/v1/wait` go on."""
        self.arrived, self.dropped = threading.Event(), threading.Event()
        """Set when a client came to `/v1/wait` or `/v1/deaf`, and when it left before its answer."""
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def __enter__(self) -> Server:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        server = web.Server(self._answer, access_log=None, auto_decompress=False, handler_cancellation=True)
        listening = await self._loop.create_server(server, self.host, 0, ssl=self._tls)
        self.port = listening.sockets[0].getsockname()[1]
        self._started.set()
        await self._stopped.wait()
        listening.close()
        await server.shutdown(0.1)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path in ("/v1/deaf", "/v1/wait"):
            self.arrived.set()
        if request.path == "/v1/deaf":
            return await self._until_dropped()
        size = 0
        async for part in request.content.iter_any():
            size += len(part)
        self.log.append((request.method, request.raw_path, request.headers.copy(), size))
        if request.path == "/v1/big":
            return web.Response(body=b"y" * int(request.query["bytes"]))
        if request.path == "/v1/wait":
            return await self._in_two_parts(request)
        if request.path == "/v1/cut":
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"begun")
            assert request.transport is not None
            request.transport.abort()
            return response
        return web.Response(
            text=f"{request.method} {request.raw_path} {size}\n", headers={"X-Two": "a", "Set-Cookie": "c=1"}
        )

    async def _until_dropped(self) -> web.StreamResponse:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.dropped.set()
            raise
        return web.Response()

    async def _in_two_parts(self, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: first\n\n")
        try:
            while not self.go.is_set():  # noqa: ASYNC110  set by another thread
                await asyncio.sleep(0.005)
            await response.write(b"data: second\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.dropped.set()
            raise
        return response


def until(holds: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Wait until something holds, and return it; the time is a bound on a hang, not a measurement."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.01)
    return found
