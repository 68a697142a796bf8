"""The waterlevel plan: what it never does, what it always does, and gates that are monotone in what they weigh."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.cells.plan import Move, Observation, Policy, plan, taken_back
from gyre_sdk.trainer.cells.state import TRANSITIONS, CellEvent, CellState, after

still = st.just(0)
seconds = st.floats(0, 1e5)
costs = st.floats(0.01, 300)


@st.composite
def observations(draw, moving=still):
    finished = draw(st.integers(0, 1000))
    started = finished + draw(st.integers(0, 300))
    return Observation(
        serving=draw(st.integers(0, 12)),
        training=draw(st.integers(0, 12)),
        moving=draw(moving),
        dispatched=started + draw(st.integers(0, 300)),
        started=started,
        finished=finished,
        cell_capacity=draw(st.floats(0.5, 200)),
        ready_s=draw(st.just(0.0) | seconds),
        awaited_s=draw(st.just(0.0) | seconds),
        rollout_left_s=draw(st.just(0.0) | seconds | st.just(float("inf"))),
        to_train_s=draw(costs),
        to_serve_s=draw(costs),
        join_s=draw(st.just(0.0) | costs),
        standalone=draw(st.sampled_from([0, 0, 1, 3])),
    )


policies = st.builds(
    Policy,
    standing=st.integers(0, 6),
    elastic=st.booleans(),
    hysteresis=st.floats(0.5, 4),
    pace=st.sampled_from([0.5, 1.0, 2.0, float("inf")]),
    at_once=st.integers(0, 3),
)
PLAIN = Policy(hysteresis=2.0)
SEEN = Observation(
    serving=8,
    training=0,
    moving=0,
    dispatched=100,
    started=100,
    finished=80,
    cell_capacity=10,
    ready_s=5000,
    awaited_s=5000,
    rollout_left_s=1000,
    to_train_s=8.5,
    to_serve_s=3.5,
    join_s=5,
)


def released(seen, policy=PLAIN):
    """Return how many cells the plan sends to training; negative when it takes some back."""
    return sum(action.cells if action.move is Move.TO_TRAINING else -action.cells for action in plan(seen, policy))


@given(observations(moving=st.integers(1, 12)), policies)
def test_nothing_moves_while_a_cell_moves(seen, policy):
    assert plan(seen, policy) == ()


@settings(max_examples=150)
@given(observations(), policies)
def test_at_most_one_action_that_can_be_carried_out(seen, policy):
    actions = plan(seen, policy)
    assert len(actions) <= 1
    for action in actions:
        assert action.reason
        assert 0 < action.cells <= (seen.serving if action.move is Move.TO_TRAINING else seen.training)


@settings(max_examples=150)
@given(observations(), policies)
def test_the_last_serving_cell_never_leaves_unfinished_runs(seen, policy):
    if seen.water and seen.carrying:
        assert seen.carrying - max(0, released(seen, policy)) >= 1


@settings(max_examples=150)
@given(observations(), policies)
def test_cells_leave_only_when_the_rest_carries_the_water(seen, policy):
    moved = released(seen, policy)
    if moved > 0 and seen.training + moved > policy.standing:
        assert (seen.carrying - moved) * seen.cell_capacity >= seen.water
        assert seen.ready_s > 0


@given(observations(), policies)
def test_the_standing_split_is_held(seen, policy):
    moved = released(seen, policy)
    cells = seen.serving + seen.training
    if moved < 0:
        assert seen.training + moved >= min(policy.standing, cells - (not seen.standalone))
    if not policy.elastic:
        kept = seen.water > 0 and not seen.standalone
        assert moved == max(0, min(policy.standing - seen.training, seen.serving - kept))


@given(observations(), policies)
def test_a_fleet_is_never_left_where_nothing_can_happen(seen, policy):
    """All runs done, work ready and nobody training; or runs, nobody serving and nothing to train: it must move."""
    if not policy.elastic:
        return
    if not seen.water and not seen.awaited_s and seen.ready_s and not seen.training and seen.serving:
        assert released(seen, policy) > 0
    if seen.water and not seen.carrying and seen.training and not seen.ready_s:
        assert released(seen, policy) < 0


@settings(max_examples=150)
@given(observations(), policies, st.floats(0, 1), st.floats(1, 10))
def test_gates_are_monotone(seen, policy, cheaper, more):
    """What is worth a switch is worth a cheaper one, and more ready work never sends fewer cells."""
    moved = released(seen, policy)
    if moved > 0:
        cheap = replace(
            seen,
            to_train_s=seen.to_train_s * cheaper,
            to_serve_s=seen.to_serve_s * cheaper,
            join_s=seen.join_s * cheaper,
        )
        assert released(cheap, policy) >= moved
        assert released(replace(seen, ready_s=seen.ready_s * more), policy) >= moved
        calmer = replace(seen, finished=seen.finished + (seen.started - seen.finished) // 2)
        assert released(calmer, policy) >= moved


def test_a_step_with_work_and_room_lets_cells_leave():
    (action,) = plan(SEEN, Policy())
    assert (action.move, action.cells) == (Move.TO_TRAINING, 6)
    assert "5000 cell-seconds" in action.reason


def test_no_work_no_move():
    assert plan(replace(SEEN, ready_s=0.0), Policy()) == ()


def test_work_that_is_not_worth_the_switch_waits_for_more():
    assert plan(replace(SEEN, ready_s=23.0), PLAIN) == ()
    assert released(replace(SEEN, ready_s=25.0)) > 0
    assert plan(replace(SEEN, ready_s=25.0), Policy(hysteresis=3)) == ()


def test_a_complete_burst_is_trained_whatever_it_is_worth():
    """Runs of the next burst go on, so waiting for the water to sink would hold publication up."""
    assert released(replace(SEEN, ready_s=5.0, awaited_s=0.0, rollout_left_s=0.0)) == 1


def test_the_join_gate_weighs_pull_and_push():
    """One core with 100 s of work left: a satellite saves 50 s, and costs 12 s and its pull and push."""
    seen = replace(SEEN, serving=7, training=1, ready_s=100.0, rollout_left_s=0.0)
    assert released(seen, Policy(hysteresis=2.0, at_once=1)) == 1
    assert released(replace(seen, join_s=14.0), Policy(hysteresis=2.0, at_once=1)) == 0


def test_the_prefix_is_capped_by_what_is_left_to_train():
    """600 cell-seconds beside runs that go on for 300 s: two cells finish with them, four would idle."""
    seen = replace(SEEN, ready_s=400.0, awaited_s=200.0, rollout_left_s=300.0, join_s=0.0)
    assert released(seen) == 2
    assert released(seen, Policy(pace=float("inf"))) == 6


def test_idle_cells_go_back_while_runs_go_on():
    seen = replace(SEEN, serving=4, training=4, ready_s=0.0)
    assert released(seen) == -4
    assert released(seen, Policy(standing=3)) == -1
    assert released(replace(seen, rollout_left_s=10.0)) == 0


def test_rising_water_takes_back_what_it_needs():
    seen = replace(SEEN, serving=2, training=6, dispatched=115)
    assert seen.water == 35
    assert released(seen) == -2
    soon = replace(seen, ready_s=60.0)
    assert released(soon) == 0, "six cells are done with 60 s of work before they would serve"


@given(observations(moving=st.integers(1, 6)), policies, st.integers(0, 5))
def test_who_has_drained_goes_only_when_the_rest_carries_the_water(seen, policy, others):
    others = min(others, seen.moving - 1)
    why = taken_back(seen, policy, others=others)
    serving = seen.carrying + others
    short = seen.water * policy.reserve > serving * seen.cell_capacity
    standing = seen.training + seen.moving - others - 1 < policy.standing
    assert (why is None) == (not short or (standing and serving > 0))
    if why is None and seen.water:
        assert serving, "the last serving cell leaves no unfinished runs"


def test_what_was_let_go_is_not_taken_back_while_nothing_changes():
    """20 runs, 10 a cell: two of eight serve on, and each of the six that leave may, whichever looks first."""
    (action,) = plan(SEEN, PLAIN)
    assert (action.move, action.cells) == (Move.TO_TRAINING, 6)
    left = replace(SEEN, serving=2, moving=6)
    assert {taken_back(left, PLAIN, others=others) for others in range(6)} == {None}
    risen = replace(left, dispatched=left.dispatched + 25)
    assert [taken_back(risen, PLAIN, others=others) is None for others in range(6)] == [False] * 3 + [True] * 3
    assert taken_back(risen, PLAIN, others=1) == "the water, 45 runs, is above what 3 other replicas carry"


def test_replicas_beside_the_cells_let_all_of_them_train():
    """20 runs, 10 a replica: with two that stand alone nobody has to serve, with one a cell has to."""
    seen = replace(SEEN, serving=4, rollout_left_s=0.0)
    assert [released(replace(seen, standalone=count)) for count in range(3)] == [2, 3, 4]
    assert released(replace(seen, standalone=3)) == 4
    back = replace(seen, serving=0, training=4, standalone=1)
    assert released(back) == -1
    assert released(replace(back, standalone=2)) == 0


def test_every_transition_of_a_cell():
    for state in CellState:
        for event in CellEvent:
            if event in TRANSITIONS[state]:
                assert after(state, event) is TRANSITIONS[state][event]
            else:
                with pytest.raises(TrainerError, match=f"{state} cannot {event}"):
                    after(state, event)


def test_a_cell_goes_round():
    state = CellState.SERVING
    for event in (CellEvent.LEAVE, CellEvent.DRAINED, CellEvent.READY, CellEvent.RETURN, CellEvent.LOADED):
        state = after(state, event)
    assert state is CellState.SERVING
    assert after(after(state, CellEvent.FAIL), CellEvent.START) is CellState.LOADING
