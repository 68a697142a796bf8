"""Byte channels to a supervisor: a Docker exec's socket, or the pipes of a local process."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import threading
from collections.abc import Callable
from typing import Protocol

Sink = Callable[[int, bytes], None]
"""Receives (1 for standard output, 2 for standard error, bytes); (0, b"") once when the channel ends."""


class Channel(Protocol):
    """Two-way bytes to one supervisor; reading happens on threads of its own."""

    def open(self, sink: Sink) -> None:
        """Start delivering what the supervisor writes."""
        ...

    def send(self, data: bytes) -> None:
        """Write all of `data`; raises OSError once the supervisor is gone."""
        ...

    def close(self) -> None:
        """End the supervisor's input and stop delivering. Idempotent."""
        ...


class SocketChannel:
    """A Docker exec attached without a terminal: frames of `>BxxxI` and payload."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def open(self, sink: Sink) -> None:
        """See `Channel`."""
        threading.Thread(target=self._read, args=(sink,), name="gyre-exec", daemon=True).start()

    def send(self, data: bytes) -> None:
        """See `Channel`."""
        with self._lock:
            self._socket.sendall(data)

    def close(self) -> None:
        """See `Channel`."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()

    def _read(self, sink: Sink) -> None:
        stream = self._socket.makefile("rb", buffering=65536)
        try:
            while len(head := stream.read(8)) == 8:
                kind, size = struct.unpack(">BxxxI", head)
                while size > 0:
                    part = stream.read(min(size, 65536))
                    if not part:
                        return
                    size -= len(part)
                    sink(kind, part)
        except (OSError, ValueError):
            pass
        finally:
            stream.close()
            sink(0, b"")


class ProcessChannel:
    """The three pipes of a local process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._lock = threading.Lock()
        self._open = 2

    def open(self, sink: Sink) -> None:
        """See `Channel`."""
        for kind, stream in ((1, self.process.stdout), (2, self.process.stderr)):
            assert stream is not None
            threading.Thread(
                target=self._read, args=(kind, stream.fileno(), sink), name="gyre-local", daemon=True
            ).start()

    def send(self, data: bytes) -> None:
        """See `Channel`."""
        assert self.process.stdin is not None
        with self._lock:
            self.process.stdin.write(data)
            self.process.stdin.flush()

    def close(self) -> None:
        """See `Channel`. The process is killed: its namespace, where it has one, dies with it."""
        self.process.kill()
        self.process.wait()
        try:
            if self.process.stdin is not None:
                self.process.stdin.close()
        except OSError:
            pass

    def _read(self, kind: int, descriptor: int, sink: Sink) -> None:
        try:
            while part := os.read(descriptor, 65536):
                sink(kind, part)
        except OSError:
            pass
        with self._lock:
            self._open -= 1
            last = self._open == 0
        if last:
            sink(0, b"")
