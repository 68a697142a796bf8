"""What the watcher of a child does when its trainer is gone: it waits for a successor, and ends the child when none comes.

It runs in the child's process group (`leash.py`). The trainer holds the write end of its stdin, and wrote one line there,
an `Inheritance`. Whoever connects to the socket later, as the same user and with the key, gets a descriptor of the child
and is its trainer for as long as the connection is open; then waiting begins anew.

When this process is killed the kernel kills the group: the child has the read end of a pipe, told to send SIGKILL there as
soon as nobody holds the write end, and only this process does.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import NoReturn

__all__ = ["GRACE", "Ties", "supported", "tie", "watch"]

GRACE = 10.0
"""Seconds between the polite signal to an orphan and the one that ends what is left."""
_LOOK = 0.5
"""Seconds between looks whether its record is still there."""
_GREETING = 5.0
"""Seconds that who connects may take to show its key."""


class Ties:
    """Descriptors of a child and its watcher."""

    def __init__(self) -> None:
        """Make them, in the child, before its watcher is forked.

        Raises:
            OSError: this kernel has no such descriptors.
        """
        self.pid = os.getpid()
        self.child = os.pidfd_open(self.pid)
        self.trainer = os.pidfd_open(os.getppid())
        self.end, self.held = os.pipe()
        fcntl.fcntl(self.end, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(self.end, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(self.end, fcntl.F_SETFL, fcntl.fcntl(self.end, fcntl.F_GETFL) | os.O_ASYNC)

    def keep_childs(self) -> None:
        """In the child: from now on it ends with its watcher."""
        for unneeded in (self.held, self.child, self.trainer):
            os.close(unneeded)


def supported() -> bool:
    """Tell whether children can outlive their trainer on this system."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


def tie() -> Ties | None:
    """Return the ties; None where they cannot be made."""
    try:
        return Ties() if supported() else None
    except OSError:
        return None


def watch(listening: int, ties: Ties) -> NoReturn:
    """Be the watcher: in the forked process, with the socket that successors connect to."""
    os.close(ties.end)
    trainer = _Trainer(0, ties.trainer)
    try:
        inheritance = json.loads(trainer.read_line())
        key, seconds, record = str(inheritance["key"]), float(inheritance["seconds"]), Path(inheritance["record"])
    except (ValueError, KeyError):  # it was gone before it said anything
        os.killpg(0, signal.SIGKILL)
        os._exit(1)
    trainer.wait()
    with socket.socket(fileno=listening) as server:
        while (successor := _await(server, ties, key, record, time.monotonic() + seconds)) is not None:
            with successor:
                while _received(successor):
                    pass
        _end(ties.child, record)


class _Trainer:
    """The trainer that started the child."""

    def __init__(self, pipe: int, process: int) -> None:
        self._pipe = pipe
        self._gone = select.poll()
        self._gone.register(pipe, select.POLLIN)
        self._gone.register(process, select.POLLIN)  # something that it forked may hold the pipe when it is gone

    def read_line(self) -> bytes:
        """Return what it writes, up to the end of a line."""
        line = b""
        while not line.endswith(b"\n"):
            byte = self._read()
            if not byte:
                return b""
            line += byte
        return line

    def wait(self) -> None:
        """Return when it is gone."""
        while self._read():
            pass
        os.close(self._pipe)

    def _read(self) -> bytes:
        ready = [descriptor for descriptor, _ in self._gone.poll()]
        return os.read(self._pipe, 1) if self._pipe in ready else b""


def _await(server: socket.socket, ties: Ties, key: str, record: Path, deadline: float) -> socket.socket | None:
    """Return the connection of who takes the child over; None when nobody does, or there is nothing to take over."""
    poll = select.poll()
    poll.register(server, select.POLLIN)
    poll.register(ties.child, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0 and record.exists():
        ready = [descriptor for descriptor, _ in poll.poll(1000 * min(left, _LOOK))]
        if ties.child in ready:
            return None
        if server.fileno() in ready:
            connection, _ = server.accept()
            if _greet(connection, ties, key):
                return connection
            connection.close()
    return None


def _greet(connection: socket.socket, ties: Ties, key: str) -> bool:
    """Tell whether who connects belongs here; it is given the child then."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    connection.settimeout(_GREETING)
    said = b""
    while not said.endswith(b"\n") and len(said) < 256 and (more := _received(connection)):
        said += more
    if user != os.geteuid() or not hmac.compare_digest(said.strip(), key.encode()):
        return False
    try:
        socket.send_fds(connection, [b"%d\n" % ties.pid], [ties.child])
    except OSError:
        return False
    connection.settimeout(None)
    return True


def _received(connection: socket.socket) -> bytes:
    """Return what comes; nothing when the other side is gone, or silent for too long."""
    try:
        return connection.recv(256)
    except OSError:
        return b""


def _end(child: int, record: Path) -> NoReturn:
    """End the group, this process included."""
    os.killpg(0, signal.SIGTERM)
    poll = select.poll()
    poll.register(child, select.POLLIN)
    poll.poll(1000 * GRACE)
    for path in (record, record.with_suffix(".sock")):
        path.unlink(missing_ok=True)
    os.killpg(0, signal.SIGKILL)
    os._exit(1)
