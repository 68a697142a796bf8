"""What the page and the lines look like, and that hostile text stays text."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gyre_sdk.events import (
    CallRecorded,
    CellMoved,
    CellsSeen,
    EvaluationMeasured,
    GroupClosed,
    LaneOpened,
    PhaseStarted,
    ProcessRestarted,
    RunEnded,
    RunStarted,
    StepSkipped,
    StepTaken,
    SwitchMeasured,
    ToolRan,
    UnitsCommitted,
    VersionPublished,
)
from gyre_sdk.records import RunStatus
from gyre_sdk.view import Page, State, render
from gyre_sdk.view.chart import chart
from gyre_sdk.view.escape import count, duration, visible
from gyre_sdk.view.plain import PlainLines

GOLDEN = Path(__file__).parents[1] / "golden"

HOSTILE = [
    "\x1b[2J\x1b[31mred\x1b]0;title\x07",
    "[bold red]markup[/bold red] [link=file:///etc/passwd]x[/link]",
    "a\rb\nc\td\x00e\x7f\x9bm",
    "\u202egnp.exe \u2066x\u2069 \u200b",
    "z" + "\u0301" * 200,
    "\ud800 lone surrogate",
    "日本語の長いコマンド " * 30,
    ":smile: \\[x] {0} %s",
]


def training() -> State:
    """Fold a small training with everything in it."""
    state = State()
    events = [
        PhaseStarted(0, "before", 2),
        RunStarted(0, "e1", "count-words-1", None, "before"),
        RunEnded(4, "e1", RunStatus.COMPLETED, 0.0, 4.0),
        EvaluationMeasured(8, "before", 200, 0.41, 0.31),
        PhaseStarted(10, "train", 20),
    ]
    for number in range(1, 9):
        at = 10.0 + 10 * number
        events += [
            StepTaken(at, number, 20, 0.02 / number, 1.1, 4000, 16, 0.3 + 0.07 * number, 0.2 + 0.05 * number),
            VersionPublished(at, number, 0.34),
            GroupClosed(at, f"g{number}", 8, 8, 0.4, number % 4 != 0),
        ]
    for number, command in enumerate(HOSTILE):
        run = f"run-{number:04}"
        events += [
            RunStarted(91, run, f"task {command}", "group-000042"),
            LaneOpened(91, run, "l", "main", f"main {command}"),
            CallRecorded(92, run, "l", "main", "c", 1200 * number, 30 + number, 8),
            ToolRan(93, run, command, number % 2, 0.1),
        ]
    events += [
        RunEnded(94, "run-0007", RunStatus.SCORER_ERROR, None, 3.0),
        RunEnded(94, "run-0006", RunStatus.COMPLETED, 1.0, 3.0),
        ProcessRestarted(95, "engine", "killed by signal 9 \x1b[2J"),
        StepSkipped(96, 9, "all 2 groups were flat"),
    ]
    for event in events:
        state.apply(event)
    return state


def drawn(state: State, width: int, height: int, *, color: bool = False) -> str:
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        height=height,
        force_terminal=color,
        color_system="truecolor" if color else None,
        legacy_windows=False,
    )
    console.print(render(state, 100.0, Page(width, height), dropped=3))
    return out.getvalue()


@pytest.mark.parametrize(("width", "height"), [(120, 36), (80, 24), (50, 14)])
def test_the_page_looks_as_it_did(width, height):
    """Golden pages; write them anew by deleting the file, and look at the difference."""
    path = GOLDEN / f"view_{width}x{height}.txt"
    found = "\n".join(line.rstrip() for line in drawn(training(), width, height).splitlines()) + "\n"
    if not path.exists():
        path.write_text(found)
        pytest.fail(f"{path} did not exist and was written: look at it, then run again")
    assert found == path.read_text()


@pytest.mark.parametrize("width", [30, 50, 78, 80, 100, 120, 200])
@pytest.mark.parametrize("height", [10, 24, 50])
def test_the_page_fits_and_holds_no_control_byte(width, height):
    page = drawn(training(), width, height)
    lines = page.splitlines()
    assert len(lines) <= max(height, 16)
    console = Console(width=width)
    for line in lines:
        assert line.isprintable()
        assert console.render_str(line, markup=False, emoji=False).cell_len <= width


def with_cells(number: int) -> State:
    """Fold the same training on cells."""
    state = training()
    for place in range(number):
        name = f"satellite {place} {HOSTILE[place % len(HOSTILE)]}" if place else "core"
        state.apply(CellMoved(40.0 + place, name, "training" if place % 2 else "serving", "loading", 5.0))
        state.apply(UnitsCommitted(50.0, name, 1, 1200 * place, 10, 1.0))
    state.apply(SwitchMeasured(60.0, "core", "training", {"drain": 1.5, "load": 2.5}))
    state.apply(CellsSeen(61.0, 12, 16.0, 2, 3, 1, 40.0))
    return state


def test_replicas_beside_the_cells_are_counted_apart():
    state = with_cells(2)
    state.apply(CellsSeen(62.0, 12, 24.0, 2, 3, 1, 40.0, standalone=1))
    assert "2 serving, 3 training, 1 moving, 1 standalone   runs 12/24" in drawn(state, 120, 36)


@pytest.mark.parametrize(("width", "height"), [(30, 10), (78, 30), (80, 24), (120, 36), (200, 50)])
@pytest.mark.parametrize("number", [1, 3, 64])
def test_cells_have_their_place_on_the_page(width, height, number):
    page = drawn(with_cells(number), width, height)
    lines = page.splitlines()
    assert len(lines) <= max(height, 18) and all(line.isprintable() for line in lines)
    (counts,) = [line for line in lines if "2 serving" in line]
    if width >= 78 and height >= 30:
        assert "2 serving, 3 training, 1 moving   runs 12/16   ready 40 cell-s" in counts
        panel = page[page.index("─ cells") : page.index("─ runs")]
        assert re.search(r"core +serving +1:00 +0 u", panel)
        shown = re.search(r"\+(\d+) more", panel)
        room = 3 * ((width - 4) // 36)
        assert (int(shown[1]) if shown else 0) == (number - room + 1 if number > room else 0)
    if width >= 120:
        assert "   idle 0.5 cells   1 to training (4.0 s)" in counts
    if number == 3 and width >= 78 and height >= 30:
        assert re.search(r"satellit… +training +0:59 +1.20k u", page)


@pytest.mark.parametrize(("limit", "shown"), [("settings", "12/16   ready"), ("speed", "12/16 (speed)   ready")])
def test_what_bounds_the_runs_of_cells_is_shown(limit, shown):
    state = with_cells(3)
    state.apply(CellsSeen(62.0, 12, 16.0, 2, 3, 1, 40.0, limit))
    assert shown in drawn(state, 120, 36)


@pytest.mark.parametrize(
    ("water", "capacity", "ready", "idle"),
    [(16, 16.0, 40.0, "0"), (0, 16.0, 40.0, "2"), (4, 16.0, 0.0, "4.5"), (4, math.nan, math.nan, "0")],
)
def test_idle_cells_are_on_the_page(water, capacity, ready, idle):
    state = with_cells(3)
    state.apply(CellsSeen(62.0, water, capacity, 2, 3, 1, ready))
    assert f"   idle {idle} cells   1 to training" in drawn(state, 120, 36)


def test_a_training_without_cells_has_no_such_panel():
    assert "cells" not in drawn(training(), 120, 36)


def test_colours_are_the_views_own():
    """The only escape sequences are colours and styles; none came out of an event."""
    page = drawn(training(), 120, 40, color=True)
    assert "\x1b[" in page
    rest = re.sub(r"\x1b\[[0-9;]*m", "", page)
    assert all(character.isprintable() or character == "\n" for character in rest)
    assert "[bold red]markup" in rest and "\x1b]8" not in page


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    Console(file=out, width=120, height=40, force_terminal=True).print(render(training(), 100.0, Page(120, 40)))
    codes = {code for match in re.findall(r"\x1b\[([0-9;]*)m", out.getvalue()) for code in match.split(";")}
    assert codes <= {"", "0", "1", "2"}, "bold and dim only"


def test_unscored_is_said_in_words():
    state = State()
    state.apply(RunStarted(0, "r", "t", None))
    state.apply(RunEnded(1, "r", RunStatus.SCORER_ERROR, None, 1.0))
    assert "unscored" in drawn(state, 120, 20) and "0.00" not in drawn(state, 120, 20)


def test_more_runs_than_lines():
    state = State()
    for number in range(100):
        state.apply(RunStarted(0, f"r{number:03}", f"t{number}", None))
    page = drawn(state, 100, 24)
    assert len(page.splitlines()) <= 24 and "more" in page


@given(st.text(max_size=300), st.integers(1, 80))
def test_visible_text_is_printable_and_short(text, limit):
    shown = visible(text, limit)
    assert shown.isprintable() and len(shown) <= limit
    shown.encode()


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_told_apart(text):
    assert visible(text, 400).isprintable()


def test_plain_text_is_left_alone():
    for text in ("sed -i 's/a/b/' x", "größer 日本", "", "[x]", "é" + "e\u0301"):
        assert visible(text, 60) == text
    assert visible("abcdef", 4) == "abc…" and visible("abcd", 4) == "abcd"
    assert visible("a\nb\x1b[0m", 60) == "a\\nb\\e[0m"


@given(st.lists(st.floats(-1, 2), min_size=1, max_size=200), st.integers(1, 60), st.integers(1, 8))
def test_a_chart_has_its_size_and_shows_every_column(values, width, height):
    lines = chart(values, width, height, low=0.0, high=1.0)
    assert len(lines) == height and all(len(line) == width for line in lines)
    assert len(lines[-1].rstrip()) == min(len(values), width)


def test_a_rising_curve_rises():
    lines = chart([0.0, 0.5, 1.0], 3, 2, low=0.0, high=1.0)
    assert lines == ["  █", "▁██"]


def test_numbers():
    assert [count(number) for number in (0, 999, 1000, 12_345, 999_499, 4_560_000, 10**10)] == [
        "0",
        "999",
        "1.00k",
        "12.3k",
        "999k",
        "4.56M",
        "10.0G",
    ]
    assert [duration(seconds) for seconds in (-1, 0, 59.9, 61, 3661)] == ["0:00", "0:00", "0:59", "1:01", "1:01:01"]


def plain(*events: object) -> list[str]:
    state, lines, found = State(), PlainLines(), []
    for event in events:
        state.apply(event)
        found += lines.lines(event, state)
    return found


def test_plain_lines_of_a_single_run():
    assert plain(
        RunStarted(0, "r", "fix [b]it[/b]", None),
        ToolRan(1, "r", "ls", 0, 0.1),
        RunEnded(2, "r", RunStatus.TIMED_OUT, None, 2.0),
    ) == ["[   0:00] run r of fix [b]it[/b] started", "[   0:02] run r ended: timed_out, reward unscored, 0:02"]


def test_plain_lines_of_one_of_each():
    call = CallRecorded(31, "r", "l", "main", "c", 5, 1, 0)
    assert plain(PhaseStarted(0, "train", 1), RunStarted(0, "r", "t", "g"), call) == [
        "[   0:00] train starts, 1 step",
        "[   0:31] train: 0/1, 1 run going, 0 ended (0 scored), 1 call, 1 token sampled",
    ]


def test_plain_progress_is_rare():
    events = [PhaseStarted(0, "train", 10)]
    for number in range(2000):
        at = number / 50
        events += [RunStarted(at, f"r{number}", "t", "g"), RunEnded(at, f"r{number}", RunStatus.COMPLETED, 1.0, 1.0)]
    found = plain(*events, StepTaken(40, 1, 10, 0.5, 1.0, 10, 8, 0.5, 0.25))
    assert 6 <= len(found) <= 22, "40 s of events: a line every 2 s at most"
    assert found[-1] == (
        "[   0:40] step 1/10: reward 0.500, full success 25.0%, loss 0.5, grad norm 1, 8 runs, 10 tokens trained, ETA 6:00"
    )
