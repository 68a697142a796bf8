"""A timeline as a trace file: Chrome's trace event format, JSON object form, which Perfetto and chrome://tracing open.

One process is the fleet: counters of runs, cells and idle ones, and instants for versions and steps. Each cell is a
process with three threads: what it does, the phases of its switches, its units; its label says how long it was idle.
Times are whole microseconds since the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf, isfinite
from typing import Any

import msgspec

from gyre_sdk.events import SwitchMeasured, UnitsCommitted
from gyre_sdk.view.timeline import Cell, Role, Timeline, idle_cells

_FLEET = 1
"""Process number of the fleet; cells follow. 0 would mean the kernel to Perfetto."""
_STATES, _SWITCHES, _UNITS = 1, 2, 3
_VERSIONS, _STEPS, _TRAININGS = 1, 2, 3
_THREADS = 10
"""Thread numbers are the process's times this, plus the thread's: unique in the file."""


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


class _Writer:
    def __init__(self, found: Timeline) -> None:
        self._found = found
        self._commits: dict[str, list[UnitsCommitted]] = {}
        self._switched: dict[str, list[SwitchMeasured]] = {}
        for commit in found.commits:
            self._commits.setdefault(commit.cell, []).append(commit)
        for switch in found.switches:
            self._switched.setdefault(switch.cell, []).append(switch)

    def names(self) -> Iterator[dict[str, Any]]:
        """Name processes and threads."""
        fleet = {_VERSIONS: "versions", _STEPS: "steps", _TRAININGS: "trainings"}
        cell = {_STATES: "state", _SWITCHES: "switches", _UNITS: "units"}
        for pid, name in enumerate(["fleet", *self._found.cells], _FLEET):
            yield {"ph": "M", "name": "process_name", "pid": pid, "ts": 0, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "ts": 0, "args": {"sort_index": pid}}
            for number, thread in (fleet if pid == _FLEET else cell).items():
                tid = pid * _THREADS + number
                yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "ts": 0, "args": {"name": thread}}
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
            yield self._instant(_FLEET, _VERSIONS, version.at, f"version {version.version}", args)
        for step in found.steps:
            args = {key: value for key, value in msgspec.structs.asdict(step).items() if key != "at"}
            yield self._instant(_FLEET, _STEPS, step.at, f"step {step.step}", args)
        for at in found.trainings:
            yield self._instant(_FLEET, _TRAININGS, at, "training starts", {})

    def cell(self, place: int, cell: Cell) -> Iterator[dict[str, Any]]:
        """Yield what one cell did."""
        pid = _FLEET + place
        for interval in cell.intervals:
            args = {"reason": interval.reason, "seconds": interval.seconds, "role": interval.role}
            yield self._slice(pid, _STATES, interval.start, interval.stop, interval.state, args)
        yield from self._switches(pid, cell)
        total = 0
        for commit in self._commits.get(cell.name, []):
            total += commit.units
            args = {"step": commit.step, "units": commit.units, "tokens": commit.tokens, "seconds": commit.seconds}
            yield self._instant(pid, _UNITS, commit.at, f"{commit.units} units of step {commit.step}", args)
            yield from self._counter(pid, commit.at, "units", {"units": total})

    def _switches(self, pid: int, cell: Cell) -> Iterator[dict[str, Any]]:
        """Yield switches with their phases inside. Only the end is known: phases are laid out before it, one by one."""
        last = self._found.start
        for switch in self._switched.get(cell.name, []):
            phases = {name: seconds for name, seconds in switch.phases.items() if isfinite(seconds) and seconds > 0}
            start = max(last, switch.at - sum(phases.values()))
            args = {"phases": switch.phases, "finished": switch.finished, "moved": switch.moved}
            yield self._slice(pid, _SWITCHES, start, switch.at, f"to {switch.to}", args)
            stop = switch.at
            for name, seconds in reversed(phases.items()):
                begin = max(start, stop - seconds)
                yield self._slice(pid, _SWITCHES, begin, stop, name, {"seconds": seconds})
                stop = begin
            last = switch.at

    def _us(self, at: float) -> int:
        return round((at - self._found.start) * 1e6)

    def _slice(
        self, pid: int, thread: int, start: float, stop: float, name: str, args: dict[str, Any]
    ) -> dict[str, Any]:
        # Both ends are rounded, not the length: slices that follow each other do not overlap.
        ts = self._us(start)
        where = {"pid": pid, "tid": pid * _THREADS + thread}
        return {"ph": "X", "name": name, "cat": "cell", "ts": ts, "dur": self._us(stop) - ts, **where, "args": args}

    def _instant(self, pid: int, thread: int, at: float, name: str, args: dict[str, Any]) -> dict[str, Any]:
        where = {"pid": pid, "tid": pid * _THREADS + thread}
        return {"ph": "i", "s": "t", "name": name, "cat": "cell", "ts": self._us(at), **where, "args": args}

    def _counter(self, pid: int, at: float, name: str, values: Mapping[str, float]) -> Iterator[dict[str, Any]]:
        args = {key: value for key, value in values.items() if isfinite(value)}
        if args:
            yield {"ph": "C", "name": name, "cat": "cell", "ts": self._us(at), "pid": pid, "args": args}
