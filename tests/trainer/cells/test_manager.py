"""The manager over toy replicas: what it does when phases fail, workers die, replicas come back, and in which order it asks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cells_kit import Batch, Forced, Hand, ManualClock, Toys, counted, moves, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre_sdk.errors import PublishError, TrainerError
from gyre_sdk.events import CellMoved, CellsSeen, ReplicaBrought, ReplicaLost, SwitchMeasured
from gyre_sdk.trainer.cells.capacity import Average, Costs
from gyre_sdk.trainer.cells.health import SILENT_S, Pulse, Sign
from gyre_sdk.trainer.cells.launch import Launched
from gyre_sdk.trainer.cells.manager import Cell, Manager
from gyre_sdk.trainer.cells.plan import Action, Move, Policy, plan
from gyre_sdk.trainer.cells.settings import CellsConfig
from gyre_sdk.trainer.cells.switch import (
    Parking,
    Patience,
    Pausing,
    PhaseFailed,
    Sleeping,
    parking_of,
    to_serving,
    to_training,
)
from gyre_sdk.trainer.children import engine_options
from gyre_sdk.trainer.config import (
    AgentConfig,
    EngineConfig,
    OutputConfig,
    PolicyConfig,
    StoreConfig,
    TasksConfig,
    TrainerConfig,
)
from gyre_sdk.trainer.sharing.core import Hung


@pytest.fixture
def toys(tmp_path: Path) -> Iterator[Toys]:
    found = Toys(tmp_path, 3)
    yield found
    found.close()


class Workers:
    """Processes of a cell, as a launcher tells of them."""

    def __init__(self) -> None:
        self.pid = 100
        self.given_up = ""
        self.replaced: list[tuple[str, int, str]] = []

    def wait(self) -> str:
        return ""

    def check(self) -> None:
        if self.given_up:
            raise TrainerError(self.given_up)

    def pids(self) -> dict[str, int]:
        return {"cell-1-worker": self.pid, "cell-2-worker": self.pid}

    def replace(self, name: str, pid: int, reason: str) -> None:
        self.replaced.append((name, pid, reason))

    def stop(self) -> None:
        pass


class World:
    """A manager whose ticks the test makes."""

    def __init__(
        self, toys: Toys, *, launched: Launched | None = None, cells: int = 3, standalone: int = 0, **more: Any
    ) -> None:
        self.toys, self.clock, self.hand = toys, ManualClock(), Hand("cell-1", "cell-2")
        self.actions: list[Action] = []
        self.counters = counted(4)
        self.manager = Manager(
            [
                Cell(
                    f"cell-{n}" if n < cells else f"standalone-{n - cells}",
                    toy.url,
                    launched=launched,
                    standalone=n >= cells,
                )
                for n, toy in enumerate(toys.replicas[: cells + standalone])
            ],
            training=self.hand,
            publisher=toys.publisher,
            counters=lambda: self.counters,
            policy=Policy(),
            drain_s=0.0,
            runs_per_cell=8,
            observer=toys.events.append,
            patience=Patience(0.0, 0.0, 0.0, 0.0),
            clock=self.clock,
            **({"decide": self.decide} | more),
        )
        self.manager._watch()
        self.manager._health.beat()

    def decide(self, seen: Any, policy: Policy) -> list[Action]:
        actions, self.actions = self.actions, []
        return actions

    def tick(self, *moved: int, seconds: float = 1.0) -> list[str]:
        """Let time go by and have the manager look once; return what the cells do."""
        self.actions = [
            Action(Move.TO_TRAINING if cells > 0 else Move.TO_SERVING, abs(cells), "the test wants it")
            for cells in moved
        ]
        self.clock.now += seconds
        self.manager._health.beat()
        self.manager._tick()
        return [str(state) for state in self.manager.states().values()]

    def check(self) -> None:
        """A cell has one user: requests reach those that serve the newest weights, and no awake replica has a worker."""
        serving = self.toys.publisher._serving
        for name, state, toy in zip(
            self.manager.states(), self.manager.states().values(), self.toys.replicas, strict=True
        ):
            assert (state == "serving") == (toy.url in serving)
            if self.hand.trains(name):
                assert toy.paused and state in ("training", "failed")
            if state == "training":
                assert self.hand.trains(name)
            if state == "serving":
                assert not toy.paused and toy.version == str(self.toys.publisher.current.version)
            moves(self.toys.events, name)

    def exclusive(self, restarted: set[str]) -> None:
        """A cell's devices have one user, whatever failed; but for a replica that came back by itself a moment ago."""
        for (name, state), toy in zip(self.manager.states().items(), self.toys.replicas, strict=True):
            assert state in (("training", "failed") if self.hand.trains(name) else ("serving", "failed"))
            assert not self.hand.trains(name) or toy.paused or name in restarted
            assert state == "serving" or toy.url not in self.toys.publisher._serving
            moves(self.toys.events, name)


