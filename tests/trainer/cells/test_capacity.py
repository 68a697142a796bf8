"""What is estimated from measured numbers: what a cell carries, when runs end, what a switch costs."""

from __future__ import annotations

import math
from dataclasses import replace

from cells_kit import Batch
from hypothesis import given
from hypothesis import strategies as st

from gyre_sdk.trainer.cells.capacity import Average, Capacity, Costs, Counters, Limit, Load, carried, rollout_left
from gyre_sdk.trainer.cells.observe import observed
from gyre_sdk.trainer.cells.plan import Policy, plan
from gyre_sdk.trainer.cells.state import CellState

positive = st.floats(0.01, 1e6)
known = st.none() | positive
loads = st.builds(Load, known, known, known, known)
seconds = st.floats(0, 1e5)


@given(loads, st.floats(1, 1000), st.floats(1, 10))
def test_a_cell_carries_the_least_of_what_is_known(load: Load, bound: float, factor: float) -> None:
    found = carried(load, bound).runs
    assert 1 <= found <= bound
    limits = [bound]
    if load.kv_tokens and load.context_tokens:
        limits.append(load.kv_tokens / load.context_tokens)
    if load.useful_calls and load.calls_per_run:
        limits.append(load.useful_calls / load.calls_per_run)
    assert found == max(1, min(limits))
    if load.context_tokens is not None:
        assert carried(replace(load, context_tokens=load.context_tokens * factor), bound).runs <= found


def test_capacity_in_numbers() -> None:
    """600k tokens of cache hold 20 contexts of 30k; 16 requests at a time are those of 40 runs that have 0.4 each."""
    load = Load(600_000, 30_000, 16, 0.4)
    assert carried(load, 64) == Capacity(20, Limit.CACHE)
    assert carried(replace(load, kv_tokens=None), 64) == Capacity(40, Limit.SPEED)
    assert carried(replace(load, kv_tokens=None, useful_calls=None), 64) == Capacity(64, Limit.SETTINGS)
    assert carried(replace(load, kv_tokens=None, calls_per_run=0.0), 64) == carried(Load(), 64) == Capacity(64)
    assert carried(replace(load, kv_tokens=1000), 64) == Capacity(1, Limit.CACHE)


def test_what_is_left_in_numbers() -> None:
    assert rollout_left(None, 100.0, 35.0) == 0
    assert rollout_left(None, None, 0.0) == 0
    assert rollout_left(3.0, None, 0.0) == rollout_left(None, None, 0.0, waiting=1) == math.inf
    assert rollout_left(3.0, 100.0, 35.0, slots=0.0) == math.inf, "nobody serves"
    assert rollout_left(0.0, 100.0, 35.0) == 100
    assert rollout_left(30.0, 100.0, 35.0, rate=2.0) == 35
    assert rollout_left(100.0, 100.0, 40.0) == rollout_left(500.0, 100.0, 40.0) == 2
    assert rollout_left(30.0, 100.0, 35.0, waiting=4, slots=2) == 100 + 2 * 35
    assert rollout_left(None, 100.0, 35.0, waiting=4, slots=2, rate=0.0) == 100 + 2 * 35


@given(
    st.none() | seconds,
    st.lists(st.floats(0.1, 1e5), min_size=1, max_size=12),
    st.integers(0, 5),
    st.floats(0.5, 50),
    st.floats(0.1, 3),
)
def test_what_is_left_falls_with_age_speed_and_room(
    age: float | None, ended: list[float], waiting: int, slots: float, rate: float
) -> None:
    longest, mean = max(ended), sum(ended) / len(ended)
    found = rollout_left(age, longest, mean, waiting=waiting, slots=slots, rate=rate)
    assert 0 <= found < math.inf and (found > 0) == (age is not None or waiting > 0)
    older = None if age is None else age + 10
    assert rollout_left(older, longest, mean, waiting=waiting, slots=slots, rate=rate) <= found
    assert rollout_left(age, longest, mean, waiting=waiting, slots=2 * slots, rate=2 * rate) <= found
    assert rollout_left(age, longest, mean, waiting=waiting + 1, slots=slots, rate=rate) >= found
    if age is not None:
        assert rollout_left(age, longest, mean, slots=slots) <= max(longest, mean)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20), st.floats(0.01, 100))
