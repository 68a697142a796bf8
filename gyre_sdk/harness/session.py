"""A session: one run of a task, from its record to its one terminal state.

Order of events::

    record the run -> open the workspace -> the user's block -> close the run's calls -> score -> record the end -> clean up

The record exists before the first call and ends in exactly one terminal state, whatever happens in the block.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

from gyre_sdk.errors import ScoringError, SettingsError, WorkspaceError
from gyre_sdk.events import RunEnded, RunStarted
from gyre_sdk.harness.agent import Agent, RunContext
from gyre_sdk.harness.hooks import Fanout, Hooks, LaneInfo, unobserved
from gyre_sdk.harness.limits import Ending, Limits, classify
from gyre_sdk.harness.ports import Clock, Observer, Workspace
from gyre_sdk.harness.proxy.server import ProxyServer, ProxySettings
from gyre_sdk.harness.scoring import score_with_retries
from gyre_sdk.harness.service import ClosedRun, OpenedRun, ServiceClient
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import WorkspacePool, open_workspace
from gyre_sdk.records import MAIN, RunId, RunResult, RunStatus, Score

_DRAIN_SECONDS = 10.0
_STARTED = time.time()


class SystemClock:
    """The machine's clock."""

    def time(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return time.monotonic()


@contextmanager
def serve(settings: ProxySettings) -> Iterator[ServiceClient]:
    """Run a recording proxy inside this process, for the sessions opened with the client it gives."""
    running = ProxyServer(settings).start_in_thread()
    try:
        with ServiceClient(running.url, running.service_key) as client:
            yield client
    finally:
        running.stop()


class Session:
    """Context manager (sync and async) that runs a task once and gives the block an `Agent`.

    Args:
        task: what to do, where, and how it is scored.
        service: the recording service; None starts one in this process from `proxy`.
        proxy: settings of the proxy to start when no service is given.
        workspace: `docker`, `local`, `auto`, or a `WorkspacePool` to take one from.
        group: the group whose rewards are compared, and `member`, the run's index in it.
        dispatch_version: policy version when the run was planned; None asks the service.
        split: what the run is for: `train`, or the name of an evaluation. Kept in the run's metadata.
        classifier: tells the lanes of an agent that uses one key for everything: `auto`, the preset of a program
            (`claude-code`, `codex`, `mini-swe-agent`, `openai-agents`), or an import path `module:attribute` of a
            `Classifier`. Empty: a lane is what has a key of its own.
        limits: budgets; a missing `seconds` is the task's agent time limit.
        hooks, observer: see `hooks.Hooks` and `ports.Observer`.
        scoring_retries: how often a failed evaluation is tried again before the run is left unscored.

    Raises:
        SettingsError: neither `service` nor `proxy` is given.
        ServiceError: the service cannot be reached: there is no run.
        WorkspaceError: the workspace cannot be opened; the run ends as `workspace_error` with the placeholder reward 0.
    """

    def __init__(
        self,
        task: Task,
        *,
        service: ServiceClient | None = None,
        proxy: ProxySettings | None = None,
        workspace: Literal["docker", "local", "auto"] | WorkspacePool = "docker",
        group: str | None = None,
        member: int = 0,
        dispatch_version: int | None = None,
        split: str = "train",
        classifier: str = "",
        limits: Limits | None = None,
        hooks: Hooks | None = None,
        observer: Observer = unobserved,
        metadata: dict[str, Any] | None = None,
        scoring_retries: int = 2,
        clock: Clock | None = None,
    ) -> None:
        limits = limits or Limits()
        self._task = task
        self._service, self._proxy = service, proxy
        self._workspace_kind = workspace
        self._group, self._member, self._dispatch_version = group, member, dispatch_version
        self._limits = replace(limits, seconds=limits.seconds or task.agent_timeout_s)
        self._hooks = hooks or Hooks()
        self._observer = Fanout(observer)
        self._metadata = dict(metadata or {})
        self._split, self._classifier = split, classifier
        self._scoring_retries = scoring_retries
        self._clock = clock or SystemClock()
        self._cleanup = ExitStack()
        self._opened: OpenedRun | None = None
        self._context: RunContext | None = None
        self._agent: Agent | None = None
        self._began = 0.0

    # -- with ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Agent:
        self._began = self._clock.monotonic()
        try:
            return self._start()
        except BaseException:
            self._cleanup.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            return self._finish(classify(error))
        finally:
            self._cleanup.close()

    async def __aenter__(self) -> Agent:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        finishing = asyncio.ensure_future(asyncio.to_thread(self.__exit__, kind, error, trace))
        try:
            return await asyncio.shield(finishing)
        except asyncio.CancelledError:
            await finishing  # the run's end is recorded before the cancellation goes on
            raise

    # -- start ---------------------------------------------------------------------------------------------------

    def _start(self) -> Agent:
        service = self._service or self._cleanup.enter_context(serve(self._own_proxy()))
        opened = service.open_run(
            task=self._task.name,
            group=self._group,
            member=self._member,
            owner=f"{socket.gethostname()}:{os.getpid()}:{_STARTED:.3f}",
            split=self._split,
            metadata=self._metadata,
            dispatch_version=self._dispatch_version,
            limits=self._limits,
            classifier=self._classifier,
        )
        self._opened = opened
        self._observer(RunStarted(self._clock.time(), opened.run, self._task.name, self._group, self._split))
        try:
            workspace = open_workspace(self._task, kind=self._workspace_kind, run_id=opened.run)
        except BaseException as error:
            self._never_started(service, error)
            raise
        self._cleanup.callback(workspace.close)
        seconds = self._limits.seconds
        context = RunContext(
            task=self._task,
            run=opened.run,
            service=service,
            workspace=workspace,
            clock=self._clock,
            hooks=self._hooks,
            observer=self._observer,
            deadline=None if seconds is None else self._clock.monotonic() + seconds,
            score=lambda: self._evaluate(workspace),
        )
        info = LaneInfo(opened.run, opened.lane, None, MAIN, MAIN, 0)
        self._context = context
        self._agent = Agent(context, info, base_url=opened.base_url, api_key=opened.api_key)
        return self._agent

    def _own_proxy(self) -> ProxySettings:
        if self._proxy is None:
            raise SettingsError(
                "a session needs a recording service: pass service=ServiceClient(url, key) of a running `gyre serve`,"
                " or proxy=ProxySettings(store=..., model=..., replicas=[...]) to run one in this process"
            )
        return self._proxy

    def _never_started(self, service: ServiceClient, error: BaseException) -> None:
        """End a run without a workspace: a placeholder 0 when it could not be opened, else cancelled."""
        if isinstance(error, WorkspaceError):
            self._record(service, RunStatus.WORKSPACE_ERROR, Score(0.0), str(error), ClosedRun(0, 0), placeholder=True)
        else:
            self._record(service, RunStatus.CANCELLED, None, f"{type(error).__name__}: {error}", ClosedRun(0, 0))

    # -- end -----------------------------------------------------------------------------------------------------

    def _finish(self, ending: Ending) -> bool:
        assert self._agent is not None and self._opened is not None and self._context is not None
        service = self._context.service
        used = service.close_run(self._opened.run, seconds=_DRAIN_SECONDS)
        status, error, score = ending.status, ending.error, self._agent._score
        if ending.scorable and score is None:
            try:
                score = self._evaluate(self._context.workspace)
            except ScoringError as failure:
                status, error = RunStatus.SCORER_ERROR, _joined(error, f"scorer: {failure}")
            except WorkspaceError as failure:
                status, error = RunStatus.WORKSPACE_ERROR, _joined(error, f"workspace lost before scoring: {failure}")
            except BaseException as failure:
                self._record(service, RunStatus.CANCELLED, None, f"while scoring: {type(failure).__name__}", used)
                raise
        self._record(service, status, score, error, used)
        return ending.swallow

    def _evaluate(self, workspace: Workspace) -> Score:
        return score_with_retries(self._task, workspace, retries=self._scoring_retries)

    def _record(
        self,
        service: ServiceClient,
        status: RunStatus,
        score: Score | None,
        error: str | None,
        used: ClosedRun,
        *,
        placeholder: bool = False,
    ) -> None:
        assert self._opened is not None
        run = self._opened.run
        reward, parts = (score.reward, score.parts) if score else (None, {})
        status = service.end_run(run, status, reward=reward, parts=parts, error=error, placeholder=placeholder)
        seconds = self._clock.monotonic() - self._began
        if self._agent is not None:
            self._agent._result = RunResult(
                RunId(run), status, reward, parts, error, used.calls, used.sampled_tokens, seconds, placeholder
            )
        self._observer(RunEnded(self._clock.time(), run, status, reward, seconds))


def _joined(first: str | None, second: str) -> str:
    return second if first is None else f"{first}; {second}"
