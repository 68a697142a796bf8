"""The controller's side of the supervisor in `script.py`: requests out, events and answers in. Knows no Docker."""

from __future__ import annotations

import itertools
import posixpath
import queue
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from gyre_sdk.harness.workspace.channel import Channel
from gyre_sdk.harness.workspace.script import BLOCK, source

_START_S = 20.0
"""Seconds after which a command that did not start, for want of processes, is given up."""
LATE_S = 5.0
"""Seconds past a command's timeout after which a supervisor that does not answer, as one that was stopped, is given up."""
KILLING_S = 90.0
"""Seconds for the killing of every process, which waits for those that wait for a disk; a supervisor's start may begin with it."""
_ids = itertools.count(1)


class SupervisorLost(Exception):
    """The supervisor ended or stopped answering. Internal: a workspace turns it into its own error or starts a new one."""


class SupervisorUnfit(Exception):
    """The image lacks what the supervisor needs. Internal."""


@dataclass(slots=True)
class Running:
    """A command under way."""

    id: str
    """Unique in this process: also the environment marker of the command's processes."""
    slot: str
    """Name, inside, of the files of its code and output."""
    wrapper: str = ""
    """Process id, inside, of the subshell that reports the command's end."""
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    """What a launcher's events of this command carry."""
    launched: bool = False
    """Whether a launcher runs it: then `done` comes in any case."""
    asked_at: float = field(default_factory=time.monotonic)
    leader: str = "none"
    """Process id, inside, of the command: the leader of its session."""
    events: queue.SimpleQueue[tuple[str, str]] = field(default_factory=queue.SimpleQueue)
    """(`exit`, 'status kills'), (`done`, 0 or 1 or both outputs), (`fail`, why), (`lost`, ''), (`cancel`, '')."""


@dataclass(slots=True)
class _Answer:
    id: str
    content: bytes = b""
    status: int | None = None
    ready: threading.Event = field(default_factory=threading.Event)


def arguments(
    folder: str,
    *,
    half_cap: int,
    how: str,
    keep: str,
    workspace: str,
    shell: tuple[str, ...] = ("sh",),
    tools: str = "",
    bare: bool = False,
    again: bool = False,
) -> list[str]:
    """Return the command line that starts a supervisor.

    Args:
        half_cap: bytes kept of the head and of the tail of each output.
        how: `user` (kill by `kill -9 -1`), `loop` (one by one), `marked` (only processes with the workspace's marker).
        keep: process ids that are never killed, or `first` to keep all that run already.
        shell: what runs it; a binary that its own user cannot read keeps that user from tracing it.
        tools: folder of tools for it, see `toolbox`.
        bare: whether it may start without all that it needs.
        again: whether the workspace is recycled: the supervisor then notes what commands could change of itself.
    """
    flags = ["bare" if bare else "", "again" if again else ""]
    return [*shell, "-s", folder, str(half_cap), how, keep, workspace, tools, *flags]


def fresh_name() -> str:
    """Return a name that no other supervisor's folder has."""
    return secrets.token_hex(8)


