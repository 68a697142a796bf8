"""The trainer's side of the agents' process: asks for runs, learns what came of them, finds the process again.

A run that was asked for gets one outcome, whatever happens to the process: when it dies and comes back, its runs are
recorded as cancelled and asked for again. Runs that a former trainer asked for are taken up by whoever asks for the same.
"""

from __future__ import annotations

import logging
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from typing import Any

from gyre_sdk.errors import TrainerError
from gyre_sdk.harness.hooks import Fanout
from gyre_sdk.harness.ports import Observer
from gyre_sdk.harness.task import Task
from gyre_sdk.records import RunRecord, RunResult
from gyre_sdk.trainer.agents.outcome import Outcome, OutcomeKind, error_of
from gyre_sdk.trainer.agents.parcels import Parcels
from gyre_sdk.trainer.agents.settings import AgentSettings
from gyre_sdk.trainer.agents.wire import (
    Begin,
    Ended,
    Hello,
    Know,
    Line,
    Message,
    Order,
    Refused,
    Running,
    Seen,
    Serve,
    Stop,
    Stopped,
    Told,
    Welcome,
    dial,
)

Done = Callable[[Outcome], None]
"""Gets a run's outcome, in the thread that receives: it must not wait for other runs."""

Died = Callable[[str], Sequence[RunRecord]]
"""Gets the owner of the runs of a process that has died; ends them as cancelled, and returns those that had ended."""

LIVES = 4
_AGAIN = 0.1
"""Seconds between two tries to reach the process."""
_PATIENCE = 120.0
"""Seconds in which it must answer at first."""
_STOP = 30.0
"""Seconds that runs under way may take to be cancelled at the end."""
_LOOK = 1.0
_SLACK = 60.0
"""Seconds by which a run of a former trainer may be older than it says."""

_log = logging.getLogger("gyre.trainer")


@dataclass(slots=True)
class _Asked:
    """A run that has no outcome yet."""

    message: Begin
    done: Done
    lives: int
    at: float
    """Seconds since the epoch: its record is not older."""

    def is_recorded_as(self, run: RunRecord) -> bool:
        """Tell whether a record is of this run."""
        order = self.message.order
        same = (run.task, run.group, run.member) == (order.task, order.group, order.member)
        return same and run.metadata.get("split") == order.split and run.created_at >= self.at


