"""What the user's block is given: a lane with model access, and the main lane's workspace and score."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gyre_sdk.errors import CommandFailed, LimitExceeded, ServiceError, SettingsError
from gyre_sdk.events import LaneOpened, ToolRan
from gyre_sdk.harness.hooks import Hooks, LaneInfo
from gyre_sdk.harness.ports import Clock, Observer, Workspace
from gyre_sdk.harness.service import ServiceClient
from gyre_sdk.harness.task import Task
from gyre_sdk.records import SUBAGENT, SUMMARY_SUFFIX, ExecResult, RunResult, Score

if TYPE_CHECKING:
    from anthropic import Anthropic, AsyncAnthropic
    from openai import AsyncOpenAI, OpenAI


@dataclass(slots=True)
class RunContext:
    """What all lanes of a run share. Internal."""

    task: Task
    run: str
    service: ServiceClient
    workspace: Workspace
    clock: Clock
    hooks: Hooks
    observer: Observer
    deadline: float | None
    """Monotonic time at which the run's budget of wall time ends."""
    score: Callable[[], Score]

    def remaining(self) -> float | None:
        """Return the seconds left, or None without a limit.

        Raises:
            LimitExceeded: when none are left.
        """
        if self.deadline is None:
            return None
        left = self.deadline - self.clock.monotonic()
        if left <= 0:
            raise LimitExceeded(f"run {self.run} spent its wall time ({self.task.name}); its work so far is scored")
        return left


class Lane:
    """One conversation stream of a run: its own role, its own capability key.

    Attributes:
        lane: id of the lane.
        role: `main`, `subagent`, or one of these with `-summary`.
        base_url: OpenAI base URL to give to any client.
        api_key: capability key to give to any client; names this run and lane.
        workspace: where the run's tools run, shared by all its lanes.
    """

    def __init__(self, context: RunContext, info: LaneInfo, *, base_url: str, api_key: str) -> None:
        self._context = context
        self.info = info
        self.lane = info.lane
        self.role = info.role
        self.base_url = base_url
        self.api_key = api_key
        self.workspace: Workspace = _Tools(context, info)
        self._client: OpenAI | None = None

    @property
    def task(self) -> Task:
        """The task of the run."""
        return self._context.task

    @property
    def run(self) -> str:
        """Id of the run."""
        return self._context.run

    def openai(self, **options: Any) -> OpenAI:
        """Return an `openai.OpenAI` client bound to this lane; without options always the same one."""
        import openai

        if options:
            return openai.OpenAI(base_url=self.base_url, api_key=self.api_key, **options)
        if self._client is None:
            self._client = openai.OpenAI(
                base_url=self.base_url,
                api_key=self.api_key,
                http_client=self._context.service.model_http,
                max_retries=5,
            )
        return self._client

    def async_openai(self, **options: Any) -> AsyncOpenAI:
        """Return an `openai.AsyncOpenAI` client bound to this lane. The caller closes it."""
        import openai

        return openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, **options)

    def anthropic(self, **options: Any) -> Anthropic:
        """Return an `anthropic.Anthropic` client bound to this lane. The caller closes it.

        Raises:
            SettingsError: the `anthropic` package is not installed.
        """
        made: Anthropic = _anthropic().Anthropic(base_url=self._root, api_key=self.api_key, **options)
        return made

    def async_anthropic(self, **options: Any) -> AsyncAnthropic:
        """Return an `anthropic.AsyncAnthropic` client bound to this lane. The caller closes it.

        Raises:
            SettingsError: the `anthropic` package is not installed.
        """
        made: AsyncAnthropic = _anthropic().AsyncAnthropic(base_url=self._root, api_key=self.api_key, **options)
        return made

    @property
    def environment(self) -> dict[str, str]:
        """Variables that give a child process this lane's model access, in OpenAI's and in Anthropic's form."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self._root,
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_AUTH_TOKEN": self.api_key,
        }

    @property
    def _root(self) -> str:
        """Base URL of Anthropic's clients: they add `/v1` themselves."""
        return self.base_url.removesuffix("/v1")

    @contextlib.contextmanager
    def subagent(self, name: str = "subagent") -> Iterator[Lane]:
        """Open a lane of its own for a sub-agent (role `subagent`), with its own key."""
        hooks = self._context.hooks
        with self._open(SUBAGENT, name, False, hooks.subagent_started, hooks.subagent_stopped) as lane:
            yield lane

    @contextlib.contextmanager
    def compaction(self) -> Iterator[Lane]:
        """Mark the calls made inside as this lane's summary (role `<role>-summary`).

        Calls made with this lane's key, by any client, count as the summary's until the block ends; the lane
        given to the block has a key of its own for the same purpose.
        """
        role = self.role if self.role.endswith(SUMMARY_SUFFIX) else self.role + SUMMARY_SUFFIX
        hooks = self._context.hooks
        with self._open(
            role, f"{self.info.name}-summary", True, hooks.compaction_started, hooks.compaction_stopped
        ) as lane:
            yield lane

    @contextlib.contextmanager
    def _open(
        self,
        role: str,
        name: str,
        takes_over: bool,
        started: Callable[[LaneInfo], None],
        stopped: Callable[[LaneInfo, BaseException | None], None],
    ) -> Iterator[Lane]:
        context = self._context
        context.remaining()
        opened = context.service.open_lane(context.run, role=role, name=name, parent=self.lane, takes_over=takes_over)
        info = LaneInfo(context.run, opened.lane, self.lane, role, name, self.info.depth + 1)
        context.observer(LaneOpened(context.clock.time(), context.run, opened.lane, role, name))
        failure: BaseException | None = None
        try:
            started(info)
            yield Lane(context, info, base_url=opened.base_url, api_key=opened.api_key)
        except BaseException as error:
            failure = error
            raise
        finally:
            if takes_over:
                with contextlib.suppress(ServiceError):
                    context.service.release_lane(context.run, opened.lane)
            stopped(info, failure)


