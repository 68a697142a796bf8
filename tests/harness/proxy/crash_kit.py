"""Processes that start in a few hundredths of a second, to be killed again and again: the proxy, and an engine to check.

The engine's next token is a hash of the whole prefix: whoever continues an answer, from whatever token, on whatever
replica, must arrive at the same answer, and the test can compute it. The engine logs each token before it sends it.

Both are forked from a process that has imported everything already: `crash_template`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SERVICE_KEY = "the-service-key"
_PATIENCE = 60.0
"""Seconds that a process may take to start, or to be gone."""


def next_token(prefix: Sequence[int], letters: Sequence[int], end: int) -> int:
    """Return what follows a prefix: a letter, or the end of the turn once in twelve times."""
    number = int.from_bytes(blake2b(array("i", prefix).tobytes(), digest_size=4).digest(), "little")
    return end if number % 12 == 0 else letters[number // 12 % len(letters)]


def answer(prompt: Sequence[int], limit: int, letters: Sequence[int], end: int) -> list[int]:
    """Return the one answer to a prompt."""
    ids: list[int] = []
    while len(ids) < limit and (not ids or ids[-1] != end):
        ids.append(next_token([*prompt, *ids], letters, end))
    return ids


class Template:
    """The process that forks; whatever of its forks is left ends with it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("crash_template.py")), str(theirs.fileno())],
                env={**os.environ, "GYRE_SERVICE_KEY": SERVICE_KEY},
                pass_fds=[theirs.fileno()],
            )
        self._orders = Connection(ours.detach())

    def fork(self, kind: str, *facts: Any) -> tuple[int, str]:
        """Start a process; return its id and its address once it listens."""
        pid, line = self._ask((kind, facts))
        assert line.startswith("ready http://"), f"the {kind} did not start: {line!r}"
        return pid, line.split()[1]

    def kill(self, pid: int) -> None:
        """SIGKILL; return when the process is gone."""
        os.kill(pid, signal.SIGKILL)
        self._ask(pid)

    def close(self) -> None:
        """End the template and what it forked."""
        self._orders.close()
        assert self._process.wait(_PATIENCE) == 0

    def _ask(self, order: Any) -> Any:
        self._orders.send(order)
        assert self._orders.poll(_PATIENCE), "no answer from the template"
        return self._orders.recv()


class Killable:
    """A process of ours on a port that it keeps when it is started again."""

    def __init__(self, template: Template) -> None:
        self.port = 0
        self.url = ""
        self._template = template
        self._pid: int | None = None

    def start(self) -> None:
        """Start; return when it listens."""
        self._pid, self.url = self._fork()
        self.port = int(self.url.rsplit(":", 1)[1])

    def kill(self) -> None:
        """SIGKILL, where it runs."""
        if self._pid is not None:
            self._template.kill(self._pid)
            self._pid = None

    def _fork(self) -> tuple[int, str]:
        raise NotImplementedError


class KillableProxy(Killable):
    """`gyre serve`."""

    def __init__(self, template: Template, arguments: list[str]) -> None:
        super().__init__(template)
        self._arguments = arguments

    def _fork(self) -> tuple[int, str]:
        return self._template.fork("proxy", [*self._arguments, "--port", str(self.port)])


class KillableEngine(Killable):
    """An engine that hashes; `log` is a file that survives it."""

    def __init__(self, template: Template, log: Path, letters: Sequence[int], end: int) -> None:
        super().__init__(template)
        self.log = log
        self._facts = (str(log), tuple(letters), end)

    def _fork(self) -> tuple[int, str]:
        return self._template.fork("engine", *self._facts, self.port)


@dataclass
class Logged:
    """One request as an engine logged it."""

    prompt: list[int]
    sampled: list[int] = field(default_factory=list)


def read_log(*logs: Path) -> dict[str, Logged]:
    """Return what engines logged, by request id."""
    found: dict[str, Logged] = {}
    for log in logs:
        for line in log.read_text().splitlines():
            name, value = line.split(" ", 1)
            if name in found:
                found[name].sampled.append(int(value))
            else:
                found[name] = Logged(json.loads(value))
    return found
