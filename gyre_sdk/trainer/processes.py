"""Supervised child processes: the engine and the proxy.

A child runs on a leash (`leash.py`), in its own process group, with its output in a log file. It is ready when it
prints its ready line, which names its URL, or answers its health check. One that dies is started again on the same
port, so that the retries of agents reach it, at most `RESTARTS` times in `WINDOW` seconds.

One that may linger (`lingering.py`) outlives this process for a while when that is killed. The successor's `Child` of the
same name and specification takes it over in place of starting it: same process, same URL.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

from gyre_sdk.errors import TrainerError
from gyre_sdk.events import ProcessRestarted
from gyre_sdk.harness.ports import Observer
from gyre_sdk.trainer.leashed import Leashed, Process
from gyre_sdk.trainer.lingering import Berth, Linger, Mooring

RESTARTS = 5
WINDOW = 60.0
_READY_TIMEOUT = 180.0
_POLL = 0.05
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks no proxy of the environment."""
_FIT_TIMEOUT = 30.0
"""Seconds that a process which is taken over may take to show that it is fit."""
_LOOK = 5.0
"""Seconds between two looks whether a child that is ready answers."""
_INHERITED = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "HF_HOME")
"""Variables of this process's environment that say what a child is, with `GYRE_*`. Others differ between terminals, and
libraries set them when they are imported."""

_log = logging.getLogger("gyre.trainer")


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How a child is started."""

    name: str
    command: Callable[[int], list[str]]
    """Port -> module and arguments. 0 for the first start: any free one."""
    ready: str
    """Start of the ready line; the URL follows it. With `/` at its start: path of a health check that then answers 200."""
    log: Path
    port: int = 0
    """Port of the first start."""
    python: Path | None = None
    """What runs it, with gyre-sdk installed; None: what runs this process."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's."""
    patience: float = _READY_TIMEOUT
    """Seconds that it may take to be ready."""
    on_death: Callable[[str], None] = lambda url: None
    """Called with the URL when one that was ready has died, before it is started again."""
    on_ready: Callable[[str], None] = lambda url: None
    """Called with the URL after every start but the first, before the child counts as ready."""
    linger: Linger | None = None
    """How it outlives this process when that is killed, and where one that did is found; None: neither."""
    lingers: bool = True
    """False: it ends with this process all the same."""
    about: str = ""
    """What it depends on besides its command and environment, such as a digest of the settings in a file."""
    fit: Callable[[str], bool] = lambda url: True
    """Asked with the URL of one that is to be taken over, until it says so; else that is ended, and another started."""
    answers: Callable[[str], bool] | None = None
    """Asked with the URL every few seconds once it is ready, for a short answer; None: it is not known whether it answers."""
    silence: float = 600.0
    """Seconds without an answer after which it is taken for hung, ended and started again."""

    def specification(self) -> str:
        """Return a digest of what is started: two with the same are the same."""
        environment = {name: os.environ[name] for name in os.environ if name in _INHERITED or name.startswith("GYRE_")}
        environment |= self.environment
        said = [str(self.python or sys.executable), str(Path.cwd()), self.command(self.port), self.about]
        text = json.dumps(
            [*said, sorted(environment.items()), self.linger.seconds if self.linger and self.lingers else 0.0]
        )
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class _Here(Leashed):
    """A child on this machine, with its output in the log."""

    address = "127.0.0.1"

    def __init__(self, spec: ChildSpec, port: int, berth: Berth | None) -> None:
        self.port = port or (_free_port() if spec.ready.startswith("/") else 0)  # one that announces nothing is told
        inheritance = berth.open() if berth is not None else None
        try:
            with spec.log.open("ab") as log:
                super().__init__(
                    spec.command(self.port),
                    log,
                    python=spec.python,
                    environment=spec.environment,
                    inheritance=inheritance,
                )
        finally:
            if inheritance is not None:
                inheritance.listening.close()


