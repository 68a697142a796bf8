"""Children that outlive a trainer that was killed, for a while, and are taken over by its successor.

Each has a berth in a folder that only this user can enter: a record `NAME.json` with its key, and a socket `NAME.sock` that
its watcher listens at (`orphan.py`). A successor takes over what was started in the same way, and ends what was not.
The connection to the watcher is the leash from then on.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import signal
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.leashed import STOP_TIMEOUT, Inheritance, Process
from gyre_sdk.trainer.orphan import supported

__all__ = ["Adopted", "Berth", "Linger", "Mooring", "Record"]

UNKNOWN = "an unknown status"
"""How a process ended that this one did not start."""
_ANSWER = 60.0
"""Seconds that a watcher may take to answer; it needs some when it is ending its child."""

_log = logging.getLogger("gyre.trainer")


class Linger:
    """How long the children of a training live without a trainer, and where they are found.

    Args:
        folder: of their berths.
        seconds: 0: they end with the trainer, however it ends.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder = folder
        self.seconds = seconds
        self._held: dict[str, tuple[Record, Adopted]] = {}
        """What was found lingering, until its `Child` takes it."""

    def berth(self, name: str, specification: str, *, lingers: bool = True) -> Berth | None:
        """Return a child's place; None where nothing can linger on this system.

        Args:
            lingers: False for one that is to end with the trainer: it only finds what is there.
        """
        return Berth(self, name, specification, self.seconds if lingers else 0.0) if supported() else None

    def hold(self, names: Collection[str]) -> None:
        """Stop the clock of all that lingers: who takes it over may come to that much later. End what has none of the names.

        Raises:
            TrainerError: one of them does not answer.
        """
        for path in sorted(self.folder.glob("*.json")) if supported() else ():
            berth = Berth(self, path.stem, "", 0.0)
            found = berth.board()
            if found is None:
                continue
            if path.stem in names:
                self._held[path.stem] = found
                continue
            _log.info("the %s of an earlier start is not needed any more and is ended", path.stem)
            found[1].end()
            berth.clear()

    def taken(self, name: str) -> tuple[Record, Adopted] | None:
        """Return what is held under a name, to whom it belongs from then on."""
        return self._held.pop(name, None)

    def let_go(self) -> None:
        """Leave what nobody has taken: its time begins anew."""
        while self._held:
            self._held.popitem()[1][1].leave()


class Record(msgspec.Struct, frozen=True):
    """What a successor needs to know of a child."""

    specification: str
    """Of what was started."""
    key: str
    url: str = ""
    """Empty until it is ready."""
    port: int = 0


class Mooring(Protocol):
    """Where a child lingers, on this machine or another."""

    @property
    def specification(self) -> str:
        """Digest of what is started."""

    def board(self) -> tuple[Record, Process] | None:
        """Take over what lingers here, whatever it is; None when nothing does.

        Raises:
            TrainerError: it cannot be had.
        """

    def ready(self, url: str, port: int) -> None:
        """Note that the child is ready: only such a one is taken over."""

    def clear(self) -> None:
        """Leave nothing."""


class Berth:
    """The place of one child on this machine."""

    def __init__(self, linger: Linger, name: str, specification: str, seconds: float) -> None:
        self.specification = specification
        self._linger = linger
        self._seconds = seconds
        self._name = name
        self._path = linger.folder / f"{name}.json"

    def open(self) -> Inheritance | None:
        """Make the place of a child that is about to be started; None when it shall not linger.

        The old place is gone then: nobody finds what had it.
        """
        self.clear()
        if not self._seconds:
            return None
        folder = self._linger.folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        listening = socket.socket(socket.AF_UNIX)
        try:
            with _short(folder) as short:
                listening.bind(f"{short}/{self._name}.sock")
            listening.listen(1)
            self._record = Record(self.specification, secrets.token_urlsafe(32))
            self._write()
        except OSError as error:
            listening.close()
            _log.warning(
                "the %s will end with this process: %s is no place to leave it at: %s", self._name, folder, error
            )
            return None
        return Inheritance(listening, self._record.key, self._seconds, self._path)

    def ready(self, url: str, port: int) -> None:
        """Note that the child is ready: only such a one is taken over."""
        if self._path.exists():
            self._record = msgspec.structs.replace(self._record, url=url, port=port)
            self._write()

    def board(self) -> tuple[Record, Adopted] | None:
        """Take over what lingers here, whatever it is; None when nothing does.

        Raises:
            TrainerError: it does not answer, so that nobody can take it over or end it.
        """
        held = self._linger.taken(self._name)
        if held is not None:
            self._record = held[0]
            return held
        try:
            self._record = record = msgspec.json.decode(self._path.read_bytes(), type=Record)
        except (OSError, msgspec.DecodeError):
            return None
        line = socket.socket(socket.AF_UNIX)
        line.settimeout(_ANSWER)
        try:
            with _short(self._path.parent) as short:
                line.connect(f"{short}/{self._name}.sock")
            line.sendall(f"{record.key}\n".encode())
            said, descriptors, _, _ = socket.recv_fds(line, 64, 1)
        except TimeoutError:
            line.close()
            raise TrainerError(
                f"a {self._name} of an earlier start is there and does not answer at {self._path.with_suffix('.sock')};"
                " end it, then run the same command again"
            ) from None
        except OSError:  # nobody listens, or it ended meanwhile
            line.close()
            return None
        if not descriptors:
            line.close()
            return None
        line.settimeout(None)
        return record, Adopted(int(said), record.port, descriptors[0], line)

    def clear(self) -> None:
        """Leave nothing."""
        for path in (self._path, self._path.with_suffix(".sock")):
            path.unlink(missing_ok=True)

    def _write(self) -> None:
        fresh = self._path.with_suffix(".fresh")
        fresh.unlink(missing_ok=True)
        fresh.touch(mode=0o600)
        fresh.write_bytes(msgspec.json.encode(self._record))
        fresh.replace(self._path)


class Adopted:
    """A child that an earlier trainer started: a `Process`."""

    address = "127.0.0.1"

    def __init__(self, pid: int, port: int, process: int, line: socket.socket) -> None:
        """`process` is a descriptor of it, `line` the connection to its watcher."""
        self.pid = pid
        self.port = port
        self._process = process
        self._line = line
        self._over = False

    def ended(self) -> str | None:
        """Return that it ended, or None while it runs. What it ended with only who started it could know."""
        return UNKNOWN if self._over or self._gone(0, self._line.fileno()) else None

    def end(self) -> None:
        """End it, and what it started: SIGTERM, and SIGKILL for what is left after a while. Idempotent."""
        if self._over:
            return
        self._over = True
        if not self._gone(0):
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)
            if not self._gone(STOP_TIMEOUT):
                _log.warning("process %d did not end in %.0f s and is killed", self.pid, STOP_TIMEOUT)
        self._signal(signal.SIGKILL)
        self._gone(STOP_TIMEOUT)
        self._close()

    def leave(self) -> None:
        """Let it wait for another trainer."""
        if not self._over:
            self._over = True
            self._close()

    def _close(self) -> None:
        self._line.close()
        os.close(self._process)

    def _gone(self, seconds: float, *others: int) -> bool:
        poll = select.poll()
        for descriptor in (self._process, *others):
            poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # the group is gone


@contextmanager
def _short(folder: Path) -> Iterator[str]:
    """Give a path of a folder that is short enough for the address of a socket, 108 bytes, however deep it lies."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
