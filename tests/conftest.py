"""Fixtures of the whole suite, each in a module of its own; and how it is shared out to two processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

pytest_plugins = ["demo_kit", "docker_engine"]

_TOGETHER = ("real_vllm", "examples", "clients", "trainer")
"""Folders whose tests share what takes long to start; in the order in which they are begun."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests that share a server, a trained policy or a module's fixtures in one process, the longest first."""

    def group(item: pytest.Item) -> str:
        parts = item.path.relative_to(HERE).parts
        return parts[0] if parts[0] in _TOGETHER else "/".join(parts)

    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))
    items.sort(key=lambda item: _TOGETHER.index(group(item)) if group(item) in _TOGETHER else len(_TOGETHER))
