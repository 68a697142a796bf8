"""What runs on a node of a cluster: the processes of one cell, on leashes held by one actor.

The actor decides nothing. It starts what it is told, keeps what the processes say until it is collected, and when it
ends, however it ends, its processes end with it. It answers to the newest trainer only.
"""

from __future__ import annotations

import io
import signal
import socket
import subprocess
import threading
from pathlib import Path

import msgspec

from gyre_sdk.trainer.cells.launch.terms import Term, Terms
from gyre_sdk.trainer.leashed import Leashed
from gyre_sdk.trainer.lingering import Record

__all__ = ["Found", "Look", "Node", "Order"]

KEPT = 1 << 20
"""Bytes of a process's output that wait to be collected; older ones are dropped."""
_LAST_WORDS = 0.5
"""Seconds that the end of an ended process's output may take."""


class Order(msgspec.Struct, frozen=True):
    """A process to start."""

    name: str
    arguments: list[str]
    """Module and its arguments."""
    python: str | None
    """What runs it; None: what runs the actor."""
    environment: dict[str, str]
    """Added to the node's."""
    folder: str
    """Where it runs, if the node has it."""


class Look(msgspec.Struct, frozen=True):
    """What there is to know of a process."""

    ended: str | None
    """What it ended with; None while it runs."""
    start: int
    """Place of `output` in all that it said, bytes. More than was asked for when some was dropped."""
    output: bytes


class Found(msgspec.Struct, frozen=True):
    """A process that an earlier trainer started, and saw ready."""

    record: Record
    pid: int
    said: int
    """Bytes of its output that were collected."""


class Node:
    """The actor. Its calls are short and come one after the other, in a thread that lives as long as it does.

    All raise `Fenced` for a term that is not the newest.

    Args:
        warden: whose terms it knows.
    """

    def __init__(self, warden: str) -> None:
        self._terms = Terms(warden)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray blocks it, and processes inherit that
        self._processes: dict[str, _Spoken] = {}

    def address(self, term: Term) -> str:
        """Return the node's address in the cluster."""
        self._terms.check(term)
        import ray

        return str(ray.util.get_node_ip_address())

    def free_port(self, term: Term, address: str) -> int:
        """Return a port on which nothing listens."""
        self._terms.check(term)
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
            free.bind((address, 0))
            return int(free.getsockname()[1])

    def start(self, term: Term, order: Order) -> int:
        """Start a process in place of the one with its name; return its id.

        Raises:
            OSError: it could not be started.
        """
        self.kill(term, order.name)
        process = _Spoken(order)
        self._processes[order.name] = process
        return process.pid

    def note(self, term: Term, name: str, record: Record) -> None:
        """Note that a process is ready, for a trainer that comes later."""
        self._terms.check(term)
        self._processes[name].record = record

    def found(self, term: Term, name: str) -> Found | None:
        """Return what is known of a process that was there before; None when it was not ready, or there is none."""
        self._terms.check(term)
        process = self._processes.get(name)
        if process is None or process.record is None:
            return None
        return Found(process.record, process.pid, process.collected)

    def look(self, term: Term, name: str, said: int) -> Look:
        """Return how a process is, and its output from byte `said` on; what is before that is not asked for again."""
        self._terms.check(term)
        return self._processes[name].look(said)

    def terminate(self, term: Term, name: str) -> None:
        """Ask a process and what it started to end."""
        self._terms.check(term)
        self._processes[name].terminate()

    def kill(self, term: Term, name: str) -> None:
        """End a process and what it started. Idempotent."""
        self._terms.check(term)
        if name in self._processes:
            self._processes[name].kill()
            self._processes[name].record = None


class _Spoken(Leashed):
    """A process whose output is collected by a thread, so that it never waits for who reads it."""

    def __init__(self, order: Order) -> None:
        super().__init__(
            order.arguments,
            subprocess.PIPE,
            python=None if order.python is None else Path(order.python),
            environment=order.environment,
            folder=folder if (folder := Path(order.folder)).is_dir() else None,
        )
        self.record: Record | None = None
        """Once it is ready."""
        self._said = bytearray()
        self._start = 0
        self._waited = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._collect, name=f"output of {order.name}", daemon=True)
        self._thread.start()

    @property
    def collected(self) -> int:
        """Bytes of its output that nobody asks for again."""
        with self._lock:
            return self._start

    def look(self, said: int) -> Look:
        ended = self.ended()
        if ended is not None and not self._waited:
            self._waited = True
            self._thread.join(_LAST_WORDS)  # in vain when what it started holds on to the pipe
        with self._lock:
            if said > self._start:
                del self._said[: said - self._start]
                self._start = said
            return Look(ended, self._start, bytes(self._said))

    def _collect(self) -> None:
        pipe = self.process.stdout
        assert isinstance(pipe, io.BufferedReader)
        with pipe:
            while data := pipe.read1(1 << 16):
                with self._lock:
                    self._said += data
                    over = len(self._said) - KEPT
                    if over > 0:
                        del self._said[:over]
                        self._start += over
