"""An agent program on this machine: its output streamed, its process group ended with it."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from gyre_sdk.errors import SettingsError
from gyre_sdk.settings import REPLICA_TOKEN, SERVICE_KEY

_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 5.0
_CHUNK = 65_536
_WITHHELD = (SERVICE_KEY, REPLICA_TOKEN)
"""Keys of gyre's own: who has the first can end runs with any reward."""


def require_here(program: str) -> None:
    """Check that a program can be run on this machine, before any run is made of it.

    Raises:
        SettingsError: it cannot.
    """
    if shutil.which(program) is None:
        raise SettingsError(f"{program!r} cannot be run here: there is no such program; install it, or give its path")


def run_here(
    command: Sequence[str],
    *,
    variables: Mapping[str, str],
    unset: Sequence[str],
    show: Callable[[bytes], None],
    check: Callable[[], None],
) -> int:
    """Run a program to its end and return its exit code, negative for a signal.

    Whatever it started in its process group ends with it.

    Args:
        variables: added to this process's environment, which goes without the keys of the service and of replicas.
        unset: further names taken out of it.
        show: gets its output and error output, as it comes.
        check: is called several times a second; what it raises ends the program, and is raised.

    Raises:
        SettingsError: there is no such program.
    """
    environment = {name: value for name, value in os.environ.items() if name not in (*unset, *_WITHHELD)}
    environment |= variables
    try:
        process = subprocess.Popen(
            list(command),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise SettingsError(
            f"{command[0]!r} cannot be run here: {error.strerror}; install it, or give its path"
        ) from error
    assert process.stdout is not None
    try:
        _pump(process, process.stdout, show, check)
        return process.wait()
    finally:
        _end(process)
        process.stdout.close()


def _pump(
    process: subprocess.Popen[bytes], output: IO[bytes], show: Callable[[bytes], None], check: Callable[[], None]
) -> None:
    """Show output until the program has ended; what holds its output open in the background is not waited for."""
    os.set_blocking(output.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while True:
            ended = process.poll() is not None
            if selector.select(0 if ended else _LOOK_SECONDS):
                data = output.read(_CHUNK)
                if data:
                    show(data)
                    continue
                if data == b"":
                    while process.poll() is None:
                        check()
                        time.sleep(_LOOK_SECONDS)
                    return
            if ended:
                return
            check()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the program's process group: politely, then not."""
    polite = process.poll() is None
    for number in (signal.SIGTERM, signal.SIGKILL) if polite else (signal.SIGKILL,):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
