"""A whole training through a Ray cluster of three nodes: the trainer dies on the way, and one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray_kit
from ranks_kit import forking
from test_training import check_store, runs, wait_for
from training_kit import CONFIG, Forked, make_training

from gyre_sdk import events
from gyre_sdk.records import RunStatus
from gyre_sdk.trainer.children import process_names
from gyre_sdk.trainer.config import load_config
from gyre_sdk.trainer.ledger import StepCommitted
from gyre_sdk.trainer.stack import Stack
from gyre_sdk.trainer.training import train

CELLS = """
[cells]
count = 2
standing = 1
hysteresis = 0.0
drain_s = 0.2
launcher = "ray"
resources = { slot = 1 }
"""


@pytest.mark.timeout(600)
def test_the_trainer_is_killed_and_then_a_node(tmp_path: Path) -> None:
    """The next trainer finds agents, proxy, replicas and workers as they are, and runs under way complete. Then the satellite's
    node goes: its replica's calls go on at the core's cell, its units go back, and every step is whole. Nothing is left."""
    text = CONFIG.replace("[train]\n", "[train]\nunit_tokens = 24\n")
    seen: list[Any] = []
    killed: list[Any] = []
    forking()  # its process is not of the cluster, which is told by its environment
    with ray_kit.cluster(3) as cluster:
        config, options = (
            make_training(tmp_path, text + CELLS),
            [f"cells.ray_address={cluster.address}", "train.steps=4"],
        )
        process = Forked(config, *(word for option in options for word in ("--set", option)))
        try:
            wait_for(tmp_path, lambda found: any(isinstance(item, StepCommitted) for item in found))
            started = ray_kit.leashed()
        finally:
            process.kill()
            process.communicate()
        went_on = {run.run for run in runs(tmp_path) if run.status is RunStatus.RUNNING}
        settings = load_config(config, options)

        def watch(event: Any) -> None:
            seen.append(event)
            if isinstance(event, events.StepTaken) and event.step == 3:
                place = ray_kit.parent(ray_kit.parent(stack.pids()["cell-1-replica"]))
                (node,) = [one for one in cluster.worker_nodes if ray_kit.raylet(one) == place]
                killed.append(node)
                cluster.remove_node(node, allow_graceful=False)

        with Stack(settings, watch, base=tmp_path) as stack:
            assert set(stack.pids().values()) == started and len(started) == 5
            assert stack.core is not None and stack.core.waiting() == {"cell-1"}
            rows = stack.service.status()["replicas"]
            served = {(row["url"], row["version"], row["state"]) for row in rows}
            assert served == {(url, stack.publisher.current.version, "serving") for url in stack.replicas}
            report = train(settings, stack=stack)
            folder = stack.publisher.current.folder
            left = started | set(stack.pids().values())
        assert not any(map(ray_kit.alive, left))
        with ray_kit.connected(cluster.address):
            ray_kit.eventually(lambda: ray_kit.groups() == [] == ray_kit.wardens())
    assert len(killed) == 1
    assert (report.steps, report.skipped) == (4, 0)
    check_store(tmp_path, steps=4)
    assert {run.status for run in runs(tmp_path) if run.run in went_on} <= {RunStatus.COMPLETED}
    assert folder.is_relative_to(tmp_path)  # where every node can read it
    assert {event.cell for event in seen if isinstance(event, events.UnitsCommitted)} >= {"cell-0"}
    assert process_names(load_config(config)) == {"agents", "proxy", "ray"}  # with a cluster of its own