def test_cells_leave_core_first_and_return_in_reverse(toys: Toys) -> None:
    world = World(toys)
    assert world.tick(2) == ["training", "training", "serving"]
    world.check()
    assert world.hand.gate and world.hand.joined == {"cell-1"}
    assert world.tick(-1) == ["training", "serving", "serving"]
    assert world.tick(1, -1) == ["training", "serving", "serving"]
    assert world.tick(-1) == ["serving"] * 3
    assert not world.hand.gate and not world.hand.joined
    world.check()
    assert moves(toys.events, "cell-0") == [
        (state, "the test wants it") for state in ("draining", "switching", "training", "loading", "serving")
    ]
    measured = [event for event in toys.events if isinstance(event, SwitchMeasured)]
    assert [list(event.phases) for event in measured if event.cell == "cell-0"] == [
        ["drain", "park", "join"],
        ["leave", "wake", "weights", "load", "awake", "route"],
    ]
    for event in measured:
        lie = sorted((event.starts[name], event.starts[name] + event.phases[name]) for name in event.phases)
        assert lie[0][0] >= 0 and all(one[1] <= other[0] + 1e-6 for one, other in pairwise(lie)), "one after the other"
    assert world.manager.costs.to_train.measured and world.manager.costs.to_serve.measured


def test_the_last_serving_cell_stays_while_runs_live(toys: Toys) -> None:
    world = World(toys)
    assert world.tick(3) == ["training", "training", "serving"]
    world.counters = counted(4, 4)
    assert world.tick(3) == ["training"] * 3
    world.check()


def test_with_a_replica_beside_them_all_cells_may_train(toys: Toys) -> None:
    """As far as that one carries the runs, and while it serves: that it died is told, and that it serves again."""
    beside = toys.replicas[2]
    world = World(toys, cells=2, standalone=1)
    assert world.tick(2) == ["training", "training", "serving"]
    assert beside.url in toys.publisher._serving
    world.tick(-2)
    world.counters = counted(9)
    assert world.tick(2) == ["training", "serving", "serving"], "eight are what one replica carries"
    assert "is above what 1 other replicas carry" in moves(toys.events, "cell-1")[-1][1]
    world.counters = counted(4)
    beside.broken.add("health")
    world.tick(-1)
    assert world.tick(2) == ["training", "serving", "failed"], "the last that serves"
    toys.publisher.publish({}, step=1)
    beside.broken.clear()
    assert world.tick(1, seconds=60) == ["training", "training", "serving"]
    world.check()
    told = [event for event in toys.events if isinstance(event, CellMoved) and event.standalone]
    assert [(event.cell, event.state) for event in told] == [
        ("standalone-0", state) for state in ("failed", "loading", "serving")
    ]
    assert told[0].reason == "its replica refuses connections"
    assert [event.standalone for event in toys.events if isinstance(event, CellsSeen)][-2:] == [0, 1]


def test_one_cell_alternates_whatever_lives(toys: Toys) -> None:
    for toy in toys.replicas[1:]:
        toys.publisher.forget(toy.url)
    world = World(toys, cells=1)
    assert world.tick(1) == ["training"]
    version = toys.publisher.publish({}, step=1)  # nobody serves
    assert toys.replicas[0].version == "0" and toys.publisher._serving == {}
    assert world.tick(-1) == ["serving"]
    assert toys.replicas[0].version == str(version)


