"""A command that runs beside its caller, on streams of its own."""

from __future__ import annotations

import codecs
import secrets
import shlex
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Literal

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness import cancelling
from gyre_sdk.harness.cancelling import Cancelled
from gyre_sdk.harness.workspace.channel import Channel
from gyre_sdk.harness.workspace.commands import KILLED
from gyre_sdk.harness.workspace.output import Capture, clip

RUNNER = r"""IFS= read -r N
IFS= read -r k
c=
while [ "$k" -gt 0 ]; do
  IFS= read -r l || exit
  c="$c$l
" k=$((k-1))
done
say() { printf '\n@%s %s\n' "$N" "$*" >&2; }
eval "$c"
"""
"""What a process is started with: reads a nonce and lines of code from its input, and leaves the rest of it to the command.

Its marks go to the error output, each between line ends that are its own: `started <session>`, `exit <status>`, `fail <why>`.
"""
HELD_PIPE = 0.15
"""Seconds that a background child may keep the output of an ended command open before it is no longer waited for."""
_START = 60.0
"""Seconds for a process to start."""
Stream = Literal["stdout", "stderr"]


def running(script: bytes, *, shell: str, entering: str, exporting: str, file: str, marker: str) -> str:
    """Return the code that a runner runs a script with.

    Args:
        entering: see `commands.entry`.
        exporting: see `commands.exports`: in a shell of its own, as its variables may have the names of the runner's.
        file: path inside where the script is put.
        marker: what its processes carry in their environment.

    Raises:
        WorkspaceError: the script has a byte that shell code cannot have.
    """
    if b"\0" in script:
        raise WorkspaceError("a command to start contains a NUL byte; remove it")
    place = shlex.quote(file)
    return (
        f"umask 022\n{entering}"
        f"printf %s {shlex.quote(script.decode(errors='surrogateescape'))} >{place} || {{ say fail room; exit; }}\n"
        "say started $$\n"
        f"(\n{exporting}export GYRE_EXEC_ID={marker}\nexec {shell} {place}\n)\n"
        f"set -- $?; {{ rm -f {place}; }} 2>/dev/null; say exit $1"
    )


class NotStarted(Exception):
    """The runner ended without starting the command: why, in the runner's word or the engine's. Internal."""