def _anthropic() -> ModuleType:
    try:
        import anthropic
    except ImportError as error:
        raise SettingsError("the `anthropic` package is not installed; run: pip install anthropic") from error
    return anthropic


class Agent(Lane):
    """The main lane of a run.

    Attributes:
        result: what came of the run; available once the `with` block has ended.
    """

    def __init__(self, context: RunContext, info: LaneInfo, *, base_url: str, api_key: str) -> None:
        super().__init__(context, info, base_url=base_url, api_key=api_key)
        self._result: RunResult | None = None
        self._score: Score | None = None

    @property
    def result(self) -> RunResult:
        """What came of the run.

        Raises:
            RuntimeError: while the block is still running.
        """
        if self._result is None:
            raise RuntimeError("agent.result is there once the session's `with` block has ended")
        return self._result

    def score(self, value: float | Score | None = None) -> Score:
        """Score the work product now; the session then does not score again.

        Args:
            value: the reward itself, where the block knows it; None runs the task's scorer.

        Raises:
            ScoringError: the scorer failed or gave no finite number.
        """
        if value is None:
            self._score = self._context.score()
        else:
            self._score = value if isinstance(value, Score) else Score(reward=float(value))
        return self._score


class _Tools:
    """The run's workspace as a lane sees it: bounded by the run's wall time, seen by hooks and observers."""

    def __init__(self, context: RunContext, info: LaneInfo) -> None:
        self._context = context
        self._info = info

    @property
    def id(self) -> str:
        return self._context.workspace.id

    def exec(
        self,
        cmd: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        input: bytes | str | None = None,
        check: bool = False,
    ) -> ExecResult:
        context = self._context
        left = context.remaining()
        limit = timeout if left is None else min(left, timeout if timeout is not None else left)
        result = context.workspace.exec(cmd, timeout=limit, cwd=cwd, env=env, user=user, input=input)
        context.observer(ToolRan(context.clock.time(), context.run, cmd, result.exit_code, result.duration_s))
        context.hooks.tool_ran(self._info, cmd, result)
        context.remaining()
        if check and result.exit_code != 0:
            raise CommandFailed(cmd, result)
        return result

    def read(self, path: str) -> bytes:
        return self._context.workspace.read(path)

    def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        self._context.workspace.write(path, data, mode=mode)

    def write_many(self, files: Mapping[str, bytes], folder: str) -> None:
        self._context.workspace.write_many(files, folder)

    def upload(self, local: Path, path: str) -> None:
        self._context.workspace.upload(local, path)

    def download(self, path: str, local: Path) -> None:
        self._context.workspace.download(path, local)

    def kill_all(self) -> None:
        self._context.workspace.kill_all()

    def close(self) -> None:
        """Do nothing: the session closes the workspace."""
