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


class ReplicaLost(Event, frozen=True, tag=True):
    """Calls go to a replica no more: it died, was started anew, or missed a publication."""

    replica: str
    """Its address."""


class ReplicaBrought(Event, frozen=True, tag=True):
    """A replica to which no calls went was brought to the weights that are served; calls go there."""

    replica: str
    version: int


class CellMoved(Event, frozen=True, tag=True):
    """A cell changed what it does."""

    cell: str
    state: str
    """What it does now: a `trainer.cells.state.CellState`."""
    before: str
    seconds: float
    """Time that it was `before`."""
    reason: str = ""
    """Why, in words: of the plan, or what failed."""
    standalone: bool = False
    """It is no cell but a replica beside them, which serves all the time."""


class CellsSeen(Event, frozen=True, tag=True):
    """The manager of cells looked: what there was to serve and to train."""

    water: int
    """Unfinished runs."""
    capacity: float
    """Runs that the serving cells carry."""
    serving: int
    training: int
    moving: int
    ready_s: float
    """Sealed work that nobody has done yet, cell-seconds."""
    limit: str = ""
    """What bounds the runs of a cell: `settings`, or what was measured to be below, its `cache` or `speed`."""
    standalone: int = 0
    """Replicas beside the cells; each carries as much as a serving cell."""


class SwitchMeasured(Event, frozen=True, tag=True):
    """A cell has gone over, to training or back."""

    cell: str
    to: str
    """`training` or `serving`."""
    phases: dict[str, float]
    """Seconds by phase, in order."""
    finished: int = 0
    """Requests that ended while it drained."""
    moved: int = 0
    """Requests that went on elsewhere."""
    starts: dict[str, float] = msgspec.field(default_factory=dict)
    """Seconds from when it began until each phase began; of older versions nothing."""


class SwitchFailed(Event, frozen=True, tag=True):
    """A phase of a cell's switch failed; the cell takes neither requests nor units until it is brought back."""

    cell: str
    to: str
    """`training` or `serving`."""
    phase: str
    """Which failed."""
    phases: dict[str, float]
    """Seconds by phase, in order, of those that began."""


class UnitsCommitted(Event, frozen=True, tag=True):
    """A cell's gradient of some units became part of the batch."""

    cell: str
    step: int
    units: int
    tokens: int
    """Targets."""
    seconds: float
    """Computing, without waiting and transfers."""


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
    | ReplicaLost
    | ReplicaBrought
    | PhaseStarted
    | CellMoved
    | CellsSeen
    | SwitchFailed
    | SwitchMeasured
    | UnitsCommitted
)
