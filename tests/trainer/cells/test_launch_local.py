"""Cells as processes of this machine: begun together, given up by name, ended together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cells_kit import until

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.cells.launch import CellSpec
from gyre_sdk.trainer.cells.launch.local import LocalLauncher
from gyre_sdk.trainer.processes import ChildSpec

TOY = """
import sys, time
if "fail" in sys.argv: sys.exit("no room for this worker")
print("toy ready on http://127.0.0.1:7", flush=True)
time.sleep(600)
"""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalLauncher]:
    (tmp_path / "toy_cell.py").write_text(TOY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    found = LocalLauncher(lambda event: None)
    yield found
    found.close()


def spec(folder: Path, name: str, *arguments: str) -> ChildSpec:
    return ChildSpec(name, lambda port: ["toy_cell", *arguments], "toy ready on", folder / f"{name}.log")


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_a_cell_is_its_replica_and_its_worker(launcher: LocalLauncher, tmp_path: Path) -> None:
    core = launcher.launch(CellSpec("cell-0", spec(tmp_path, "cell-0-replica")))
    other = launcher.launch(CellSpec("cell-1", spec(tmp_path, "cell-1-replica"), spec(tmp_path, "cell-1-worker")))
    assert core.wait() == other.wait() == "http://127.0.0.1:7"
    assert list(core.pids()) == ["cell-0-replica"] and list(other.pids()) == ["cell-1-replica", "cell-1-worker"]
    other.check()
    pids = [*core.pids().values(), *other.pids().values()]
    assert not any(gone(pid) for pid in pids)
    launcher.close()
    launcher.close()
    until(lambda: all(gone(pid) for pid in pids), "all have ended")


def test_a_worker_that_does_not_start_is_named(launcher: LocalLauncher, tmp_path: Path) -> None:
    cell = launcher.launch(
        CellSpec("cell-1", spec(tmp_path, "cell-1-replica"), spec(tmp_path, "cell-1-worker", "fail"))
    )
    with pytest.raises(TrainerError, match=r"cell-1-worker did not start: .*\n.*no room for this worker"):
        cell.wait()
    with pytest.raises(TrainerError, match="cell-1-worker"):
        cell.check()
