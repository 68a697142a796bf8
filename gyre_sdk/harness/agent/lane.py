"""What the user's block is given: a lane with model access, and the main lane's workspace and score."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gyre_sdk.errors import ScoringError, SettingsError
from gyre_sdk.harness.agent.context import RunContext
from gyre_sdk.harness.agent.gate import gated
from gyre_sdk.harness.agent.scope import CompactionScope, SubagentScope
from gyre_sdk.harness.agent.workspace import LaneWorkspace
from gyre_sdk.harness.hooks import LaneInfo
from gyre_sdk.harness.limits import Limits
from gyre_sdk.harness.ports import Workspace
from gyre_sdk.harness.service import OpenedLane
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.tools import BUILT_IN, Toolset
from gyre_sdk.records import RunResult, Score

if TYPE_CHECKING:
    from anthropic import Anthropic, AsyncAnthropic
    from openai import AsyncOpenAI, OpenAI


class Lane:
    """One conversation stream of a run: its own role, its own capability key.

    Attributes:
        lane: id of the lane.
        role: `main`, `subagent`, or one of these with `-summary`.
        base_url: OpenAI base URL to give to any client.
        api_key: capability key to give to any client; names this run and lane.
        workspace: where the run's tools run, shared by all its lanes.
        output: what the lane's work came to, where its block says so; told to `SubagentStop` and `PostCompact` hooks.
        messages: of a compaction, the history that it was given, as hooks left it.
    """

    def __init__(self, context: RunContext, info: LaneInfo, *, base_url: str, api_key: str) -> None:
        self.context = context
        self.info = info
        self.lane = info.lane
        self.role = info.role
        self.base_url = base_url
        self.api_key = api_key
        self.workspace: Workspace = LaneWorkspace(context, info)
        self.output: str | None = None
        self.messages: Sequence[Any] | None = None
        self._client: OpenAI | None = None
        self._tools: Toolset | None = None

    @property
    def task(self) -> Task:
        """The task of the run."""
        return self.context.task

    @property
    def run(self) -> str:
        """Id of the run."""
        return self.context.run

    @property
    def tools(self) -> Toolset:
        """Tools for a model: `bash`, `read`, `write`, `edit`, `submit`, with their schemas; see `Toolset`."""
        if self._tools is None:
            workspace = LaneWorkspace(self.context, self.info, hooked=False)
            self._tools = Toolset(BUILT_IN, workspace, self.info, self.context.hooks, self.context.clock)
        return self._tools

    def openai(self, **options: Any) -> OpenAI:
        """Return an `openai.OpenAI` client bound to this lane; without options always the same one."""
        import openai

        if options:
            return openai.OpenAI(**(self._access(self.base_url, openai.DefaultHttpxClient) | options))
        if self._client is None:
            shared = {"http_client": self.context.service.model_http, "max_retries": 5}
            self._client = openai.OpenAI(**(shared | self._access(self.base_url, openai.DefaultHttpxClient)))
        return self._client

    def async_openai(self, **options: Any) -> AsyncOpenAI:
        """Return an `openai.AsyncOpenAI` client bound to this lane. The caller closes it."""
        import openai

        return openai.AsyncOpenAI(**(self._access(self.base_url, openai.DefaultAsyncHttpxClient) | options))

    def anthropic(self, **options: Any) -> Anthropic:
        """Return an `anthropic.Anthropic` client bound to this lane. The caller closes it.

        Raises:
            SettingsError: the `anthropic` package is not installed.
        """
        package = _anthropic()
        made: Anthropic = package.Anthropic(**(self._access(self._root, package.DefaultHttpxClient) | options))
        return made

    def async_anthropic(self, **options: Any) -> AsyncAnthropic:
        """Return an `anthropic.AsyncAnthropic` client bound to this lane. The caller closes it.

        Raises:
            SettingsError: the `anthropic` package is not installed.
        """
        package = _anthropic()
        access = self._access(self._root, package.DefaultAsyncHttpxClient)
        made: AsyncAnthropic = package.AsyncAnthropic(**(access | options))
        return made

    def _access(self, base_url: str, connections: type[Any]) -> dict[str, Any]:
        """Return the arguments of a client; one of a lane whose working time is limited asks before each call."""
        access: dict[str, Any] = {"base_url": base_url, "api_key": self.api_key}
        if self.context.meter.metered(self.lane):
            access["http_client"] = gated(connections, self.context.meter, self.lane)
        return access

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

    def subagent(self, name: str = "subagent", *, limits: Limits | None = None) -> SubagentScope:
        """Open a lane of its own for a sub-agent (role `subagent`), with its own key: `with` or `async with`.

        Args:
            name: what it is called in the record.
            limits: what it, and all lanes that it opens, may spend, within what this lane may.

        Raises (at the block):
            LimitExceeded: at its begin, this lane has nothing left; at its end, the sub-agent had spent its limits.
            Vetoed: a `SubagentStart` hook refused.
            ServiceError: `limits` holds a cost, and the service has no prices.
        """
        return SubagentScope(self, self._child, name, limits)

    def compaction(self, messages: Sequence[Any] | None = None, *, trigger: str = "auto") -> CompactionScope:
        """Mark the calls made inside as this lane's summary (role `<role>-summary`): `with` or `async with`.

        Calls made with this lane's key, by any client, count as the summary's until the block ends; the lane
        given to the block has a key of its own for the same purpose.

        Args:
            messages: the history, for `PreCompact` hooks; the block finds it, as they left it, in `lane.messages`.
            trigger: `auto` when the loop decided, `manual` when somebody asked.

        Raises (at the block): `Vetoed`: a `PreCompact` hook refused.
        """
        return CompactionScope(self, self._child, messages, trigger)

    def _child(self, opened: OpenedLane, role: str, name: str) -> Lane:
        info = LaneInfo(
            run=self.run, lane=opened.lane, parent=self.lane, role=role, name=name, depth=self.info.depth + 1
        )
        return Lane(self.context, info, base_url=opened.base_url, api_key=opened.api_key)


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

    def steps(self) -> Iterator[Task]:
        """Yield each step of the task as a task: its files are there, its instruction is what to do next.

        What was done for a step is scored when the next one is asked for, or when the session ends; the later steps are left
        out when it falls below its `min_reward`. A task without steps is its only one. An agent of a task with steps that
        asks for none gets reward 0.

        Raises:
            WorkspaceError: a step's setup failed, or the workspace is not healthy for it.
        """
        yield from self.context.steps()

    def score(self, value: float | Score | None = None) -> Score:
        """Score the work product now; the session then does not score again.

        Args:
            value: the reward itself, where the block knows it; None runs the task's scorer.

        Raises:
            ScoringError: the scorer failed, or there is no finite number.
        """
        if value is None:
            self._score = self.context.score()
            return self._score
        score = value if isinstance(value, Score) else Score(reward=float(value))
        for number in (score.reward, *score.parts.values()):
            if number is not None and not isfinite(number):
                raise ScoringError(f"agent.score got {number}; give a finite number, or None to run the task's scorer")
        self._score = score
        return score
