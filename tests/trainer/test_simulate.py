"""The simulator's laws: nothing is lost or done twice, every GPU-second has one state, no policy beats the bound."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.cells.plan import Action, Move, Policy
from gyre_sdk.trainer.cells.state import CellState
from gyre_sdk.trainer.simulate import controls
from gyre_sdk.trainer.simulate.compare import bound_s
from gyre_sdk.trainer.simulate.fleet import Fleet, Mode, gpu_seconds
from gyre_sdk.trainer.simulate.scenario import Batch, Costs, Runs, Scenario, Training
from gyre_sdk.trainer.simulate.scenario import Fleet as Cells
from gyre_sdk.trainer.simulate.workload import Workload, drawn

scenarios = st.builds(
    Scenario,
    fleet=st.builds(Cells, cells=st.integers(2, 6), slots=st.floats(1, 12), solo=st.floats(1, 5)),
    batch=st.builds(
        Batch,
        groups=st.integers(1, 4),
        runs=st.integers(1, 4),
        steps=st.integers(1, 9),
        mu=st.integers(1, 3),
        phi=st.floats(0, 3),
        whole_steps=st.booleans(),
    ),
    runs=st.builds(
        Runs,
        median_s=st.floats(10, 5000),
        sigma=st.floats(0, 1.5),
        correlation=st.floats(0, 1),
        timeout_s=st.floats(1000, 20000),
    ),
    training=st.builds(Training, batch_s=st.floats(1, 2000)),
    costs=st.builds(
        Costs,
        drain_s=st.floats(0, 60),
        switch_s=st.floats(0, 60),
        load_s=st.floats(0, 60),
        join_s=st.floats(0, 30),
        recompute_s=st.floats(0, 10),
    ),
)


def setups(scenario):
    """Return every way to share cells that is compared."""
    split = scenario.given_split
    return {
        "colocate": controls.colocated(scenario, streaming=False),
        "colocate_streaming": controls.colocated(scenario, streaming=True),
        "carry_step": controls.carried(scenario, whole_burst=False),
        "carry_burst": controls.carried(scenario, whole_burst=True, streaming=False),
        "async": controls.fixed(scenario, split, streaming=False),
        "async_streaming": controls.fixed(scenario, split, streaming=True),
        "elastic": controls.elastic(Policy()),
        "one_at_a_time": controls.elastic(Policy(at_once=1, pace=float("inf"))),
        "standing": controls.elastic(Policy(standing=1)),
        "split": controls.elastic(controls.split(Policy(), split)),
    }


NAMES = list(setups(Scenario()))


@settings(max_examples=120, deadline=None)
@given(scenarios, st.sampled_from(NAMES), st.integers(0, 5))
def test_conservation(scenario, name, seed):
    workload = drawn(scenario, seed)
    setup = setups(scenario)[name]
    fleet = Fleet(scenario, workload, setup.mode, record=True)
    counts, batch, looks = fleet.counts, scenario.batch, []
    ahead = batch.ahead if setup.mode.ahead else 0

    def deep(published):
        """Groups that may be handed out."""
        return int((published + batch.mu + ahead) * batch.groups)

    def watched(seen_fleet):
        seen = seen_fleet.observe()
        assert seen.serving + seen.training + seen.moving == scenario.fleet.cells
        assert seen.finished <= seen.started <= seen.dispatched <= workload.runs
        assert seen.water == sum(seen_fleet.unfinished)
        published = len(seen_fleet.trace.steps) // batch.mu * batch.mu
        assert seen.dispatched == min(deep(published), batch.steps * batch.groups) * batch.runs
        actions = setup.decide(seen_fleet)
        left = sum(action.cells for action in actions if action.move is Move.TO_TRAINING)
        looks.append((seen.started, seen.finished, seen.serving - left))
        return actions

    fleet.run(watched)
    assert counts.dispatched == counts.started == counts.finished == workload.runs
    assert sorted(fleet.trace.trained) == list(range(batch.steps * batch.groups))
    assert len(fleet.trace.steps) == batch.steps
    assert fleet.trace.steps == sorted(fleet.trace.steps)
    assert len(fleet.trace.staleness) == batch.steps * batch.groups
    for (started, finished, serving), (after, _, _) in pairwise(looks):
        assert after == started or after - finished <= serving * scenario.fleet.slots + 1e-6, "no slot was free"
    assert counts.switches == sum(action.cells for _, action in fleet.trace.actions)
    for history in fleet.trace.cells:
        for (since, state), (until, _) in pairwise(history):
            if state is CellState.LOADING:
                assert until - since == pytest.approx(scenario.costs.load_s, abs=1e-6)
            if state is CellState.SWITCHING:
                assert until - since >= scenario.costs.switch_s - 1e-6
    dispatched = [next(v for v in range(0, batch.steps, batch.mu) if group < deep(v)) for group in fleet.trace.trained]
    assert fleet.trace.staleness == [place // batch.groups - v for place, v in enumerate(dispatched)]
    assert min(fleet.trace.staleness) >= 0
    assert max(fleet.trace.staleness) < 2 * batch.mu - 1 + ahead + 1e-9
    per_cell = gpu_seconds(fleet)
    for cell in per_cell:
        assert sum(cell.values()) == pytest.approx(fleet.now)
    assert sum(sum(cell.values()) for cell in per_cell) == pytest.approx(scenario.fleet.cells * fleet.now)
    training = sum(cell.get(CellState.TRAINING, 0.0) for cell in per_cell)
    serving = sum(cell.get(CellState.SERVING, 0.0) for cell in per_cell)
    assert fleet.train_busy <= training * (1 + 1e-9) + 1e-6
    assert fleet.slots_used <= serving * (1 + 1e-9) + 1e-6
    if setup.mode.streaming:
        assert fleet.train_busy == pytest.approx(sum(workload.work), abs=1e-3)
    else:
        assert fleet.train_busy >= sum(workload.work) * (1 - 1e-9) - 1e-3
    assert fleet.now >= bound_s(scenario, workload) * (1 - 1e-6) - 1e-3
    assert fleet.trace.water[0][1] > 0


@settings(max_examples=40, deadline=None)
@given(scenarios, st.sampled_from(NAMES), st.integers(0, 5))
def test_served_work_is_the_runs_lengths(scenario, name, seed):
    """Where a lone run is no faster and a move loses nothing, slots in use add up to the work of all runs."""
    plain = Scenario(
        fleet=Cells(cells=scenario.fleet.cells, slots=scenario.fleet.slots, solo=1.0),
        batch=scenario.batch,
        runs=scenario.runs,
        training=scenario.training,
        costs=Costs(recompute_s=0.0),
    )
    workload = drawn(plain, seed)
    fleet = setups(plain)[name].run(plain, workload)
    assert fleet.slots_used * plain.fleet.slots == pytest.approx(sum(map(sum, workload.lengths)), rel=1e-6)


def test_the_same_seed_gives_the_same_training():
    scenario = Scenario(batch=Batch(groups=4, runs=4, steps=8))
    one, other = (controls.elastic(Policy()).run(scenario, drawn(scenario, 3)) for _ in range(2))
    assert (one.now, one.trace.actions) == (other.now, other.trace.actions)
    assert one.now != controls.elastic(Policy()).run(scenario, drawn(scenario, 4)).now


def test_one_cell_alternates():
    scenario = Scenario(fleet=Cells(cells=1, slots=4), batch=Batch(groups=2, runs=2, steps=4, mu=1))
    fleet = controls.elastic(Policy()).run(scenario, drawn(scenario, 0))
    moves = [action.move for _, action in fleet.trace.actions]
    assert moves[::2] == [Move.TO_TRAINING] * len(moves[::2])
    assert moves[1::2] == [Move.TO_SERVING] * len(moves[1::2])


def by_hand(**batch):
    """Return a scenario whose course can be computed by hand: full cells, no costs of any kind but loading."""
    return Scenario(
        fleet=Cells(cells=2, slots=1, solo=1.0),
        batch=Batch(**{"groups": 1, "runs": 2, "steps": 1, "mu": 1, "phi": 0, **batch}),
        costs=Costs(drain_s=1.0, switch_s=2.0, load_s=4.0, join_s=0.0, recompute_s=0.0),
    )


def test_colocate_by_hand():
    """Runs of 10 s and 30 s, 8 cell-seconds of training: 30 s, a switch of 2 s with nothing to drain, 5 s of training.

    For its first 2 s the core is alone: the satellite has waited for it."""
    scenario, workload = by_hand(), Workload(((10.0, 30.0),), (8.0,))
    assert controls.colocated(scenario, streaming=True).run(scenario, workload).now == pytest.approx(37.0)
    dealt = controls.colocated(scenario, streaming=False).run(scenario, workload)
    assert dealt.now == pytest.approx(40.0), "one group cannot be dealt to two cells"


def test_a_cell_with_runs_is_drained():
    """The first group's run ends at 10 s; a cell leaves the other's run, which takes a drain and a switch of 3 s."""
    scenario = by_hand(groups=2, runs=1)
    fleet = controls.elastic(Policy()).run(scenario, Workload(((10.0,), (100.0,)), (20.0, 20.0)))
    assert [at for at, _ in fleet.trace.cells[0][1:4]] == pytest.approx([10.0, 11.0, 13.0])


@pytest.mark.parametrize("streaming", [True, False])
def test_cells_of_one_action_move_side_by_side(streaming):
    """Three of five cells leave: 1 s of drain, 2 s of switch; satellites wait for the core, then pull together.

    A fourth joins later by itself: a drain, a switch and one pull."""
    costs = Costs(drain_s=1.0, switch_s=2.0, load_s=4.0, join_s=5.0, recompute_s=0.0)
    scenario = Scenario(fleet=Cells(cells=5, slots=3, solo=1.0), batch=Batch(4, 1, 1, 1, 0), costs=costs)
    fleet = Fleet(scenario, Workload(((10.0,), *((100.0,),) * 3), (40.0,) * 4), Mode(streaming=streaming))

    def decide(seen):
        if seen.moving or seen.training >= 4 or not seen.now:
            return (Action(Move.TO_TRAINING, 1, "the rest"),) if seen.serving and not seen.water else ()
        return (Action(Move.TO_TRAINING, 1 if seen.training else 3, "by hand"),)

    fleet.run(decide)
    core, *satellites = ([at for at, _ in cell[1:4]] for cell in fleet.trace.cells)
    assert core == pytest.approx([10, 11, 13])
    together = [10, 13, 25] if streaming else [10, 11, 13]
    assert satellites[:2] == [pytest.approx(together)] * 2, "two pulls of 5 s at the same time take both 10 s"
    begun = together[-1]
    assert satellites[2] == pytest.approx([begun, begun + 1, begun + (8 if streaming else 3)])


@pytest.mark.parametrize(("phi", "ahead"), [(0.5, 0), (1.0, 4), (1.5, 4), (2.0, 8)])
def test_whole_steps_ahead(phi, ahead):
    """A part of a step allows no run beyond the open burst: the same training as without it."""
    batch = {"groups": 4, "runs": 1, "steps": 4, "whole_steps": True}
    workload = Workload(((10.0,),) * 16, (1.0,) * 16)
    fleet = Fleet(by_hand(**batch, phi=phi), workload, Mode(training=1))
    assert fleet.counts.dispatched == 4 + ahead
    whole = controls.fixed(fleet.scenario, 1, streaming=True).run(by_hand(**batch, phi=phi), workload)
    assert (
        whole.now == controls.fixed(fleet.scenario, 1, streaming=True).run(by_hand(**batch, phi=int(phi)), workload).now
    )


def test_runs_start_in_the_order_of_their_dispatch():
    """One cell serves one run at a time."""
    fleet = controls.fixed(by_hand(), 1, streaming=True).run(
        by_hand(groups=2, runs=1), Workload(((20.0,), (10.0,)), (1.0, 1.0))
    )
    assert fleet.trace.trained == [0, 1]


def test_groups_train_in_the_order_in_which_they_close():
    """All four runs go at once; those of the second step end first, and wait for the first to close."""
    scenario = with_slots(by_hand(groups=2, runs=1, steps=2, phi=1), 4)
    workload = Workload(((50.0,), (60.0,), (20.0,), (10.0,)), (1.0,) * 4)
    assert controls.fixed(scenario, 1, streaming=True).run(scenario, workload).trace.trained == [0, 1, 3, 2]


def test_more_runs_than_slots_share_them():
    """At 10 s a run ends and one of two cells leaves: three runs go on at two thirds, so 90 s of work take 135 s."""
    scenario = with_slots(by_hand(groups=4, runs=1), 2)
    workload = Workload(((10.0,), (100.0,), (100.0,), (100.0,)), (1.0,) * 4)
    fleet = Fleet(scenario, workload, Mode())
    leave = Action(Move.TO_TRAINING, 1, "now")
    fleet.run(lambda one: (leave,) if one.now == 10.0 and not one.moving else ())
    assert fleet.now == pytest.approx(10.0 + 135.0 + 3.0)


def with_slots(scenario, slots):
    """Return a scenario of two cells with other slots."""
    return Scenario(fleet=Cells(cells=2, slots=slots, solo=1.0), batch=scenario.batch, costs=scenario.costs)


def test_a_fixed_split_by_hand():
    """One cell serves 10 s, then 30 s; the other trains 8 s when the group is complete."""
    scenario, workload = by_hand(), Workload(((10.0, 30.0),), (8.0,))
    assert controls.fixed(scenario, 1, streaming=True).run(scenario, workload).now == pytest.approx(48.0)


def test_training_overlaps_with_the_tail():
    """Groups of one run, 10 s and 100 s: elastic trains the first 20 s of work beside the second's run."""
    scenario = by_hand(groups=2, runs=1)
    workload = Workload(((10.0,), (100.0,)), (20.0, 20.0))
    fleet = controls.elastic(Policy()).run(scenario, workload)
    assert fleet.now == pytest.approx(100.0 + 20.0, abs=15.0)
    assert fleet.now < controls.colocated(scenario, streaming=True).run(scenario, workload).now
    assert next(action.move for _, action in fleet.trace.actions) is Move.TO_TRAINING