def test_no_satellite_trains_without_the_core_or_without_a_worker(toys: Toys) -> None:
    world = World(toys)
    toys.replicas[0].broken.add("pause")
    assert world.tick(2) == ["failed", "serving", "serving"]
    toys.replicas[0].broken.clear()
    assert world.tick() == ["serving"] * 3
    world.hand.workers = {"cell-2"}
    assert world.tick(2) == ["training", "serving", "training"]
    world.check()


@pytest.mark.parametrize(
    ("broken", "phase", "reached"),
    [
        ("pause", "park: Unready: pause answered 500", "switching"),
        ("slow", "join: its worker did not join", "switching"),
    ],
)
def test_a_phase_that_fails_on_the_way_out_is_named(toys: Toys, broken: str, phase: str, reached: str) -> None:
    world = World(toys)
    world.tick(1)
    toy = toys.replicas[1]
    toy.broken.add(broken)
    world.hand.slow = {"cell-1"} if broken == "slow" else set()
    assert world.tick(1) == ["training", "failed", "serving"]
    *_, before, (state, reason) = moves(toys.events, "cell-1")
    assert before[0] == reached and state == "failed" and reason.startswith(phase)
    world.check()
    toy.broken.clear()
    assert world.tick()[1] == "serving"
    world.check()


@pytest.mark.parametrize(
    ("broken", "phase"),
    [
        ("stuck", "leave: its worker did not let go"),
        ("finish_weight_update", "weights: Behind: version 0 did not reach replica"),
        ("resume", "weights: Unready: resume answered 500"),
    ],
)
def test_a_phase_that_fails_on_the_way_back_is_named(toys: Toys, broken: str, phase: str) -> None:
    world = World(toys)
    world.tick(2)
    toys.replicas[1].broken.add(broken)
    world.hand.stuck = {"cell-1"} if broken == "stuck" else set()
    assert world.tick(-1) == ["training", "failed", "serving"]
    state, reason = moves(toys.events, "cell-1")[-1]
    assert state == "failed" and reason.startswith(phase)
    assert world.tick(seconds=60)[1] == "failed"
    world.check()
    assert world.hand.joined == ({"cell-1"} if broken == "stuck" else set())
    toys.replicas[1].broken.clear()
    world.hand.stuck.clear()
    assert world.tick(seconds=60)[1] == "serving"
    world.check()


def test_a_failed_cell_is_tried_less_and_less_often(toys: Toys) -> None:
    world = World(toys)
    world.tick(1)
    toys.replicas[0].broken.add("finish_weight_update")
    world.tick(-1)
    tries = [len(moves(toys.events, "cell-0"))]
    for _ in range(30):
        world.tick(seconds=2)
        if len(moves(toys.events, "cell-0")) > tries[-1]:
            tries.append(len(moves(toys.events, "cell-0")))
    assert 4 <= len(tries) <= 7


def test_a_dead_replica_is_taken_out_and_comes_back_with_the_newest_weights(toys: Toys) -> None:
    world = World(toys)
    toy = toys.replicas[2]
    toy.broken.add("health")
    assert world.tick() == ["serving"] * 3  # one refusal may be a moment's
    assert world.tick() == ["serving", "serving", "failed"]
    assert moves(toys.events, "cell-2") == [("failed", "its replica refuses connections")]
    world.check()
    toys.publisher.publish({}, step=1)
    assert toy.version == "0" and world.tick(seconds=60)[2] == "failed"
    toys.publisher.returned(toy.url)  # its supervisor started it again: the manager brings it, nobody else
    toy.broken.clear()
    assert world.tick()[2] == "serving"
    assert toy.version == "1"
    world.check()


def test_a_worker_that_dies_takes_its_cell_out_and_it_serves_again(toys: Toys) -> None:
    workers = Workers()
    world = World(toys, launched=workers)
    assert world.tick(2) == ["training", "training", "serving"]
    workers.pid = 101
    world.tick()
    assert moves(toys.events, "cell-1")[3:] == [
        ("failed", "its worker's process ended"),
    ]
    assert world.tick(seconds=2) == ["training", "serving", "serving"]
    world.check()
    assert world.tick(1) == ["training", "training", "serving"]
    workers.given_up = "the cell-1-worker died 5 times"
    with pytest.raises(TrainerError, match="died 5 times"):
        world.manager.check()


