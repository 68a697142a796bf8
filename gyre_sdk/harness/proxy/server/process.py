"""What a process that serves for hours needs beside an event loop."""

from __future__ import annotations

import asyncio
import gc
import importlib
from collections.abc import Coroutine
from typing import Any

_YOUNG, _MIDDLE, _OLD = 50_000, 50, 100
"""Objects and collections between collections: calls leave few cycles behind, and a run's history is never one."""


def serve_process(main: Coroutine[Any, Any, None]) -> None:
    """Run a service until it ends, on uvloop where that is installed."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(main)


def _loop_factory() -> Any:
    try:
        return importlib.import_module("uvloop").new_event_loop
    except ImportError:
        return None
