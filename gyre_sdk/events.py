"""What observers may learn, in past tense. Events carry facts only; a view folds them and decides nothing."""

from __future__ import annotations

import msgspec

from gyre_sdk.records import RunStatus


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=True):
    """Base of all events."""

    at: float
    """Seconds since the epoch."""


class RunStarted(Event, frozen=True, tag=True):
    """A run has a record and a workspace is being prepared."""

    run: str
    task: str
    group: str | None
    split: str = "train"
    """`train`, or the name of an evaluation."""


class LaneOpened(Event, frozen=True, tag=True):
    """A lane exists in a run."""

    run: str
    lane: str
    role: str
    name: str


class CallRecorded(Event, frozen=True, tag=True):
    """A call is complete and durable."""

    run: str
    lane: str
    role: str
    call: str
    prompt_tokens: int
    sampled_tokens: int
    version: int


class ToolRan(Event, frozen=True, tag=True):
    """A command ended in a run's workspace. `command` is raw, hostile text: escape it before showing it."""

    run: str
    command: str
    exit_code: int
    seconds: float


class RunEnded(Event, frozen=True, tag=True):
    """A run reached its terminal state."""

    run: str
    status: RunStatus
    reward: float | None
    seconds: float
    placeholder: bool = False
    """The reward is that of a run that never started: nobody evaluated it."""


class GroupClosed(Event, frozen=True, tag=True):
    """All runs of a group have ended."""

    group: str
    scored: int
    started: int
    mean_reward: float | None
    trainable: bool
    """False when the group is flat or has fewer than two scored runs."""


class StepTaken(Event, frozen=True, tag=True):
    """The optimizer has stepped."""

    step: int
    steps: int
    """Planned number of steps."""
    loss: float
    grad_norm: float
    trained_tokens: int
    runs: int
    mean_reward: float
    success: float
    """Fraction of the step's scored runs with full reward."""


class StepSkipped(Event, frozen=True, tag=True):
    """A step had nothing to train."""

    step: int
    reason: str


class VersionPublished(Event, frozen=True, tag=True):
    """Replicas serve new weights."""

    version: int
    seconds: float


class EvaluationMeasured(Event, frozen=True, tag=True):
    """An evaluation finished."""

    name: str
    runs: int
    reward: float
    success: float


class ProcessRestarted(Event, frozen=True, tag=True):
    """A supervised process died and was started again."""

    process: str
    reason: str


class PhaseStarted(Event, frozen=True, tag=True):
    """A stretch of work began whose progress can be shown."""

    name: str
    total: int
    """Units of work in the phase (runs or steps); 0 when unknown."""


AnyEvent = (
    RunStarted
    | LaneOpened
    | CallRecorded
    | ToolRan
    | RunEnded
    | GroupClosed
    | StepTaken
    | StepSkipped
    | VersionPublished
    | EvaluationMeasured
    | ProcessRestarted
    | PhaseStarted
)