def test_measured_costs_replace_the_prior(measured: list[float], prior: float) -> None:
    average = Average(prior)
    for number, value in enumerate(measured):
        average = average.after(value)
        assert average.measured and (number or average.value == value)
    assert min(measured) * 0.999 <= average.value <= max(measured) * 1.001


def test_an_observation_of_a_fleet() -> None:
    """8,000 tokens to train at 500 a second; of the burst 4 runs are awaited, one of which has no slot yet."""
    counters = Counters(20, 15, 10, [2.0, 4.0, 6.0], [10.0] * 10, 4, 1000.0)
    batch = Batch(ready_tokens=5000, leased_tokens=3000, tokens_per_second={"cell-0": 400.0, "cell-1": 600.0})
    states = [CellState.TRAINING, CellState.SERVING, CellState.SERVING, CellState.LOADING, CellState.FAILED]
    seen = observed(states, counters, batch, Costs(), capacity=4)
    assert (seen.serving, seen.training, seen.moving, seen.water, seen.live) == (2, 1, 1, 10, 5)
    assert (seen.ready_s, seen.awaited_s) == (16.0, 8.0)
    assert seen.rollout_left_s == 10 + 10 / 8
    assert (seen.to_train_s, seen.to_serve_s, seen.join_s) == (5, 5, 0)
    all_begun = replace(counters, awaited_runs=3)
    assert observed(states, all_begun, batch, Costs(), capacity=4).rollout_left_s == 8, "the youngest is 2 s old"
    longer = replace(all_begun, longest=60.0)
    assert observed(states, longer, batch, Costs(), capacity=4).rollout_left_s == 58, "also of a run long ago"


def test_cells_stay_between_two_steps_of_a_burst() -> None:
    """The core steps, so that no unit is there: groups of the next step have closed, of a later one runs go on for long."""
    states = [CellState.TRAINING, CellState.TRAINING, CellState.SERVING]
    counters = Counters(24, 20, 16, [1.0] * 4, [500.0] * 16, 8, 1000.0)
    between = Batch(step=0, tokens_per_second={"cell-0": 100.0})
    closed = observed(states, replace(counters, closed_runs=8), between, Costs(), capacity=8)
    assert closed.ready_s == 80.0 and closed.awaited_s == 80.0
    assert plan(closed, Policy()) == ()
    (action,) = plan(observed(states, counters, between, Costs(), capacity=8), Policy())
    assert (action.move, action.cells) == ("to_serving", 2), "nothing but runs to wait for"


def test_a_burst_without_a_measured_run_is_not_complete() -> None:
    """Before the first group was sealed nobody knows what a run gives to train: awaited work is not nothing."""
    seen = observed([CellState.SERVING], Counters(4, 4, 0, [1.0] * 4, [], 4, 0.0), Batch(), Costs(), capacity=4)
    assert seen.awaited_s > 0 and seen.rollout_left_s == math.inf
    assert plan(seen, Policy()) == ()


def test_one_cell_alternates() -> None:
    """With runs it serves, without it trains; it goes back as soon as there are new ones."""
    costs, batch = Costs(), Batch(ready_tokens=500_000)
    counters = Counters(8, 8, 4, [1.0] * 4, [5.0] * 4, 0, 100.0)
    assert plan(observed([CellState.SERVING], counters, batch, costs, capacity=8), Policy()) == ()
    done = replace(counters, finished=8, live_ages=[])
    (action,) = plan(observed([CellState.SERVING], done, batch, costs, capacity=8), Policy())
    assert (action.move, action.cells) == ("to_training", 1)
    assert plan(observed([CellState.TRAINING], done, batch, costs, capacity=8), Policy()) == ()
    more = replace(done, dispatched=16, started=9, awaited_runs=8, live_ages=[0.5])
    (action,) = plan(observed([CellState.TRAINING], more, Batch(), costs, capacity=8), Policy())
    assert (action.move, action.cells) == ("to_serving", 1)
