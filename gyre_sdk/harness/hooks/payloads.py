"""What hooks are told, and what they may answer. Frozen; each payload says where in the run it happened.

The names are those that agent programs use. A start and its stop come in pairs: every `PreToolUse` of which a hook was
told is followed by exactly one `PostToolUse`, and so on, also when the work between them raised, was cancelled, was
refused, or was still going on in the background when the run ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

from gyre_sdk.records import ExecResult, RunStatus


class Outcome(StrEnum):
    """How what a start began has ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    """It raised."""
    LIMIT = "limit"
    """A budget ran out in it."""
    CANCELLED = "cancelled"
    DENIED = "denied"
    """A hook refused it, or failed, so it did not begin."""
    ABANDONED = "abandoned"
    """It was still going on when the run ended."""


class LaneInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where a hook was called; the base of all payloads."""

    run: str
    lane: str
    """Lane that it is about: the one that uses a tool, that opens, whose history is compacted."""
    parent: str | None
    """Lane that opened this one; None for the main agent."""
    role: str
    name: str
    depth: int
    """0 for the main agent, 1 for its sub-agents and summaries."""


class RunStart(LaneInfo, frozen=True, kw_only=True):
    """A run is on record; its workspace is opened next. May be denied: the run then ends as cancelled."""

    task: str
    """Name of the task."""
    instruction: str
    group: str | None
    member: int


class RunEnd(LaneInfo, frozen=True, kw_only=True):
    """A run has reached its terminal state; it is on record."""

    task: str
    status: RunStatus
    reward: float | None
    """None: unscored."""
    error: str | None
    seconds: float
    """Wall time from the run's record to its end."""


class SubagentStart(LaneInfo, frozen=True, kw_only=True):
    """A sub-agent's lane is open; its block begins next. May be denied: opening it then raises `Vetoed`."""


class SubagentStop(LaneInfo, frozen=True, kw_only=True):
    """A sub-agent's block has ended."""

    outcome: Outcome
    error: BaseException | None
    """What ended it, where something did."""
    output: str | None
    """What the block said its work came to (`lane.output`)."""


class PreCompact(LaneInfo, frozen=True, kw_only=True):
    """A lane's history is about to be summarised. May be denied (`Vetoed`), or its messages edited."""

    trigger: str
    """`auto` when the loop decided, `manual` when somebody asked."""
    messages: Sequence[Any] | None
    """The history, where the loop gave it."""


class PostCompact(LaneInfo, frozen=True, kw_only=True):
    """A compaction's block has ended."""

    trigger: str
    summary_lane: str
    """Lane that its calls are on record under; empty where none was opened."""
    outcome: Outcome
    error: BaseException | None
    output: str | None
    """The summary, where the block kept it (`lane.output`)."""


class PreToolUse(LaneInfo, frozen=True, kw_only=True):
    """A tool is about to run. May be denied: the reason becomes its result. Its input may be edited."""

    tool: str
    """`bash`, `read`, ... of `agent.tools`; `exec` and `start` for the workspace's own."""
    input: Mapping[str, Any]
    """Valid arguments."""
    call_id: str
    """The model's id of the call; empty where code called."""


class PostToolUse(LaneInfo, frozen=True, kw_only=True):
    """A tool has run, or did not get to. The output that the model is shown may be edited."""

    tool: str
    input: Mapping[str, Any]
    """As it was run: edits of `PreToolUse` are in it."""
    call_id: str
    output: str
    """What the model is shown; of `exec` the standard output, of `start` nothing."""
    is_error: bool
    outcome: Outcome
    error: BaseException | None
    result: ExecResult | None
    """What the command did, where the tool ran one."""
    duration_s: float


Payload: TypeAlias = (
    RunStart | RunEnd | SubagentStart | SubagentStop | PreCompact | PostCompact | PreToolUse | PostToolUse
)
PAYLOADS: dict[str, type[LaneInfo]] = {
    kind.__name__: kind
    for kind in (RunStart, RunEnd, SubagentStart, SubagentStop, PreCompact, PostCompact, PreToolUse, PostToolUse)
}
"""Event name -> its payload."""


class Deny(msgspec.Struct, frozen=True):
    """Answer of a hook: do not do it."""

    reason: str
    """For a tool, what the model is told."""


class Edit(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of a hook: do it with this in place of what the payload holds. None leaves a field as it is."""

    input: Mapping[str, Any] | None = None
    """Of `PreToolUse`; validated like the model's own."""
    output: str | None = None
    """Of `PostToolUse`."""
    messages: Sequence[Any] | None = None
    """Of `PreCompact`."""


DENIABLE = frozenset({"RunStart", "SubagentStart", "PreCompact", "PreToolUse"})
"""Events that may be answered with `Deny`."""
EDITABLE = {"PreToolUse": "input", "PostToolUse": "output", "PreCompact": "messages"}
"""Event -> the field that `Edit` may change."""
