"""Connections of agents: bounds on the time of a request's head and of an answer, and errors below HTTP in our format.

aiohttp bounds the size of a head (128 fields of 8 KiB) but not its time: a client that sends one byte a minute would
hold a connection for ever, and so would one that does not read its answer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from aiohttp import StreamReader, web

from gyre_sdk.errors import ProtocolError, ServiceError
from gyre_sdk.harness.proxy.server.refusals import of_status, refusal

log = logging.getLogger(__name__)
_BROKEN = "/v1/"
"""Path to answer a request in whose head no path could be read: in the format that most agents know."""
BUFFERED = 1 << 15
"""Bytes that a connection may leave unread before its patience is counted; below what makes a write wait."""


def origin(host: str, port: int) -> str:
    """Return the address that clients of a listening socket are given; IPv6 stands in brackets there."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; 0 takes a free port. To be called before a store or a key is made.

    Raises:
        ServiceError: the port is taken, or the address is none of this machine.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, UnicodeError) as error:
        raise ServiceError(
            f"cannot listen on {host}:{port}: {error}; choose another port, 0 for any, or an address of this machine"
        ) from error


class SlowClient(ConnectionError):
    """A connection did not take its answer in time."""


async def send(request: web.Request, response: web.StreamResponse, data: bytes, patience: float) -> None:
    """Write a part of an answer, which the connection has `patience` seconds to take.

    Raises:
        SlowClient: it did not.
    """
    transport = request.transport
    if transport is None or transport.get_write_buffer_size() + len(data) < BUFFERED:
        await response.write(data)
        return
    async with _time_to_read(patience):
        await response.write(data)


async def send_end(response: web.StreamResponse, patience: float) -> None:
    """Write the end of an answer; it waits for parts that were written before and are not read yet.

    Raises:
        SlowClient: the connection did not take them within `patience` seconds.
    """
    async with _time_to_read(patience):
        await response.write_eof()


def abort(request: web.Request) -> None:
    """Close the connection of an agent that is gone or does not read, so that what it has of an answer is no whole one."""
    if request.transport is not None:
        request.transport.abort()


@asynccontextmanager
async def _time_to_read(patience: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(patience):
            yield
    except TimeoutError:
        raise SlowClient(f"the answer was not read for {patience:g} s") from None


class Runner(web.AppRunner):
    """Serves an application over connections with bounds.

    Args:
        app: what is served.
        head_patience: seconds from a connection's start, or from the first byte of a later request, to the end of the
            request's head.
        shutdown_timeout: seconds that open connections get when the runner stops.
        options: of aiohttp's connections.
    """

    def __init__(self, app: web.Application, head_patience: float, *, shutdown_timeout: float, **options: Any) -> None:
        super().__init__(app, access_log=None, shutdown_timeout=shutdown_timeout, **options)
        self._head_patience = head_patience
        self._options = {"access_log": None, **options}

    @property
    def server(self) -> Any:
        """What a listening socket calls for each connection."""
        manager = super().server
        return None if manager is None else lambda: self._connection(manager)

    def _connection(self, manager: web.Server) -> Connection:
        return Connection(manager, self._head_patience, loop=asyncio.get_running_loop(), **self._options)


def _nothing() -> None:
    return None


class Connection(web.RequestHandler):
    """One connection; closed when the head of a request takes too long."""

    def __init__(self, manager: web.Server, head_patience: float, **options: Any) -> None:
        super().__init__(manager, **options)
        self._patience = head_patience
        self._timer: asyncio.TimerHandle | None = None
        self._body: StreamReader | None = None
        """Of the last request whose head is complete."""
        self._when_lost: Callable[[], object] = _nothing

    @contextmanager
    def when_lost(self, call: Callable[[], object]) -> Iterator[None]:
        """Have something called if the connection is lost meanwhile; at once if it is already."""
        if self.transport is None:
            call()
        self._when_lost = call
        try:
            yield
        finally:
            self._when_lost = _nothing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: BaseException | None) -> None:
        """See `asyncio.Protocol`."""
        self._disarm()
        super().connection_lost(exc)
        self._when_lost()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        heads = self._request_count
        super().data_received(data)
        if self._request_count > heads:
            self._disarm()
            self._body = self._messages[-1][1]
        elif self._timer is None and data and (self._body is None or self._body.is_eof()):
            self._arm()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer what is not HTTP, and defects that no handler caught. Nothing that the client sent is logged."""
        if isinstance(exc, ConnectionError):
            raise exc  # the client is gone: nobody is to be told
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun; another one cannot take its place")
        if status >= 500:
            log.error("%s %s failed: %s", request.method, request.path, type(exc).__name__)
            problem = ProtocolError("internal error", status=status, code="internal_error", retryable=True)
        else:
            reason = (message or type(exc).__name__).split("\n", 1)[0].rstrip(":")
            problem = ProtocolError(f"the request is not valid HTTP: {reason}", status=status, code="bad_http")
        response = refusal(_BROKEN, request.headers, problem)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; errors that aiohttp raised outside of the handlers get our format."""
        if isinstance(resp, web.HTTPException) and resp.status >= 400:
            what = f"{request.method} {request.path}"
            resp = refusal(request.path, request.headers, of_status(what, resp.status, resp.reason))
            resp.force_close()
        return await super().finish_response(request, resp, start_time)

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._patience, self._too_slow)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        if self._request_in_progress or self._messages:
            self._arm()  # an earlier request of this connection is being answered
            return
        self._timer = None
        self.force_close()
