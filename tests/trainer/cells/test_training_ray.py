"""A whole training through a Ray cluster of three nodes, one of which dies on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray_kit
from test_training import check_store
from training_kit import CONFIG, make_training

from gyre_sdk import events
from gyre_sdk.trainer.config import load_config
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
def test_a_node_is_killed(tmp_path: Path) -> None:
    """The satellite's: its replica's calls go on at the core's cell, its units go back, and every step is whole."""
    text = CONFIG.replace("[train]\n", "[train]\nunit_tokens = 24\n")
    seen: list[Any] = []
    killed: list[Any] = []
    with ray_kit.cluster(3) as cluster:
        settings = load_config(
            make_training(tmp_path, text + CELLS), [f"cells.ray_address={cluster.address}", "train.steps=5"]
        )

        def watch(event: Any) -> None:
            seen.append(event)
            if isinstance(event, events.StepTaken) and event.step == 2:
                place = ray_kit.parent(ray_kit.parent(stack.pids()["cell-1-replica"]))
                (node,) = [one for one in cluster.worker_nodes if ray_kit.raylet(one) == place]
                killed.append(node)
                cluster.remove_node(node, allow_graceful=False)

        with Stack(settings, watch, base=tmp_path) as stack:
            report = train(settings, stack=stack)
            folder = stack.publisher.current.folder
    assert len(killed) == 1
    assert (report.steps, report.skipped, report.version) == (5, 0, 5)
    check_store(tmp_path, steps=5)
    assert folder.is_relative_to(tmp_path)  # where every node can read it
    assert {event.cell for event in seen if isinstance(event, events.UnitsCommitted)} >= {"cell-0"}
