"""A port inside a container, reachable at an address of this machine's loopback although the container has no network."""

from __future__ import annotations

import selectors
import socket
import socketserver
import threading

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.workspace.network.inside import CannotEnter, connect_inside, inside

_BLOCK = 65_536


class Exposure:
    """Forwards connections from `address` to 127.0.0.1:`port` inside a container, until `close`.

    Raises:
        WorkspaceError: this process cannot join the container's network namespace.
    """

    def __init__(self, pid: int, container: str, port: int) -> None:
        """Start forwarding.

        Args:
            pid: the container's first process, as this machine counts; 0 when it is not known.
            container: its full id.
            port: where something listens inside, now or later.
        """
        if not 0 < port < 65536:
            raise WorkspaceError(f"port {port} is none; give one from 1 to 65535")
        try:
            inside(pid, lambda: None, container=container)
        except (CannotEnter, OSError) as error:
            raise WorkspaceError(
                f"port {port} of workspace {container[:12]} cannot be exposed: {error}; that needs root on the engine's own"
                " machine. Otherwise run the client inside the workspace"
            ) from error
        self._server = _Server(pid, container, port)
        self.address: tuple[str, int] = ("127.0.0.1", self._server.server_address[1])
        """(host, port) on this machine."""
        threading.Thread(target=self._server.serve_forever, args=(0.2,), name="gyre-expose", daemon=True).start()

    def close(self) -> None:
        """End it and every connection. Idempotent."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, pid: int, container: str, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.pid, self.container, self.port = pid, container, port
        self.open: set[socket.socket] = set()

    def server_close(self) -> None:
        super().server_close()
        for one in list(self.open):
            _end(one, socket.SHUT_RDWR)


class _Forward(socketserver.BaseRequestHandler):
    """One connection. One that nothing answers inside is closed at once, as a refused one would be."""

    server: _Server

    def handle(self) -> None:
        here: socket.socket = self.request
        try:
            there = connect_inside(self.server.pid, self.server.port, container=self.server.container)
        except (CannotEnter, OSError):
            return
        there.settimeout(None)
        self.server.open |= {here, there}
        try:
            _pump(here, there)
        finally:
            self.server.open -= {here, there}
            there.close()


def _pump(here: socket.socket, there: socket.socket) -> None:
    """Copy both ways until both sides have ended; the end of one side is passed on."""
    other = {here: there, there: here}
    with selectors.DefaultSelector() as ready:
        for one in other:
            ready.register(one, selectors.EVENT_READ)
        while ready.get_map():
            for key, _ in ready.select():
                source = key.fileobj
                assert isinstance(source, socket.socket)
                try:
                    data = source.recv(_BLOCK)
                    if data:
                        other[source].sendall(data)
                        continue
                except OSError:
                    return
                ready.unregister(source)
                _end(other[source], socket.SHUT_WR)


def _end(one: socket.socket, how: int) -> None:
    try:
        one.shutdown(how)
    except OSError:
        pass