class Agents:
    """Asks the agents' process for runs.

    Args:
        address: where it listens now.
        key: of the training.
        settings: what runs are made by.
        observer: learns what happens in runs, in order.
        listed: the tasks of `[tasks]`: those that cannot be pickled the process loads itself.
        check: raises when the process was given up.
        lives: processes that may die under one run; then it is given up.
    """

    def __init__(
        self,
        address: Callable[[], str],
        key: bytes,
        settings: AgentSettings,
        observer: Observer,
        *,
        listed: Sequence[Task] = (),
        check: Callable[[], None] = lambda: None,
        lives: int = LIVES,
    ) -> None:
        self._address = address
        self._key = key
        self._hello = Hello(settings.packed())
        self._observer = Fanout(observer)
        self._parcels = Parcels(listed)
        self._died: Died = lambda owner: ()
        self._check = check
        self._lives = lives
        self._lock = threading.RLock()
        self._line: Line | None = None
        self._service: Serve | None = None
        self._asked: dict[str, _Asked] = {}
        self._known: set[str] = set()
        """Tasks that the process has."""
        self._adopted: dict[str, tuple[Running, Outcome | None]] = {}
        """Runs of a former trainer that nobody has asked for yet."""
        self._failure: Exception | None = None
        self._closing = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="agents", daemon=True)
        self.owner = ""
        """What runs of the process have as their owner."""

    def connect(self) -> None:
        """Greet the process.

        Raises:
            SettingsError, WorkspaceError: there is no such agent, or nothing to run it in.
            TrainerError: it does not answer.
        """
        line, welcome = self._greeted(time.monotonic() + _PATIENCE)
        self._adopted = {running.id: (running, None) for running in welcome.under_way}
        self.owner, self._line = welcome.owner, line
        self._thread.start()

    def serve(self, url: str, key: str, died: Died = lambda owner: ()) -> None:
        """Say where the recording service is, before the first run is asked for.

        Args:
            died: ends the runs of a process that is there no more, before they are asked for again.
        """
        with self._lock:
            self._died = died
            self._service = Serve(url, key)
            self._send(self._service)

    def under_way(self) -> list[Running]:
        """Return the runs of a former trainer that nobody has asked for yet."""
        with self._lock:
            return [running for running, _ in self._adopted.values()]

    def begin(self, task: Task, order: Order, done: Done) -> None:
        """Ask for a run; the same run of a former trainer is taken up, if it is under way.

        Args:
            done: gets the outcome, once.

        Raises:
            SettingsError: the task cannot be sent.
        """
        with self._lock:
            running, outcome = self._take_up(order)
            if running is None:
                message = Begin(secrets.token_hex(8), order, self._parcels.key_of(task))
                self._asked[message.id] = _Asked(message, done, self._lives, time.time())
                self._ask(message)
                return
            if outcome is None:
                message = Begin(running.id, order, self._parcels.key_of(task))
                self._asked[running.id] = _Asked(message, done, self._lives, time.time() - running.seconds - _SLACK)
                return
        done(outcome)

    def run(self, task: Task, order: Order) -> RunResult:
        """Ask for a run, and wait for its end.

        Raises:
            ServiceError: the service could not be reached.
            GyreError: as it was raised in the agents' process.
            RuntimeError: the agent raised something; the run has ended and is recorded.
            TrainerError: the process was given up.
        """
        found: Future[Outcome] = Future()
        self.begin(task, order, found.set_result)
        while True:
            try:
                return found.result(_LOOK).checked()
            except TimeoutError:
                self._check()
                self.check()

    def check(self) -> None:
        """Raise when no outcome will come any more.

        Raises:
            TrainerError: the process that came after one that died refuses the settings, or something failed here.
        """
        if self._failure is not None:
            raise TrainerError(f"the agents' process cannot be used any more: {self._failure}") from self._failure

    def close(self) -> None:
        """Have runs under way recorded as cancelled and their workspaces removed, then hang up. Idempotent."""
        with self._lock:
            stopping = self._line is not None and not self._closing.is_set()
            self._closing.set()
            if stopping:
                self._send(Stop())
        if stopping and not self._stopped.wait(_STOP):
            _log.warning("the agents' process did not stop in %.0f s", _STOP)
        self.leave()

    def leave(self) -> None:
        """Hang up. Runs under way go on, for the next trainer that greets the process. Idempotent."""
        with self._lock:
            self._closing.set()
            if self._line is not None:
                self._line.hang_up()
        if self._thread.ident is not None:
            self._thread.join()

    # -- sending: the lock is held -------------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        """Send where there is a line; without one, all that counts is sent on the next."""
        if self._line is not None:
            try:
                self._line.send(message)
            except ConnectionError:
                pass  # the thread that receives learns it, too

    def _ask(self, message: Begin) -> None:
        if message.key and message.key not in self._known:
            self._send(Know(message.key, self._parcels.packed(message.key)))
            self._known.add(message.key)
        self._send(message)

    def _take_up(self, order: Order) -> tuple[Running | None, Outcome | None]:
        """Return a run of a former trainer that is what is asked for, and its outcome, if it has one already."""
        if order.group is None and order.split == "train":
            return None, None
        found = next((running for running, _ in self._adopted.values() if running.order == order), None)
        if found is None:
            return None, None
        return found, self._adopted.pop(found.id)[1]

    # -- the thread that receives --------------------------------------------------------------------------------------

    def _follow(self) -> None:
        try:
            self._listen()
        except Exception as error:  # boundary: top of the thread; `check` raises it
            self._failure = error
            _log.exception("the agents' process is not heard any more")
        finally:
            self._stopped.set()

    def _listen(self) -> None:
        line = self._line
        while line is not None:
            try:
                self._take(line.receive())
            except ConnectionError as error:
                line.close()
                with self._lock:
                    self._line = None
                if self._closing.is_set():
                    return
                _log.info("the agents' process is away: %s", error)
                line = self._again()
            except Exception:  # boundary: top of the thread; one message is lost, not all that follow
                _log.exception("a message of the agents' process")

    def _take(self, message: Message) -> None:
        match message:
            case Told(event):
                self._observer(event)
            case Ended(id, outcome):
                self._end(id, outcome)
            case Stopped():
                self._stopped.set()

    def _end(self, id: str, outcome: Outcome) -> None:
        with self._lock:
            asked = self._asked.pop(id, None)
            if asked is None and id in self._adopted:
                self._adopted[id] = (self._adopted[id][0], outcome)
            self._send(Seen(id))
        if asked is not None:
            asked.done(outcome)

    def _again(self) -> Line | None:
        """Find the process again, or the one that came after it; ask it for what has no outcome. None: at the end."""
        while not self._closing.is_set():
            try:
                line, welcome = self._greeted()
            except (ConnectionError, TrainerError) as error:
                _log.debug("%s", error)
                self._closing.wait(_AGAIN)
                continue
            self._resume(line, welcome)
            if self._closing.is_set():
                line.hang_up()  # `leave` may not have seen it
            return line
        return None

    def _resume(self, line: Line, welcome: Welcome) -> None:
        """Ask anew for what has no outcome. Runs of a process that has died begin again, unless they had ended."""
        another = welcome.owner != self.owner
        ended = self._died(self.owner) if another else ()
        over: list[tuple[Done, Outcome]] = []
        with self._lock:
            self._line = line
            if self._service is not None:
                self._send(self._service)
            if another:
                self.owner = welcome.owner
                self._adopted, self._known = {}, set()
            for id, asked in list(self._asked.items()):
                outcome = self._after_death(asked, ended) if another else None
                if outcome is None:
                    self._ask(asked.message)
                else:
                    over.append((self._asked.pop(id).done, outcome))
        for done, outcome in over:
            done(outcome)

    def _after_death(self, asked: _Asked, ended: Sequence[RunRecord]) -> Outcome | None:
        """Return the outcome of a run whose process has died, if it begins no more."""
        asked.lives -= 1
        found = next((run for run in ended if asked.is_recorded_as(run)), None)
        if found is not None:
            result = RunResult(found.run, found.status, found.reward, found.parts, found.error)
            return Outcome(OutcomeKind.ENDED, result=result)
        if asked.lives:
            return None
        died = f"the agents' process died {self._lives} times while this run was under way"
        return Outcome(OutcomeKind.LOST, died)

    # -- greeting ------------------------------------------------------------------------------------------------------

    def _greeted(self, give_up: float = 0.0) -> tuple[Line, Welcome]:
        """Call the process until it answers.

        Raises:
            ConnectionError: it does not, and it is time to give up.
            GyreError: what is wrong with the settings.
        """
        while True:
            try:
                line = dial(self._address(), self._key)
                line.send(self._hello)
                answer = line.receive()
            except ConnectionError as error:
                if not give_up:
                    raise
                self._check()
                if time.monotonic() > give_up:
                    raise TrainerError(f"the agents' process does not answer at {self._address()}: {error}") from error
                time.sleep(_AGAIN)
                continue
            if isinstance(answer, Welcome):
                return line, answer
            line.close()
            if isinstance(answer, Refused):
                raise error_of(answer.name, answer.error)
            raise TrainerError(
                f"the agents' process answered with a {type(answer).__name__}; is it of another release?"
            )


def packed(options: dict[str, Any]) -> bytes:
    """Return options of one run for an `Order`.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: one of them cannot go to another process.
    """
    return pickle.dumps(options) if options else b""


def members(running: Sequence[Running]) -> dict[tuple[str, int], float]:
    """Return group and member of the runs of groups, with the seconds that each has taken."""
    return {(one.order.group, one.order.member): one.seconds for one in running if one.order.group is not None}