@pytest.mark.parametrize("moved", [(), (-1,)])
def test_a_worker_that_is_lost_keeps_its_cell_from_serving_until_it_is_back(toys: Toys, moved: tuple[int, ...]) -> None:
    """Nobody knows whether it still has the devices: neither its end nor its call tells."""
    world = World(toys)
    world.tick(2)
    world.hand.workers = set()
    world.hand.joined.clear()  # the core has given it up
    assert world.tick(*moved, seconds=0.1 if moved else 1.0) == ["training", "failed", "serving"]
    assert moves(toys.events, "cell-1")[-1][1] == "its worker is not connected to the core any more"
    assert world.tick(seconds=60)[1] == "failed"
    world.hand.workers = {"cell-1"}
    assert world.tick()[1] == "serving"
    world.check()


def test_a_worker_that_hangs_is_replaced_and_its_successor_is_left_alone(toys: Toys) -> None:
    workers = Workers()
    world = World(toys, launched=workers)
    world.tick(2)
    world.hand.workers, world.hand.gone = set(), {"cell-1": Hung(100, "no unit ended")}
    world.hand.joined.clear()  # the core has given it up
    assert world.tick() == ["training", "failed", "serving"]
    assert set(workers.replaced) == {("cell-1-worker", 100, "no unit ended")}
    assert world.tick(seconds=60)[1] == "failed", "it may still have the devices"
    workers.pid = 101
    workers.replaced.clear()
    assert world.tick(seconds=2)[1] == "serving" and not workers.replaced
    world.check()


def test_a_core_whose_unit_does_not_end_is_told_and_serves_once_it_has(toys: Toys) -> None:
    """The others go on meanwhile, and nobody waits for it."""
    world = World(toys)
    world.tick(2)
    world.hand.stuck = {"cell-0"}
    assert world.tick(-2) == ["failed", "serving", "serving"]
    state, reason = moves(toys.events, "cell-0")[-1]
    assert state == "failed" and reason.startswith("leave: the core still computes a unit after 0 s")
    assert "raise cells.lease_s" in reason
    assert world.tick(1, seconds=60) == ["failed", "serving", "serving"], "no satellite trains without the core"
    assert toys.replicas[0].paused and world.hand.gate
    world.hand.stuck.clear()
    assert world.tick() == ["serving"] * 3
    world.check()


def test_a_core_that_never_lets_go_does_not_hold_up_the_end(toys: Toys) -> None:
    world = World(toys)
    world.tick(1)
    let_go = threading.Event()
    world.hand.close_gate = lambda seconds: let_go.wait()  # type: ignore[method-assign]
    world.manager.stop(0.2)
    assert world.manager.states()["cell-0"] == "training"
    let_go.set()


def test_a_replica_that_comes_back_awake_while_its_cell_trains_is_parked(toys: Toys) -> None:
    world = World(toys)
    world.tick(1)
    toys.replicas[0].restart()
    toys.publisher.returned(toys.replicas[0].url)
    assert world.tick() == ["training", "serving", "serving"]
    assert toys.replicas[0].paused
    world.check()


def test_a_replica_that_comes_back_elsewhere_is_brought_there(toys: Toys) -> None:
    world = World(toys)
    old, toys.replicas[1] = toys.replicas[1], type(toys.replicas[1])()
    toys.publisher.forget(old.url)
    old.close()
    world.manager.moved(old.url + "/", toys.replicas[1].url)
    world.tick()
    assert world.tick(seconds=60) == ["serving"] * 3
    assert moves(toys.events, "cell-1")[0][1] == f"its replica came back at {toys.replicas[1].url}"
    world.check()


def test_a_replica_that_comes_back_elsewhere_is_brought_there_without_a_manager(toys: Toys) -> None:
    old, toys.replicas[1] = toys.replicas[1], type(toys.replicas[1])()
    toys.publisher.forget(old.url)
    old.close()
    toys.publisher.returned(toys.replicas[1].url, known=False)
    until(lambda: isinstance(toys.events[-1], ReplicaBrought), "it is brought")
    assert toys.replicas[1].url in toys.publisher._serving
    version = toys.publisher.current.version
    assert toys.replicas[1].version == str(version)
    told = [event for event in toys.events[3:] if isinstance(event, ReplicaLost | ReplicaBrought)]
    assert [(type(event), event.replica) for event in told] == [
        (ReplicaLost, old.url),
        (ReplicaBrought, toys.replicas[1].url),
    ]


