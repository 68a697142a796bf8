"""The fold of what cells did: stretches without overlap or gap, true sums, and stores that were cut off."""

from __future__ import annotations

import math
import struct
import zlib
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from cell_events import EVENTS, SMALL, check_trace, moved, seen, told, walks
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gyre_sdk.events import CellMoved, CellsSeen, Event, ProcessRestarted, SwitchFailed, SwitchMeasured, UnitsCommitted
from gyre_sdk.trainer.cells.state import CellState
from gyre_sdk.view.cells import EventsMissed, RecordingStarted, read
from gyre_sdk.view.drawing import Box, Line, Words
from gyre_sdk.view.drawing import draw as shapes_of
from gyre_sdk.view.lanes import COLOURS, Lanes, Point, Span, lanes
from gyre_sdk.view.letters import ADVANCE, HEIGHT, pixels
from gyre_sdk.view.page import page
from gyre_sdk.view.raster import png
from gyre_sdk.view.timeline import ROLES, UNKNOWN, Cell, Role, Timeline, idle_cells, timeline
from gyre_sdk.view.trace import trace


def stretches(cell: Cell) -> list[tuple[float, float, str]]:
    return [(one.start, one.stop, one.state) for one in cell.intervals]


def check(found: Timeline, events: list[Event]) -> None:
    """Check what holds for any events."""
    trainings = 1 + sum(isinstance(event, RecordingStarted) for event in events[1:])
    for cell in found.cells.values():
        assert all(one.start < one.stop for one in cell.intervals)
        gaps = 0
        for one, other in pairwise(cell.intervals):
            assert one.stop <= other.start, "stretches overlap"
            gaps += one.stop < other.start
        assert gaps < trainings, "a gap within a training"
        if cell.intervals:
            assert found.start <= cell.intervals[0].start and cell.intervals[-1].stop <= found.end
        assert sum(cell.states.values()) == pytest.approx(cell.span_s) == pytest.approx(sum(cell.roles.values()))
        assert 0 <= cell.spare_s <= cell.roles[Role.SERVING] + 1e-6
        assert 0 <= cell.idle[Role.TRAINING] <= cell.roles[Role.TRAINING] + 1e-6
    if trainings == 1:
        for name, cell in found.cells.items():
            of_it = [event.at for event in events if getattr(event, "cell", None) == name]
            if not cell.intervals:
                assert min(of_it) == found.end, "it was first heard of at the end"
                continue
            assert cell.intervals[0].start <= min(of_it) and cell.intervals[-1].stop == found.end
            assert cell.span_s == pytest.approx(found.end - cell.intervals[0].start)


def draw(found: Timeline) -> None:
    check_trace(trace(found))
    assert page("t", [lanes(found, "t")]).count("<svg") == 1


def test_a_small_training():
    found = timeline(SMALL)
    core, satellite = found.cells["core"], found.cells["s1"]
    assert stretches(core) == [
        (1000.0, 1010.0, "serving"),
        (1010.0, 1012.0, "draining"),
        (1012.0, 1015.0, "switching"),
        (1015.0, 1025.0, "training"),
        (1025.0, 1029.0, "loading"),
        (1029.0, 1034.0, "serving"),
    ]
    assert core.intervals[1].reason == "the burst is complete" and core.state == "serving"
    assert stretches(satellite) == [(1010.0, 1030.0, "training"), (1030.0, 1034.0, "failed")]
    assert satellite.intervals[1].reason == "no sign of life for 6 s"
    # From 1020 on half of the capacity has a run; before, all of it.
    assert core.idle == {Role.SERVING: pytest.approx(2.5), Role.TRAINING: pytest.approx(2.0)}
    assert satellite.idle == {Role.SERVING: 0.0, Role.TRAINING: pytest.approx(17.0)}
    assert (core.units, core.tokens, core.computing_s, core.switches) == (6, 600, 8.0, 2)
    cost = found.costs["training"]
    assert (cost.count, cost.mean_s, cost.finished, cost.moved) == (1, 5.0, 3, 1)
    assert list(cost.phases.items()) == [("drain", 2.0), ("sleep", 1.0), ("load", 2.0)]
    assert (found.start, found.end, found.span_s) == (1000.0, 1034.0, 34.0)
    assert ([one.version for one in found.versions], len(found.steps), found.trainings) == ([1], 1, [1000.0])


