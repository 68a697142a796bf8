"""HTTP/1.1 over bare transports, parsed by httptools: the load and the stub engine take little of the machine they share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools

Answer = tuple[int, bytes]
"""Status and body."""
Post = Callable[[str, bytes, Mapping[str, str]], Awaitable[Answer]]
"""Posts a body of JSON to an address, with headers."""


class Client:
    """Posts one request at a time, over one kept connection per server.

    Raises:
        ConnectionError: the server is not there, or the connection broke before the answer was whole.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Asking] = {}

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Post a body; return status and body of the answer."""
        parts = urlsplit(url)
        connection = self._open.get(parts.netloc)
        if connection is None or connection.over:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(_Asking, parts.hostname, parts.port)
            self._open[parts.netloc] = connection
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
        return await connection.ask(head.encode() + body)

    def close(self) -> None:
        """Close the connections."""
        for connection in self._open.values():
            connection.close()


class Serving(asyncio.Protocol):
    """One connection of a server: `answer` gets method, path, body and this connection, for each request in turn."""

    def __init__(self, answer: Callable[[str, str, bytes, Serving], Awaitable[None]]) -> None:
        self._answer = answer
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._body = b"", b""
        self._tasks: set[asyncio.Task[None]] = set()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        """Keep the path of the request that begins."""
        self._url, self._body = url, b""

    def on_body(self, data: bytes) -> None:
        """Keep a part of the body."""
        self._body += data

    def on_message_complete(self) -> None:
        """Have the request answered."""
        method = self._parser.get_method().decode()
        task = asyncio.ensure_future(self._answer(method, self._url.decode(), self._body, self))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def write(self, data: bytes) -> None:
        """Send at once."""
        assert self._transport is not None
        self._transport.write(data)


class _Asking(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self) -> None:
        self.over = False
        """The server closed it, or will after this answer."""
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[Answer] | None = None

    async def ask(self, request: bytes) -> Answer:
        """Send a request; return its answer."""
        assert self._transport is not None
        self._parser, self._parts = httptools.HttpResponseParser(self), list[bytes]()
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._waiting

    def close(self) -> None:
        """Close it."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.over = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(ConnectionError("the connection broke before the answer was whole"))

    def on_body(self, data: bytes) -> None:
        """Keep a part of the body."""
        self._parts.append(data)

    def on_message_complete(self) -> None:
        """Give the answer to who waits."""
        if not self._parser.should_keep_alive():
            self.over = True
            self.close()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result((self._parser.get_status_code(), b"".join(self._parts)))
