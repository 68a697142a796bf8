"""Connections to replicas, for the one request that every call makes: a POST whose answer is read as it comes.

The general client (aiohttp) takes 120 µs of processor time per call of 32 tokens here, this takes 70: a tenth of all that
the proxy does for a call. Parsing is `httptools`, Node's parser. Everything else goes through the general client.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import cast
from urllib.parse import unquote, urlsplit

import httptools

_CONNECT_SECONDS = 5.0
_IDLE_SECONDS = 4.0
"""vLLM closes idle connections after 5 s; one that is about to close must not be written to."""
_HELD = 1 << 18
"""Bytes of an answer that may wait to be read before the connection is told to stop."""


def without_password(url: str) -> str:
    """Return an address as it may be shown: without the name and the password that it may hold."""
    return url.replace(f"{urlsplit(url).netloc.rpartition('@')[0]}@", "", 1) if "@" in url else url


class Reply:
    """An answer whose head has come. Read it to its end, or `close` it: its connection is of use to others then."""

    def __init__(self, connection: _Connection, pool: _Pool) -> None:
        self.status = connection.status
        self._connection: _Connection | None = connection
        self._pool = pool

    async def read_any(self, gather: float = 0.0) -> bytes:
        """Return what has come since the last time, at least a byte; nothing at the end.

        Args:
            gather: seconds to wait for more once something has come, unless the answer ends: for readers in no hurry.

        Raises:
            OSError: the connection broke off; everything that came before has been returned.
        """
        return await self._connection.read_any(gather) if self._connection is not None else b""

    async def read(self) -> bytes:
        """Return the rest."""
        pieces = []
        while piece := await self.read_any():
            pieces.append(piece)
        return b"".join(pieces)

    def close(self, *, nearly_over: bool = False) -> None:
        """Let go of the connection: kept when the answer has been read whole, else closed. Idempotent.

        Args:
            nearly_over: what is left of the answer says nothing and comes at once: the connection is kept after it.
        """
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.give_back(connection, nearly_over)


class Wire:
    """Connections to any number of replicas, kept while they are of use.

    Args:
        headers: sent with every request.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._pools: dict[str, _Pool] = {}

    async def post(self, url: str, path: str, body: bytes, request_id: str) -> Reply:
        """Send JSON; return when the head of the answer has come.

        Args:
            url: of the replica.
            path: below it.
            body: JSON.
            request_id: for the replica's log.

        Raises:
            OSError: the replica cannot be reached, or broke off. TimeoutError: it does not take the connection.
        """
        pool = self._pools.get(url)
        if pool is None:
            pool = self._pools[url] = _Pool(url, self._headers)
        connection = pool.take() or await pool.connect()
        try:
            connection.send(pool.head(path, len(body), request_id), body)
            await connection.answered()
        except BaseException:
            connection.abort()
            raise
        return Reply(connection, pool)

    def connected(self, url: str) -> bool:
        """Tell whether a request to a replica would go over a connection that is open already."""
        pool = self._pools.get(url)
        return pool is not None and pool.ready

    def keep(self, urls: Collection[str]) -> None:
        """Close what is idle for too long, and all that is idle to other replicas than these."""
        for url, pool in list(self._pools.items()):
            pool.trim()
            if url not in urls:
                self._pools.pop(url).close()

    def close(self) -> None:
        """Close all idle connections."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


class _Pool:
    """Connections to one replica."""

    def __init__(self, url: str, headers: str) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._secure = parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        self._prefix = parts.path.rstrip("/")
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers += f"Authorization: Basic {base64.b64encode(pair.encode()).decode()}\r\n"
        self._fixed = (
            f" HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\n{headers}"
        )
        self._loop = asyncio.get_running_loop()
        self._idle: list[tuple[float, _Connection]] = []
        self._closed = False

    def head(self, path: str, size: int, request_id: str) -> bytes:
        """Return the head of a request."""
        line = f"POST {self._prefix}{path}{self._fixed}"
        return f"{line}X-Request-Id: {request_id}\r\nContent-Length: {size}\r\n\r\n".encode()

    @property
    def ready(self) -> bool:
        """Whether `take` would return a connection."""
        now = self._loop.time()
        return any(connection.open and now - since < _IDLE_SECONDS for since, connection in reversed(self._idle))

    def take(self) -> _Connection | None:
        """Return a connection that is open and has not been idle for long, the last one used first."""
        while self._idle:
            since, connection = self._idle.pop()
            if connection.open and self._loop.time() - since < _IDLE_SECONDS:
                return connection
            connection.abort()
        return None

    async def connect(self) -> _Connection:
        """Open a connection."""
        context = ssl.create_default_context() if self._secure else None
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, connection = await self._loop.create_connection(_Connection, self._host, self._port, ssl=context)
        return connection

    def give_back(self, connection: _Connection, nearly_over: bool = False) -> None:
        """Keep a connection whose answer is complete, or nearly so; close another one."""
        if nearly_over and not connection.reusable:
            connection.drop_rest(self.give_back)
        elif connection.reusable and not self._closed:
            self._idle.append((self._loop.time(), connection))
        else:
            connection.abort()

    def trim(self) -> None:
        """Close what has been idle for long."""
        kept, now = [], self._loop.time()
        for since, connection in self._idle:
            if connection.open and now - since < _IDLE_SECONDS:
                kept.append((since, connection))
            else:
                connection.abort()
        self._idle = kept

    def close(self) -> None:
        """Close what is idle, and what is given back from now on."""
        self._closed = True
        for _, connection in self._idle:
            connection.abort()
        self._idle.clear()


class _Connection(asyncio.Protocol):
    """One connection: one request at a time. Names without underscore are called by the loop and the parser too."""

    def __init__(self) -> None:
        self.open = False
        self.status = 0
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._pieces: deque[bytes] = deque()
        self._held = 0
        self._paused = False
        self._gathering = False
        self._complete = True
        self._keep = True
        self._problem: OSError | None = None
        self._dropped: Callable[[_Connection], None] | None = None
        """Called at the end of an answer that nobody reads any more."""
        self._waiter: asyncio.Future[None] | None = None

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent: the answer is complete, and the replica keeps the connection."""
        return self.open and self._complete and self._keep and not self._pieces

    def send(self, head: bytes, body: bytes) -> None:
        """Send a request."""
        self._parser, self.status, self._complete, self._problem = httptools.HttpResponseParser(self), 0, False, None
        if not self.open or self._transport is None:
            raise ConnectionResetError("the connection is closed")
        self._transport.write(head + body if len(body) < _HELD else head)
        if len(body) >= _HELD:
            self._transport.write(body)

    async def answered(self) -> None:
        """Wait for the head of the answer."""
        while not self.status:
            if self._problem is not None:
                raise self._problem
            await self._wait()

    async def read_any(self, gather: float) -> bytes:
        """See `Reply.read_any`."""
        while not self._pieces:
            if self._complete:
                return b""
            if self._problem is not None:
                raise self._problem
            await self._wait()
        if gather and not self._complete and self._problem is None and not self._paused:
            await self._more(gather)
        data = self._pieces.popleft() if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._held = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    def drop_rest(self, done: Callable[[_Connection], None]) -> None:
        """Throw the rest of the answer away, then call `done`."""
        self._pieces.clear()
        if self._complete or not self.open:
            done(self)
        else:
            self._dropped = done

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    async def _more(self, seconds: float) -> None:
        """Wait for the end of the answer, or a break, or a while."""
        timer = self._loop.call_later(seconds, self._wake)
        self._gathering = True
        try:
            await self._wait()
        finally:
            self._gathering = False
            timer.cancel()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        self.open = True

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._parser is None or self._complete:
            self.abort()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._problem = ConnectionError(f"the answer is not HTTP: {error}")
            self.abort()
        if self._held > _HELD and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        if not self._gathering or self._complete or self._problem is not None or self._paused:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.open = False
        if self.status and not self._keep:
            self._complete = True  # an answer of no announced length ends with its connection
        if self._problem is None:
            self._problem = ConnectionResetError(str(exc) if exc else "the connection was closed by the replica")
        self._wake()

    # -- the parser --------------------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        """See `httptools`."""
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status
            self._keep = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        """See `httptools`."""
        if self._dropped is None:
            self._pieces.append(data)
            self._held += len(data)

    def on_message_complete(self) -> None:
        """See `httptools`."""
        self._complete = self.status > 0
        dropped = self._dropped
        if self._complete and dropped is not None:
            self._dropped = None
            dropped(self)
