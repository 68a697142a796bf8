"""Events of cells for tests: short ways to write them, and drawn ones."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

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
from gyre_sdk.trainer.cells.state import TRANSITIONS, CellState
from gyre_sdk.view.cells import EventsMissed, RecordingStarted


def moved(at: float, cell: str, before: str, state: str, seconds: float, reason: str = "") -> CellMoved:
    return CellMoved(at, cell, state, before, seconds, reason)


def seen(at: float, water: int, capacity: float = 10.0, ready_s: float = 0.0) -> CellsSeen:
    return CellsSeen(at, water, capacity, 1, 1, 0, ready_s)


def step(at: float, number: int) -> StepTaken:
    return StepTaken(at, number, 9, float("nan"), 1.0, 100, 8, 0.5, 0.25)


SMALL: list[Event] = [
    RecordingStarted(1000.0),
    seen(1000.0, 10, ready_s=4.0),
    moved(1010.0, "core", "serving", "draining", 10.0, "the burst is complete"),
    moved(1012.0, "core", "draining", "switching", 2.0),
    moved(1015.0, "core", "switching", "training", 3.0),
    SwitchMeasured(1015.0, "core", "training", {"drain": 2.0, "sleep": 1.0, "load": 2.0}, 3, 1),
    seen(1020.0, 5),
    UnitsCommitted(1024.0, "core", 1, 6, 600, 8.0),
    UnitsCommitted(1024.0, "s1", 1, 2, 200, 3.0),
    step(1025.0, 1),
    moved(1025.0, "core", "training", "loading", 10.0),
    SwitchMeasured(1029.0, "core", "serving", {"offer": 1.0, "load": 3.0}),
    moved(1029.0, "core", "loading", "serving", 4.0),
    VersionPublished(1029.0, 1, 1.5),
    moved(1030.0, "s1", "training", "failed", 20.0, "no sign of life for 6 s"),
    seen(1034.0, 0),
]
"""Two cells through a step: `core` goes over and back, `s1` trains and dies."""

_times = st.floats(0, 1000)
_cells = st.sampled_from(["core", "s1", "s2"])
_states = st.sampled_from([*CellState, "hovering"])
_any = st.floats(allow_nan=True, allow_infinity=True)
_counts = st.integers(0, 50)
EVENTS = st.lists(
    st.one_of(
        st.builds(moved, _times, _cells, _states, _states, st.one_of(_times, _any), st.text(max_size=5)),
        st.builds(CellsSeen, _times, _counts, st.one_of(_times, _any), _counts, _counts, _counts, _any),
        st.builds(
            SwitchMeasured,
            _times,
            _cells,
            st.sampled_from(["training", "serving", "elsewhere"]),
            st.dictionaries(st.sampled_from(["drain", "sleep", "load"]), st.one_of(_times, _any)),
            _counts,
            _counts,
            st.dictionaries(st.sampled_from(["drain", "sleep", "load"]), st.one_of(_times, _any)),
        ),
        st.builds(SwitchFailed, _times, _cells, st.just("training"), st.just("drain"), st.dictionaries(_cells, _any)),
        st.builds(UnitsCommitted, _times, _cells, _counts, _counts, _counts, st.one_of(_times, _any)),
        st.builds(VersionPublished, _times, _counts, _any),
        st.builds(step, _times, _counts),
        st.builds(EventsMissed, _times, _counts),
        st.builds(RecordingStarted, _times),
    ),
    max_size=14,
)
"""Anything that may stand in a store, sense or not."""


@st.composite
def walks(draw: st.DrawFn, cells: int = 3) -> dict[str, list[tuple[float, CellState]]]:
    """Draw what cells did: since when they were what, legally, at whole seconds."""
    found = {}
    for number in range(cells):
        at, state = float(draw(st.integers(0, 20))), CellState.SERVING
        walk = [(at, state)]
        for _ in range(draw(st.integers(1, 8))):
            state = draw(st.sampled_from(sorted(TRANSITIONS[state].values())))
            at += draw(st.integers(1, 30))
            walk.append((at, state))
        found[f"cell {number}"] = walk
    return found


def told(walks: dict[str, list[tuple[float, CellState]]]) -> list[Event]:
    """Return the events that tell walks, in the order of time."""
    events: list[Event] = [
        moved(at, cell, before, state, at - since)
        for cell, walk in walks.items()
        for (since, before), (at, state) in pairwise(walk)
    ]
    return sorted(events, key=lambda event: event.at)


def check_trace(data: bytes) -> list[dict[str, Any]]:
    """Check a trace file against the rules of its format; return its events."""

    def refused(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    whole = json.loads(data, parse_constant=refused)
    events = whole["traceEvents"]
    names = [event for event in events if event["ph"] == "M"]
    processes = {event["pid"]: event["args"]["name"] for event in names if event["name"] == "process_name"}
    threads = {(event["pid"], event["tid"]) for event in names if event["name"] == "thread_name"}
    assert len({tid for _, tid in threads}) == len(threads), "a thread number belongs to one process"
    assert events[: len(names)] == names
    before = 0
    open_slices: dict[int, list[int]] = defaultdict(list)
    for event in events[len(names) :]:
        assert event["ph"] in ("X", "i", "C") and event["pid"] in processes and event["name"]
        assert type(event["ts"]) is int and event["ts"] >= before, "monotone microseconds"
        before = event["ts"]
        if event["ph"] == "C":
            assert event["args"] and all(type(value) in (int, float) for value in event["args"].values())
            continue
        assert (event["pid"], event["tid"]) in threads
        if event["ph"] == "i":
            assert event["s"] == "t"
            continue
        assert type(event["dur"]) is int and event["dur"] >= 0
        stack = open_slices[event["tid"]]
        while stack and stack[-1] <= event["ts"]:
            stack.pop()
        assert not stack or event["ts"] + event["dur"] <= stack[-1], "slices of a thread nest"
        stack.append(event["ts"] + event["dur"])
    return events
