"""Cells on a Ray cluster of three nodes: they come back where they were, or elsewhere, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import ray_kit
from ray_kit import alive, eventually, helper, parent, raylet, toy
from training_kit import make_model

from gyre_sdk.errors import TrainerError
from gyre_sdk.events import ProcessRestarted
from gyre_sdk.trainer.cells.launch import CellSpec
from gyre_sdk.trainer.cells.launch.node import KEPT, Node, Order
from gyre_sdk.trainer.cells.launch.ray import RayCell, RayLauncher
from gyre_sdk.trainer.cells.launch.terms import Fenced, Term, Terms
from gyre_sdk.trainer.lingering import Linger
from gyre_sdk.trainer.weights import WeightFolder

SLOT = {"slot": 1.0, "GPU": 8.0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_kit.cluster(3) as made:
        yield made


class Cells:
    """A launcher, and what it told."""

    def __init__(self, address: str, **changes: Any) -> None:
        self.events: list[Any] = []
        self.told: list[Any] = []
        self.launcher = RayLauncher(address, observer=self.events.append, room=30.0, **changes)

    def launch(self, name: str, replica: Any, worker: Any = None, resources: Any = SLOT) -> RayCell:
        return self.launcher.launch(
            CellSpec(name, replica, worker, resources), lambda old, new: self.told.append(("moved", old, new))
        )


@pytest.fixture
def cells(cluster: Any) -> Iterator[Cells]:
    made = Cells(cluster.address)
    yield made
    made.launcher.close()


def pid(cell: RayCell) -> int:
    return next(iter(cell.pids().values()))


def host(url: str) -> str:
    return str(urlsplit(url).hostname)


def generate(url: str) -> list[int]:
    body = {"token_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_tokens": 8}, "stream": False}
    request = urllib.request.Request(
        url + "/inference/v1/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        ids: list[int] = json.loads(response.read())["choices"][0]["token_ids"]
        return ids


def test_a_process_comes_back_where_it_was_and_its_cell_ends_whole(cells: Cells, tmp_path: Path) -> None:
    told = cells.told
    replica = toy(
        tmp_path,
        "replica",
        ready="/",
        python=Path(sys.executable),
        on_death=lambda url: told.append(("died", url)),
        on_ready=lambda url: told.append(("ready", url)),
    )
    cell = cells.launch("cell-1", replica, toy(tmp_path, "worker"))
    url = cell.wait()
    before = cell.pids()
    assert set(before) == {"replica", "worker"} and parent(before["replica"]) == parent(before["worker"])
    first = helper(tmp_path / "replica.log")
    os.kill(before["replica"], signal.SIGKILL)
    eventually(lambda: len(cells.events) == 1)
    assert isinstance(cells.events[0], ProcessRestarted) and cells.events[0].reason == "signal SIGKILL"
    assert told == [("died", url), ("ready", url)]
    assert cell.wait() == url and urllib.request.urlopen(url, timeout=5).status == 200
    after = cell.pids()
    assert after["worker"] == before["worker"] and after["replica"] != before["replica"]
    eventually(lambda: not alive(first))

    actor = parent(after["worker"])
    os.kill(actor, signal.SIGKILL)  # its processes end with it, and start again under another
    eventually(lambda: len(cells.events) == 3)
    assert not alive(after["replica"]) and not alive(after["worker"])
    assert {event.process for event in cells.events[1:]} == {"replica", "worker"}
    last = cell.pids()
    assert parent(last["replica"]) == parent(last["worker"]) != actor
    cell.check()
    left = [*last.values(), helper(tmp_path / "replica.log"), helper(tmp_path / "worker.log")]
    assert all(map(alive, left))
    cell.stop()
    cell.stop()
    assert not any(map(alive, left)) and cell.pids() == {"replica": 0, "worker": 0}
    eventually(lambda: not alive(parent(last["replica"])))


def test_a_cell_whose_node_dies_comes_back_on_another(
    cells: Cells, cluster: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gyre.trainer")
    make_model(tmp_path / "model")
    both = [
        cells.launch(name, ray_kit.engine(tmp_path, name, tmp_path / "model"), toy(tmp_path, f"{name}-worker"))
        for name in ("cell-1", "cell-2")
    ]
    urls = [cell.wait() for cell in both]
    answer = generate(urls[0])
    assert len(answer) == 8 and generate(urls[1]) == answer
    places = {parent(parent(pid(cell))): cell for cell in both}
    assert len(places) == 2
    here = cells.launcher.host
    node = next(one for one in cluster.worker_nodes if raylet(one) in places and one.node_ip_address != here)
    cell = places[raylet(node)]
    other = both[1 - both.index(cell)]
    undisturbed, gone = other.pids(), cell.pids()
    cluster.remove_node(node, allow_graceful=False)
    eventually(lambda: len(cells.events) == 2)  # its replica and its worker
    assert not any(map(alive, gone.values()))
    old, new = urls[both.index(cell)], cell.wait()
    assert cells.told == [("moved", old, new)] and generate(new) == answer
    assert len({host(url) for url in (*urls, new)}) == 3
    assert parent(parent(pid(cell))) not in places
    assert other.pids() == undisturbed and generate(other.wait()) == answer
    cell.check()
    other.check()
    eventually(lambda: "Ray: The node with node id" in caplog.text)
    assert "raylet" not in capfd.readouterr().out
    cell.stop()
    other.stop()
    ray_kit.add_node(cluster, node.node_ip_address)


def test_what_cannot_run_says_why(cells: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not start, dies again and again, or finds no room."""
    cell = cells.launch("cell-1", toy(tmp_path, "replica", "none"))
    why = r"replica did not start: it ended with exit status 3; see .*replica\.log:\nmodel none on GPU 0,1,2,3,4,5,6,7\nno model here"
    with pytest.raises(TrainerError, match=why):
        cell.wait()
    cell.stop()
    absent = cells.launch("cell-2", toy(tmp_path, "absent", python=Path("/nowhere/python")))
    with pytest.raises(TrainerError, match=r"on the node .*FileNotFoundError.*/nowhere/python"):
        absent.wait()
    absent.stop()

    monkeypatch.setattr("gyre_sdk.trainer.processes.RESTARTS", 2)
    monkeypatch.setattr("gyre_sdk.trainer.processes.WINDOW", 600.0)
    dying = cells.launch("cell-3", toy(tmp_path, "dying"))
    dying.wait()
    os.kill(pid(dying), signal.SIGKILL)
    eventually(lambda: len(cells.events) == 1)
    os.kill(pid(dying), signal.SIGKILL)

    def given_up() -> bool:
        try:
            dying.check()
        except TrainerError as error:
            return "died 2 times" in str(error) and "toy ready on" in str(error)
        return False

    eventually(given_up)
    eventually(lambda: dying.pids() == {"dying": 0} and not alive(helper(tmp_path / "dying.log")))

    cells.launcher._room = 1.0
    large = cells.launch("cell-4", toy(tmp_path, "large"), resources={"slot": 5.0})
    with pytest.raises(TrainerError, match=r"no room for cell-4 in 1 s: it needs \{'slot': 5\.0\} on the node of"):
        large.wait()


