"""What every cell did over time: a pure fold over the events of cells.

The stretches of a cell never overlap and leave no gap within a training: from the first thing known of the cell to the
last event of any kind. So a store that a crash cut off reads like any other. Between two trainings on one store, cells
did nothing that anybody knows, and have no stretch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from math import inf, isfinite
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from gyre_sdk.events import (
    CellMoved,
    CellsSeen,
    Event,
    StepTaken,
    SwitchFailed,
    SwitchMeasured,
    UnitsCommitted,
    VersionPublished,
)
from gyre_sdk.view.cells import EventsMissed, RecordingStarted

UNKNOWN = "unknown"
"""State of a cell that is heard of before it is said what it does."""


class Role(StrEnum):
    """What a state is for."""

    SERVING = "serving"
    TRAINING = "training"
    MOVING = "moving"
    OFF = "off"
    OTHER = "other"
    """Nobody knows, or a state of a newer version."""


ROLES: Mapping[str, Role] = MappingProxyType(
    {
        "serving": Role.SERVING,
        "draining": Role.MOVING,
        "switching": Role.MOVING,
        "training": Role.TRAINING,
        "loading": Role.MOVING,
        "failed": Role.OFF,
        "stopped": Role.OFF,
    }
)
"""State -> role."""


class Interval(NamedTuple):
    """A stretch of time in one state. `start < stop`, seconds since the epoch."""

    start: float
    stop: float
    state: str
    reason: str = ""
    """Why the cell went into the state."""

    @property
    def seconds(self) -> float:
        """Length."""
        return self.stop - self.start

    @property
    def role(self) -> Role:
        """What the state is for."""
        return ROLES.get(self.state, Role.OTHER)


@dataclass(slots=True)
class Cell:
    """What one cell did."""

    name: str
    intervals: list[Interval] = field(default_factory=list)
    """In order."""
    state: str = UNKNOWN
    """The last one."""
    standalone: bool = False
    """It is no cell but a replica beside them, which serves all the time."""
    units: int = 0
    tokens: int = 0
    """Targets of its units."""
    computing_s: float = 0.0
    """Seconds that its units computed."""
    spare_s: float = 0.0
    """Seconds of serving in which nobody wanted it: serving time times the share of the capacity without a run."""
    switches: int = 0

    @property
    def span_s(self) -> float:
        """Seconds that are accounted for."""
        return sum(interval.seconds for interval in self.intervals)

    @property
    def states(self) -> dict[str, float]:
        """Seconds by state, of those that it was in."""
        found: dict[str, float] = {}
        for interval in self.intervals:
            found[interval.state] = found.get(interval.state, 0.0) + interval.seconds
        return found

    @property
    def roles(self) -> dict[Role, float]:
        """Seconds by role; every role is there."""
        found = dict.fromkeys(Role, 0.0)
        for interval in self.intervals:
            found[interval.role] += interval.seconds
        return found

    @property
    def idle(self) -> dict[Role, float]:
        """Seconds without work by role: serving that no run needed, training that computed no committed unit."""
        waiting = max(0.0, self.roles[Role.TRAINING] - self.computing_s)
        return {Role.SERVING: self.spare_s, Role.TRAINING: waiting}


@dataclass(frozen=True, slots=True)
class Cost:
    """What going over to a role cost, over all cells."""

    count: int
    mean_s: float
    """Seconds, all phases."""
    phases: dict[str, float]
    """Mean seconds by phase, in order; a phase that a switch did not have counts as 0."""
    finished: int
    """Requests that ended while cells drained."""
    moved: int
    """Requests that went on elsewhere."""


@dataclass(slots=True)
class Timeline:
    """All cells of a store, and what they worked on. Lists are in the order of time."""

    cells: dict[str, Cell] = field(default_factory=dict)
    """In the order in which they were first heard of, with the replicas beside them."""
    seen: list[CellsSeen] = field(default_factory=list)
    switches: list[SwitchMeasured] = field(default_factory=list)
    failures: list[SwitchFailed] = field(default_factory=list)
    """Switches that failed; they count in no cost."""
    commits: list[UnitsCommitted] = field(default_factory=list)
    versions: list[VersionPublished] = field(default_factory=list)
    steps: list[StepTaken] = field(default_factory=list)
    trainings: list[float] = field(default_factory=list)
    """When each process that trained began to record."""
    start: float = inf
    """Seconds since the epoch at which anything is known."""
    end: float = -inf
    """The last event's time."""
    missed: int = 0
    """Events that were not recorded."""
    unknown: int = 0
    """Events that this version cannot read."""

    @property
    def span_s(self) -> float:
        """Seconds from the first thing known to the last event."""
        return max(0.0, self.end - self.start) if self.start < inf else 0.0

    @property
    def costs(self) -> dict[str, Cost]:
        """What switches cost, by the role that cells went over to."""
        found: dict[str, list[SwitchMeasured]] = {}
        for switch in self.switches:
            found.setdefault(switch.to, []).append(switch)
        return {to: _cost(switches) for to, switches in found.items()}


def timeline(events: Iterable[Event], *, unknown: int = 0) -> Timeline:
    """Fold events into a timeline.

    Args:
        events: in the order of the store; within a training those of several threads may be a little out of order.
        unknown: entries that could not be read.
    """
    found = Timeline(unknown=unknown)
    for training in _trainings(events):
        _fold(found, training)
    begins = [cell.intervals[0].start for cell in found.cells.values() if cell.intervals]
    found.start = min([found.start, *begins])
    return found