class Supervisor:
    """One supervisor. Methods may be called from many threads.

    Attributes:
        shell: `bash` or `sh`, what commands are run with.
        keep: process ids that were there before the first command.
        bare: whether it lacks tools, so that it can kill and answer, but not launch.
        guarded: whether the kernel keeps other processes of its user out of its memory and descriptors.
        left: process ids that survived the killing with which the supervisor started.
    """

    def __init__(
        self, channel: Channel, folder: str, *, launcher: bytes | None = None, start_timeout: float = KILLING_S
    ) -> None:
        nonce = secrets.token_hex(16).encode()
        self.folder = folder
        self.shell = "sh"
        self.keep = ""
        self.left = ""
        self.guarded = self.bare = False
        self.alive = True
        self._channel = channel
        self._nonce = nonce.decode()
        self._answer_mark = b"\n=" + nonce + b" "
        self._part_mark = b"\n~" + nonce + b"\n"
        self._running: dict[str, Running] = {}
        self._slots: list[str] = []
        self._answers: deque[_Answer] = deque()
        self._answering = bytearray()
        self._searched = 0
        self._partial = b""
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._ready = threading.Event()
        self._unfit: str | None = None
        self.noise = deque[bytes](maxlen=20)
        """Last lines that were not the supervisor's: engine messages, shell diagnostics."""
        channel.open(self._receive)
        try:
            channel.send(source(self._nonce, launcher))
        except OSError:
            self._end()
        self._ready.wait(start_timeout)
        if self._unfit is not None:
            self.close()
            raise SupervisorUnfit(self._unfit)
        if not self._ready.is_set() or not self.alive:
            why = f"no answer within {start_timeout:g} s" if self.alive else "it ended at once"
            self.close()
            raise SupervisorLost(self.heard() or why)

    # -- requests ------------------------------------------------------------------------------------------------

    def reserve(self) -> Running:
        """Return a command to be started: its name, and the files that it may use."""
        with self._lock:
            serial = next(_ids)
            return Running(f"x{serial}", self._slots.pop() if self._slots else f"s{serial}")

    def start(self, running: Running, code: str) -> None:
        """Start a command; `code` ends by calling `launch`."""
        with self._lock:
            self._running[running.id] = running
        self._send(b"R %s %d 0\n" % (running.id.encode(), _lines(code)), _text(code))

    def ask(self, code: str, *, timeout: float = 60.0, data: bytes | None = None) -> tuple[int, bytes]:
        """Run code in the main loop and return (status, output).

        Raises:
            SupervisorLost: it died, or gave no answer within `timeout` seconds (and is then given up).
        """
        answer = self._request(code, data)
        if not self.alive:
            answer.ready.set()
        if not answer.ready.wait(timeout):
            self.close()
            raise SupervisorLost(f"no answer within {timeout:g} s")
        if answer.status is None:
            raise SupervisorLost(self.heard() or "it ended")
        return answer.status, answer.content

    def _request(self, code: str, data: bytes | None = None) -> _Answer:
        answer = _Answer(f"a{next(_ids)}")
        head = b"S %s %d 0\n" % (answer.id.encode(), _lines(code))
        body = _text(code)
        if data is not None:
            blocks = -(-len(data) // BLOCK)
            head = b"T %s %d %d\n" % (answer.id.encode(), _lines(code), blocks)
            body += data + b"\0" * (blocks * BLOCK - len(data))
        with self._send_lock:
            with self._lock:
                self._answers.append(answer)
            self._write(head + body)
        return answer

    def is_attended(self, running: Running, timeout: float = 10.0) -> bool:
        """Tell whether the subshell that will report the command's end still lives: the command may have killed it."""
        with self._lock:
            busy = bool(self._answers)
        if not running.wrapper:
            return busy or time.monotonic() < running.asked_at + _START_S
        if busy:
            return True
        state = f"{{ IFS= read -r st </proc/{running.wrapper}/stat; }} 2>/dev/null"
        return self.ask(f"{state} && case ${{st##*) }} in Z*|X*) false;; *) true;; esac", timeout=timeout)[0] == 0

    def kill(self, id: str, leader: str) -> bool:
        """Kill what a command started: what has its marker or is of its session; False when some of it kept escaping."""
        return self.ask(f"kill_marked {id} {leader}", timeout=LATE_S)[0] == 0

    def collect(self, running: Running, *, drop: bool) -> tuple[tuple[bytes, int | None], tuple[bytes, int | None]]:
        """Return (kept bytes, bytes lost or None when unknown) of both outputs.

        Args:
            drop: remove the command's files; what its processes still write is then thrown away.
        """
        _, content = self.ask(f"collect {running.slot}{' drop' if drop else ''}")
        outputs: list[tuple[bytes, int | None]] = []
        for part in content.split(self._part_mark)[:2]:
            lost, _, kept = part.partition(b"\n")
            outputs.append((kept, int(lost) if lost.isdigit() else None))
        return outputs[0], outputs[1]

    def release(self, running: Running) -> None:
        """Let another command use the files of one whose outputs ended and were collected."""
        with self._lock:
            self._slots.append(running.slot)

    def forget(self, running: Running) -> None:
        """Drop a command's state here; its late events are ignored."""
        with self._lock:
            self._running.pop(running.id, None)

    def close(self) -> None:
        """Let go of the supervisor. Idempotent."""
        self._channel.close()
        self._end()

    def heard(self) -> str:
        """Return the last text that was not protocol, for messages."""
        return b" | ".join(self.noise).decode(errors="replace")[-500:]

    # -- wire ----------------------------------------------------------------------------------------------------

    def _send(self, head: bytes, body: bytes) -> None:
        with self._send_lock:
            self._write(head + body)

    def _write(self, data: bytes) -> None:
        if not self.alive:
            raise SupervisorLost(self.heard() or "it ended")
        try:
            self._channel.send(data)
        except (OSError, ValueError) as error:
            self._end()
            raise SupervisorLost(str(error)) from error

    def _receive(self, kind: int, data: bytes) -> None:
        if kind == 0:
            self._end()
        elif kind == 1:
            self._answer(data)
        else:
            *lines, self._partial = (self._partial + data).split(b"\n")
            for line in lines:
                self._event(line)

    def _event(self, line: bytes) -> None:
        mark, _, said = line.decode(errors="replace").partition(" ")
        name, _, rest = said.partition(" ")
        id, _, value = rest.partition(" ")
        with self._lock:
            running = self._running.get(id)
        if mark != f"@{self._nonce}" and (running is None or mark != f"@{running.mark}"):
            self.noise.append(line[:300])
        elif name == "ready":
            head, _, self.left = rest.partition(" left:")
            head, _, self.keep = head.partition(" keep:")
            _, self.shell, guarded, bare = head.split()
            self.guarded, self.bare = guarded == "guarded", bare == "bare"
            if self.bare:
                self.folder = posixpath.dirname(self.folder)
            self._ready.set()
        elif name == "unfit":
            self._unfit = rest.strip()
            self._ready.set()
        elif running is None:
            pass  # of a command that was given up
        elif name == "started":
            running.wrapper, _, running.leader = value.partition(" ")
            running.launched = mark == f"@{running.mark}"
        else:
            running.events.put((name, value))

    def _answer(self, data: bytes) -> None:
        """Take bytes of answers, each ended by the mark, its id and its status."""
        self._answering += data
        while True:
            at = self._answering.find(self._answer_mark, self._searched)
            end = self._answering.find(b"\n", at + len(self._answer_mark)) if at >= 0 else -1
            if end < 0:
                self._searched = at if at >= 0 else max(0, len(self._answering) - len(self._answer_mark) + 1)
                return
            id, _, status = self._answering[at + len(self._answer_mark) : end].partition(b" ")
            content = bytes(memoryview(self._answering)[:at])
            del self._answering[: end + 1]
            self._searched = 0
            with self._lock:
                answer = self._answers.popleft() if self._answers else None
            if answer is None or id != answer.id.encode() or not status.isdigit():
                self.close()
                return
            answer.content, answer.status = content, int(status)
            answer.ready.set()

    def _end(self) -> None:
        with self._lock:
            self.alive = False
            answers, running = list(self._answers), list(self._running.values())
            self._answers.clear()
        self._ready.set()
        for answer in answers:
            answer.ready.set()
        for one in running:
            one.events.put(("lost", ""))


def _lines(code: str) -> int:
    return code.count("\n") + 1


def _text(code: str) -> bytes:
    return code.encode(errors="surrogateescape") + b"\n"
