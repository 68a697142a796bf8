"""Fixtures of the whole suite, each in a module of its own; and how it is shared out to two processes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["demo_kit", "docker_engine"]

_TOGETHER = {"examples": "policy", "real_vllm": "policy", "clients": "clients", "trainer": "trainer"}
"""Folders whose tests share what takes long to make: a trained policy, installed programs, a server. Begun in this order."""

for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:  # started in the background: what tests start would ignore them too
        signal.signal(_number, signal.default_int_handler if _number is signal.SIGINT else signal.SIG_DFL)
if os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin take the cores from each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # there are two of them on two cores


def _group(nodeid: str) -> str:
    """Return the folder or the module whose tests run in one process."""
    path = nodeid.partition("::")[0].removeprefix("tests/")
    folder = path.partition("/")[0]
    return _TOGETHER.get(folder, path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest."""
    place = {name: number for number, name in enumerate(dict.fromkeys(_TOGETHER.values()))}
    items.sort(key=lambda item: place.get(_group(item.nodeid), len(place)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep tests that share a server, a trained policy or a module's fixtures in one process."""
    from xdist.scheduler import LoadScopeScheduling

    class Grouped(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return Grouped(config, log)
