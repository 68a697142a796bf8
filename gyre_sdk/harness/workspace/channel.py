"""Byte channels to what runs in a workspace: a Docker exec's socket, a local process's pipes, or pipes with names."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

Sink = Callable[[int, bytes], None]
"""Receives (1 for standard output, 2 for standard error, bytes); (0, b"") once when the channel ends."""


class Channel(Protocol):
    """Two-way bytes to one process inside; reading happens on threads of its own."""

    def open(self, sink: Sink) -> None:
        """Start delivering what the process writes."""
        ...

    def send(self, data: bytes) -> None:
        """Write all of `data`; raises OSError once the process is gone."""
        ...

    def settle(self) -> None:
        """Take note that the process runs: from now on its death is told by `send`."""
        ...

    def end_input(self) -> None:
        """End the input of what runs there; what it writes is still delivered. Idempotent."""
        ...

    def close(self) -> None:
        """End the input and stop delivering. Idempotent."""
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

    def settle(self) -> None:
        """See `Channel`."""

    def end_input(self) -> None:
        """See `Channel`."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

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

    def settle(self) -> None:
        """See `Channel`."""

    def end_input(self) -> None:
        """See `Channel`."""
        assert self.process.stdin is not None
        with self._lock, contextlib.suppress(OSError):
            self.process.stdin.close()

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


class FifoChannel:
    """Three pipes with names, made here, that a process in a namespace of this machine opens by itself.

    Args:
        paths: of its standard input, output and error output, as seen here.
    """

    def __init__(self, paths: tuple[Path, Path, Path]) -> None:
        self._paths = paths
        for path in paths:
            os.mkfifo(path)
            path.chmod(0o666)  # the process may run as another user
        self._lock = threading.Lock()
        self._input = os.open(paths[0], os.O_RDWR)  # for writing only, it would wait here for the process
        self._ended = False
        self._outputs = {os.open(path, os.O_RDONLY | os.O_NONBLOCK): kind for kind, path in enumerate(paths[1:], 1)}
        self._stop, self._stopping = os.pipe()

    def open(self, sink: Sink) -> None:
        """See `Channel`."""
        threading.Thread(target=self._read, args=(sink,), name="gyre-process", daemon=True).start()

    def send(self, data: bytes) -> None:
        """See `Channel`."""
        with self._lock:
            if self._ended:
                raise OSError("its input was closed")
            view = memoryview(data)
            while view:
                view = view[os.write(self._input, view) :]

    def end_input(self) -> None:
        """See `Channel`."""
        with self._lock:
            if not self._ended:
                self._ended = True
                os.close(self._input)

    def close(self) -> None:
        """See `Channel`."""
        self.end_input()
        with self._lock, contextlib.suppress(OSError):
            os.close(self._stopping)
            self._stopping = -1

    def _read(self, sink: Sink) -> None:
        waiting = select.poll()
        for descriptor in (*self._outputs, self._stop):
            waiting.register(descriptor, select.POLLIN)
        left = dict(self._outputs)
        try:
            while left:
                for descriptor, _ in waiting.poll():
                    if descriptor == self._stop:
                        return
                    part = os.read(descriptor, 65536)
                    if part:
                        sink(left[descriptor], part)
                    else:
                        waiting.unregister(descriptor)
                        del left[descriptor]
        finally:
            self.close()
            for descriptor in (*self._outputs, self._stop):
                os.close(descriptor)
            for path in self._paths:
                path.unlink(missing_ok=True)
            sink(0, b"")

    def settle(self) -> None:
        """See `Channel`."""
        with self._lock:
            if self._ended:
                return
            try:
                writing = os.open(self._paths[0], os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # it has closed its input already
                return
            os.set_blocking(writing, True)
            os.close(self._input)
            self._input = writing
