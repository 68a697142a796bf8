"""Several worker processes behind one port. A run belongs to one worker, by its id; that worker alone writes its calls.

Each worker is a whole proxy on a port of its own, over the same store. This process listens on the public port and
passes on what comes, answers streamed; agents on this machine are given their worker's own address. A worker that dies
is started again on its port and takes its runs up from the store, as a proxy of its own would.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from gyre_sdk.errors import ProtocolError, ServiceError
from gyre_sdk.harness.proxy.server.agents import bearer
from gyre_sdk.harness.proxy.server.children import Child, supervise
from gyre_sdk.harness.proxy.server.connections import (
    Connection,
    Runner,
    SlowClient,
    abort,
    listen,
    origin,
    send,
    send_end,
)
from gyre_sdk.harness.proxy.server.metrics import CONTENT_TYPE, loopback
from gyre_sdk.harness.proxy.server.refusals import refusal
from gyre_sdk.harness.proxy.server.settings import ProxySettings
from gyre_sdk.harness.proxy.server.shards import merged, merged_metrics, shard_of
from gyre_sdk.harness.proxy.server.state import key_digest
from gyre_sdk.harness.proxy.server.worker import READY, encode_settings
from gyre_sdk.journal import Journal
from gyre_sdk.steering import HEADER

log = logging.getLogger(__name__)
_PATIENCE = 30.0
"""Seconds that a request waits for its worker to be started again."""
_KEYS = 100_000
"""Keys whose worker is remembered."""
_WORKER = "import sys; from gyre_sdk.harness.proxy.server.worker import main; sys.exit(main())"
_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
     "upgrade", "host", "expect")
)  # fmt: skip
"""Headers of one connection, not of a request."""


class Workers:
    """A service of several workers.

    Args:
        settings: of the service.
        count: how many workers.
    """

    def __init__(self, settings: ProxySettings, count: int) -> None:
        self.settings = settings
        self.url = ""
        """`http://host:port` once started."""
        self._count = count
        self._next = itertools.count()
        self._keys: dict[str, int] = {}
        self._table: bytes | None = None
        """Replicas as they were announced last, for workers that are started again."""
        self._term = ""
        """Of the trainer that announced them."""
        self._stop = asyncio.Event()
        self._children: list[Child] = []

    async def serve(
        self, started: Callable[[str], None] = lambda url: None, listening: socket.socket | None = None
    ) -> None:
        """Serve until `stop` is called; `started` gets the address.

        Args:
            started: called once.
            listening: where connections come in, which this closes; None listens as the settings say.

        Raises:
            ServiceError: the port is taken, or a worker does not start or dies again and again.
        """
        settings = self.settings
        if listening is None:
            listening = listen(settings.host, settings.port)
        self.url = origin(settings.host, listening.getsockname()[1])
        self._children = [self._child(index) for index in range(self._count)]
        async with AsyncExitStack() as leaving:
            leaving.callback(listening.close)
            leaving.push_async_callback(self._stop_children)
            await asyncio.gather(*(child.start() for child in self._children))
            self._store = await asyncio.to_thread(Journal, settings.store, "r")
            leaving.callback(self._store.close)
            self._session = await leaving.enter_async_context(
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0),
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
                    auto_decompress=False,
                )
            )
            runner = Runner(self._application(), settings.head_patience, auto_decompress=False, shutdown_timeout=1.0)
            leaving.push_async_callback(runner.cleanup)
            await runner.setup()
            site = web.SockSite(runner, listening, backlog=1024)
            await site.start()
            started(self.url)
            await supervise(self._children, self._stop)
            await site.stop()
            await self._stop_children()  # what they answer while they drain is still passed on

    def stop(self) -> None:
        """Stop serving: the workers drain."""
        self._stop.set()

    async def _stop_children(self) -> None:
        await asyncio.gather(*(child.stop() for child in self._children))

    # -- workers -----------------------------------------------------------------------------------------------------

    def _child(self, index: int) -> Child:
        settings = self.settings
        public = settings.public_url or (None if loopback(settings.host) else self.url)

        def feed(port: int) -> bytes:
            return encode_settings(
                msgspec.structs.replace(
                    settings, host="127.0.0.1", port=port, public_url=public, shard=index, shards=self._count
                )
            )

        wanted = settings.port + 1 + index if settings.port else 0
        return Child(
            f"worker {index}",
            lambda port: ["-c", _WORKER],
            READY,
            port=wanted if _free(wanted) else 0,
            feed=feed,
            grace=settings.grace + 5.0,
            on_restart=self._announce_again,
        )

    async def _announce_again(self, url: str) -> None:
        """Tell a worker that was started again which replicas there are now."""
        if self._table is None:
            return
        headers = self._key() | ({HEADER: self._term} if self._term else {})
        try:
            async with self._session.put(f"{url}/gyre/v1/replicas", data=self._table, headers=headers) as answer:
                answer.raise_for_status()
        except aiohttp.ClientError as error:
            raise ServiceError(f"the worker at {url} could not be told its replicas: {error}") from error

    def _key(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.settings.service_key}"}

    # -- requests ----------------------------------------------------------------------------------------------------

    def _application(self) -> web.Application:
        app = web.Application(client_max_size=self.settings.max_body)
        replicas = "/gyre/v1/replicas"
        app.add_routes(
            [
                web.post("/gyre/v1/runs", self._guarded(self._open_run)),
                web.route("*", "/gyre/v1/runs/{run}", self._guarded(self._of_run)),
                web.route("*", "/gyre/v1/runs/{run}/{rest:.*}", self._guarded(self._of_run)),
                *(web.route("*", path, self._guarded(self._of_all)) for path in (replicas, f"{replicas}/drain")),
                web.get("/gyre/v1/status", self._guarded(self._of_all)),
                web.get("/metrics", self._guarded(self._metrics)),
                *(web.get(path, self._guarded(self._health)) for path in ("/health", "/healthz")),
                web.route("*", "/{rest:.*}", self._guarded(self._of_key)),
            ]
        )
        return app

    def _guarded(
        self, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Turn a handler's errors into answers in the protocol's form."""

        async def serve(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except ProtocolError as error:
                return refusal(request.path, request.headers, error)

        return serve

    async def _open_run(self, request: web.Request) -> web.StreamResponse:
        return await self._relay(request, next(self._next) % self._count)

    async def _of_run(self, request: web.Request) -> web.StreamResponse:
        return await self._relay(request, shard_of(request.match_info["run"], self._count))

    async def _of_key(self, request: web.Request) -> web.StreamResponse:
        """Pass on what an agent asks; what no key places is answered by the first worker."""
        key = bearer(request)
        digest = key_digest(key)
        index = self._keys.get(digest)
        if index is None:
            lane = await asyncio.to_thread(self._store.lane_of_key, digest) if key else None
            if lane is None:
                return await self._relay(request, 0)
            if len(self._keys) >= _KEYS:
                self._keys.clear()
            index = self._keys[digest] = shard_of(lane.run, self._count)
        return await self._relay(request, index)

    async def _of_all(self, request: web.Request) -> web.StreamResponse:
        """Ask every worker, give their answers as one."""
        body = await request.read()
        asked = await asyncio.gather(
            *(self._ask(index, request.method, request.path_qs, body, request.headers) for index in range(self._count))
        )
        for status, text in asked:
            if status != 200:
                return web.Response(status=status, body=text, content_type="application/json")
        if request.method != "GET":
            self._term = request.headers.get(HEADER, self._term)
            await self._remember_table()
        return web.json_response(merged([msgspec.json.decode(text) for _, text in asked]))

    async def _remember_table(self) -> None:
        status, text = await self._ask(0, "GET", "/gyre/v1/replicas", b"", self._key())
        if status == 200:
            replicas = [item for item in msgspec.json.decode(text)["replicas"] if item["state"] != "draining"]
            specs = [{name: item[name] for name in ("url", "version", "model") if name in item} for item in replicas]
            self._table = msgspec.json.encode({"replicas": specs})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        if not loopback(self.settings.host) and not hmac.compare_digest(
            bearer(request).encode(), self.settings.service_key.encode()
        ):
            raise ProtocolError("/metrics needs the service key", status=401, code="invalid_service_key")
        asked = await asyncio.gather(*(self._ask(index, "GET", "/metrics", b"", {}) for index in range(self._count)))
        page = merged_metrics([text.decode() for _, text in asked])
        return web.Response(body=page.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        """Tell whether all workers serve."""
        asked = await asyncio.gather(
            *(self._ask(index, "GET", request.path, b"", {}, patience=0.0) for index in range(self._count)),
            return_exceptions=True,
        )
        good = [item for item in asked if not isinstance(item, BaseException) and item[0] == 200]
        first: dict[str, Any] = msgspec.json.decode(good[0][1]) if good else {}
        whole = len(good) == self._count
        body = {**first, **({} if whole else {"status": "degraded"}), "workers": len(good)}
        return web.json_response(body, status=200 if whole else 503)

    async def _ask(
        self, index: int, method: str, path: str, body: bytes, headers: Any, patience: float = _PATIENCE
    ) -> tuple[int, bytes]:
        url = await self._worker(index, patience)
        try:
            async with self._session.request(
                method, URL(f"{url}{path}", encoded=True), data=body or None, headers=_end_to_end(headers)
            ) as answer:
                return answer.status, await answer.read()
        except aiohttp.ClientError as error:
            raise _gone(index) from error

    async def _relay(self, request: web.Request, index: int) -> web.StreamResponse:
        """Pass a request on to a worker, and its answer back as it comes and is read.

        A client that goes away takes its connection to the worker along: the worker must know that nobody got the answer.
        """
        task = asyncio.current_task()
        assert task is not None and isinstance(request.protocol, Connection)
        with request.protocol.when_lost(task.cancel):
            return await self._passed_on(request, index)

    async def _passed_on(self, request: web.Request, index: int) -> web.StreamResponse:
        url = URL(f"{await self._worker(index)}{request.rel_url.raw_path_qs}", encoded=True)
        response: web.StreamResponse | None = None
        patience = self.settings.client_patience
        try:
            async with self._session.request(
                request.method,
                url,
                data=request.content if request.body_exists else None,
                headers=_end_to_end(request.headers),
                allow_redirects=False,
            ) as answer:
                response = web.StreamResponse(
                    status=answer.status, reason=answer.reason, headers=_end_to_end(answer.headers)
                )
                await response.prepare(request)
                try:
                    async for piece in answer.content.iter_any():
                        await send(request, response, piece, patience)
                    await send_end(response, patience)
                except SlowClient:
                    abort(request)
        except aiohttp.ClientError as error:
            if response is None:
                raise _gone(index) from error
            abort(request)  # an answer that broke off must not look whole
            raise ConnectionResetError(f"worker {index} broke off") from error
        return response

    async def _worker(self, index: int, patience: float = _PATIENCE) -> str:
        child = self._children[index]
        if not child.ready.is_set():
            try:
                async with asyncio.timeout(patience):
                    await child.ready.wait()
            except TimeoutError:
                raise _gone(index) from None
        return child.url


def _gone(index: int) -> ProtocolError:
    problem = f"worker {index} is being started again; send the request again"
    return ProtocolError(problem, status=503, code="worker_restarting", retryable=True)


def _end_to_end(headers: Any) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers.items() if name.lower() not in _HOP]


def _free(port: int) -> bool:
    if not port:
        return True
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except (OSError, OverflowError):
        return False
    return True
