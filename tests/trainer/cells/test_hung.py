"""A satellite's worker stops in the middle of a unit, for good: it is ended and started again, and the batch goes on."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cells_kit import Toys, counted, moves, until
from hung_worker import CELL, KEY, Policy

from gyre_sdk.events import ProcessRestarted, UnitsCommitted
from gyre_sdk.trainer.cells.launch import CellSpec
from gyre_sdk.trainer.cells.launch.local import LocalLauncher
from gyre_sdk.trainer.cells.manager import Cell, Manager
from gyre_sdk.trainer.cells.plan import Action, Move
from gyre_sdk.trainer.cells.plan import Policy as Rules
from gyre_sdk.trainer.processes import ChildSpec
from gyre_sdk.trainer.sharing.core import Core
from gyre_sdk.trainer.sharing.wire import Counted
from gyre_sdk.trainer.units import Unit

UNITS = [Unit(f"u{number}", "g", (), 1, 3 + number) for number in range(6)]
STANDS_FOR_A_REPLICA = "print('toy ready on x', flush=True)\nimport time\ntime.sleep(600)\n"


def test_a_worker_that_hangs_is_replaced_and_every_unit_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_replica.py").write_text(STANDS_FOR_A_REPLICA)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parent)]))
    toys, told, go_on = Toys(tmp_path, 3), list[str](), threading.Event()
    launcher = LocalLauncher(toys.events.append)
    policy, counts = Policy(), Counted()
    with Core(key=KEY, lease_s=0.5, stuck_s=2.0, observer=toys.events.append) as core:
        core.on_hung = told.append
        mark = tmp_path / "stopped"
        launched = launcher.launch(
            CellSpec(
                CELL,
                ChildSpec("cell-1-replica", lambda port: ["toy_replica"], "toy ready on", tmp_path / "replica.log"),
                ChildSpec(
                    "cell-1-worker",
                    lambda port: ["hung_worker", str(core.address[1]), str(mark)],
                    "toy-worker ready on",
                    tmp_path / "worker.log",
                ),
            )
        )

        def decide(seen: Any, rules: Rules) -> Sequence[Action]:
            wanted = 2 - seen.training
            return [Action(Move.TO_TRAINING, wanted, "the test wants it")] if wanted > 0 and not seen.moving else []

        def train() -> None:
            for hand in core.deal(1, 0, policy.model, iter(UNITS)):
                for unit in hand:
                    policy.compute(unit, 0, counts)
                assert go_on.wait(180)
            found = core.collect()
            found.sums.add_to(policy.model)

        manager = Manager(
            [Cell(f"cell-{n}", toy.url, launched=launched if n == 1 else None) for n, toy in enumerate(toys.replicas)],
            training=core,
            publisher=toys.publisher,
            counters=lambda: counted(4),
            policy=Rules(),
            drain_s=0.0,
            runs_per_cell=8,
            observer=toys.events.append,
            decide=decide,
            period_s=0.05,
        )
        trainer = threading.Thread(target=train, daemon=True)
        try:
            launched.wait()
            manager.start()
            trainer.start()
            until(mark.exists, "the worker stops in a unit")
            first = launched.pids()["cell-1-worker"]
            until(lambda: launched.pids()["cell-1-worker"] not in (0, first), "it is started again")
            until(lambda: core.joined(CELL), "the new one joins the same batch")
            until(lambda: told, "the core's own unit, which waits for this test, is told of")
            go_on.set()
            trainer.join(180)
            assert not trainer.is_alive()
            manager.check()
        finally:
            go_on.set()
            manager.stop()
            launcher.close()
            toys.close()
    [restart] = [event for event in toys.events if isinstance(event, ProcessRestarted)]
    assert restart.process == "cell-1-worker" and "longer than the 2 s that they may take" in restart.reason
    assert len(told) == 1 and "the core has 3 targets in hand" in told[0]
    states = [state for state, _ in moves(toys.events, CELL)]
    assert "failed" in states and states.count("training") >= 2
    committed = Counter[str]()
    for event in toys.events:
        if isinstance(event, UnitsCommitted):
            committed[event.cell] += event.units
    assert committed.total() == len(UNITS) and set(committed) <= {"cell-0", CELL}
    alone = Policy()
    for unit in UNITS:
        alone.compute(unit, 0, Counted())
    for found, wanted in zip(policy.model.parameters(), alone.model.parameters(), strict=True):
        assert float((found.grad - wanted.grad).norm()) <= 1e-12 * float(wanted.grad.norm())
