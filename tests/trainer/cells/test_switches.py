"""Agents across role switches, with real engines, a real `gyre serve` and real agents: they notice nothing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
from cells_kit import Fleet, Forced, Hand, check_calls, converse, converse_all, counted, fleet, moves, until, weights
from training_kit import make_model

from gyre_sdk.events import CellMoved, ProcessRestarted, SwitchMeasured
from gyre_sdk.trainer.cells.rates import RateMeter
from gyre_sdk.trainer.transports import Replica

RUNS, CALLS, TOKENS, LONG = 6, 10, 16, 256
SWITCHES = 8
"""Switches that the agents live through at least."""
BOUND_S = 400.0
"""Seconds that they may take on a machine that is busy with other tests."""
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    make_model(folder / "model", initializer_range=0.2)
    with fleet(folder, folder / "model", 3) as found:
        yield found


def test_agents_do_not_notice_switches(served: Fleet) -> None:
    """Cells go to and fro all the time, and versions with the same weights are published meanwhile.

    Greedy answers are those of a quiet fleet, byte for byte; nobody sees an error; nothing is recorded twice. Two more
    agents make long calls until calls were carried to another cell in the middle.
    """
    served.events.clear()
    policy, versions = weights(served), {served.publisher.current.version}
    quiet = converse_all(served.service, RUNS, CALLS, TOKENS)
    check_calls(served.store, [run for run, _ in quiet], CALLS, TOKENS, versions)
    ended, enough = threading.Event(), threading.Event()

    def publish() -> None:
        while not ended.wait(0.3):
            versions.add(served.publisher.publish(policy, step=len(versions)))

    def measure() -> None:
        while not ended.wait(0.5):
            rates.beat()
        rates.stop()

    def moved() -> int:
        return sum(event.moved for event in served.events if isinstance(event, SwitchMeasured))

    long: list[tuple[str, list[str]]] = []

    def ask_long() -> None:
        while not enough.is_set():
            long.append(converse(served.service, 99, 1, LONG))

    def before(call: int) -> None:
        if call == CALLS - 2:  # the last calls come after switches, whatever the machine's speed
            assert enough.wait(BOUND_S)

    forced = Forced([2, -1, 1, -2], live=lambda: not ended.is_set())
    hand, rates = Hand("cell-1", "cell-2"), RateMeter(lambda: served.urls)
    publishing = threading.Thread(target=publish)
    with served.manager(served.cells(), hand, decide=forced, drain_s=0.0):
        watching = threading.Thread(
            target=lambda: (
                until(lambda: served.switches() >= SWITCHES and moved(), "cells switch, and calls move", BOUND_S),
                enough.set(),
            )
        )
        others = [
            publishing,
            watching,
            threading.Thread(target=measure),
            *(threading.Thread(target=ask_long) for _ in range(2)),
        ]
        for thread in others:
            thread.start()
        try:
            found = converse_all(served.service, RUNS, CALLS, TOKENS, before)
        finally:
            ended.set()
            for thread in others:
                thread.join()
    assert [said for _, said in found] == [said for _, said in quiet]
    assert len({said for _, (said,) in long}) == 1
    carried = check_calls(served.store, [run for run, _ in found], CALLS, TOKENS, versions)
    assert carried + check_calls(served.store, [run for run, _ in long], 1, LONG, versions) > 0
    assert len(versions) > 2
    for cell in ("cell-0", "cell-1"):
        assert {"draining", "switching", "training", "loading", "serving"} <= {
            state for state, _ in moves(served.events, cell)
        }
    assert not [event for event in served.events if isinstance(event, CellMoved) and event.state == "failed"]
    measured = [event for event in served.events if isinstance(event, SwitchMeasured)]
    assert len(measured) >= SWITCHES
    assert set(served.states().values()) == {"serving"}
    assert any(level.rate > 0 for _, level in rates.rates.levels)
    for url in served.urls:
        with Replica(url, 0) as replica:
            assert not replica.is_paused() and replica.version() == str(served.publisher.current.version)


def test_a_parked_engine_holds_nothing_and_publication_goes_on_without_it(served: Fleet) -> None:
    """All three are withdrawn: versions are written and recorded; each comes back with the newest, compared."""
    policy = weights(served)
    served.publisher.publish(policy, step=1)
    before = served.publisher.current.version
    cells = served.cells()
    for cell in cells:
        drained = served.publisher.withdraw(cell.url, 0.0)
        assert (drained.finished, drained.moved) == (0, 0)
        with Replica(cell.url, 0) as replica:
            cell.parking.park(replica)
    assert set(served.states().values()) <= {"draining"}
    version = served.publisher.publish(policy, step=1)
    assert version == before + 1 == served.publisher.current.version
    for cell in cells:
        with Replica(cell.url, 0) as replica:
            assert replica.version() == str(before) and replica.is_paused()
        phases = served.publisher.restore(cell.url)
        assert phases["load"] > 0 and "route" in phases
        with Replica(cell.url, 0) as replica:
            assert replica.version() == str(version) and not replica.is_paused()
    assert {row["version"] for row in served.service.status()["replicas"]} == {version}


def test_nothing_moves_while_the_proxy_is_stopped(served: Fleet) -> None:
    """It answers nobody: the manager looks on, notices a death and decides nothing; all goes on when it is back."""
    served.events.clear()
    go, forced = threading.Event(), Forced([2, -2])
    forced._live = go.is_set
    with served.manager(served.cells(), Hand("cell-1", "cell-2"), decide=forced) as manager:
        os.kill(served.proxy.pid, signal.SIGSTOP)
        try:
            go.set()
            until(lambda: forced.count >= 3, "the manager looks again and again")
            assert set(manager.states().values()) == {"serving"}
            assert not [event for event in served.events if isinstance(event, CellMoved)]
            os.kill(served.launched[2].pids()["cell-2-replica"], signal.SIGKILL)
            until(lambda: manager.states()["cell-2"] == "failed", "the death is noticed")
            asked = forced.count
            until(lambda: forced.count >= asked + 3, "the manager looks on")
            assert list(manager.states().values()) == ["serving", "serving", "failed"]
        finally:
            os.kill(served.proxy.pid, signal.SIGCONT)
        until(lambda: served.switches() >= 4, "cells go over again")
        until(lambda: manager.states()["cell-2"] != "failed", "the cell is back")
        go.clear()
    assert not [state for cell in ("cell-0", "cell-1") for state, _ in moves(served.events, cell) if state == "failed"]
    assert served.states() == dict.fromkeys(served.urls, "serving")
    served.events.clear()


def test_one_cell_serves_and_trains_in_turn(served: Fleet) -> None:
    """Calls that come while it trains wait for it; what is published meanwhile is what they are answered with."""
    policy, cell = weights(served), served.cells()[0]
    for other in served.cells()[1:]:
        served.publisher.withdraw(other.url, 0.0)
    hand, asked = Hand(), threading.Event()
    forced = Forced([1, -1], live=lambda: asked.is_set() or not hand.gate)
    with served.manager([cell], hand, decide=forced) as manager:
        until(lambda: manager.states()["cell-0"] == "training", "the cell trains")
        version = served.publisher.publish(policy, step=1)
        answers: list[object] = []
        agents = threading.Thread(target=lambda: answers.extend(converse_all(served.service, 2, 1, 4)))
        agents.start()
        until(lambda: served.service.status()["calls_in_flight"] == 2, "calls wait")
        forced.count = 1
        asked.set()
        agents.join(60)
        assert len(answers) == 2
    check_calls(served.store, [run for run, _ in answers], 1, 4, {version})  # type: ignore[misc]
    for other in served.cells()[1:]:
        served.publisher.restore(other.url)


def test_deaths_are_noticed_and_made_good(served: Fleet) -> None:
    """A worker is killed while its cell trains, then a replica that serves, then one whose cell trains."""
    hand, cells = Hand("cell-1", "cell-2"), served.cells()
    forced, steps = Forced([2]), threading.Semaphore(1)
    forced._live = lambda: steps.acquire(blocking=False)

    def failures(cell: str) -> list[str]:
        return [reason for state, reason in moves(served.events, cell) if state == "failed"]

    def restarts(name: str) -> int:
        return sum(isinstance(event, ProcessRestarted) and event.process == name for event in served.events)

    with served.manager(cells, hand, decide=forced, counters=lambda: counted(1)) as manager:
        until(lambda: list(manager.states().values()) == ["training", "training", "serving"], "two train")
        os.kill(served.launched[1].pids()["cell-1-worker"], signal.SIGKILL)
        until(lambda: failures("cell-1") == ["its worker's process ended"], "the worker's death is noticed")
        until(lambda: manager.states()["cell-1"] == "serving", "the cell serves again")
        until(lambda: restarts("cell-1-worker") == 1, "the worker is started again")
        assert hand.joined == set() and served.states()[served.urls[1]] == "serving"
        os.kill(served.launched[2].pids()["cell-2-replica"], signal.SIGKILL)
        os.kill(served.launched[0].pids()["cell-0-replica"], signal.SIGKILL)
        until(lambda: restarts("cell-2-replica") == restarts("cell-0-replica") == 1, "both are started again")
        until(lambda: served.states().get(served.urls[2]) == "serving", "it serves again")
        until(
            lambda: manager.states() == {"cell-0": "training", "cell-1": "serving", "cell-2": "serving"}, "all is well"
        )
        with Replica(served.urls[0], 0) as replica:
            until(replica.is_paused, "the replica that came back is parked: its cell trains")
        assert failures("cell-0") == []
    with Replica(served.urls[0], 0) as replica:
        assert not replica.is_paused() and replica.version() == str(served.publisher.current.version)
