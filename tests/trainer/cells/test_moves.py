"""Cells of one action that move side by side: together, each on its own when one fails, and back again when water rises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cells_kit import ToyReplica, Toys, counted, moves
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_manager import Workers, World
from training_kit import make_model

import gyre_sdk as gyre
from gyre_sdk import ProxySettings
from gyre_sdk.errors import ServiceError, TrainerError
from gyre_sdk.events import SwitchFailed, SwitchMeasured
from gyre_sdk.harness.service import Drained, ServiceClient
from gyre_sdk.trainer.cells.capacity import Average
from gyre_sdk.trainer.cells.moves import side_by_side

LONG = 60.0


class Drains(ServiceClient):
    """A client of a real proxy; `draining` is called when a replica has drained, before who asked for it knows."""

    draining: Callable[[str], object] = staticmethod(lambda url: None)
    deaf: str = ""
    """What the proxy does not hear: `drain` or `table`."""

    def set_replicas(self, replicas: list[dict[str, Any]]) -> None:
        if self.deaf == "table":
            raise ServiceError("the proxy died a moment ago")
        super().set_replicas(replicas)

    def drain(self, url: str, *, seconds: float) -> Drained:
        if self.deaf == "drain":
            raise ServiceError("the proxy died a moment ago")
        found = super().drain(url, seconds=seconds)
        self.draining(url)
        return found

    @property
    def table(self) -> set[str]:
        """Replicas that calls are sent to."""
        return {row["url"] for row in self.status()["replicas"] if row["state"] == "serving"}


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drains]:
    """One proxy for all tests; each announces its own replicas."""
    folder = tmp_path_factory.mktemp("proxy")
    make_model(folder / "model")
    settings = ProxySettings(
        store=folder / "s.db", model=folder / "model", renderer="qwen3", service_key="the key of this test"
    )
    with gyre.serve(settings) as client:
        drains = Drains(client.url, settings.service_key, patience=0.0)
        yield drains
        drains.close()


@contextmanager
def routed(folder: Path, proxy: Drains) -> Iterator[World]:
    """Three cells behind a proxy."""
    toys = Toys(folder, 3)
    try:
        toys.publisher.connect([toy.url for toy in toys.replicas], proxy)
        toys.publisher.start()
        yield World(toys)
    finally:
        proxy.draining, proxy.deaf = lambda url: None, ""
        toys.close()


@pytest.fixture
def behind(tmp_path: Path, proxy: Drains) -> Iterator[tuple[World, Drains]]:
    with routed(tmp_path, proxy) as world:
        yield world, proxy


def states(world: World, cell: str) -> list[str]:
    return [state for state, _ in moves(world.toys.events, cell)]


def test_cells_of_one_action_drain_and_join_side_by_side(behind: tuple[World, Drains]) -> None:
    """Each waits for the others where only one after the other would never meet."""
    world, proxy = behind
    drains, joins, leaves = threading.Barrier(3), threading.Barrier(2), threading.Barrier(2)
    proxy.draining = lambda url: drains.wait(LONG)
    world.hand.join_wait = lambda cell, seconds: joins.wait(LONG) >= 0  # type: ignore[method-assign]
    dismiss, close_gate = world.hand.dismiss, world.hand.close_gate
    order: list[str] = []

    def together(cell: str, seconds: float) -> bool:
        leaves.wait(LONG)
        order.append(cell)
        return dismiss(cell, seconds)

    def last(seconds: float) -> bool:
        order.append("cell-0")
        return close_gate(seconds)

    world.hand.dismiss, world.hand.close_gate = together, last  # type: ignore[method-assign]
    world.counters = counted(4, 4)
    assert world.tick(3) == ["training"] * 3
    world.check()
    measured = [event for event in world.toys.events if isinstance(event, SwitchMeasured)]
    assert {event.cell: event.finished for event in measured} == {"cell-0": 0, "cell-1": 0, "cell-2": 0}
    assert world.tick(-3) == ["serving"] * 3
    assert sorted(order) == ["cell-0", "cell-1", "cell-2"] and order[-1] == "cell-0"
    assert proxy.table == {toy.url for toy in world.toys.replicas}
    world.check()


@pytest.mark.parametrize("broken", ["pause", "slow"])
def test_one_that_fails_does_not_stop_the_others(behind: tuple[World, Drains], broken: str) -> None:
    world, _ = behind
    world.tick(1)
    world.counters = counted(4, 4)
    world.toys.replicas[1].broken.add(broken)
    world.hand.slow = {"cell-1"} if broken == "slow" else set()
    assert world.tick(2) == ["training", "failed", "training"]
    world.toys.replicas[1].broken.clear()
    assert world.tick() == ["training", "serving", "training"]
    world.hand.stuck = {"cell-2"}
    assert world.tick(-2) == ["serving", "serving", "failed"]
    world.exclusive(set())


@pytest.mark.parametrize(
    ("broken", "way", "phase", "began"),
    [
        ("pause", "training", "park", ["drain", "park"]),
        ("slow", "training", "join", ["drain", "park", "join"]),
        ("stuck", "serving", "leave", ["leave"]),
        ("finish_weight_update", "serving", "weights", ["leave", "wake", "weights"]),
    ],
)
def test_a_switch_that_fails_tells_what_its_phases_took(
    behind: tuple[World, Drains], broken: str, way: str, phase: str, began: list[str]
) -> None:
    world, _ = behind
    world.tick(1 if way == "training" else 2)
    world.toys.replicas[1].broken.add(broken)
    {"slow": world.hand.slow, "stuck": world.hand.stuck}.get(broken, set()).add("cell-1")
    assert world.tick(1 if way == "training" else -1) == ["training", "failed", "serving"]
    [told] = [event for event in world.toys.events if isinstance(event, SwitchFailed)]
    assert (told.cell, told.to, told.phase, list(told.phases)) == ("cell-1", way, phase, began)
    assert all(seconds >= 0 for seconds in told.phases.values())


@pytest.mark.parametrize(
    ("deaf", "moved", "why"), [("drain", 1, "drain: PublishError"), ("table", -1, "weights: PublishError")]
)
def test_a_cell_whose_switch_the_proxy_does_not_hear_of_is_in_no_role_until_it_does(
    behind: tuple[World, Drains], deaf: str, moved: int, why: str
) -> None:
    world, proxy = behind
    world.tick(1 if moved > 0 else 2)
    proxy.deaf = deaf
    assert world.tick(moved) == ["training", "failed", "serving"]
    assert moves(world.toys.events, "cell-1")[-1][1].startswith(why)
    world.check()
    world.tick(seconds=60)
    world.exclusive(set())
    proxy.deaf = ""
    assert world.tick(seconds=60) == ["training", "serving", "serving"]
    world.check()
    assert proxy.table == {toy.url for toy in world.toys.replicas[1:]}


def test_a_worker_that_is_started_again_while_its_cell_drains_trains(behind: tuple[World, Drains]) -> None:
    """It is the new one that is let in."""
    (toys, proxy), workers = (behind[0].toys, behind[1]), Workers()
    world = World(toys, launched=workers)

    def die(url: str) -> None:
        workers.pid += 1

    proxy.draining = die
    assert world.tick(2) == ["training", "training", "serving"]
    assert world.tick() == ["training", "training", "serving"]
    workers.pid += 1
    assert world.tick() == ["training", "failed", "serving"]


def test_a_pull_is_no_part_of_what_a_switch_costs(behind: tuple[World, Drains]) -> None:
    """The plan adds it by itself."""
    world, _ = behind
    world.hand.join_wait = lambda cell, seconds: not threading.Event().wait(0.1)  # type: ignore[method-assign]
    world.tick(2)
    found = Average(0.0)
    for event in world.toys.events:
        if isinstance(event, SwitchMeasured):
            assert (event.phases["join"] >= 0.1) == (event.cell != "cell-0")
            found = found.after(event.phases["drain"] + event.phases["park"])
    assert world.manager.costs.to_train.value == pytest.approx(found.value, abs=1e-6)


def test_satellites_whose_core_fails_serve_on(behind: tuple[World, Drains]) -> None:
    """They have drained by then, and are as they were."""
    world, proxy = behind
    world.toys.replicas[0].broken.add("pause")
    world.toys.replicas[1].asked.clear()
    assert world.tick(2) == ["failed", "serving", "serving"]
    assert moves(world.toys.events, "cell-1") == [
        ("draining", "the test wants it"),
        ("serving", "the core does not train"),
    ]
    assert world.toys.replicas[1].url in proxy.table and "/pause" not in str(world.toys.replicas[1].asked)
    world.check()


@pytest.mark.parametrize(
    ("water", "found"),
    [
        (7, ["training", "training", "serving"]),
        (8, ["training", "training", "serving"]),
        (9, ["training", "serving", "serving"]),
        (16, ["training", "serving", "serving"]),
        (17, ["serving", "serving", "serving"]),
    ],
)
def test_cells_that_the_water_needs_again_are_taken_back(
    behind: tuple[World, Drains], water: int, found: list[str]
) -> None:
    """8 runs a cell; the last to leave stays first."""
    world, proxy = behind
    asked = [list(toy.asked) for toy in world.toys.replicas]

    def rise(url: str) -> None:
        world.counters = counted(water)

    proxy.draining = rise
    assert world.tick(2) == found
    world.check()
    for number, state in enumerate(found[:2]):
        assert states(world, f"cell-{number}") == (
            ["draining", "serving"] if state == "serving" else ["draining", "switching", "training"]
        )
        if state == "serving":
            alone = number and found[0] == "serving"
            why = "the core does not train" if alone else f"the water, {water} runs, is above"
            assert why in moves(world.toys.events, f"cell-{number}")[-1][1]
            assert "pause" not in str(world.toys.replicas[number].asked[len(asked[number]) :])
    measured = [event.cell for event in world.toys.events if isinstance(event, SwitchMeasured)]
    assert len(measured) == found.count("training"), "what was taken back is no switch"


def test_a_version_that_came_meanwhile_reaches_who_is_taken_back(behind: tuple[World, Drains]) -> None:
    world, proxy = behind
    toy = world.toys.replicas[0]

    def rise(url: str) -> None:
        if toy.version == "0":
            world.counters = counted(99)
            assert world.toys.publisher.publish({}, step=1)

    proxy.draining = rise
    assert world.tick(1) == ["serving"] * 3
    assert toy.version == str(world.toys.publisher.current.version) != "0"
    world.check()


def test_the_deaths_of_cells_are_told_side_by_side(
    behind: tuple[World, Drains], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And replicas of cells that train are asked side by side whether they are parked."""
    world, proxy = behind
    monkeypatch.setattr("gyre_sdk.trainer.cells.moves._TOLD_S", LONG)
    together, met = threading.Barrier(2), list[str]()

    def meet(what: str) -> None:
        together.wait(LONG / 4)
        met.append(what)

    proxy.draining = meet
    for toy in world.toys.replicas[:2]:
        toy.broken.add("health")
    world.tick()
    assert world.tick() == ["failed", "failed", "serving"]
    assert set(met) == {toy.url for toy in world.toys.replicas[:2]}
    proxy.draining = lambda url: None
    for toy in world.toys.replicas[:2]:
        toy.broken.clear()
    world.tick(seconds=60)
    assert world.tick(2, seconds=60) == ["training", "training", "serving"]

    def get(toy: ToyReplica, path: str) -> tuple[int, dict[str, Any]]:
        if path == "/is_paused":
            meet(path)
        return ToyReplica.get(toy, path)

    for toy in world.toys.replicas[:2]:
        toy.get = partial(get, toy)  # type: ignore[method-assign]
    world.tick()
    assert met[2:] == ["/is_paused"] * 2


