"""Fixtures of the whole suite, each in a module of its own; and how it is shared out to two processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["demo_kit", "docker_engine"]

_TOGETHER = ("examples", "real_vllm", "clients", "trainer")
"""Folders whose tests share what takes long to start, in the order in which they are begun."""


def _group(nodeid: str) -> str:
    """Return the folder or the module whose tests run in one process."""
    path = nodeid.partition("::")[0].removeprefix("tests/")
    folder = path.partition("/")[0]
    return folder if folder in _TOGETHER else path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest."""
    place = {name: number for number, name in enumerate(_TOGETHER)}
    items.sort(key=lambda item: place.get(_group(item.nodeid), len(place)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep tests that share a server, a trained policy or a module's fixtures in one process."""
    from xdist.scheduler import LoadScopeScheduling

    class Grouped(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return Grouped(config, log)
