"""The fold: what it counts, that it stays small, that order and gaps do not break it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_page import drawn

from gyre_sdk.events import (
    AnyEvent,
    CallRecorded,
    CellMoved,
    CellsSeen,
    EvaluationMeasured,
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
    SwitchMeasured,
    ToolRan,
    UnitsCommitted,
    VersionPublished,
)
from gyre_sdk.records import RunStatus
from gyre_sdk.view.escape import reward
from gyre_sdk.view.state import State


def step(number: int, at: float, *, steps: int = 10, reward: float = 0.5) -> StepTaken:
    return StepTaken(at, number, steps, 0.1, 1.0, 100, 8, reward, 0.25)


def fold(*events: AnyEvent) -> State:
    state = State()
    for event in events:
        state.apply(event)
    return state


def test_a_run_from_start_to_end():
    state = fold(
        RunStarted(0.0, "r", "task", "g"),
        LaneOpened(0.1, "r", "l1", "main", "main"),
        LaneOpened(0.2, "r", "l2", "subagent", "reviewer"),
        CallRecorded(1.0, "r", "l1", "main", "c1", 100, 20, 3),
        CallRecorded(2.0, "r", "l2", "subagent", "c2", 50, 5, 4),
        ToolRan(3.0, "r", "pytest -q", 1, 0.5),
    )
    run = state.active["r"]
    assert (run.lane, run.turn, run.tokens, run.context, run.version) == ("reviewer", 2, 25, 55, 4)
    assert (run.command, run.exit_code) == ("pytest -q", 1)
    assert state.open_groups["g"].started == 1
    state.apply(RunEnded(4.0, "r", RunStatus.TIMED_OUT, 0.5, 4.0))
    assert state.active == {} and state.finished[0].reward == 0.5
    assert (state.scored, state.unscored, state.calls, state.sampled_tokens) == (1, 0, 2, 25)
    assert state.open_groups["g"].ended == 1
    state.apply(GroupClosed(5.0, "g", 1, 1, 0.5, False))
    assert state.open_groups == {} and state.groups == {"too small": 1}


def test_a_placeholder_is_told_from_a_zero_that_was_evaluated():
    state = fold(
        RunStarted(0, "r", "t", None),
        RunStarted(0, "s", "t", None),
        RunEnded(1, "r", RunStatus.WORKSPACE_ERROR, 0.0, 1, placeholder=True),
        RunEnded(1, "s", RunStatus.COMPLETED, 0.0, 1),
    )
    assert (state.scored, state.mean_reward) == (1, 0.0)
    assert [reward(run.reward, placeholder=run.placeholder) for run in state.finished] == ["placeholder", "0.00"]


def test_unscored_is_not_zero():
    state = fold(RunStarted(0, "r", "t", None), RunEnded(1, "r", RunStatus.SCORER_ERROR, None, 1))
    assert state.mean_reward is None and state.unscored == 1 and state.problems


def test_what_trains_nothing_is_counted():
    state = fold(
        GroupClosed(0, "a", 4, 4, 1.0, False),
        GroupClosed(0, "b", 1, 4, 1.0, False),
        GroupClosed(0, "c", 4, 4, 0.5, True),
        StepSkipped(1, 1, "no contrast"),
        ProcessRestarted(2, "engine", "killed"),
    )
    assert state.groups == {"flat": 1, "too small": 1, "trained": 1}
    assert state.skipped == {"no contrast": 1} and state.restarts == {"engine": 1} and len(state.problems) == 2


def test_progress_of_training_counts_steps_and_of_an_evaluation_runs():
    state = fold(
        PhaseStarted(0, "before", 2),
        RunStarted(0, "e", "t", None, "before"),
        RunEnded(5, "e", RunStatus.COMPLETED, 1, 5),
    )
    assert state.phase.done == 1 and state.phase.eta(5.0) == pytest.approx(5.0)
    state.apply(PhaseStarted(10, "train", 10))
    for number in range(4):
        state.apply(RunStarted(10, f"r{number}", "t", "g"))
        state.apply(RunEnded(11, f"r{number}", RunStatus.COMPLETED, 1, 1))
    assert state.phase.done == 0 and state.phase.eta(11) is None
    state.apply(step(1, 20))
    state.apply(step(2, 30))
    assert state.phase.done == 2 and state.phase.eta(30) == pytest.approx(80)
    assert state.phase.eta(35) == pytest.approx(75), "time runs down between steps"
    state.apply(StepSkipped(40, 3, "flat"))
    assert state.phase.done == 3


def test_a_resumed_training_counts_from_where_it_took_up():
    state = fold(PhaseStarted(0, "train", 5), step(26, 10, steps=30), step(27, 20, steps=30))
    assert state.phase.done == 2 and state.phase.eta(20) == pytest.approx(30)


def test_the_pace_is_that_of_the_last_units():
    state = fold(PhaseStarted(0, "train", 100), *(step(number, 100.0 + number, steps=100) for number in range(1, 21)))
    assert state.phase.eta(120.0) == pytest.approx(80), "the slow first step is forgotten"


def test_cells_and_what_they_do():
    state = fold(
        CellMoved(10.0, "core", "draining", "serving", 10.0, "the burst is complete"),
        CellMoved(12.0, "core", "training", "draining", 2.0),
        SwitchMeasured(12.0, "core", "training", {"drain": 2.0, "load": 1.0}, 1, 0),
        SwitchMeasured(13.0, "s1", "training", {"drain": 4.0, "load": 1.0}, 0, 2),
        UnitsCommitted(14.0, "s1", 1, 3, 400, 1.0),
        UnitsCommitted(15.0, "s1", 1, 2, 100, 1.0),
        CellsSeen(16.0, 5, 8.0, 0, 2, 0, 3.5),
        CellMoved(17.0, "s1", "failed", "training", 5.0, "no sign of life"),
    )
    core, satellite = state.cells["core"], state.cells["s1"]
    assert (core.state, core.since, core.units) == ("training", 12.0, 0)
    assert (satellite.state, satellite.since, satellite.units, satellite.tokens) == ("failed", 17.0, 5, 500)
    assert (state.switches["training"].count, state.switches["training"].seconds) == (2, 8.0)
    assert state.fleet is not None and state.fleet.water == 5
    assert list(state.problems) == [(17.0, "cell s1 failed: no sign of life")] and state.unknown == 0
    state.apply(ReplicaLost(18.0, "http://h:1"))
    state.apply(CellMoved(19.0, "standalone-0", "failed", "serving", 9.0, "it refuses connections", standalone=True))
    assert (
        list(state.problems)[1:] == [(19.0, "replica standalone-0 failed: it refuses connections")] and not state.lost
    )


def test_a_replica_without_cells_is_lost_until_it_is_brought():
    state = fold(ReplicaBrought(1.0, "http://h:1", 0), ReplicaLost(2.0, "http://h:1"))
    assert state.lost == {"http://h:1"}
    assert list(state.problems) == [(2.0, "replica http://h:1 was lost, and takes no calls")]
    assert "1 replica without calls" in drawn(state, 120, 36)
    state.apply(ReplicaBrought(3.0, "http://h:1", 1))
    assert not state.lost and len(state.problems) == 1 and state.unknown == 0


def test_long_trainings_stay_small():
    state = State()
    for number in range(5000):
        state.apply(RunStarted(number, f"r{number}", "t", f"g{number}"))
        state.apply(RunEnded(number, f"r{number}", RunStatus.AGENT_ERROR, None, 1))
        state.apply(GroupClosed(number, f"g{number}", 0, 1, None, False))
        state.apply(step(number + 1, number, steps=5000))
    assert len(state.finished) <= 8 and len(state.problems) <= 8 and not state.open_groups and not state.active
    assert len(state.steps) <= 2048 and state.ended.total() == 5000


_names = st.sampled_from(["r1", "r2", "r3"])
_times = st.floats(0, 1e9)
_any = st.one_of(
    st.builds(
        RunStarted, _times, _names, st.text(), st.one_of(st.none(), st.just("g")), st.sampled_from(["train", "before"])
    ),
    st.builds(LaneOpened, _times, _names, st.just("l"), st.text(), st.text()),
    st.builds(
        CallRecorded,
        _times,
        _names,
        st.just("l"),
        st.text(),
        st.just("c"),
        st.integers(0, 9),
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    st.builds(ToolRan, _times, _names, st.text(), st.integers(-9, 255), _times),
    st.builds(
        RunEnded, _times, _names, st.sampled_from(RunStatus), st.one_of(st.none(), st.floats(allow_nan=True)), _times
    ),
    st.builds(GroupClosed, _times, st.just("g"), st.integers(0, 4), st.integers(0, 4), st.none(), st.booleans()),
    st.builds(
        StepTaken,
        _times,
        st.integers(0, 99),
        st.integers(0, 9),
        st.floats(),
        st.floats(),
        st.integers(0, 9),
        st.integers(0, 9),
        st.floats(),
        st.floats(0, 1),
    ),
    st.builds(StepSkipped, _times, st.integers(0, 99), st.text()),
    st.builds(VersionPublished, _times, st.integers(0, 9), _times),
    st.builds(EvaluationMeasured, _times, st.text(), st.integers(0, 9), st.floats(), st.floats(0, 1)),
    st.builds(ProcessRestarted, _times, st.text(), st.text()),
    st.builds(ReplicaLost, _times, _names),
    st.builds(ReplicaBrought, _times, _names, st.integers(0, 9)),
    st.builds(PhaseStarted, _times, st.text(), st.integers(0, 9)),
    st.builds(CellMoved, _times, st.text(max_size=12), st.text(), st.text(), _times, st.text()),
    st.builds(
        CellsSeen,
        _times,
        st.integers(0, 99),
        st.floats(),
        st.integers(0, 9),
        st.integers(0, 9),
        st.integers(0, 9),
        st.floats(),
    ),
    st.builds(SwitchMeasured, _times, _names, st.text(), st.dictionaries(st.text(), st.floats(), max_size=3)),
    st.builds(UnitsCommitted, _times, _names, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), _times),
)


@given(st.lists(_any, max_size=30), st.integers(20, 160), st.integers(5, 60))
def test_any_sequence_of_events_can_be_folded_and_drawn(events, width, height):
    import io

    from rich.console import Console

    from gyre_sdk.view import Page, render
    from gyre_sdk.view.plain import PlainLines

    state, plain = State(), PlainLines()
    for event in events:
        state.apply(event)
        for line in plain.lines(event, state):
            assert line.isprintable()
    out = io.StringIO()
    Console(file=out, width=width, height=height, color_system=None).print(
        render(state, state.now, Page(width, height))
    )
    assert all(character.isprintable() or character == "\n" for character in out.getvalue())
    again = State()
    for event in events:
        again.apply(event)
    assert again.ended == state.ended and again.active == state.active