class Process:
    """Implements `ports.Process`. Methods may be called from many threads.

    Args:
        channel: to a `RUNNER` that waits for its code.
        code: what it runs; it says `started`, then `exit`.
        limit: bytes kept of each output that nobody has read yet.
        kill: kills what belongs to the session with the given leader.
        lost: called when the runner ended without a word; raises where the workspace is dead.
    """

    def __init__(
        self, channel: Channel, code: str, *, limit: int, kill: Callable[[str], None], lost: Callable[[str], None]
    ) -> None:
        nonce = secrets.token_hex(16).encode()
        self._channel = channel
        self._mark = b"\n@" + nonce + b" "
        self._limit = limit
        self._kill = kill
        self._lost = lost
        self._session = ""
        self._failed: str | None = None
        self._status: int | None = None
        self._exited_at = 0.0
        self._over = False
        self._pending = b""
        self._captures = {"stdout": Capture(limit), "stderr": Capture(limit)}
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in self._captures}
        self._changed = threading.Condition()
        channel.open(self._receive)
        try:
            channel.send(b"%s\n%d\n%s" % (nonce, code.count("\n") + 1, code.encode(errors="surrogateescape") + b"\n"))
        except OSError:
            pass  # the runner is gone: what it said comes through the channel
        try:
            self._wait(lambda: bool(self._session) or self._failed is not None or self._over, _START)
        except BaseException:
            channel.close()
            raise
        if not self._session:
            channel.close()
            said = self._captures["stdout"].take()[0] + self._captures["stderr"].take()[0]  # engines complain on either
            raise NotStarted(self._failed or said.decode(errors="replace").strip()[-500:])
        channel.settle()

    # -- ports.Process -------------------------------------------------------------------------------------------

    def read(self, timeout: float | None = None, *, stream: Stream = "stdout") -> str:
        """See `ports.Process`."""
        decoder = self._decoders[stream]
        deadline = None if timeout is None else time.monotonic() + timeout
        capture = self._captures[stream]
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._wait(lambda: bool(len(capture)) or self._drained(), left):
                raise TimeoutError(f"the process wrote nothing to its {stream} within {timeout:g} s")
            with self._changed:
                content, lost = capture.take()
                ended = not content and self._drained()
            if lost:
                content, _ = clip(content, lost, self._limit)
            text = decoder.decode(content, final=ended)
            if text or ended:
                return text

    def write(self, data: bytes | str) -> None:
        """See `ports.Process`."""
        try:
            self._channel.send(data.encode() if isinstance(data, str) else data)
        except (OSError, ValueError) as error:
            raise WorkspaceError(f"the process does not take input any more: {error}") from error

    def close_input(self) -> None:
        """See `ports.Process`."""
        self._channel.end_input()

    def poll(self) -> int | None:
        """See `ports.Process`."""
        with self._changed:
            if self._status is None and not self._over:
                return None
        return self.wait()

    def wait(self, timeout: float | None = None) -> int:
        """See `ports.Process`."""
        if not self._wait(lambda: self._status is not None or self._over, timeout):
            raise TimeoutError(f"the process still runs after {timeout:g} s")
        if self._status is None:
            self._lost("the process ended without a word")
            return KILLED
        self._wait(lambda: self._over, HELD_PIPE)
        return self._status

    def kill(self) -> None:
        """See `ports.Process`."""
        with self._changed:
            if self._over:
                return
        self._kill(self._session)
        self._wait(lambda: self._over, HELD_PIPE)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            if self._status is None:
                self.kill()
        finally:
            self._channel.close()

    # -- for the plain way to run commands -------------------------------------------------------------------------

    def captured(self, stream: Stream) -> tuple[bytes, int]:
        """Return (what was kept, bytes lost in its middle) of an output that nobody read."""
        with self._changed:
            return self._captures[stream].take()

    # -- inside --------------------------------------------------------------------------------------------------

    def _drained(self) -> bool:
        """Whether nothing more will be read: the streams ended, or only a background child holds them."""
        return self._over or (self._status is not None and time.monotonic() > self._exited_at + HELD_PIPE)

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Wait for a condition of the process; False at the timeout. A cancelled wait leaves the process alone."""
        deadline = None if timeout is None else time.monotonic() + timeout
        wish = cancelling.current.get()
        with ExitStack() as registered:
            if wish is not None:
                registered.enter_context(wish.calls(self._notify))
            with self._changed:
                while not ready():
                    if wish is not None and wish.wished:
                        raise Cancelled
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        return False
                    if self._status is not None and not self._over:  # `_drained` turns true by time alone
                        left = min(HELD_PIPE, left) if left is not None else HELD_PIPE
                    self._changed.wait(left)
                return True

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _receive(self, kind: int, data: bytes) -> None:
        with self._changed:
            if kind == 0:
                self._captures["stderr"].add(self._pending)
                self._pending, self._over = b"", True
            elif kind == 1:
                self._captures["stdout"].add(data)
            else:
                self._receive_error(data)
            self._changed.notify_all()

    def _receive_error(self, data: bytes) -> None:
        """Take error output and the marks within; what could be the beginning of one waits for its rest."""
        self._pending += data
        while True:
            at = self._pending.find(self._mark)
            if at < 0:
                held = _beginning(self._pending, self._mark)
                self._captures["stderr"].add(self._pending[: len(self._pending) - held])
                self._pending = self._pending[len(self._pending) - held :]
                return
            end = self._pending.find(b"\n", at + len(self._mark))
            if end < 0:
                return
            word, _, value = self._pending[at + len(self._mark) : end].decode(errors="replace").partition(" ")
            self._captures["stderr"].add(self._pending[:at])
            self._pending = self._pending[end + 1 :]
            if word == "started":
                self._session = value
            elif word == "exit":
                self._status, self._exited_at = int(value), time.monotonic()
            elif word == "fail":
                self._failed = value


def _beginning(data: bytes, mark: bytes) -> int:
    """Return how many bytes at the end of `data` are the beginning of `mark`."""
    for length in range(min(len(data), len(mark) - 1), 0, -1):
        if mark.startswith(data[-length:]):
            return length
    return 0
