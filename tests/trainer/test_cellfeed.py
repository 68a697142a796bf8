"""Promise 10 for the record of cells: it blocks and fails nobody, and says what it missed."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gyre_sdk.events import CellMoved, CellsSeen, Event, RunStarted, StepTaken, UnitsCommitted, VersionPublished
from gyre_sdk.journal import Journal
from gyre_sdk.trainer.cellfeed import CellRecorder
from gyre_sdk.view.cells import STREAM, EventsMissed, RecordingStarted, read
from gyre_sdk.view.timeline import timeline


def moved(number: int, reason: str = "") -> CellMoved:
    return CellMoved(100.0 + number, f"cell {number % 3}", "serving", "loading", 1.0, reason)


def seen(at: float, water: int = 4) -> CellsSeen:
    return CellsSeen(at, water, 8.0, 2, 1, 0, 0.0)


def recorded(journal: Journal) -> list[Event]:
    found = read(entry.body for entry in journal.entries(STREAM))
    assert found.unknown == 0
    return found.events


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, "it did not happen in 30 s"
        time.sleep(0.01)


@pytest.fixture
def journal(tmp_path):
    with Journal(tmp_path / "gyre.db") as journal:
        yield journal


def test_what_cells_do_is_recorded_and_everything_is_passed_on(journal):
    passed: list[Event] = []
    recorder = CellRecorder(journal, passed.append)
    recorder.start()
    told = [
        moved(1, "a reason"),
        RunStarted(101.0, "r", "task", None),
        seen(102.0),
        UnitsCommitted(103.0, "cell 1", 1, 2, 300, 1.5),
        VersionPublished(104.0, 1, 0.5),
        StepTaken(105.0, 1, 9, 0.5, 1.0, 10, 8, 0.5, 0.25),
    ]
    for event in told:
        recorder(event)
    recorder.stop()
    recorder.stop()
    assert passed == told and recorder.missed == 0
    assert recorded(journal) == [
        RecordingStarted(101.0),
        *(event for event in told if not isinstance(event, RunStarted)),
    ]
    kinds = [entry.kind for entry in journal.entries(STREAM)]
    assert kinds[:2] == ["RecordingStarted", "CellMoved"]


def test_without_events_nothing_is_recorded(journal):
    recorder = CellRecorder(journal)
    recorder.start()
    recorder(RunStarted(101.0, "r", "task", None))
    recorder.stop()
    assert journal.entries(STREAM) == []


def test_looks_that_see_the_same_are_one_every_ten_seconds_and_the_last_one(journal):
    recorder = CellRecorder(journal)
    recorder.start()
    for number in range(251):
        recorder(seen(100.0 + number / 10, water=4 if number < 200 else 3))
    recorder.stop()
    assert [(one.at, one.water) for one in recorded(journal)[1:]] == [(100.0, 4), (110.0, 4), (120.0, 3), (125.0, 3)]


def test_an_observer_that_raises_does_not_end_the_record(journal):
    def broken(event: Event) -> None:
        raise RuntimeError("broken")

    recorder = CellRecorder(journal, broken)
    recorder.start()
    recorder(moved(1))
    recorder(moved(2))
    recorder.stop()
    assert recorded(journal)[1:] == [moved(1), moved(2)]


def test_a_store_that_another_process_holds_blocks_nobody_and_what_is_missed_is_counted(journal):
    recorder = CellRecorder(journal, capacity=50)
    holder = sqlite3.connect(journal.path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    recorder.start()
    for number in range(1000):
        recorder(moved(number))
    assert recorder.missed >= 900, "nobody waited for the disk"
    holder.execute("ROLLBACK")
    holder.close()
    recorder.stop()
    found = recorded(journal)
    kept = [event for event in found if isinstance(event, CellMoved)]
    assert len(kept) >= 50 and len(kept) + recorder.missed == 1000
    assert sum(event.count for event in found if isinstance(event, EventsMissed)) == recorder.missed
    assert timeline(found).missed == recorder.missed


def test_the_end_does_not_wait_for_a_disk_that_takes_nothing(journal, monkeypatch):
    monkeypatch.setattr("gyre_sdk.trainer.cellfeed._CLOSE", 0.1)
    recorder = CellRecorder(journal)
    holder = sqlite3.connect(journal.path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    recorder.start()
    recorder(moved(1))
    recorder.stop()
    assert journal.entries(STREAM) == [], "it came back before the disk did"
    holder.execute("ROLLBACK")
    holder.close()
    until(lambda: len(journal.entries(STREAM)) == 2)


def test_any_thread_may_tell(journal):
    recorder = CellRecorder(journal)
    recorder.start()
    threads = [
        threading.Thread(target=lambda base=base: [recorder(moved(base + number)) for number in range(50)])
        for base in range(0, 400, 50)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.stop()
    assert sorted(event.at for event in recorded(journal)[1:]) == [100.0 + number for number in range(400)]


def test_a_store_that_is_closed_fails_nobody(journal):
    recorder = CellRecorder(journal)
    recorder.start()
    recorder(moved(1))
    until(lambda: len(journal.entries(STREAM)) == 2)
    with Journal(journal.path, "r") as reader:
        journal.close()
        recorder(moved(2))
        recorder.stop()
        assert recorder.missed == 1 and recorded(reader)[1:] == [moved(1)]


def test_an_event_that_no_store_can_hold_is_missed_alone(journal):
    recorder = CellRecorder(journal)
    recorder.start()
    for event in (moved(1), moved(2, "\ud800"), moved(3)):
        recorder(event)
    until(lambda: recorder.missed == 1)
    recorder.stop()
    assert recorded(journal) == [RecordingStarted(101.0), moved(1), moved(3), EventsMissed(103.0, 1)]


KILLED = """
import os, signal, sys, time
from gyre_sdk.events import CellMoved
from gyre_sdk.journal import Journal
from gyre_sdk.trainer.cellfeed import CellRecorder
journal = Journal(sys.argv[1])
recorder = CellRecorder(journal)
recorder.start()
recorder(CellMoved(110.0, "a", "serving", "loading", 10.0))
recorder(CellMoved(120.0, "a", "draining", "serving", 10.0))
while len(journal.entries("cells")) < 3:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_trainer_that_was_killed_and_its_successor(tmp_path: Path):
    path = tmp_path / "gyre.db"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], timeout=60, env={**os.environ}, check=False)
    assert done.returncode == -signal.SIGKILL
    with Journal(path) as journal:
        recorder = CellRecorder(journal)
        recorder.start()
        recorder(CellMoved(205.0, "a", "serving", "loading", 5.0))
        recorder(seen(210.0))
        recorder.stop()
        found = timeline(recorded(journal))
    assert [(one.start, one.stop, one.state) for one in found.cells["a"].intervals] == [
        (100.0, 110.0, "loading"),
        (110.0, 120.0, "serving"),
        (200.0, 205.0, "loading"),
        (205.0, 210.0, "serving"),
    ]
    assert found.trainings == [110.0, 205.0]