def test_static_phases_wait_for_the_fullest_cell():
    scenario = by_hand(groups=4, runs=1)
    workload = Workload(((1.0,),) * 4, (10.0, 1.0, 10.0, 1.0))
    shared = controls.colocated(scenario, streaming=True).run(scenario, workload).now
    dealt = controls.colocated(scenario, streaming=False).run(scenario, workload).now
    assert dealt - shared == pytest.approx(20.0 - 12.0), "the core trains 2 s alone, both cells 10 s; one of them 20 s"


def test_a_run_loses_its_prefix_when_its_cell_leaves():
    scenario = by_hand(groups=2, runs=1)
    workload = Workload(((10.0,), (100.0,)), (20.0, 20.0))
    costly = Scenario(fleet=scenario.fleet, batch=scenario.batch, costs=Costs(1.0, 2.0, 4.0, 0.0, recompute_s=7.0))
    free = controls.elastic(Policy()).run(scenario, workload)
    paid = controls.elastic(Policy()).run(costly, workload)
    assert paid.now - free.now == pytest.approx(7.0 / 2), "one of two cells left: half of the runs lose their prefix"


@pytest.mark.parametrize("training", [1, 10000, 19999])
@pytest.mark.parametrize("streaming", [True, False])
def test_what_is_left_may_be_less_than_the_clock_can_tell(training, streaming):
    """Thousands of cells eat the end of much work in less than the clock's last digit after centuries."""
    batch = Batch(groups=4, runs=2, steps=4, mu=1)
    scenario = Scenario(fleet=Cells(cells=20000), batch=batch, runs=Runs(1e6, 0.6, 0.5, 1e9), training=Training(1e6))
    fleet = controls.fixed(scenario, training, streaming=streaming).run(scenario, drawn(scenario, 0))
    assert len(fleet.trace.steps) == batch.steps


def test_bad_policies_are_reported():
    scenario = Scenario(batch=Batch(groups=2, runs=2, steps=2))
    workload = drawn(scenario, 0)
    with pytest.raises(TrainerError, match="the policy must move a cell"):
        Fleet(scenario, workload, Mode()).run(lambda fleet: ())
    with pytest.raises(TrainerError, match="9 cells to move to training, of 8"):
        Fleet(scenario, workload, Mode()).run(lambda fleet: (Action(Move.TO_TRAINING, 9, "too many"),))
    two = Action(Move.TO_TRAINING, 1, "one"), Action(Move.TO_TRAINING, 1, "and another")
    with pytest.raises(TrainerError, match="while 1 move"):
        Fleet(scenario, workload, Mode()).run(lambda fleet: two)
    assert replace(two[0], cells=2) != two[0]