def test_every_state_of_a_cell_has_a_role_and_a_colour():
    assert set(ROLES) == set(CellState) == set(COLOURS)


def test_costs_are_means_and_a_phase_that_was_skipped_cost_nothing():
    switches: list[Event] = [
        SwitchMeasured(1.0, "a", "training", {"drain": 4.0, "sleep": 2.0}, 1, 0),
        SwitchMeasured(2.0, "b", "training", {"sleep": 4.0}, 0, 2),
    ]
    cost = timeline(switches).costs["training"]
    assert (cost.count, cost.mean_s, cost.phases) == (2, 5.0, {"drain": 2.0, "sleep": 3.0})
    assert (cost.finished, cost.moved) == (1, 2)


@given(walks(), st.integers(0, 40))
def test_what_cells_did_is_what_the_timeline_says(walks, after):
    events = told(walks)
    end = max(event.at for event in events) + after
    found = timeline([*events, seen(end, 0)])
    for name, walk in walks.items():
        stops = [at for at, _ in walk[1:]] + [end]
        expected = [(at, stop, state) for (at, state), stop in zip(walk, stops, strict=True) if at < stop]
        assert stretches(found.cells[name]) == expected
    check(found, events)


@given(walks(), st.randoms(use_true_random=False))
def test_threads_may_tell_things_a_little_late(walks, random):
    events = told(walks)
    shuffled = sorted(events, key=lambda event: (event.at // 20, random.random()))
    by_cell = {name: [event for event in shuffled if event.cell == name] for name in walks}
    assert {name: stretches(cell) for name, cell in timeline(shuffled).cells.items()} == {
        name: stretches(timeline(events).cells[name]) for name in by_cell
    }


@settings(max_examples=200)
@given(EVENTS)
@example(SMALL)
@example([moved(5.0, "a", "serving", "training", 1.7e308)])
@example([SwitchMeasured(5.0, "a", "training", {"drain": 1.7e308, "load": 1.7e308})])
def test_a_store_cut_at_any_event_still_reads(events):
    for number in range(len(events) + 1):
        cut = events[:number]
        found = timeline(cut)
        check(found, cut)
        if number == len(events) or number % 5 == 0:
            draw(found)


@given(walks())
def test_what_is_cut_off_does_not_change_what_was_before(walks):
    events = told(walks)
    whole = timeline(events)
    for number in range(1, len(events)):
        cut = timeline(events[:number])
        for name, cell in cut.cells.items():
            expected = [one for one in stretches(whole.cells[name]) if one[0] < cut.end]
            expected[-1:] = [(start, min(stop, cut.end), state) for start, stop, state in expected[-1:]]
            assert stretches(cell) == expected


def test_moves_that_were_missed_are_not_made_up():
    found = timeline([moved(10.0, "a", "serving", "draining", 10.0), moved(30.0, "a", "training", "loading", 5.0)])
    assert stretches(found.cells["a"]) == [(0, 10, "serving"), (10, 25, "draining"), (25, 30, "training")]


def test_a_cell_that_only_commits_is_of_an_unknown_state():
    found = timeline([UnitsCommitted(5.0, "a", 1, 1, 10, 2.0), seen(9.0, 0)])
    assert stretches(found.cells["a"]) == [(5.0, 9.0, UNKNOWN)] and found.cells["a"].roles[Role.OTHER] == 4.0


def test_between_two_trainings_cells_do_nothing():
    first = [RecordingStarted(0.0), moved(10.0, "a", "loading", "serving", 10.0), seen(11.0, 0), seen(12.0, 0)]
    second = [RecordingStarted(50.0), moved(53.0, "a", "loading", "serving", 60.0), seen(54.0, 0)]
    found = timeline([*first, *second])
    assert stretches(found.cells["a"]) == [
        (0, 10, "loading"),
        (10, 12, "serving"),
        (12, 53, "loading"),  # it says itself that it has loaded since before the other training's end
        (53, 54, "serving"),
    ]
    second[1] = moved(53.0, "a", "loading", "serving", 3.0)
    found = timeline([*first, *second])
    assert stretches(found.cells["a"])[1:] == [(10, 12, "serving"), (50, 53, "loading"), (53, 54, "serving")]
    assert found.trainings == [0.0, 50.0]
    assert found.cells["a"].idle[Role.SERVING] == pytest.approx(1.0), (
        "what was seen last in one training is not true until the next"
    )
    check(found, [*first, *second])


def test_a_clock_that_is_set_back_does_not_fold_time():
    first = [RecordingStarted(100.0), moved(110.0, "a", "loading", "serving", 10.0)]
    second = [RecordingStarted(20.0), moved(30.0, "a", "loading", "serving", 10.0), seen(120.0, 1)]
    found = timeline([*first, *second])
    assert stretches(found.cells["a"]) == [(100, 110, "loading"), (110, 120, "serving")]
    draw(found)


def test_what_was_missed_or_is_of_no_cell_is_counted():
    found = timeline([EventsMissed(1.0, 7), ProcessRestarted(2.0, "engine", "killed")], unknown=2)
    assert (found.missed, found.unknown) == (7, 3)


def test_nothing_is_a_timeline_too():
    found = timeline([])
    assert (found.cells, found.span_s, found.costs) == ({}, 0.0, {})
    assert check_trace(trace(found)) == [] and "<svg" in page("t", [lanes(found, "t")])


class CellFlew(Event, frozen=True, tag=True):
    """Of a version to come."""

    cell: str


class Richer(Event, frozen=True, tag="CellMoved"):
    """A known event with more in it."""

    cell: str
    state: str
    before: str
    seconds: float
    altitude: float


@given(st.integers(0, 60))
def test_entries_of_newer_versions_and_torn_ones_are_counted(cut):
    pack = msgspec.msgpack.encode
    good = pack(moved(1.0, "a", "serving", "draining", 1.0))
    torn = good[: min(cut, len(good) - 1)]
    bodies = [good, pack(CellFlew(2.0, "a")), torn, pack(Richer(3.0, "a", "training", "draining", 2.0, 9.0))]
    bodies += [pack(seen(at, 0)) for at in (math.nan, math.inf, -1.0)]
    found = read([*bodies, pack({"event": "CellMoved", "at": 1.0}), pack(7), b"\xa1\xff"])
    assert [type(event) for event in found.events] == [CellMoved, CellMoved] and found.unknown == 8


# -- the trace -------------------------------------------------------------------------------------------------------


def slices(events: list[dict[str, Any]], process: str, thread: str) -> list[dict[str, Any]]:
    """Return what lies on a thread of a trace."""
    named = [event for event in events if event["ph"] == "M"]
    (pid,) = [one["pid"] for one in named if (one["name"], one["args"].get("name")) == ("process_name", process)]
    (tid,) = [
        one["tid"]
        for one in named
        if (one["name"], one["pid"], one["args"].get("name")) == ("thread_name", pid, thread)
    ]
    return [event for event in events if event["ph"] == "X" and event["tid"] == tid]


def lie(found: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Return where slices lie, seconds."""
    return [(one["name"], one["ts"] / 1e6, (one["ts"] + one["dur"]) / 1e6) for one in found]


def test_phases_of_a_switch_lie_where_they_were():
    """Also those of cells that go over side by side, one of which waits for the other between two phases."""
    phases, starts = {"drain": 1.0, "park": 1.0, "join": 2.0}, {"drain": 0.0, "park": 5.0, "join": 6.0}
    events: list[Event] = [
        seen(0.0, 1),
        SwitchMeasured(16.0, "core", "training", {"drain": 5.0, "park": 1.0}, starts={"drain": 0.0, "park": 5.0}),
        SwitchMeasured(18.0, "s1", "training", phases, starts=starts),
    ]
    events = check_trace(trace(timeline(events)))
    assert lie(slices(events, "core", "switches")) == [("to training", 10, 16), ("drain", 10, 15), ("park", 15, 16)]
    assert lie(slices(events, "s1", "switches")) == [
        ("to training", 10, 18),
        ("drain", 10, 11),
        ("park", 15, 16),
        ("join", 16, 18),
    ]


def test_a_switch_that_failed_is_drawn_and_costs_nothing():
    failed = SwitchFailed(9.0, "a", "training", "park", {"drain": 2.0, "park": 1.0})
    found = timeline([moved(9.0, "a", "switching", "failed", 9.0), failed, seen(12.0, 0)])
    assert (found.unknown, found.costs, found.failures) == (0, {}, [failed])
    switch, *phases = slices(check_trace(trace(found)), "a", "switches")
    assert (switch["name"], switch["args"]["failed in"]) == ("to training, failed", "park")
    assert [one["name"] for one in phases] == ["drain", "park"]


def test_phases_that_overlap_lie_on_threads_of_their_own_and_nested_ones_within():
    phases = {"weights": 6.0, "load": 2.0, "wake": 5.0}
    starts = {"weights": 0.0, "load": 1.0, "wake": 5.0}
    events = check_trace(trace(timeline([seen(0.0, 1), SwitchMeasured(20.0, "a", "serving", phases, 0, 0, starts)])))
    assert lie(slices(events, "a", "switches")) == [("to serving", 10, 20), ("weights", 10, 16), ("load", 11, 13)]
    assert lie(slices(events, "a", "switches 2")) == [("wake", 15, 20)]


def test_a_replica_beside_the_cells_has_a_lane():
    told = CellMoved(1.0, "standalone-0", "serving", "loading", 0.0, "it serves all the time", standalone=True)
    look = CellsSeen(1.0, 5, 10.0, 0, 1, 0, 0.0, standalone=1)
    found = timeline([told, look, seen(9.0, 0)])
    assert stretches(found.cells["standalone-0"]) == [(1.0, 9.0, "serving")] and found.cells["standalone-0"].standalone
    assert idle_cells(look) == {"serving": 0.5, "training": 1.0}
    assert lie(slices(check_trace(trace(found)), "standalone-0", "state")) == [("serving", 0, 8)]


def test_the_trace_of_a_small_training():
    events = check_trace(trace(timeline(SMALL)))
    of = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert list(of) == ["fleet", "core", "s1"]
    core = [event for event in events if event["pid"] == of["core"]]
    states = slices(events, "core", "state")
    assert [(event["name"], event["ts"], event["dur"]) for event in states[:3]] == [
        ("serving", 0, 10_000_000),
        ("draining", 10_000_000, 2_000_000),
        ("switching", 12_000_000, 3_000_000),
    ]
    assert states[1]["args"]["reason"] == "the burst is complete"
    switches = slices(events, "core", "switches")
    assert [event["name"] for event in switches] == [
        "to training",
        "drain",
        "sleep",
        "load",
        "to serving",
        "offer",
        "load",
    ]
    (units,) = [event for event in core if event["ph"] == "i"]
    assert units["args"] == {"step": 1, "units": 6, "tokens": 600, "seconds": 8.0}
    fleet = [event for event in events if event["pid"] == of["fleet"]]
    counters = [(event["name"], event["args"]) for event in fleet if event["ph"] == "C"]
    assert counters[:4] == [
        ("runs", {"water": 10, "capacity": 10.0}),
        ("cells", {"serving": 1, "training": 1, "moving": 0}),
        ("ready work (cell-seconds)", {"ready": 4.0}),
        ("idle (cells)", {"serving": 0.0, "training": 0}),
    ]
    assert [event["name"] for event in fleet if event["ph"] == "i"] == ["training starts", "step 1", "version 1"]


def test_the_checker_of_traces_finds_what_is_wrong():
    good = msgspec.json.decode(trace(timeline(SMALL)))
    slices = [place for place, event in enumerate(good["traceEvents"]) if event["ph"] == "X"]
    for wrong in ({"dur": -1}, {"ts": -5}, {"dur": 11_000_000}, {"tid": 999}, {"pid": 99}, {"ts": 1.5}):
        events = [dict(event) for event in good["traceEvents"]]
        events[slices[0]].update(wrong)
        with pytest.raises(AssertionError):
            check_trace(msgspec.json.encode({"traceEvents": events}))


# -- the picture -----------------------------------------------------------------------------------------------------


def test_hostile_names_stay_text_in_the_picture():
    name = "<script>alert(1)</script>\x1b[2J"
    found = timeline(
        [moved(5.0, name, "<b>", "serving", 5.0), moved(9.0, name, "serving", '"><img>', 4.0), seen(99, 1)]
    )
    drawn = page(name, [lanes(found, name)])
    assert "<script>" not in drawn and "<img>" not in drawn and "<b>" not in drawn and "\x1b" not in drawn


def boxes_and_words(one: Lanes) -> tuple[list[Box], list[str]]:
    shapes = shapes_of(one).shapes
    return [shape for shape in shapes if isinstance(shape, Box)], [
        shape.text for shape in shapes if isinstance(shape, Words)
    ]


@pytest.mark.parametrize(
    ("end", "ticks"),
    [
        (90.0, ["0", "10 s", "20 s", "30 s", "40 s", "50 s", "60 s", "70 s", "80 s", "90 s"]),
        (600.0, ["0", "1 min", "2 min", "3 min", "4 min", "5 min", "6 min", "7 min", "8 min", "9 min", "10 min"]),
        (36_000.0, ["0", "1 h", "2 h", "3 h", "4 h", "5 h", "6 h", "7 h", "8 h", "9 h", "10 h"]),
        (53_000.0, ["0", "2 h", "4 h", "6 h", "8 h", "10 h", "12 h", "14 h"]),
    ],
)
def test_axis_and_curves_of_the_picture(end: float, ticks: list[str]):
    points = [Point(end * place / 5000, place, 5000, 7200.0 * place) for place in range(5001)]
    one = Lanes("t", ["a"], [[Span(0.0, end, "serving")]], points, end)
    _, words = boxes_and_words(one)
    assert words == ["a", *ticks, "5000 runs", "10000 cell-h", "0"]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 9)), max_size=30), st.integers(0, 5))
def test_whatever_stands_out_of_a_long_curve_is_drawn(moments: list[tuple[float, int]], end: int):
    """A capacity that is gone for a moment is seen to be, among ten thousand looks."""
    points = [Point(end * place / 10_000, 5.0, 8.0, 0.0) for place in range(10_001)]
    for share, height in moments:
        place = int(share * 10_000)
        points[place] = Point(points[place].at, 20.0 + height, 0.0, 7.0 + height)
    thin = Lanes("t", ["a"], [[]], points, float(end)).thinned()
    assert len(thin) <= 601 * 8 and (thin[0], thin[-1]) == (points[0], points[-1])
    assert thin == sorted(thin, key=lambda one: one.at) and set(thin) <= set(points)
    for name in ("water", "capacity", "ready_s"):
        for choose in (min, max):
            assert choose(getattr(one, name) for one in thin) == choose(getattr(one, name) for one in points)
    for share, _ in moments:
        near = [one.capacity for one in thin if abs(one.at - points[int(share * 10_000)].at) <= end / 600]
        assert min(near) == 0.0


def test_runs_change_at_moments_in_the_picture():
    """Water that rises after an hour is not drawn as if it had risen all the time."""
    points = [Point(0.0, 8, 8, 0.0), Point(10.0, 2, 8, 0.0), Point(90.0, 8, 4, 0.0)]
    shapes = shapes_of(Lanes("t", ["a"], [[Span(0.0, 100.0, "serving")]], points, 100.0)).shapes
    curves = [shape.points for shape in shapes if isinstance(shape, Line)][-2:]
    for curve in curves:
        assert all(x == after or y == below for (x, y), (after, below) in pairwise(curve))
        assert curve[-1][0] == max(x for x, _ in curve) == pytest.approx(1200.0)


def test_a_large_fleet_is_thinned_and_that_is_said():
    cells = [[Span(0.0, 10.0, "serving")] for _ in range(1000)]
    boxes, words = boxes_and_words(Lanes("t", [f"s{number}" for number in range(1000)], cells, [], 10.0))
    assert len(boxes) == 167 and "one of 6 cells is shown, of 1000" in words
    assert {"s0", "s36"} <= set(words) and "s6" not in words, "names do not run into each other"


def test_idle_time_is_in_the_pictures_title():
    found = timeline(SMALL)
    assert lanes(found, "mine").title == "mine: 0:34, 37% of the cells' time idle"


def dots(data: bytes) -> list[str]:
    """Return the units of a picture in rows, `#` for what is not white."""
    (width, height), at = struct.unpack(">II", data[16:24]), data.index(b"IDAT") + 4
    size = struct.unpack(">I", data[at - 8 : at - 4])[0]
    rows = np.frombuffer(zlib.decompress(data[at : at + size]), np.uint8).reshape(height, 1 + 3 * width)
    dark = (rows[::2, 1:].reshape(-1, width, 3) < 255).any(axis=2)[:, ::2]
    return ["".join("#" if one else "." for one in row) for row in dark]


def is_said(text: str, picture: list[str]) -> bool:
    """Tell whether a picture has a line of text somewhere."""
    letters = ["".join("#" if one else "." for one in row) for row in pixels(text)]
    for y in range(len(picture) - HEIGHT + 1):
        x = picture[y].find(letters[0])
        while x >= 0:
            if all(picture[y + down].startswith(row, x) for down, row in enumerate(letters)):
                return True
            x = picture[y].find(letters[0], x + 1)
    return False


def test_an_image_says_what_the_page_says():
    found = timeline(SMALL)
    picture = dots(png("mine", [lanes(found, "mine"), lanes(found, "again")], "elastic loses to async"))
    said = ["elastic loses to async", "serving", "draining", "training", "water (runs)", "ready work", "core", "s1"]
    for text in [*said, "10 runs", "4 cell-s", "30 s"]:
        assert is_said(text, picture), text
    assert not is_said("elastic loses to asynk", picture)
    assert dots(png("", [], "")), "nothing is a picture too"


def test_every_letter_has_a_form_of_its_own():
    forms = {pixels(chr(number)).tobytes() for number in range(ord("!"), ord("~") + 1)}
    assert len(forms) == 94 and pixels("é").tobytes() == pixels("\u4e2d").tobytes() not in forms
    assert pixels("ab").shape == (HEIGHT, 2 * ADVANCE) and not pixels(" ").any()


def test_what_is_idle_is_in_the_trace():
    events = check_trace(trace(timeline(SMALL)))
    labels = [event["args"]["labels"] for event in events if event["name"] == "process_labels"]
    assert labels == ["idle 2.5 s serving, 2.0 s training", "idle 0.0 s serving, 17.0 s training"]
    idle = [event["args"] for event in events if event["name"] == "idle (cells)"]
    assert idle == [{"serving": 0.0, "training": 0}, {"serving": 0.5, "training": 1}, {"serving": 1.0, "training": 1}]