def test_cells_serve_when_the_manager_has_stopped(toys: Toys) -> None:
    """Those that trained, and one whose replica answers again."""
    world = World(toys)
    world.tick(2)
    toys.replicas[2].broken.add("health")
    world.tick()
    assert world.tick() == ["training", "training", "failed"]
    toys.replicas[2].broken.clear()
    world.manager._health.beat()
    world.manager.stop()
    assert set(world.manager.states().values()) == {"serving"}
    world.check()


def test_a_thread_that_ends_is_told(toys: Toys) -> None:
    def broken(seen: Any, policy: Policy) -> list[Action]:
        raise RuntimeError("no plan")

    world = World(toys, decide=broken, period_s=0.01)
    world.manager.start()
    world.manager._thread.join(20)
    with pytest.raises(TrainerError, match="the manager of cells ended: RuntimeError: no plan"):
        world.manager.check()
    world.manager.stop()


def test_a_look_at_replicas_that_ends_is_told(toys: Toys) -> None:
    """Who looks no more would take the dead for living."""
    world = World(toys, period_s=0.01)
    world.manager.start()
    world.manager.moved(toys.replicas[2].url, "http://127.0.0.1:port")
    world.manager._health._thread.join(60)
    with pytest.raises(TrainerError, match="the look at the health of cells ended: InvalidURL"):
        world.manager.check()
    world.manager.stop()


def test_replicas_are_asked_at_the_same_time(toys: Toys) -> None:
    """None that is slow to answer keeps the others from being looked at."""
    health, together = World(toys).manager._health, threading.Barrier(3)

    def meet(path: str) -> tuple[int, dict[str, Any]]:
        try:
            together.wait(1.0)
        except threading.BrokenBarrierError:
            together.reset()
            return 503, {}
        return 200, {}

    for toy in toys.replicas:
        toy.get = meet  # type: ignore[method-assign]
    until(lambda: health.beat() or all(health.answers(toy.url) for toy in toys.replicas), "all answer at once", 60)


def test_the_plan_moves_cells_by_what_is_measured(toys: Toys) -> None:
    """4 runs fit on one cell, and two of three may train 20 s of work, at 1,000 tokens a second; then nothing is left."""
    world = World(toys, decide=plan, costs=Costs(Average(0.1), Average(0.1)))
    world.counters = counted(12, 8)
    world.hand.batch = Batch(ready_tokens=20_000)
    assert world.tick() == ["training", "training", "serving"]
    world.hand.batch = Batch(pull_s=0.5, push_s=0.25)
    world.counters = counted(48, 8)
    assert world.tick() == ["serving"] * 3
    assert world.manager.costs.join.value == 0.75
    seen = [event for event in toys.events if isinstance(event, CellsSeen)]
    assert [(event.water, event.capacity, event.serving, event.ready_s) for event in seen] == [
        (4, 24, 3, 20),
        (40, 8, 1, 0),
    ]


failures = st.sampled_from(["pause", "resume", "finish_weight_update", "health", "slow", "stuck"])
cells = st.integers(0, 2)
schedules = st.lists(
    st.tuples(st.just("move"), st.integers(-3, 3).filter(bool))
    | st.tuples(st.just("break"), cells, failures)
    | st.tuples(st.just("mend"), cells)
    | st.tuples(st.just("restart"), cells)
    | st.tuples(st.just("publish"))
    | st.tuples(st.just("runs"), st.booleans()),
    max_size=10,
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedules)
def test_whatever_happens_a_cell_has_one_user_and_legal_moves(
    tmp_path_factory: pytest.TempPathFactory, schedule: list[Any]
) -> None:
    toys = Toys(tmp_path_factory.mktemp("toys"), 3)
    try:
        world, restarted = World(toys), set[str]()
        for what, *more in schedule:
            cell = f"cell-{more[0]}" if more else ""
            if what == "break":
                number, how = more
                {"slow": world.hand.slow, "stuck": world.hand.stuck}.get(how, set()).add(cell)
                toys.replicas[number].broken.add(how)
            elif what == "mend":
                toys.replicas[more[0]].broken.clear()
                world.hand.slow.discard(cell)
                world.hand.stuck.discard(cell)
            elif what == "restart" and world.manager.states()[cell] == "training":
                toys.replicas[more[0]].restart()
                restarted.add(cell)
            elif what == "publish":
                try:
                    toys.publisher.publish({}, step=1)
                except PublishError:
                    pass  # no replica could take it
            elif what == "runs":
                world.counters = counted(4, 4 * more[0])
            served = "serving" in world.manager.states().values()
            world.tick(*(more if what == "move" else ()))
            world.exclusive(restarted)
            if what == "move" and served and not world.counters.finished:
                assert {"serving", "failed"} & set(world.manager.states().values()), "the last to serve left its runs"
        for toy in toys.replicas:
            toy.broken.clear()
        world.hand.slow.clear()
        world.hand.stuck.clear()
        for _ in range(3):
            world.tick(seconds=60)
        toys.publisher.publish({}, step=1)
        world.manager.stop()
        assert set(world.manager.states().values()) == {"serving"}
        world.check()
    finally:
        toys.close()


