"""One thread of this process serves the listeners of all its workspaces, on an event loop of its own."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, TypeVar

CONNECTIONS = 128
"""Connections that one service has at a time; further ones are closed. What runs inside must not use up our descriptors."""
_PATIENCE = 30.0
"""Seconds that this thread is waited for: all it does is start and stop things."""
T = TypeVar("T")


class Service(ABC):
    """Answers the connections of one workspace. Its methods run on the serving thread."""

    @abstractmethod
    async def start(self) -> None:
        """Make what connections need."""

    @abstractmethod
    def connection(self) -> asyncio.Protocol:
        """Return what takes a new connection."""

    @property
    @abstractmethod
    def connections(self) -> int:
        """How many there are."""

    @abstractmethod
    async def stop(self) -> None:
        """End every connection. Idempotent."""

    def admit(self) -> asyncio.Protocol:
        """Return what takes a new connection, or what closes it when there are too many."""
        return self.connection() if self.connections < CONNECTIONS else _Closed()


class _Closed(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


class Serving:
    """A service that is being served, on a listening socket or on connections that are handed over."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loop = _loop()
        self._owner = os.getpid()
        self._listening: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._lifetime: int | None = None
        self._closed = False
        _run(self._loop, service.start())

    def listen(self, listening: socket.socket, lifetime: int | None = None) -> None:
        """Accept on a socket; both arguments are now this object's.

        Args:
            lifetime: a descriptor; the service ends when it becomes readable.
        """

        async def begin() -> None:
            self._listening, self._lifetime = listening, lifetime
            self._server = await self._loop.create_server(self._service.admit, sock=listening)
            if lifetime is not None:
                self._loop.add_reader(lifetime, lambda: self._loop.create_task(self._end()))

        _run(self._loop, begin())

    def hand(self, connection: socket.socket) -> None:
        """Serve one connection; it is now this object's."""

        async def take() -> None:
            if self._closed:
                connection.close()
                return
            connection.setblocking(False)
            await self._loop.connect_accepted_socket(self._service.admit, connection)

        _run(self._loop, take())

    def close(self) -> None:
        """End the listener and every connection; when this returns they have ended. Idempotent."""
        if self._owner == os.getpid():  # a forked child has neither the thread nor the right to stop its parent's
            _run(self._loop, self._end())

    @property
    def closed(self) -> bool:
        """Whether it has ended, by `close` or with its lifetime."""
        return self._closed

    async def _end(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._lifetime is not None:
            self._loop.remove_reader(self._lifetime)
            os.close(self._lifetime)
        if self._listening is not None:
            try:
                self._listening.shutdown(socket.SHUT_RDWR)  # also for copies of the descriptor in forked children
            except OSError:
                pass
        if self._server is not None:
            self._server.close()
        await self._service.stop()


_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}


def _loop() -> asyncio.AbstractEventLoop:
    """Return this process's serving loop, started once."""
    with _lock:
        found = _loops.get(os.getpid())
        if found is None:
            found = asyncio.new_event_loop()
            _loops[os.getpid()] = found
            threading.Thread(target=found.run_forever, name="gyre-network", daemon=True).start()
        return found


def _run(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, loop).result(_PATIENCE)