def test_a_closed_connection_ends_the_supervision(
    cells: Cells, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ray would start a cluster of its own at the next call, and end the process at the next but one.

    SIGTERM is left to who handles it: Ray would say so, and have the process aborted three seconds later.
    """
    import ray

    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert came == [signal.SIGTERM] and "SIGTERM received" not in capfd.readouterr().err
    finally:
        signal.signal(signal.SIGTERM, before)
    cell = cells.launch("cell-1", toy(tmp_path, "replica"))
    cell.wait()
    process = pid(cell)
    ray.shutdown()
    eventually(lambda: not alive(process))

    def given_up() -> bool:
        try:
            cell.check()
        except TrainerError as error:
            return "connection to the Ray cluster was closed" in str(error)
        return False

    eventually(given_up)
    cells.launcher.close()
    assert not ray.is_initialized()


@pytest.fixture
def successor(cluster: Any, tmp_path: Path) -> Iterator[Callable[..., Cells]]:
    """Makes trainers that take over from `ray_kit.driver`, or from one another."""
    made: list[Cells] = []

    def make(seconds: float = 300.0) -> Cells:
        linger = Linger(tmp_path / "run", seconds)
        wanted = ["cell-0", "cell-1", "more-1"]
        made.append(Cells(cluster.address, namespace="gyre-toy", linger=linger, cells=wanted, silence=3.0))
        return made[-1]

    yield make
    for cells in reversed(made):
        cells.launcher.close()
    with ray_kit.connected(cluster.address):
        eventually(lambda: ray_kit.groups() == [] == ray_kit.wardens())


def test_a_trainer_that_was_only_slow_is_fenced(cluster: Any, successor: Callable[..., Cells], tmp_path: Path) -> None:
    """Its successor takes over what it would start the same way, ends the rest, and the slow one touches nothing of it."""
    slow = ray_kit.driver(tmp_path, cluster.address, 300.0, "1", "50")
    pids = json.loads(ray_kit.said(slow))
    assert set(pids) == {"replica-0", "replica-1", "worker-1"}
    os.kill(slow.pid, signal.SIGSTOP)
    made = successor()
    first, second, more = ray_kit.driven(tmp_path, ["1"])
    second = replace(second, replica=toy(tmp_path, "replica-1", "two"))
    more = replace(more, resources={"slot": 1.0, "CPU": 0.1})  # where the other had it, so that one has to go
    cells = [made.launch(one.name, one.replica, one.worker, one.resources) for one in (first, second, more)]
    urls = [cell.wait() for cell in cells]
    assert cells[0].pids() == {"replica-0": pids["replica-0"]}
    assert cells[1].pids()["worker-1"] == pids["worker-1"] and pid(cells[1]) != pids["replica-1"]
    assert not alive(pids["replica-1"]) and urllib.request.urlopen(urls[0], timeout=60).status == 200
    assert "bytes were dropped" not in (tmp_path / "replica-0.log").read_text()
    eventually(lambda: len(ray_kit.groups()) == 3)
    os.kill(slow.pid, signal.SIGCONT)
    assert "another trainer has taken over the cells of this training" in ray_kit.said(slow)
    assert slow.wait(timeout=120) == 0
    slow.communicate()
    for cell in cells:
        cell.check()
    last = cells[1].pids()
    assert all(map(alive, (*cells[0].pids().values(), *last.values()))) and made.events == []
    os.kill(parent(pid(cells[1])), signal.SIGKILL)  # its place is taken anew, though who began all this is gone
    eventually(lambda: len(made.events) == 2)
    assert not any(map(alive, last.values())) and all(map(alive, cells[1].pids().values()))
    eventually(lambda: len(ray_kit.wardens()) == 1)
    os.kill(ray_kit.wardens()[0], signal.SIGKILL)  # all places go with it, and are taken anew
    eventually(lambda: len(made.events) == 2 + 4)
    for cell in cells:
        cell.check()
        assert all(map(alive, cell.pids().values()))


def test_cells_that_shall_linger_in_another_way_begin_anew(successor: Callable[..., Cells], tmp_path: Path) -> None:
    """Whose cells these were learns that they have gone to another, though who could tell it is gone too."""
    before, (spec, _) = successor(), ray_kit.driven(tmp_path)
    cell = before.launch(spec.name, spec.replica, spec.worker, spec.resources)
    cell.wait()
    process = pid(cell)
    again = successor(200.0).launch(spec.name, spec.replica, spec.worker, spec.resources)
    again.wait()
    assert not alive(process) and alive(pid(again))

    def fenced() -> bool:
        try:
            cell.check()
        except Fenced:
            return True
        return False

    eventually(fenced)
    again.check()
    assert alive(pid(again))


def test_nobody_comes_back_to_a_cluster(cluster: Any, tmp_path: Path) -> None:
    """Cells end, and so does what waited for room, of a trainer that is gone and of one that never moves again."""
    ways, drivers, pids = {"gyre-gone": signal.SIGKILL, "gyre-still": signal.SIGSTOP}, {}, []
    try:
        with ray_kit.connected(cluster.address):
            for training in ways:
                (tmp_path / training).mkdir()
                drivers[training] = ray_kit.driver(tmp_path / training, cluster.address, 2.0, "50", TRAINING=training)
            for process in drivers.values():
                pids += json.loads(ray_kit.said(process)).values()
            eventually(lambda: len(ray_kit.groups()) == 2 * 3)
            for training, way in ways.items():
                drivers[training].send_signal(way)
            eventually(lambda: not any(map(alive, pids)))
            eventually(lambda: ray_kit.groups() == [] == ray_kit.wardens())
    finally:
        for process in drivers.values():
            process.kill()
            process.communicate()


def test_a_cluster_of_ones_own_outlives_a_trainer_killed_with_9(tmp_path: Path) -> None:
    """The next trainer finds it, with the cells. When that is killed too and nobody could find it, nothing is left."""
    mark = f"GYRE_TEST_{tmp_path.name.upper()}"
    environment = {**ray_kit.QUIET, mark: "1"}
    pids = []
    for _ in range(2):
        process = ray_kit.driver(tmp_path, **environment)
        pids.append(json.loads(ray_kit.said(process)))
        process.kill()
        process.communicate()
    assert pids[0] == pids[1] and all(map(alive, pids[0].values()))
    (tmp_path / "run" / "ray.json").unlink()
    eventually(lambda: not ray_kit.marked(mark))


@pytest.mark.parametrize(
    ("before", "error"),
    [
        ("sys.modules['ray'] = None", "needs Ray: pip install 'gyre-sdk[ray]'"),
        ("", "no Ray cluster at cells.ray_address = '127.0.0.1:1'"),
        ("address = 'ray://' + address", "cells.ray_address = 'ray://127.0.0.1:1' must be 'auto' or HOST:PORT"),
    ],
)
def test_without_ray_or_a_cluster_the_settings_are_wrong(before: str, error: str) -> None:
    program = f"""
import sys
address = "127.0.0.1:1"
{before}
from gyre_sdk.trainer.cells.launch.ray import RayLauncher, SettingsError
try:
    RayLauncher(address, observer=print)
except SettingsError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert error in run.stdout, run.stderr


def test_only_the_newest_term_is_heard() -> None:
    terms = Terms("here")
    first, second = terms.begin(), terms.begin()
    terms.check(second)
    for older in (first, Term("elsewhere", 9)):
        with pytest.raises(Fenced, match="another trainer has taken over"):
            terms.check(older)
    terms.check(Term("here", 5))  # another was told of it first
    with pytest.raises(Fenced):
        terms.check(second)


def test_weights_for_other_machines_lie_in_the_output_folder(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path, tmp_path / "out", 10, memory=False)
    assert folder.root == tmp_path / "out" / "weights" and folder.root.is_dir()


def test_output_waits_for_who_collects_it_and_old_output_gives_way(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(
        f"import sys\nfor n in range({KEPT // 8 + 1000}): sys.stdout.write(f'{{n:07d}}\\n')\nsys.stdout.flush()\ninput()"
    )
    node, term = Node("here"), Term("here", 1)
    order = Order("talk", ["talk"], None, {"PYTHONPATH": str(tmp_path)}, str(tmp_path / "absent"))
    assert node.start(term, order) > 0
    try:
        eventually(lambda: node.look(term, "talk", 0).ended is not None)
        look = node.look(term, "talk", 0)
        assert (look.ended, len(look.output)) == ("exit status 1", KEPT) and b"EOFError" in look.output
        assert look == node.look(term, "talk", 0) and look.start > 8000
        rest = node.look(term, "talk", look.start + 16)
        assert (rest.start, rest.output) == (look.start + 16, look.output[16:])
        assert node.look(term, "talk", look.start + KEPT).output == b""
        again = node.start(term, order)
        assert alive(again)
        node.terminate(term, "talk")
        eventually(lambda: node.look(term, "talk", 0).ended == "signal SIGTERM")
    finally:
        node.kill(term, "talk")
        node.kill(term, "talk")
