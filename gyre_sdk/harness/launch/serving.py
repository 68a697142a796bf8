"""The recording service of `gyre run`: one that runs already, or a `gyre serve` of its own that ends with it."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gyre_sdk.errors import ServiceError
from gyre_sdk.harness.service import ServiceClient
from gyre_sdk.settings import SERVICE_KEY

_READY = "ready "
_READY_SECONDS = 600.0
"""A large model takes minutes to load."""
_END_SECONDS = 40.0


@contextmanager
def served(arguments: Sequence[str]) -> Iterator[ServiceClient]:
    """Run `gyre serve` with these arguments, as a process that cannot outlive this one.

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
    said: deque[str] = deque(maxlen=20)
    listening = threading.Thread(target=_keep, args=(process.stderr, said), daemon=True)
    listening.start()
    try:
        url = _ready(process)
        if url is None:
            listening.join(5.0)
            raise ServiceError(
                f"gyre serve {' '.join(arguments)} did not come up (exit status {process.poll()}): {' '.join(said)[-1500:]}"
            )
        with ServiceClient(url, key) as client:
            yield client
    finally:
        _end(process)


def _ready(process: subprocess.Popen[str]) -> str | None:
    """Return the address that the service says it has; None when it ended before, or took too long."""
    assert process.stdout is not None
    watchdog = threading.Timer(_READY_SECONDS, process.kill)
    watchdog.start()
    try:
        for line in process.stdout:
            if line.startswith(_READY):
                threading.Thread(target=_keep, args=(process.stdout, deque(maxlen=1)), daemon=True).start()
                return line[len(_READY) :].strip()
    finally:
        watchdog.cancel()
    process.wait()
    return None


def _keep(lines: object, said: deque[str]) -> None:
    for line in lines:  # type: ignore[attr-defined]
        said.append(line.rstrip())


def _end(process: subprocess.Popen[str]) -> None:
    """Let calls in flight end, then the process; its group with it."""
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
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