def test_a_sleeping_replica_is_asked_in_the_order_that_memory_needs(toys: Toys) -> None:
    """Weights are woken alone, brought and compared; then the cache, then it samples: nothing is loaded beside old things."""
    toy, hand, events = toys.replicas[0], Hand(), list[str]()
    cell = Cell("cell-0", toy.url, parking=Sleeping())
    toy.asked.clear()
    to_training(cell, True, toys.publisher, hand, Patience(0.0), events.append)
    assert toy.asked == ["/sleep?level=2&mode=abort"] and hand.gate and toy.asleep
    toys.publisher.publish({}, step=1)
    toy.asked.clear()
    to_serving(cell, True, toys.publisher, hand, Patience(0.0), events.append)
    assert toy.asked == ["/wake_up?tags=weights", "/finish_weight_update", "/wake_up?tags=kv_cache"]
    assert (toy.version, toy.paused, toy.asleep, hand.gate) == ("1", False, set(), False)
    assert events == ["leave", "drained", "ready", "return", "loaded"]
    assert parking_of(["--enable-sleep-mode"], "lora") == Sleeping(1)
    assert parking_of(["--enable-sleep-mode"], "file") == Sleeping(2)
    assert parking_of([], "file") == Pausing()


@pytest.mark.parametrize(
    ("resources", "options", "parking"),
    [
        ({"GPU": 1.0}, [], Sleeping(2)),
        ({"GPU": 1.0}, ["--no-enable-sleep-mode"], Pausing()),
        ({"GPU": 0.5}, ["--enable-sleep-mode", "--dtype", "float16"], Sleeping(2)),
        ({"CPU": 4.0}, [], Pausing()),
    ],
)
def test_on_gpus_the_replica_of_a_cell_sleeps(
    tmp_path: Path, resources: dict[str, float], options: list[str], parking: Parking
) -> None:
    """While its cell trains, without being told; on processors it is paused."""
    config = TrainerConfig(
        PolicyConfig(tmp_path),
        TasksConfig("a:b"),
        AgentConfig("a:b"),
        StoreConfig(tmp_path / "store.db"),
        OutputConfig(tmp_path),
        engine=EngineConfig(kind="vllm", options=options),
        cells=CellsConfig(launcher="ray", resources=resources),
    )
    found = engine_options(config)
    assert found[: len(options)] == options and found.count("--enable-sleep-mode") == (parking == Sleeping(2))
    assert parking_of(found, "file") == parking
    alone = msgspec.structs.replace(config, cells=None)
    assert engine_options(alone) == options, "an engine without cells keeps its memory"


def test_a_version_that_comes_while_a_replica_wakes_is_brought_too(toys: Toys) -> None:
    """It is published after the replica took the one before and before requests go there."""
    toy = toys.replicas[0]
    toys.publisher.withdraw(toy.url, 0.0)
    published: list[int] = []

    def awake() -> None:
        if not published:
            published.append(toys.publisher.publish({}, step=1))
            assert toy.version == "0" and toy.url not in toys.publisher._serving

    phases = toys.publisher.restore(toy.url, awake=awake)
    assert toy.version == str(published[0]) and toys.publisher._serving[toy.url].version == published[0]
    assert set(phases) == {"load", "awake", "route"}


