"""Every error gyre raises, one class per boundary.

A message says what failed, which value, which limit, and what to do next. A `GyreError` is never raised
itself: catch the boundary that you can act on.

Tree::

    GyreError
    ├── SettingsError        a configuration file, argument or variable is wrong
    ├── TaskError            a task folder or task object is wrong
    ├── WorkspaceError       the workspace could not do what was asked
    │   ├── ImageMissing     its image is not present and cannot be built
    │   └── WorkspaceUnavailable  it was there and is not any more (dead container, dead engine)
    ├── CommandFailed        a command run with `check=True` gave another exit code than 0
    ├── ScoringError         the scorer crashed, timed out or gave no number (never a reward)
    ├── ProtocolError        a request from an agent is wrong; carries the HTTP status and code
    ├── RenderError          messages cannot be turned into tokens, or tokens into messages
    ├── ReplicaError         an inference replica refused, broke off or cannot be reached
    ├── ServiceError         the recording service cannot be reached or refused a control request
    ├── JournalError         the store cannot be opened, read or written
    ├── TreeError            recorded calls do not form a tree
    ├── LimitExceeded        a run, or a sub-agent in it, spent a budget (tokens, turns, cost, time)
    ├── AgentFailed          an agent program ended with an exit code other than 0
    ├── Vetoed               a hook refused a run, a sub-agent or a compaction
    ├── HookError            a hook raised, or returned what its event cannot take
    └── TrainerError         training cannot go on
        ├── EngineError      the embedded engine cannot serve
        ├── MismatchError    the trainer computes other log-probs than the engine sampled with
        └── PublishError     new weights did not reach a replica
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gyre_sdk.records import ExecResult


class GyreError(Exception):
    """The root of gyre's errors; catch a subclass."""


class SettingsError(GyreError):
    """A setting has an unknown key, a wrong type or an impossible value."""


class TaskError(GyreError):
    """A task cannot be loaded or is inconsistent."""


class WorkspaceError(GyreError):
    """A workspace could not be started or used. Never a tool's own failure: that is an exit code."""


class ImageMissing(WorkspaceError):
    """The image of a workspace is not present on the engine and no Dockerfile is given."""


class WorkspaceUnavailable(WorkspaceError):
    """The workspace died: every later command would fail too. The message is its post-mortem."""


class CommandFailed(GyreError):
    """A command that was run with `check=True` failed. The workspace itself is well.

    Attributes:
        cmd: what was run.
        result: its exit code and output.
    """

    def __init__(self, cmd: str, result: ExecResult) -> None:
        self.cmd = cmd
        self.result = result
        what = "ran into its time limit" if result.timed_out else f"ended with exit code {result.exit_code}"
        said = (result.stderr.strip() or result.stdout.strip())[-500:]
        super().__init__(f"{cmd[:200]!r} {what}" + (f": {said}" if said else ""))

    def __reduce__(self) -> tuple[type[CommandFailed], tuple[str, ExecResult]]:
        return CommandFailed, (self.cmd, self.result)


class ScoringError(GyreError):
    """The evaluation failed. The run has no reward; this is not a reward of zero."""


class ProtocolError(GyreError):
    """A model request cannot be honoured.

    Attributes:
        status: HTTP status for the answer.
        code: machine-readable reason, for example `invalid_api_key`.
        param: the request field at fault, or None.
        retryable: whether sending the same request again can succeed.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request",
        param: str | None = None,
        retryable: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retryable = retryable


class RenderError(GyreError):
    """Messages could not be rendered to tokens, or sampled tokens not parsed."""


class ReplicaError(GyreError):
    """A replica refused a request, broke off in the middle of one, or cannot be reached."""


class ServiceError(GyreError):
    """The recording service refused a control request or cannot be reached."""


class JournalError(GyreError):
    """The store could not be opened, read or written."""


class TreeError(GyreError):
    """Recorded calls contradict each other and do not form a tree."""


class LimitExceeded(GyreError):
    """A run, or a sub-agent in it, spent one of its budgets.

    Attributes:
        limit: the field of `Limits` that ran out, for example `turns`.
        lane: the lane whose own budget it was; None for the run's.
    """

    def __init__(self, message: str, *, limit: str = "wall_s", lane: str | None = None) -> None:
        super().__init__(message)
        self.limit = limit
        self.lane = lane


class AgentFailed(GyreError):
    """An agent program ended with an exit code other than 0.

    Attributes:
        exit_code: of the program, negative for a signal.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the agent program ended with exit code {exit_code}")
        self.exit_code = exit_code


class Vetoed(GyreError):
    """A hook said no to a run, a sub-agent or a compaction; the message holds its reason."""


class HookError(GyreError):
    """A hook is at fault: the message names it. What it raised is the cause."""


class TrainerError(GyreError):
    """Training cannot go on."""


class EngineError(TrainerError):
    """The embedded engine cannot load a model or serve a request."""


class MismatchError(TrainerError):
    """The trainer's log-probs differ from those at sampling by more than the threshold; the message says where and why."""


class PublishError(TrainerError):
    """New weights did not reach a replica."""
