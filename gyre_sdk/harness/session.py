"""A session: one run of a task, from its record to its one terminal state.

Order of events::

    record the run -> `RunStart` hooks -> open the workspace -> scrub and seal it -> the user's block
    -> stops of what is still open -> close the run's calls -> score -> record the end -> clean up -> `RunEnd` hooks

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

import msgspec

from gyre_sdk.errors import HookError, SettingsError, Vetoed, WorkspaceError
from gyre_sdk.events import RunEnded, RunStarted
from gyre_sdk.harness.agent import Agent, Meter, RunContext, in_thread, to_the_end
from gyre_sdk.harness.hooks import (
    Deny,
    Fanout,
    Hooks,
    LaneInfo,
    RunEnd,
    RunHooks,
    RunStart,
    telling,
    unobserved,
)
from gyre_sdk.harness.limits import Ending, Limits, classify, is_refused, spent_end
from gyre_sdk.harness.ports import Clock, Observer
from gyre_sdk.harness.proxy.server import ProxyServer, ProxySettings
from gyre_sdk.harness.scoring import POLICY, RunScoring, outcome, reason, retried_start
from gyre_sdk.harness.service import ClosedRun, OpenedRun, ServiceClient
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import WorkspacePool, open_workspace
from gyre_sdk.records import MAIN, End, RunId, RunResult, RunStatus, Score

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


def owner() -> str:
    """Return what the runs that this process opens have as their owner."""
    return f"{socket.gethostname()}:{os.getpid()}:{_STARTED:.3f}"


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
        limits: budgets; a missing `wall_s` is the task's agent time limit.
        hooks, observer: see `hooks.Hooks` and `ports.Observer`.
        scoring_retries: how often a failed evaluation is tried again before the run is left unscored.
        keep_snapshots: keep what the run left as an image of the engine, so that `gyre rescore` can score it again.
        overall_s: seconds for agent and evaluation together, from the start; a run that is not scored by then is
            dropped. None: no limit.

    Raises:
        SettingsError: neither `service` nor `proxy` is given.
        Vetoed: a `RunStart` hook refused; the run is on record as cancelled.
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
        keep_snapshots: bool = False,
        overall_s: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        limits = limits or Limits()
        self._task = task
        self._service, self._proxy = service, proxy
        self._workspace_kind = workspace
        self._group, self._member, self._dispatch_version = group, member, dispatch_version
        self._limits = replace(limits, wall_s=limits.wall_s or task.agent_timeout_s)
        self._hooks = RunHooks(hooks or Hooks())
        self._observer = Fanout(observer)
        self._metadata = dict(metadata or {})
        self._split, self._classifier = split, classifier
        self._clock = clock or SystemClock()
        self._scoring_options: dict[str, Any] = {"retries": scoring_retries, "keep": keep_snapshots}
        self._overall_s = overall_s
        self._scoring: RunScoring
        self._cleanup = ExitStack()
        self._began = 0.0
        self._opened: OpenedRun | None = None
        self._client: ServiceClient
        self._info: LaneInfo
        self._meter: Meter
        self._context: RunContext | None = None
        self._agent: Agent | None = None
        self._ended: tuple[RunStatus, float | None, str | None, float] | None = None
        """Terminal state, reward, error, seconds."""
        self._told = False
        """Whether hooks were told of the run's start, and not yet of its end."""

    # -- with ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Agent:
        try:
            self._open_run()
            self._admit(self._hooks.fire(self._run_start())[1])
            return self._open_workspace()
        except BaseException as error:
            try:
                self._never_started(error)
            finally:
                self._cleanup.close()
            self._tell(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        ending = self._ending(error)
        try:
            self._finish(ending)
        finally:
            self._cleanup.close()
            self._tell(error)
        return ending.swallow

    async def __aenter__(self) -> Agent:
        try:
            await in_thread(self._open_run)
            self._admit((await self._hooks.afire(self._run_start()))[1])
            return await in_thread(self._open_workspace)
        except BaseException as error:
            try:
                await in_thread(self._never_started, error)
            finally:
                await in_thread(self._cleanup.close)
            await to_the_end(self._atell(error))
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        # A cancellation goes on once the run's end is recorded.
        return await to_the_end(self._aexit(error))

    async def _aexit(self, error: BaseException | None) -> bool:
        ending = self._ending(error)
        try:
            await asyncio.to_thread(self._finish, ending)
        finally:
            await asyncio.to_thread(self._cleanup.close)
            await self._atell(error)
        return ending.swallow

    # -- start ---------------------------------------------------------------------------------------------------

    def _open_run(self) -> None:
        self._began = self._clock.monotonic()
        service = self._service or self._cleanup.enter_context(serve(self._own_proxy()))
        opened = service.open_run(
            task=self._task.name,
            group=self._group,
            member=self._member,
            owner=owner(),
            split=self._split,
            metadata=self._metadata,
            dispatch_version=self._dispatch_version,
            limits=self._limits,
            classifier=self._classifier,
        )
        self._opened, self._client = opened, service
        self._info = LaneInfo(run=opened.run, lane=opened.lane, parent=None, role=MAIN, name=MAIN, depth=0)
        self._meter = Meter(service, opened.run, opened.lane, self._limits, self._clock)
        self._cleanup.callback(self._meter.close)
        self._observer(RunStarted(self._clock.time(), opened.run, self._task.name, self._group, self._split))

    def _run_start(self) -> RunStart:
        self._told = True
        return RunStart(
            **msgspec.structs.asdict(self._info),
            task=self._task.name,
            instruction=self._task.instruction,
            group=self._group,
            member=self._member,
        )

    def _admit(self, denied: Deny | None) -> None:
        if denied is not None:
            raise Vetoed(f"run {self._info.run} of {self._task.name!r} was denied: {denied.reason}")

    def _open_workspace(self) -> Agent:
        assert self._opened is not None
        opened = self._opened
        deadline = None if self._overall_s is None else self._began + self._overall_s
        self._scoring = RunScoring(self._task, self._clock, deadline=deadline, **self._scoring_options)
        workspace = retried_start(
            lambda: open_workspace(self._task, kind=self._workspace_kind, run_id=opened.run), self._clock
        )
        self._cleanup.callback(workspace.close)
        self._scoring.begin(workspace)
        context = RunContext(
            task=self._task,
            run=opened.run,
            service=self._client,
            workspace=workspace,
            clock=self._clock,
            hooks=self._hooks,
            observer=self._observer,
            meter=self._meter,
            score=lambda: self._scoring.now(workspace),
            steps=lambda: self._scoring.steps(workspace),
        )
        self._context = context
        self._agent = Agent(context, self._info, base_url=opened.base_url, api_key=opened.api_key)
        self._meter.begin()
        return self._agent

    def _own_proxy(self) -> ProxySettings:
        if self._proxy is None:
            raise SettingsError(
                "a session needs a recording service: pass service=ServiceClient(url, key) of a running `gyre serve`,"
                " or proxy=ProxySettings(store=..., model=..., replicas=[...]) to run one in this process"
            )
        return self._proxy

    def _never_started(self, error: BaseException) -> None:
        """End a run without a block: a placeholder 0 when its workspace could not be opened, else cancelled."""
        if self._opened is None:
            return
        if isinstance(error, WorkspaceError):
            self._record(End.NEVER_STARTED, None, str(error), ClosedRun(0, 0))
        else:
            self._record(End.CANCELLED, None, f"{type(error).__name__}: {error}", ClosedRun(0, 0))

    # -- end -----------------------------------------------------------------------------------------------------

    def _ending(self, error: BaseException | None) -> Ending:
        """Return how the block ended; a budget that ran out is how, whatever the agent made of that."""
        ending, over = classify(error), self._meter.over()
        if over is None or not POLICY[ending.end].graded:
            return ending
        swallow = ending.swallow or (error is not None and is_refused(error))
        return replace(ending, end=spent_end(over.limit), error=f"LimitExceeded: {over}", swallow=swallow)

    def _finish(self, ending: Ending) -> None:
        assert self._agent is not None and self._opened is not None and self._context is not None
        failure = self._abandon()
        used = self._client.close_run(self._opened.run, seconds=_DRAIN_SECONDS)
        end, error, score = ending.end, ending.error, self._agent._score
        if POLICY[end].graded and score is None and self._task.scorable:
            try:
                score = self._scoring.evaluate(self._context.workspace)
            except BaseException as problem:
                self._record(End.CANCELLED, None, f"while scoring: {type(problem).__name__}", used)
                raise
            error = _joined(error, reason(score))
        self._record(end, score, error, used)
        if failure is not None:
            raise failure

    def _abandon(self) -> HookError | None:
        """Tell the stops of what is still going on in the background; a hook's failure waits for the run's end."""
        try:
            self._hooks.abandon()
        except HookError as failure:
            return failure
        return None

    def _record(self, end: End, score: Score | None, error: str | None, used: ClosedRun) -> None:
        assert self._opened is not None
        run, found = self._opened.run, outcome(end, score)
        parts = score.parts if score is not None and found.reward is not None else {}
        seconds = self._clock.monotonic() - self._began
        self._ended = (found.status, found.reward, error, seconds)
        status = self._client.end_run(
            run, found.status, reward=found.reward, parts=parts, error=error, placeholder=found.placeholder
        )
        self._ended = (status, found.reward, error, seconds)
        if self._agent is not None:
            self._agent._result = RunResult(
                RunId(run),
                status,
                found.reward,
                parts,
                error,
                used.calls,
                used.sampled_tokens,
                seconds,
                found.placeholder,
                score.tampered if score is not None else (),
                score.snapshot if score is not None else None,
            )
            self._scoring.record(run, score, lambda: str(self._client.status()["store"]))
        self._observer(RunEnded(self._clock.time(), run, status, found.reward, seconds, found.placeholder))

    def _run_end(self) -> RunEnd | None:
        """Return what hooks are told of the end; None where they were not told of a start."""
        if not self._told:
            return None
        self._told = False
        unknown = (RunStatus.CANCELLED, None, "its end could not be recorded", self._clock.monotonic() - self._began)
        status, reward, error, seconds = self._ended or unknown
        return RunEnd(
            **msgspec.structs.asdict(self._info),
            task=self._task.name,
            status=status,
            reward=reward,
            error=error,
            seconds=seconds,
        )

    def _tell(self, error: BaseException | None) -> None:
        end = self._run_end()
        if end is not None:
            with telling(error):
                self._hooks.fire(end)

    async def _atell(self, error: BaseException | None) -> None:
        end = self._run_end()
        if end is not None:
            with telling(error):
                await self._hooks.afire(end)


def _joined(*reasons: str | None) -> str | None:
    return "; ".join(reason for reason in reasons if reason is not None) or None
