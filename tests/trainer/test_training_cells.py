"""A whole training on cells with real processes: they serve, train and go over; and it takes up after any of them was killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_training import check_store, items, wait_for
from training_kit import CONFIG, Forked, alive, leashed, make_training

from gyre_sdk import events
from gyre_sdk.trainer.cells.switch import Pausing
from gyre_sdk.trainer.config import load_config
from gyre_sdk.trainer.ledger import StepCommitted, fold
from gyre_sdk.trainer.stack import Stack
from gyre_sdk.trainer.training import train
from gyre_sdk.trainer.transports import Replica

CELLS = """
[cells]
count = {count}
hysteresis = 0.0
drain_s = 0.2
lease_s = 20.0
{more}
"""


def prepare(folder: Path, count: int, more: str = "") -> Path:
    text = CONFIG.replace("[train]\n", "[train]\nunit_tokens = 24\n")
    return make_training(folder, text + CELLS.format(count=count, more=more))


def trained(seen: list[Any], folder: Path) -> Counter[str]:
    """Units that each cell committed; all of them are those of the ledger's steps."""
    shares: Counter[str] = Counter()
    for event in seen:
        if isinstance(event, events.UnitsCommitted):
            shares[event.cell] += event.units
    state = fold(items(folder))
    assert shares.total() == sum(len(kept.units) for kept in state.steps.values()) > 0
    return shares


def sound(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gyre_sdk.cli", "fsck", str(folder / "out" / "store.db")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_cell_alternates(tmp_path: Path) -> None:
    """It serves or trains, never both; each way was measured."""
    seen: list[Any] = []
    settings = load_config(prepare(tmp_path, 1), ["rollout.staleness=0"])
    report = train(settings, seen.append, base=tmp_path)
    assert (report.steps, report.skipped, report.version) == (3, 0, 3)
    check_store(tmp_path, steps=3)
    assert set(trained(seen, tmp_path)) == {"cell-0"}
    ways = Counter(event.to for event in seen if isinstance(event, events.SwitchMeasured))
    assert ways["training"] >= 3 and ways["serving"] >= 3
    sound(tmp_path)


def test_cells_share_each_batch(tmp_path: Path) -> None:
    """Two cells train all the time and share every batch; the third serves, and helps when the plan says so.

    A replica beside them serves all the time.
    """
    seen: list[Any] = []
    settings = load_config(prepare(tmp_path, 3, "standing = 2\nstandalone = 1"))
    with Stack(settings, seen.append, base=tmp_path) as stack:
        report = train(settings, stack=stack)
        names = set(stack.pids())
        rows = stack.service.status()["replicas"]
    replicas = {*(f"cell-{number}-replica" for number in range(3)), "standalone-0-replica"}
    assert names == {"agents", "proxy", *replicas, "cell-1-worker", "cell-2-worker"}
    assert (report.steps, report.skipped, report.version) == (3, 0, 3)
    assert report.metrics["ratio"] == pytest.approx(1.0, abs=0.05)
    check_store(tmp_path, steps=3)
    assert {"cell-0", "cell-1"} <= set(trained(seen, tmp_path))
    assert {(row["version"], row["state"]) for row in rows} == {(3, "serving")} and len(rows) == 4
    told = [event for event in seen if isinstance(event, events.CellMoved)]
    every = ["cell-0", "cell-1", "cell-2", "standalone-0"]
    assert [event.cell for event in told[:4]] == every, "one that never moves is heard of too"
    moved = {event.cell for event in told[4:-4]}
    assert moved <= {"cell-0", "cell-1", "cell-2"} and {"cell-0", "cell-1"} <= moved
    last = [(event.cell, event.before, event.state) for event in told[-4:]]
    assert last == [(name, "serving", "stopped") for name in every]
    assert {event.cell for event in told if event.standalone} == {"standalone-0"}
    assert {event.standalone for event in seen if isinstance(event, events.CellsSeen)} == {1}
    sound(tmp_path)


def test_the_core_is_killed_and_takes_up(tmp_path: Path) -> None:
    """Replicas, workers and proxy go on, whatever they were in the middle of, and the same command takes them over."""
    config = prepare(tmp_path, 2, "standing = 1")
    process = Forked(config)
    try:
        wait_for(tmp_path, lambda found: any(isinstance(item, StepCommitted) for item in found))
        started = leashed(process.pid)
    finally:
        process.kill()
        process.communicate()
    record = json.loads((tmp_path / "out" / "run" / "cell-1-replica.json").read_text())
    with Replica(record["url"], 0) as replica:
        Pausing().park(replica)
    settings = load_config(config)
    with Stack(settings, base=tmp_path) as stack:
        assert set(stack.pids().values()) == started and len(started) == 5
        assert stack.core is not None and stack.core.waiting() == {"cell-1"}
        rows = stack.service.status()["replicas"]
        assert {row["url"] for row in rows} == set(stack.replicas) and record["url"] in stack.replicas
        assert {(row["version"], row["state"]) for row in rows} == {(stack.publisher.current.version, "serving")}
        with Replica(record["url"], 0) as replica:
            assert not replica.is_paused()
        report = train(settings, stack=stack)
    assert report.steps == 3
    check_store(tmp_path, steps=3)
    assert not any(map(alive, started))
    sound(tmp_path)
