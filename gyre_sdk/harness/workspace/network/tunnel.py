"""A connection to the egress proxy: a tunnel when it begins with CONNECT, else handed to an HTTP server as it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from gyre_sdk.harness.workspace.network.addresses import split_authority

Reach = Callable[[str, int], Awaitable[list[str]]]
"""Gives the addresses of a host (and port) that may be connected to; raises PermissionError when there are none."""
_METHOD = b"CONNECT "
_HEAD_S, _CONNECT_S = 30.0, 10.0
_PIECE = 65536
"""Bytes read at a time, and the most that the head of a CONNECT may have."""


class Tunnel(asyncio.Protocol):
    """Looks at the first bytes of a connection and then becomes what they ask for.

    Args:
        server: takes every connection that does not begin with CONNECT.
        reach: decides where a tunnel may lead.
        open_tunnels: the living ones; this one is among them from its start to its end.
    """

    def __init__(self, server: web.Server, reach: Reach, open_tunnels: set[Tunnel]) -> None:
        self._server = server
        self._reach = reach
        self._living = open_tunnels
        self._transport: asyncio.Transport | None = None
        self._http: asyncio.Protocol | None = None
        self._reader: asyncio.StreamReader | None = None
        self._streams: asyncio.StreamReaderProtocol | None = None
        self._task: asyncio.Task[None] | None = None
        self._seen = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._living.add(self)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._chosen is not None:
            self._chosen.data_received(data)
            return
        self._seen += data
        if not _METHOD.startswith(self._seen[: len(_METHOD)]):
            self._http = self._server()
            self._begin(self._http)
        elif len(self._seen) >= len(_METHOD):
            self._reader = asyncio.StreamReader(_PIECE)
            self._streams = asyncio.StreamReaderProtocol(self._reader)
            self._begin(self._streams)
            self._task = asyncio.get_running_loop().create_task(self._connect())

    def eof_received(self) -> bool | None:
        """See `asyncio.Protocol`."""
        return self._chosen.eof_received() if self._chosen is not None else None

    def connection_lost(self, exc: BaseException | None) -> None:
        """See `asyncio.Protocol`."""
        self._living.discard(self)
        if self._chosen is not None:
            self._chosen.connection_lost(exc)  # type: ignore[arg-type]

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        if self._chosen is not None:
            self._chosen.pause_writing()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        if self._chosen is not None:
            self._chosen.resume_writing()

    def abort(self) -> None:
        """End it at once."""
        if self._task is not None:
            self._task.cancel()
        if self._transport is not None:
            self._transport.abort()

    @property
    def _chosen(self) -> asyncio.Protocol | asyncio.StreamReaderProtocol | None:
        return self._http or self._streams

    def _begin(self, protocol: asyncio.Protocol | asyncio.StreamReaderProtocol) -> None:
        assert self._transport is not None
        protocol.connection_made(self._transport)
        seen, self._seen = self._seen, b""
        protocol.data_received(seen)

    async def _connect(self) -> None:
        assert self._transport is not None and self._reader is not None and self._streams is not None
        loop = asyncio.get_running_loop()
        writer = asyncio.StreamWriter(self._transport, self._streams, self._reader, loop)
        there: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(_HEAD_S):
                head = await self._reader.readuntil(b"\r\n\r\n")
            status, message, found = await self._open(head.split(b"\r\n", 1)[0].decode("latin-1"))
            if found is None:
                writer.write(_answer(status, message))
                await writer.drain()
                return
            reader, there = found
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            async with asyncio.TaskGroup() as both:
                both.create_task(_pump(self._reader, there))
                both.create_task(_pump(reader, writer))
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, BaseExceptionGroup):
            self._transport.abort()
        finally:
            writer.close()
            if there is not None:
                there.close()

    async def _open(self, line: str) -> tuple[int, str, tuple[asyncio.StreamReader, asyncio.StreamWriter] | None]:
        """Return (status, message, the connection that a CONNECT line asks for or None)."""
        try:
            host, port = split_authority(line.split()[1], 443)
        except (ValueError, IndexError):
            return 400, f"{line[:200]!r} does not ask for host:port", None
        try:
            addresses = await self._reach(host, port)
        except PermissionError as error:
            return 403, str(error), None
        except (OSError, TimeoutError) as error:
            return 502, f"{host} does not resolve: {error or 'no answer'}", None
        problem: Exception | None = None
        for address in addresses:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    return 200, "", await asyncio.open_connection(address, port)
            except (OSError, TimeoutError) as error:
                problem = error
        return 502, f"{host} cannot be reached: {problem or 'no answer'}", None


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry bytes to their end, then end the other side's input too; a broken side raises and ends both ways."""
    while data := await reader.read(_PIECE):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def _answer(status: int, message: str) -> bytes:
    reason = {400: "Bad Request", 403: "Forbidden", 502: "Bad Gateway"}[status]
    body = message.encode(errors="replace") + b"\n"
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body
