"""What has happened so far, as a fold over events. Reads no clock, decides nothing, and stays small on long trainings."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from gyre_sdk.events import (
    CallRecorded,
    CellMoved,
    CellsSeen,
    EvaluationMeasured,
    Event,
    GroupClosed,
    LaneOpened,
    PhaseStarted,
    ProcessRestarted,
    ReplicaBrought,
    ReplicaLost,
    RunEnded,
    RunStarted,
    StepSkipped,
    StepTaken,
    SwitchFailed,
    SwitchMeasured,
    ToolRan,
    UnitsCommitted,
    VersionPublished,
)
from gyre_sdk.records import RunStatus

TRAIN = "train"
"""Name of the phase whose units are steps, and split of runs that are trained on."""
_RECENT = 8
_CURVE = 2048
_RATE_WINDOW = 8
"""Units of progress over which the pace is measured."""


@dataclass(slots=True)
class RunView:
    """A run, as far as it is shown."""

    run: str
    task: str
    group: str | None
    split: str
    started_at: float
    last_at: float
    status: RunStatus = RunStatus.RUNNING
    lane: str = "main"
    """Lane of the latest call, by name."""
    role: str = "main"
    lanes: dict[str, str] = field(default_factory=dict)
    """Lane id -> name."""
    turn: int = 0
    """Recorded calls."""
    tokens: int = 0
    """Sampled tokens."""
    context: int = 0
    """Prompt + sampled tokens of the latest call."""
    version: int = -1
    command: str = ""
    """Latest tool command, raw: escape it."""
    exit_code: int | None = None
    reward: float | None = None
    placeholder: bool = False
    seconds: float = 0.0


@dataclass(slots=True)
class GroupView:
    """A group that is still open."""

    task: str
    started: int = 0
    ended: int = 0


@dataclass(slots=True)
class CellView:
    """A cell, as far as it is shown."""

    since: float
    """Since when it is what it is."""
    state: str = ""
    """What it does; empty while nobody has said so. Raw text."""
    units: int = 0
    """Units that it committed."""
    tokens: int = 0


@dataclass(slots=True)
class SwitchView:
    """Going over to a role, over all cells."""

    count: int = 0
    seconds: float = 0.0
    """Of all of them."""


@dataclass(slots=True)
class Phase:
    """A stretch of work with progress."""

    name: str
    total: int
    started_at: float
    runs: int = 0
    """Runs of an evaluation that ended in it."""
    steps: int = 0
    """Steps taken or skipped in it."""
    base: int | None = None
    """Number of the step before its first one: a resumed training does not start at 0."""
    marks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RATE_WINDOW + 1))
    """(time, done) after each unit."""

    @property
    def done(self) -> int:
        """Units of work done: steps in training, runs in an evaluation."""
        done = self.steps or (0 if self.name == TRAIN else self.runs)
        return min(done, self.total) if self.total else done

    def eta(self, now: float) -> float | None:
        """Return seconds left at the recent pace, or None when that is not known yet."""
        if not self.total or not self.done:
            return None
        first_at, first_done = self.marks[0] if len(self.marks) > _RATE_WINDOW else (self.started_at, 0)
        last_at, last_done = self.marks[-1]
        if last_done <= first_done or last_at <= first_at:
            return None
        pace = (last_at - first_at) / (last_done - first_done)
        return max(0.0, (self.total - last_done) * pace - max(0.0, now - last_at))


class State:
    """The fold. `apply` takes any event in any order and never raises for one it does not understand."""

    def __init__(self) -> None:
        self.started_at: float | None = None
        self.now = 0.0
        """Time of the latest event."""
        self.phase: Phase | None = None
        self.active: dict[str, RunView] = {}
        """Runs that have not ended, oldest first."""
        self.finished: deque[RunView] = deque(maxlen=_RECENT)
        """Runs that ended last."""
        self.ended = Counter[str]()
        """Ended runs by terminal state."""
        self.scored = 0
        self.reward_sum = 0.0
        """Sum of the rewards of scored runs; a mean over training runs only would hide evaluations."""
        self.calls = 0
        self.prompt_tokens = 0
        self.sampled_tokens = 0
        self.open_groups: dict[str, GroupView] = {}
        self.groups = Counter[str]()
        """Closed groups: `trained`, `flat`, `too small`."""
        self.steps: deque[StepTaken] = deque(maxlen=_CURVE)
        self.trained_tokens = 0
        self.skipped = Counter[str]()
        """Skipped steps by reason."""
        self.version: VersionPublished | None = None
        self.versions = 0
        self.evaluations: dict[str, EvaluationMeasured] = {}
        self.restarts = Counter[str]()
        """Restarts by process."""
        self.lost = set[str]()
        """Addresses of the replicas beside no cells that take no calls now."""
        self.cells: dict[str, CellView] = {}
        """Cells by name, in the order in which they were first heard of."""
        self.fleet: CellsSeen | None = None
        """The latest look at the cells."""
        self.switches: dict[str, SwitchView] = {}
        """Switches by the role that cells went over to."""
        self.problems: deque[tuple[float, str]] = deque(maxlen=_RECENT)
        """(time, what): restarts, failed runs, skipped steps; raw text."""
        self.unknown = 0
        """Events that were not understood."""

    def apply(self, event: Event) -> None:
        """Take one event into account."""
        if self.started_at is None:
            self.started_at = event.at
        self.now = max(self.now, event.at)
        match event:
            case RunStarted():
                self.active[event.run] = RunView(
                    event.run, event.task, event.group, event.split, started_at=event.at, last_at=event.at
                )
                if event.group is not None:
                    self.open_groups.setdefault(event.group, GroupView(event.task)).started += 1
            case LaneOpened():
                if (run := self._run(event.run, event.at)) is not None:
                    run.lanes[event.lane] = event.name
            case CallRecorded():
                self._call_recorded(event)
            case ToolRan():
                if (run := self._run(event.run, event.at)) is not None:
                    run.command, run.exit_code = event.command, event.exit_code
            case RunEnded():
                self._run_ended(event)
            case GroupClosed():
                self.open_groups.pop(event.group, None)
                self.groups["trained" if event.trainable else "flat" if event.scored >= 2 else "too small"] += 1
            case StepTaken():
                self.steps.append(event)
                self.trained_tokens += event.trained_tokens
                if self.phase is None:
                    self.phase = Phase(TRAIN, event.steps, self.started_at)
                self._stepped(event.step, event.at)
            case StepSkipped():
                self.skipped[event.reason] += 1
                self.problems.append((event.at, f"step {event.step} skipped: {event.reason}"))
                self._stepped(event.step, event.at)
            case VersionPublished():
                self.version = event
                self.versions += 1
            case EvaluationMeasured():
                self.evaluations[event.name] = event
            case ProcessRestarted():
                self.restarts[event.process] += 1
                self.problems.append((event.at, f"{event.process} restarted: {event.reason}"))
            case ReplicaLost() if not self.cells:  # where there are cells, the cell says that it failed
                self.lost.add(event.replica)
                self.problems.append((event.at, f"replica {event.replica} was lost, and takes no calls"))
            case ReplicaLost():
                pass
            case ReplicaBrought():
                self.lost.discard(event.replica)
            case PhaseStarted():
                self.phase = Phase(event.name, event.total, event.at)
            case CellsSeen():
                self.fleet = event
            case CellMoved() | UnitsCommitted() | SwitchMeasured():
                self._of_cell(event)
            case SwitchFailed():
                pass  # the cell says itself that it failed
            case _:
                self.unknown += 1

    @property
    def mean_reward(self) -> float | None:
        """Mean reward of the scored runs, or None when there are none."""
        return self.reward_sum / self.scored if self.scored else None

    @property
    def unscored(self) -> int:
        """Ended runs without an evaluated reward."""
        return self.ended.total() - self.scored

    def _run(self, run: str, at: float) -> RunView | None:
        found = self.active.get(run)
        if found is not None:
            found.last_at = max(found.last_at, at)
        return found

    def _of_cell(self, event: CellMoved | UnitsCommitted | SwitchMeasured) -> None:
        cell = self.cells.setdefault(event.cell, CellView(event.at))
        match event:
            case CellMoved():
                cell.state, cell.since = event.state, event.at
                if event.state == "failed":
                    what = "replica" if event.standalone else "cell"
                    self.problems.append((event.at, f"{what} {event.cell} failed: {event.reason}"))
            case UnitsCommitted():
                cell.units += event.units
                cell.tokens += event.tokens
            case SwitchMeasured():
                switch = self.switches.setdefault(event.to, SwitchView())
                switch.count += 1
                switch.seconds += sum(event.phases.values())

    def _call_recorded(self, event: CallRecorded) -> None:
        self.calls += 1
        self.prompt_tokens += event.prompt_tokens
        self.sampled_tokens += event.sampled_tokens
        if (run := self._run(event.run, event.at)) is None:
            return
        run.lane, run.role = run.lanes.get(event.lane, event.role), event.role
        run.turn += 1
        run.tokens += event.sampled_tokens
        run.context = event.prompt_tokens + event.sampled_tokens
        run.version = event.version

    def _run_ended(self, event: RunEnded) -> None:
        self.ended[str(event.status)] += 1
        if event.reward is not None and not event.placeholder:
            self.scored += 1
            self.reward_sum += event.reward
        run = self.active.pop(event.run, None)
        if event.status not in (RunStatus.COMPLETED, RunStatus.TIMED_OUT, RunStatus.LIMIT, RunStatus.CANCELLED):
            self.problems.append((event.at, f"run {event.run} of {run.task if run else '?'}: {event.status}"))
        if run is None:
            return
        if run.group in self.open_groups:
            self.open_groups[run.group].ended += 1
        run.status, run.reward, run.placeholder = event.status, event.reward, event.placeholder
        run.seconds, run.last_at = event.seconds, event.at
        self.finished.append(run)
        if self.phase is not None and self.phase.name != TRAIN and run.split != TRAIN:
            self.phase.runs += 1
            if not self.phase.steps:
                self.phase.marks.append((event.at, self.phase.runs))

    def _stepped(self, step: int, at: float) -> None:
        if self.phase is None:
            return
        if self.phase.base is None:
            self.phase.base = step - 1
            self.phase.marks.clear()
        if step - self.phase.base > self.phase.steps:
            self.phase.steps = step - self.phase.base
            self.phase.marks.append((at, self.phase.steps))
