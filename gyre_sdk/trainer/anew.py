"""A trainer whose own units hang begins anew: the same command takes its place, as if it had been killed and started again.

The thread that computes may never come back, so nothing is ended in order. The new program has the same process id, and so
the same place in a terminal, a service or a Slurm step. It finds what a killed trainer leaves: what is durable, and children
that linger (`lingering.py`). A step that hangs again and again is not tried for ever.

What hangs and keeps Python's lock is not seen from here, and is ended from outside (`heartbeat.py`).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from gyre_sdk.errors import TrainerError
from gyre_sdk.events import ProcessRestarted
from gyre_sdk.trainer.heartbeat import watched_from_outside

if TYPE_CHECKING:
    from gyre_sdk.trainer.stack import Stack

__all__ = ["Anew", "Note", "watched"]

_TRIES = 3
"""Times that one step may hang before it is given up."""
_LOCKED = 3.0
"""Times `cells.stuck_s` for which Python's lock may be kept: a library that loads slowly keeps it too."""
_NAME = "hung.json"

_log = logging.getLogger("gyre.trainer")


class Note(msgspec.Struct, frozen=True):
    """What a trainer that hung leaves to its successor."""

    step: int
    """Whose batch was open."""
    times: int
    """That this step has hung so far."""
    reason: str
    told: bool = False
    """Whether the successor has told of it."""


@contextmanager
def watched(stack: Stack, ranks: int) -> Iterator[None]:
    """Begin this program anew when the core's own units hang; tell observers if that is how it began.

    For programs that are nothing but the training. Elsewhere a unit that hangs is logged.
    """
    core, cells = stack.core, stack.config.cells
    if core is None or cells is None:
        yield
        return
    anew = Anew(stack.config.output.dir, lambda: core.progress().step, ranks)
    if (reason := anew.untold()) is not None:
        stack.observer(ProcessRestarted(time.time(), "trainer", reason))
    with watched_from_outside(_LOCKED * cells.stuck_s) as end:

        def hung(reason: str) -> None:
            end()  # the next program is not its own to watch
            anew.begin(reason)

        core.on_hung = hung
        yield


class Anew:
    """Begins the program of this process anew.

    Args:
        folder: of the training; it keeps the note.
        step: gives the step whose batch is open.
        ranks: processes that train together. Of several none can be replaced alone: all end, and who started them may
            start them again (`torchrun --max-restarts`).
    """

    def __init__(self, folder: Path, step: Callable[[], int], ranks: int = 1) -> None:
        self._path = folder / _NAME
        self._step = step
        self._ranks = ranks

    def begin(self, reason: str) -> NoReturn:
        """End this program at once, whatever its threads do, and begin it again where that may help."""
        step = self._step()
        before = self._left()
        times = before.times + 1 if before is not None and before.step == step else 1
        try:
            self._path.write_bytes(msgspec.json.encode(Note(step, times, reason)))
        except OSError as error:  # it would hang again and again, and nobody would count
            os.write(2, f"gyre-train: {reason}; it does not begin anew: {error}; run the same command again\n".encode())
            os._exit(1)
        hopeless = times >= _TRIES
        what = f"step {step} hung for the {times}. time: {reason}"
        if hopeless or self._ranks > 1:
            next_step = (
                "look at the log and at the devices, raise cells.stuck_s if units take that long, then run the same"
                " command again: it resumes"
                if hopeless
                else "start the ranks again: they resume (torchrun does it with --max-restarts)"
            )
            if hopeless:
                self._path.unlink()
            os.write(2, f"gyre-train: {TrainerError.__name__}: {what}; {next_step}\n".encode())
            os._exit(1)
        _log.error("%s; this training begins anew from its checkpoint", what)
        open_now = Path("/proc/self/fd")
        for kept in list(open_now.iterdir()) if open_now.is_dir() else ():
            if int(kept.name) > 2:
                _close_on_exec(int(kept.name))
        try:
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
        except OSError as error:
            os.write(2, f"gyre-train: {what}; it cannot begin anew: {error}; run the same command again\n".encode())
            os._exit(1)

    def untold(self) -> str | None:
        """Return why the program before this one hung; None where it did not, or that was asked before."""
        note = self._left()
        if note is None or note.told:
            return None
        self._path.write_bytes(msgspec.json.encode(msgspec.structs.replace(note, told=True)))
        return note.reason

    def _left(self) -> Note | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Note)
        except (OSError, msgspec.DecodeError):
            return None


def _close_on_exec(descriptor: int) -> None:
    """Have a descriptor end with this program: a lock, a port or a device that it kept would be in the way of the next."""
    try:
        os.set_inheritable(descriptor, False)
    except OSError:
        pass  # closed meanwhile
