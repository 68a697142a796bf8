"""Fixtures of the whole suite, each in a module of its own; and how it is shared out to two processes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest

hypothesis.settings.register_profile("gyre", deadline=None)  # no test depends on the machine's speed
hypothesis.settings.load_profile("gyre")
sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["demo_kit", "docker_engine"]

_TOGETHER = {
    "examples/": "policy",
    "real_vllm/": "policy",
    "clients/": "tools",
    "harness/test_forging.py": "tools",
    "harness/test_scoring_history.py": "tools",
    "harness/workspace/test_pool.py": "sandboxes",
    "harness/workspace/test_sandboxes.py": "sandboxes",
    "trainer/cells/": "trainer/cells",
    "trainer/engines/": "trainer/engines",
    "trainer/sharing/": "trainer/sharing",
}
"""Tests that share what takes long to make: a trained policy, servers, installed programs, images, a cluster."""
_FIRST = ("policy", "tools")
_WAIT = 0.35
"""Share of the others that begin before the trainer's: the policy's compute meanwhile."""
_LONG = (
    "test_training.py",
    "cells",
    "sharing",
    "test_chaos.py",
    "test_distributed",
    "engines",
    "test_training_cells.py",
)
"""Of the trainer's, what takes longest."""

for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:  # started in the background: what tests start would ignore them too
        signal.signal(_number, signal.default_int_handler if _number is signal.SIGINT else signal.SIG_DFL)
if os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin take the cores from each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # there are two of them on two cores
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):  # hundreds of processes would compile the same modules again
    sys.dont_write_bytecode = False


def _group(nodeid: str) -> str:
    """Return the folder or the module whose tests run in one process."""
    path = nodeid.partition("::")[0].removeprefix("tests/")
    return next((group for start, group in _TOGETHER.items() if path.startswith(start)), path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest; let what computes take turns with what waits, so that both processes stay busy."""
    groups = list(dict.fromkeys(_group(item.nodeid) for item in items))
    long = [group for start in _LONG for group in groups if group.startswith(f"trainer/{start}")]
    computing = list(dict.fromkeys([*long, *(group for group in groups if group.startswith("trainer/"))]))
    waiting = [group for group in groups if group not in computing and group not in _FIRST]
    place = {group: float(number - len(_FIRST)) for number, group in enumerate(_FIRST)}
    for several, start in ((computing, _WAIT), (waiting, 0.0)):
        place |= {group: start + (1 - start) * number / len(several) for number, group in enumerate(several)}
    items.sort(key=lambda item: place[_group(item.nodeid)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep tests that share a server, a trained policy or a module's fixtures in one process."""
    from xdist.scheduler import LoadScopeScheduling

    class Grouped(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return Grouped(config, log)
