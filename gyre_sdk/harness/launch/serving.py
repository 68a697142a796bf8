"""The recording service of `gyre run`: one that runs already, or a `gyre serve` of its own that ends with it."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from gyre_sdk.errors import ServiceError
from gyre_sdk.harness.service import ServiceClient
from gyre_sdk.settings import SERVICE_KEY

_READY = "ready "
_READY_SECONDS = 600.0
"""A large model takes minutes to load."""
_END_SECONDS = 40.0


@contextmanager
def served(arguments: Sequence[str], say: Callable[[str], None] = lambda line: None) -> Iterator[ServiceClient]:
    """Run `gyre serve` with these arguments, as a process that cannot outlive this one.

    Args:
        arguments: of `gyre serve`.
        say: gets each line that a service that came up wrote to its standard error: what it warns of.

    Raises:
        ServiceError: it did not come up; holds what it said.
    """
    key = os.environ.get(SERVICE_KEY) or secrets.token_urlsafe(32)
    # A process group of its own: Ctrl-C in a terminal must reach it only once the runs are on record.
    process = subprocess.Popen(
        [sys.executable, "-m", "gyre_sdk.trainer.leash", "gyre_sdk.cli", "serve", *arguments],
        env={**os.environ, SERVICE_KEY: key},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    heard = _Heard(say)
    listening = threading.Thread(target=heard.read, args=(process.stderr,), daemon=True)
    listening.start()
    try:
        url = _ready(process)
        if url is None:
            listening.join(5.0)
            raise ServiceError(
                f"gyre serve {' '.join(arguments)} did not come up (exit status {process.poll()}): {' '.join(heard.waiting)[-1500:]}"
            )
        heard.pass_on()
        with ServiceClient(url, key) as client:
            yield client
    finally:
        _end(process, listening)


class _Heard:
    """What the service says: kept until it is up, for the error where it does not come up; then passed on."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._up = False
        self.waiting: deque[str] = deque(maxlen=20)

    def read(self, lines: Iterable[str]) -> None:
        """Take lines until their end."""
        for line in lines:
            with self._lock:
                self.waiting.append(line.rstrip())
                self._flush()

    def pass_on(self) -> None:
        """The service is up."""
        with self._lock:
            self._up = True
            self._flush()

    def _flush(self) -> None:
        while self._up and self.waiting:
            self._say(self.waiting.popleft())


def _ready(process: subprocess.Popen[str]) -> str | None:
    """Return the address that the service says it has; None when it ended before, or took too long."""
    assert process.stdout is not None
    watchdog = threading.Timer(_READY_SECONDS, process.kill)
    watchdog.start()
    try:
        for line in process.stdout:
            if line.startswith(_READY):
                threading.Thread(target=deque, args=(process.stdout, 0), daemon=True).start()  # read, not kept
                return line[len(_READY) :].strip()
    finally:
        watchdog.cancel()
    process.wait()
    return None


def _end(process: subprocess.Popen[str], listening: threading.Thread) -> None:
    """Let calls in flight end, then the process; its group with it. What it said last is still heard."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    listening.join(5.0)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
