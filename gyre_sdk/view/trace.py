"""A timeline as a trace file: Chrome's trace event format, JSON object form, which Perfetto and chrome://tracing open.

One process is the fleet: counters of runs, cells and idle ones, and instants for versions and steps. Each cell, and each
replica beside them, is a process whose threads are what it does, the phases of its switches, and its units; its label says
how long it was idle. Slices of a thread nest: phases that overlap without one within the other lie on threads of their
own. Times are whole microseconds since the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from math import inf, isfinite
from typing import Any, NamedTuple

import msgspec

from gyre_sdk.events import SwitchFailed, SwitchMeasured, UnitsCommitted
from gyre_sdk.view.escape import counted
from gyre_sdk.view.timeline import Cell, Role, Timeline, idle_cells

_FLEET = 1
"""Process number of the fleet; cells follow. 0 would mean the kernel to Perfetto."""


def trace(found: Timeline) -> bytes:
    """Return the trace file of a timeline; an empty one has no events."""
    events: list[dict[str, Any]] = []
    if found.start < inf:
        writer = _Writer(found)
        timed = [
            *writer.fleet(),
            *(event for place in enumerate(found.cells.values(), 1) for event in writer.cell(*place)),
        ]
        # What is equally old goes outermost first, as nested slices need it.
        timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
        events = [*writer.names(), *timed]
    about = {"start": found.start if events else None, "missed": found.missed, "unknown": found.unknown}
    return msgspec.json.encode({"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}) + b"\n"


_LONGEST = 1e9
"""Seconds; a phase that claims to be longer, or to have begun so long before, is not drawn where it says."""


class _Writer:
    def __init__(self, found: Timeline) -> None:
        self._found = found
        self._threads: dict[tuple[int, str], int] = {}
        """(process, name) -> number, unique in the file."""
        self._commits: dict[str, list[UnitsCommitted]] = {}
        self._switched: dict[str, list[SwitchMeasured | SwitchFailed]] = {}
        for commit in found.commits:
            self._commits.setdefault(commit.cell, []).append(commit)
        switches: list[SwitchMeasured | SwitchFailed] = [*found.switches, *found.failures]
        for switch in switches:
            self._switched.setdefault(switch.cell, []).append(switch)

    def names(self) -> Iterator[dict[str, Any]]:
        """Name processes, and the threads that were written to."""
        for pid, name in enumerate(["fleet", *self._found.cells], _FLEET):
            yield {"ph": "M", "name": "process_name", "pid": pid, "ts": 0, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "ts": 0, "args": {"sort_index": pid}}
        for (pid, thread), tid in self._threads.items():
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "ts": 0, "args": {"name": thread}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "ts": 0, "args": {"sort_index": tid}}
        for pid, one in enumerate(self._found.cells.values(), _FLEET + 1):
            idle = ", ".join(f"{one.idle[role]:.1f} s {role}" for role in (Role.SERVING, Role.TRAINING))
            yield {"ph": "M", "name": "process_labels", "pid": pid, "ts": 0, "args": {"labels": f"idle {idle}"}}

    def fleet(self) -> Iterator[dict[str, Any]]:
        """Yield what is of no cell alone."""
        found = self._found
        for seen in found.seen:
            yield from self._counter(_FLEET, seen.at, "runs", {"water": seen.water, "capacity": seen.capacity})
            cells = {"serving": seen.serving, "training": seen.training, "moving": seen.moving}
            yield from self._counter(_FLEET, seen.at, "cells", cells)
            yield from self._counter(_FLEET, seen.at, "ready work (cell-seconds)", {"ready": seen.ready_s})
            yield from self._counter(_FLEET, seen.at, "idle (cells)", idle_cells(seen))
        for version in found.versions:
            args = {"version": version.version, "published in (s)": version.seconds}
            yield self._instant(_FLEET, "versions", version.at, f"version {version.version}", args)
        for step in found.steps:
            args = {key: value for key, value in msgspec.structs.asdict(step).items() if key != "at"}
            yield self._instant(_FLEET, "steps", step.at, f"step {step.step}", args)
        for at in found.trainings:
            yield self._instant(_FLEET, "trainings", at, "training starts", {})

    def cell(self, place: int, cell: Cell) -> Iterator[dict[str, Any]]:
        """Yield what one cell did."""
        pid = _FLEET + place
        for interval in cell.intervals:
            args = {"reason": interval.reason, "seconds": interval.seconds, "role": interval.role}
            yield self._slice(pid, "state", interval.start, interval.stop, interval.state, args)
        yield from self._switches(pid, cell)
        total = 0
        for commit in self._commits.get(cell.name, []):
            total += commit.units
            args = {"step": commit.step, "units": commit.units, "tokens": commit.tokens, "seconds": commit.seconds}
            yield self._instant(pid, "units", commit.at, f"{counted(commit.units, 'unit')} of step {commit.step}", args)
            yield from self._counter(pid, commit.at, "units", {"units": total})

    def _switches(self, pid: int, cell: Cell) -> Iterator[dict[str, Any]]:
        """Yield switches and their phases, each on the first thread on which it nests."""
        slices = [one for switch in self._switched.get(cell.name, []) for one in _laid(switch)]
        slices.sort(key=lambda one: (self._us(one.start), -self._us(one.stop)))
        threads: list[list[int]] = []  # where the open slices of each end, outermost first
        for one in slices:
            start, stop = self._us(one.start), self._us(one.stop)
            for ends in threads:
                while ends and ends[-1] <= start:
                    ends.pop()
            fits = [number for number, ends in enumerate(threads) if not ends or stop <= ends[-1]]
            number = fits[0] if fits else len(threads)
            threads[number:] = threads[number:] or [[]]
            threads[number].append(stop)
            thread = f"switches {number + 1}" if number else "switches"
            yield self._slice(pid, thread, one.start, one.stop, one.name, one.args)

    def _us(self, at: float) -> int:
        return max(0, round((at - self._found.start) * 1e6))

    def _thread(self, pid: int, name: str) -> dict[str, int]:
        return {"pid": pid, "tid": self._threads.setdefault((pid, name), len(self._threads) + 1)}

    def _slice(
        self, pid: int, thread: str, start: float, stop: float, name: str, args: dict[str, Any]
    ) -> dict[str, Any]:
        # Both ends are rounded, not the length: slices that follow each other do not overlap.
        ts = self._us(start)
        where = self._thread(pid, thread)
        return {"ph": "X", "name": name, "cat": "cell", "ts": ts, "dur": self._us(stop) - ts, **where, "args": args}

    def _instant(self, pid: int, thread: str, at: float, name: str, args: dict[str, Any]) -> dict[str, Any]:
        where = self._thread(pid, thread)
        return {"ph": "i", "s": "t", "name": name, "cat": "cell", "ts": self._us(at), **where, "args": args}

    def _counter(self, pid: int, at: float, name: str, values: Mapping[str, float]) -> Iterator[dict[str, Any]]:
        args = {key: value for key, value in values.items() if isfinite(value)}
        if args:
            yield {"ph": "C", "name": name, "cat": "cell", "ts": self._us(at), "pid": pid, "args": args}


class _Slice(NamedTuple):
    """A stretch of a switch, seconds since the epoch."""

    start: float
    stop: float
    name: str
    args: dict[str, Any]


def _laid(switch: SwitchMeasured | SwitchFailed) -> Iterator[_Slice]:
    """Yield a switch, which ends where it was measured, and its phases.

    Where it was not recorded when they began, they are laid before the end, one after the other.
    """
    phases = {name: seconds for name, seconds in switch.phases.items() if 0 < seconds <= _LONGEST}
    args: dict[str, Any] = {"phases": switch.phases}
    if isinstance(switch, SwitchFailed):
        name, known = f"to {switch.to}, failed", {}
        args["failed in"] = switch.phase
    else:
        name, known = f"to {switch.to}", switch.starts
        args |= {"finished": switch.finished, "moved": switch.moved}
    starts = {phase: known.get(phase, inf) for phase in phases}
    if not all(abs(start) <= _LONGEST for start in starts.values()):
        starts = dict(zip(phases, accumulate(phases.values(), initial=0.0), strict=False))
    begin = switch.at - max((starts[phase] + seconds for phase, seconds in phases.items()), default=0.0)
    yield _Slice(begin + min(starts.values(), default=0.0), switch.at, name, args)
    for phase, seconds in phases.items():
        stop = begin + starts[phase] + seconds
        yield _Slice(begin + starts[phase], stop, phase, {"seconds": seconds})