def _trainings(events: Iterable[Event]) -> Iterator[list[Event]]:
    """Yield the events of each training, in the order of time."""
    some: list[Event] = []
    for event in events:
        if isinstance(event, RecordingStarted) and some:
            yield sorted(some, key=lambda one: one.at)
            some = []
        some.append(event)
    if some:
        yield sorted(some, key=lambda one: one.at)


def _fold(found: Timeline, training: list[Event]) -> None:
    """Add a training. A clock that was set back does not take time back: its events come at the end of the last one."""
    floor = found.end
    ways: dict[str, _Way] = {}
    first_seen = len(found.seen)
    for raw in training:
        event = raw if raw.at >= floor else msgspec.structs.replace(raw, at=floor)
        match event:
            case CellMoved():
                _way(found, ways, event.cell, event.at, floor).moved(event)
            case UnitsCommitted():
                cell = _way(found, ways, event.cell, event.at, floor).cell
                cell.units += event.units
                cell.tokens += event.tokens
                cell.computing_s += _seconds(event.seconds)
                found.commits.append(event)
            case SwitchMeasured():
                _way(found, ways, event.cell, event.at, floor).cell.switches += 1
                found.switches.append(event)
            case SwitchFailed():
                _way(found, ways, event.cell, event.at, floor)
                found.failures.append(event)
            case CellsSeen():
                found.seen.append(event)
            case VersionPublished():
                found.versions.append(event)
            case StepTaken():
                found.steps.append(event)
            case RecordingStarted():
                found.trainings.append(event.at)
            case EventsMissed():
                found.missed += event.count
            case _:
                found.unknown += 1
        found.start, found.end = min(found.start, event.at), max(found.end, event.at)
    spare = _Spare(found.seen[first_seen:], found.end)
    for way in ways.values():
        way.close(found.end)
        serving = (interval for interval in way.cell.intervals[way.begin :] if interval.role is Role.SERVING)
        way.cell.spare_s += sum(spare.between(interval.start, interval.stop) for interval in serving)


def _way(found: Timeline, ways: dict[str, _Way], name: str, at: float, floor: float) -> _Way:
    if name not in ways:
        ways[name] = _Way(found.cells.setdefault(name, Cell(name)), at, floor)
    return ways[name]


class _Way:
    """A cell's way through one training."""

    def __init__(self, cell: Cell, first: float, floor: float) -> None:
        """`first` is when it is first heard of; nothing of it is before `floor`."""
        self.cell = cell
        self.begin = len(cell.intervals)
        self._floor = floor
        self._since = first
        self._reason = ""
        self._known = False
        cell.state = UNKNOWN

    def moved(self, event: CellMoved) -> None:
        """End the stretch that the event tells the length of; what was missed before it is not made up."""
        before_since = max(event.at - _seconds(event.seconds), self._floor, 0.0)
        if not self._known and before_since < self._since:
            self._since = before_since
            self.cell.state = event.before
        elif self.cell.state != event.before:
            self._end(min(max(before_since, self._since), event.at))
            self.cell.state, self._reason = event.before, ""
        self._end(event.at)
        self.cell.state, self._reason, self._known = event.state, event.reason, True
        self.cell.standalone = event.standalone

    def close(self, at: float) -> None:
        """End what is open with the training's last event."""
        self._end(at)

    def _end(self, at: float) -> None:
        if self._since < at:
            self.cell.intervals.append(Interval(self._since, at, self.cell.state, self._reason))
            self._since = at


class _Spare:
    """The share of the serving capacity that no run needed, as an integral over time."""

    def __init__(self, seen: list[CellsSeen], end: float) -> None:
        self._times = [one.at for one in seen] + [end]
        self._shares = [unused(one) for one in seen]
        self._sums = [0.0]
        for (start, stop), share in zip(pairwise(self._times), self._shares, strict=True):
            self._sums.append(self._sums[-1] + (stop - start) * share)

    def between(self, start: float, stop: float) -> float:
        """Return seconds times share over a stretch; what was not looked at counts as needed."""
        return max(0.0, self._until(stop) - self._until(start))

    def _until(self, at: float) -> float:
        place = bisect_right(self._times, at) - 1
        if place < 0:
            return 0.0
        if place >= len(self._shares):
            return self._sums[-1]
        return self._sums[place] + (at - self._times[place]) * self._shares[place]


def unused(seen: CellsSeen) -> float:
    """Return the share of the serving capacity that no run needed."""
    if not (isfinite(seen.capacity) and seen.capacity > 0):
        return 0.0
    return min(1.0, max(0.0, 1.0 - seen.water / seen.capacity))


def idle_cells(seen: CellsSeen) -> dict[str, float]:
    """Return how many cells had nothing to do at a look, by role: serving without a run for it, training without work.

    Replicas beside the cells count as serving cells.
    """
    serving = seen.serving + seen.standalone
    return {"serving": serving * unused(seen), "training": 0.0 if seen.ready_s else float(seen.training)}


def _seconds(value: float) -> float:
    """Return a duration that can be added up."""
    return value if isfinite(value) and value > 0 else 0.0


def _cost(switches: list[SwitchMeasured]) -> Cost:
    phases: dict[str, float] = {}
    for switch in switches:
        for name, seconds in switch.phases.items():
            phases[name] = phases.get(name, 0.0) + _seconds(seconds)
    number = len(switches)
    return Cost(
        count=number,
        mean_s=sum(phases.values()) / number,
        phases={name: total / number for name, total in phases.items()},
        finished=sum(switch.finished for switch in switches),
        moved=sum(switch.moved for switch in switches),
    )