def test_a_replica_that_cannot_be_taken_back_takes_no_requests(behind: tuple[World, Drains]) -> None:
    """It died while it drained, and came back with nothing."""
    world, proxy = behind
    toy = world.toys.replicas[0]

    def die(url: str) -> None:
        world.counters = counted(99)
        toy.broken.add("finish_weight_update")

    proxy.draining = die
    assert world.tick(1) == ["failed", "serving", "serving"]
    assert moves(world.toys.events, "cell-0")[-1][1].startswith("return: Behind")
    assert toy.url not in proxy.table
    toy.broken.clear()
    proxy.draining = lambda url: None
    assert world.tick(seconds=60) == ["serving"] * 3
    world.check()


def test_the_end_takes_back_what_has_not_left(behind: tuple[World, Drains]) -> None:
    world, proxy = behind

    def end(url: str) -> None:
        world.manager._stopping.set()

    proxy.draining = end
    assert world.tick(2) == ["serving"] * 3
    assert moves(world.toys.events, "cell-1")[-1] == ("serving", "the training ends")
    world.check()


steps = st.lists(
    st.tuples(st.integers(-3, 3).filter(bool), st.integers(0, 30), st.sets(st.integers(0, 2)), st.booleans()),
    max_size=6,
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps)
def test_whatever_the_water_does_meanwhile_somebody_serves(
    tmp_path_factory: pytest.TempPathFactory, proxy: Drains, schedule: list[tuple[int, int, set[int], bool]]
) -> None:
    """While cells drain, water rises or falls and replicas break; a cell that left is one that the rest could spare."""
    with routed(tmp_path_factory.mktemp("moves"), proxy) as world:
        for cells, water, broken, before in schedule:
            world.counters = counted(99, 98 if before else 99)

            def meanwhile(url: str, water: int = water) -> None:
                world.counters = counted(99, 99 - water)

            proxy.draining = meanwhile
            for number in broken:
                world.toys.replicas[number].broken.add("pause")
            began = len(world.toys.events)
            found = world.tick(cells, seconds=60)
            world.exclusive(set())
            events = world.toys.events[began:]
            went = any(isinstance(event, SwitchMeasured) and event.to == "training" for event in events)
            assert not went or found.count("serving") * 8 >= water
            assert "training" not in found or found[0] in ("training", "failed")
            for toy in world.toys.replicas:
                toy.broken.clear()
        proxy.draining = lambda url: None
        for _ in range(3):
            world.tick(seconds=60)
        world.manager.stop()
        assert set(world.manager.states().values()) == {"serving"}
        world.check()


def test_what_one_raises_is_raised_when_all_have_ended() -> None:
    ended: list[int] = []
    first = threading.Event()

    def broken() -> None:
        first.set()
        raise TrainerError("the second")

    def whole() -> None:
        assert first.wait(LONG)
        ended.append(1)

    with pytest.raises(TrainerError, match="the second"):
        side_by_side([whole, broken, whole])
    assert ended == [1, 1]
    side_by_side([])