class Child:
    """One supervised process. `begin` starts it, `wait` waits until it is ready, `stop` ends all that it started.

    Args:
        start: starts the process that a spec says, with a port, or 0 for any, elsewhere than here.
        poll: seconds between two looks at it.
        mooring: where one that was started elsewhere lingers; None: nowhere.
    """

    def __init__(
        self,
        spec: ChildSpec,
        observer: Observer,
        start: Callable[[ChildSpec, int], Process] | None = None,
        poll: float = _POLL,
        mooring: Mooring | None = None,
    ) -> None:
        self.spec = spec
        self.url = ""
        self.adopted = False
        """Whether the process was there before this one; known once it is ready, and false again once it has died."""
        self._start = start
        self._berth = mooring
        self._poll = poll
        self._observer = observer
        self._port = spec.port
        self._process: Process | None = None
        self._stopping = threading.Event()
        self._unwanted: tuple[int, str] = (0, "")
        """A process that is to be replaced, and why."""
        self._looked = 0.0
        self._silent = 0.0
        """Seconds for which it has not answered; time in which nobody looked does not count."""
        self._started = threading.Event()
        self._failure: TrainerError | None = None
        self._thread = threading.Thread(target=self._supervise, name=f"supervise {spec.name}", daemon=True)

    @property
    def pid(self) -> int:
        """Process id of the child that runs now, or 0."""
        process = self._process
        return process.pid if process is not None else 0

    def pids(self) -> dict[str, int]:
        """Return the process id by name."""
        return {self.spec.name: self.pid}

    def begin(self) -> None:
        """Start the child."""
        self._thread.start()

    def wait(self) -> str:
        """Wait until the child is ready; return its URL.

        Raises:
            TrainerError: it did not get ready; the message holds the end of its log.
        """
        self._started.wait()
        self.check()
        return self.url

    def check(self) -> None:
        """Raise when the child was given up.

        Raises:
            TrainerError: it could not be started, or died too often.
        """
        if self._failure is not None:
            raise self._failure

    def replace(self, pid: int, reason: str) -> None:
        """End the child and start it again, as after a death, if it is still the process `pid`."""
        self._unwanted = (pid, reason)

    def stop(self) -> None:
        """End the child's process group: SIGTERM, and SIGKILL for what is left after a while. Idempotent."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    # -- the supervising thread: it lives as long as the child may, as the leash asks ---------------------------------

    def _supervise(self) -> None:
        deaths: deque[float] = deque(maxlen=RESTARTS)
        try:
            if self._start is None:
                self._start = self._start_here()
            if not self._take_over():
                self._launch()
            self._started.set()
            while not self._stopping.wait(self._poll):
                assert self._process is not None
                reason = self._process.ended()
                if reason is None and self._unwanted[0] == self._process.pid:
                    reason = self._unwanted[1]
                reason = reason or self._hangs()
                if reason is None:
                    continue
                deaths.append(time.monotonic())
                if len(deaths) == RESTARTS and deaths[-1] - deaths[0] < WINDOW:
                    raise TrainerError(
                        f"the {self.spec.name} died {RESTARTS} times in {WINDOW:.0f} s, last with {reason};"
                        f" see {self.spec.log}:\n{_tail(self.spec.log)}"
                    )
                _log.warning("the %s ended with %s, and is started again", self.spec.name, reason)
                self._end_group()
                self.adopted = False
                self.spec.on_death(self.url)
                if not self._launch(again=True):
                    continue  # it died while it started: counted like any other death
                self.spec.on_ready(self.url)
                self._observer(ProcessRestarted(time.time(), self.spec.name, reason))
        except TrainerError as error:
            self._failure = error
        except Exception as error:  # boundary: top of the supervising thread
            self._failure = TrainerError(f"supervision of the {self.spec.name} failed: {type(error).__name__}: {error}")
            _log.exception("supervision of the %s failed", self.spec.name)
        finally:
            self._started.set()
            self._end_group()
            if self._berth is not None:
                self._berth.clear()

    def _hangs(self) -> str | None:
        """Look now and then whether it answers; return in words that it has not for too long."""
        now = time.monotonic()
        if self.spec.answers is None or now - self._looked < _LOOK:
            return None
        self._looked = now
        if self.spec.answers(self.url):
            self._silent = 0.0
            return None
        self._silent += _LOOK
        return f"no answer for {self._silent:.0f} s" if self._silent >= self.spec.silence else None

    def _start_here(self) -> Callable[[ChildSpec, int], Process]:
        spec, berth = self.spec, None
        if spec.linger is not None:
            berth = spec.linger.berth(spec.name, spec.specification(), lingers=spec.lingers)
        self._berth = berth
        return lambda spec, port: _Here(spec, port, berth)

    def _take_over(self) -> bool:
        """Take over the process that an earlier trainer left; what is not the same, or not fit, is ended."""
        found = self._berth.board() if self._berth is not None else None
        if found is None or self._berth is None:
            return False
        record, self._process = found
        same = bool(record.url) and record.specification == self._berth.specification
        if same and self._shows_fit(record.url):
            self.url, self._port, self.adopted = record.url, record.port, True
            _log.info("the %s of an earlier start goes on as process %d", self.spec.name, self.pid)
            return True
        why = "does not answer as it should" if same else "was started differently, or was not ready"
        _log.info("the %s of an earlier start %s and is replaced", self.spec.name, why)
        self._end_group()
        self._port = self.spec.port or record.port  # agents that go on look for it there
        return False

    def _shows_fit(self, url: str) -> bool:
        process, give_up = self._process, time.monotonic() + _FIT_TIMEOUT
        assert process is not None
        while process.ended() is None and time.monotonic() < give_up:
            if self.spec.fit(url):
                return True
            if self._stopping.wait(_POLL):
                break
        return False

    def _launch(self, *, again: bool = False) -> bool:
        """Start the process and wait until it is ready; False when it died before, and it is not the first start."""
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        with self.spec.log.open("ab") as log:
            seen = log.seek(0, os.SEEK_END)
        assert self._start is not None
        self._process = self._start(self.spec, self._port)
        url = self._wait_ready(seen, again)
        if url is None:
            return False
        self.url, self._silent = url, 0.0
        found = re.search(r":(\d+)$", url)
        if found:
            self._port = int(found.group(1))
        if self._berth is not None:
            self._berth.ready(url, self._port)
        return True

    def _wait_ready(self, seen: int, again: bool) -> str | None:
        process = self._process
        assert process is not None
        give_up = time.monotonic() + self.spec.patience
        while not self._stopping.wait(self._poll):
            reason = process.ended()
            url = self._announced(process, seen)
            if url is not None:
                return url
            if reason is not None:
                if again:
                    return None
                raise TrainerError(
                    f"the {self.spec.name} did not start: it ended with {reason}; see {self.spec.log}:\n"
                    f"{_tail(self.spec.log)}"
                )
            if time.monotonic() > give_up:
                raise TrainerError(
                    f"the {self.spec.name} was not ready after {self.spec.patience:.0f} s; see {self.spec.log}:\n"
                    f"{_tail(self.spec.log)}"
                )
        raise TrainerError(f"the {self.spec.name} was stopped while it started")

    def _announced(self, process: Process, seen: int) -> str | None:
        """Return the URL of a child that is ready."""
        if self.spec.ready.startswith("/"):
            url = f"http://{process.address}:{process.port}"
            try:
                with _DIRECT.open(url + self.spec.ready, timeout=2.0):
                    return url
            except OSError:
                self._stopping.wait(10 * _POLL)
                return None
        line = re.compile(re.escape(self.spec.ready).encode() + rb"\s+(\S+)")
        with self.spec.log.open("rb") as log:
            log.seek(seen)
            found = line.search(log.read())
        return found.group(1).decode().rstrip("/") if found else None

    def _end_group(self) -> None:
        if self._process is not None:
            self._process.end()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _tail(path: Path, lines: int = 12) -> str:
    try:
        return "\n".join(path.read_text("utf-8", "replace").splitlines()[-lines:])
    except OSError:
        return ""


def answers_within(url: str, seconds: float = 2.0) -> bool:
    """Tell whether something answers, whatever it says; one that refuses connections is dead or starts, and not silent."""
    try:
        _DIRECT.open(f"{url}/health", timeout=seconds).close()
    except OSError as error:
        return not isinstance(getattr(error, "reason", error), TimeoutError)
    except HTTPException:
        return True
    return True