def test_a_withdrawn_replica_is_left_alone(toys: Toys) -> None:
    """Neither a publication nor its own death and return brings it; only `restore` does. A stranger is added by it."""
    first, *others = toys.replicas
    for toy in toys.replicas:
        toys.publisher.withdraw(toy.url + "/", 0.0)
    for toy in toys.replicas:
        toy.asked.clear()
    toys.publisher.lost(first.url)
    toys.publisher.returned(first.url)
    toys.publisher.publish({}, step=1)
    assert not any(toy.asked for toy in toys.replicas) and toys.publisher._catching_up == set()
    toys.publisher.restore(first.url)
    assert list(toys.publisher._serving) == [first.url] and first.version == "1"
    toys.publisher.forget(others[0].url)
    with pytest.raises(PublishError, match="nothing is published to replica"):
        toys.publisher.withdraw(others[0].url, 0.0)
    toys.publisher.restore(others[0].url)
    assert {files.version for files in toys.publisher._serving.values()} == {1}
    others[1].broken.add("finish_weight_update")
    with pytest.raises(PublishError, match="did not reach"):
        toys.publisher.restore(others[1].url, patience=0.0)
    assert others[1].url not in toys.publisher._serving


def test_a_replica_is_withdrawn_in_the_middle_of_a_publication(toys: Toys) -> None:
    """What is on its way arrives first: nobody else touches the replica then, and no requests are sent to it."""
    toy = toys.replicas[0]
    toy.go_on.clear()
    toy.asked.clear()
    with ThreadPoolExecutor(2) as pool:
        published = pool.submit(toys.publisher.publish, {}, step=1)
        until(lambda: toy.asked, "the weights are on their way")
        withdrawn = pool.submit(toys.publisher.withdraw, toy.url, 0.0)
        until(lambda: toy.url not in toys.publisher._serving, "it is out of routing")
        assert not withdrawn.done()
        toy.go_on.set()
        version = published.result(30)
        withdrawn.result(30)
    assert toy.version == str(version)
    assert {url: files.version for url, files in toys.publisher._serving.items()} == {
        other.url: version for other in toys.replicas[1:]
    }


def test_a_replica_is_withdrawn_while_it_waits_to_be_caught_up(toys: Toys) -> None:
    """Whoever is next in line for it finds that it is nobody's business any more: it may be parked by then."""
    asked, free = threading.Event(), threading.Event()

    class Held:
        def __enter__(self) -> None:
            asked.set()
            assert free.wait(60)

        def __exit__(self, *_: object) -> None:
            pass

    toy = toys.replicas[0]
    toys.publisher.lost(toy.url)
    toys.publisher._locks[toy.url] = Held()  # type: ignore[assignment]
    toys.publisher.returned(toy.url)
    assert asked.wait(60)
    with ThreadPoolExecutor(1) as pool:
        withdrawn = pool.submit(toys.publisher.withdraw, toy.url, 0.0)
        until(lambda: toy.url in toys.publisher._withdrawn, "it is withdrawn")
        toy.asked.clear()
        free.set()
        withdrawn.result(60)
    until(lambda: not toys.publisher._catching_up, "it is given up")
    assert not toy.asked and toy.url not in toys.publisher._serving


def test_silence_is_borne_longer_than_refusal() -> None:
    pulse = Pulse().after(Sign.SILENT, 0.0)
    assert pulse.fault(SILENT_S - 1) is None
    assert "has not answered for 30 s" in str(pulse.after(Sign.SILENT, SILENT_S).fault(SILENT_S))
    assert pulse.after(Sign.ALIVE, 1.0) == Pulse(Sign.ALIVE)
    refused = Pulse().after(Sign.REFUSED, 0.0)
    assert (
        refused.fault(0.0) is None and refused.after(Sign.REFUSED, 0.1).fault(0.1) == "its replica refuses connections"
    )
    assert Pulse().after(Sign.REFUSED, 0.0).after(Sign.SILENT, 0.1).after(Sign.REFUSED, 0.2).fault(0.2) is None


def test_a_failed_phase_keeps_its_name() -> None:
    assert PhaseFailed("park", "why").phase == "park"
    assert Forced([1, -1])(None, Policy())[0].move == "to_training"
