"""One session after the other, or many at a time: the user's agent on a task, from the run's record to its end."""

from __future__ import annotations

import logging
import pickle
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gyre_sdk.errors import GyreError, ServiceError, SettingsError
from gyre_sdk.events import Event, RunEnded, RunStarted
from gyre_sdk.harness.limits import Limits
from gyre_sdk.harness.ports import Observer
from gyre_sdk.harness.service import ServiceClient
from gyre_sdk.harness.session import Session
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import WorkspacePool
from gyre_sdk.records import RunStatus
from gyre_sdk.trainer.agents.calling import call
from gyre_sdk.trainer.agents.outcome import Outcome, OutcomeKind
from gyre_sdk.trainer.agents.settings import AgentSettings
from gyre_sdk.trainer.agents.wire import Order
from gyre_sdk.trainer.tasks import load_agent, load_tasks

_AT_ONCE = 8
"""Runs that are ended at a time when all are."""
_AWAY = 30.0
"""Seconds to wait for the service when it is met: it may be starting again just then."""
_STOP = 3.0
"""Seconds that the service may be away then."""

_log = logging.getLogger("gyre.agents")


class Sessions:
    """Makes runs by a training's settings.

    Args:
        observer: learns what happens in them.

    Raises:
        SettingsError: the settings name an agent that is not there.
        WorkspaceError: there is nothing to make workspaces with.
    """

    def __init__(self, settings: AgentSettings, observer: Observer) -> None:
        sys.path.extend(folder for folder in settings.path if folder not in sys.path)
        self._settings = settings
        self._observer = observer
        self._agent = load_agent(settings.agent, settings.base)
        rollout = settings.rollout
        self._limits = Limits(tokens=rollout.tokens, turns=rollout.turns, wall_s=rollout.timeout_s)
        self._pool = WorkspacePool(rollout.workspace, recycle=rollout.recycle)
        self._service: ServiceClient | None = None
        self._service_at = ("", "")
        self._lock = threading.Lock()
        self._known: dict[str, bytes | Task] = {}
        """Tasks that the trainer sent, unpacked once one is needed."""
        self._listed: dict[str, Task] | None = None
        """Those of `[tasks]`, by name, once one is needed."""
        self._open: dict[str, float] = {}
        """Run under way -> when it began."""
        self._stopping = False

    def serve(self, url: str, key: str) -> None:
        """Have runs from now on recorded there."""
        if self._service_at != (url, key):
            # the one before is that of the runs that began with it
            self._service = ServiceClient(url, key, arrival=_AWAY)
            self._service_at = (url, key)

    def know(self, key: str, task: bytes) -> None:
        """Take in a task."""
        with self._lock:
            self._known[key] = task

    def run(self, order: Order, key: str) -> Outcome:
        """Make a run to its end; return what came of it, whatever the agent does."""
        try:
            return self._run(self._task(order, key), order)
        except ServiceError as error:
            return Outcome(OutcomeKind.SERVICE, str(error), "ServiceError")
        except GyreError as error:
            return Outcome(OutcomeKind.FAILED, str(error), type(error).__name__)
        except BaseException as error:  # boundary: the user's agent; the session has recorded it
            _log.info("run %d of %s", order.member, order.group or order.split, exc_info=True)
            return Outcome(OutcomeKind.RAISED, _said(error), type(error).__name__)

    def stop(self) -> None:
        """Record the runs under way as cancelled, and remove their workspaces."""
        self._stopping = True
        left = dict(self._open)
        if left:
            with ServiceClient(*self._service_at, patience=_STOP) as service, ThreadPoolExecutor(_AT_ONCE) as ending:
                list(ending.map(lambda run: self._cancel(service, *run), left.items()))
        self._pool.close()

    # -- a run -------------------------------------------------------------------------------------------------------

    def _run(self, task: Task, order: Order) -> Outcome:
        options: dict[str, Any] = pickle.loads(order.options) if order.options else {}
        service = self._service
        if service is None or self._stopping:
            raise ServiceError("no recording service is there for this run")
        opened: list[str] = []

        def observe(event: Event) -> None:
            if isinstance(event, RunStarted):
                opened.append(event.run)
                self._open[event.run] = event.at
            self._observer(event)

        try:
            with Session(
                task,
                service=service,
                workspace=self._pool,
                group=order.group,
                member=order.member,
                split=order.split,
                limits=self._limits,
                classifier=self._settings.agent.classifier,
                observer=observe,
            ) as agent:
                call(
                    lambda: self._agent(agent, **{**self._settings.agent.options, **options}),
                    self._limits.wall_s or task.agent_timeout_s,
                )
        finally:
            for run in opened:
                self._open.pop(run, None)
        return Outcome(OutcomeKind.ENDED, result=agent.result)

    def _task(self, order: Order, key: str) -> Task:
        """Return the task of a run.

        Raises:
            SettingsError: it cannot be had here.
        """
        with self._lock:
            if not key:
                return self._listed_task(order.task)
            found = self._known[key]
            if not isinstance(found, Task):
                self._known[key] = found = _unpacked(order.task, found)
            return found

    def _listed_task(self, name: str) -> Task:
        if self._listed is None:
            self._listed = {task.name: task for task in load_tasks(self._settings.tasks, self._settings.base)}
        if name not in self._listed:
            raise SettingsError(
                f"task {name!r} cannot be sent to the agents' process, and [tasks] gives none of that name there: let its"
                " loader give the same tasks each time, or a scorer that is a function of a module"
            )
        return self._listed[name]

    def _cancel(self, service: ServiceClient, run: str, began: float) -> None:
        try:
            service.end_run(
                run, RunStatus.CANCELLED, reward=None, parts={}, error="the trainer was stopped", placeholder=False
            )
        except ServiceError as error:
            _log.warning("run %s: %s", run, error)  # whoever takes up the training records it
            return
        now = time.time()
        self._observer(RunEnded(now, run, RunStatus.CANCELLED, None, now - began))


def _unpacked(name: str, body: bytes) -> Task:
    try:
        found = pickle.loads(body)
    except (pickle.UnpicklingError, AttributeError, ImportError) as error:
        raise SettingsError(
            f"task {name!r} cannot be unpacked in the agents' process: {error}; let its scorer be a function of a module"
            " that lies next to the config file, or is installed"
        ) from error
    assert isinstance(found, Task)
    return found


def _said(error: BaseException) -> str:
    """Return an exception's message, whatever its class makes of being asked."""
    say: Callable[[object], str] = str
    try:
        return say(error)
    except Exception:  # boundary: the user's exception class
        return "it has no message"
