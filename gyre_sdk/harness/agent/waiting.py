"""Async work that is not left half done: a cancellation is raised once the work has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await work; a cancellation meanwhile, and any further one, waits for its end."""
    working, cancelled = asyncio.ensure_future(work), False
    while not working.done():
        try:
            await asyncio.wait([working])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        working.exception() if not working.cancelled() else None
        raise asyncio.CancelledError
    return working.result()


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run blocking work in a thread, to its end."""
    return await to_the_end(asyncio.to_thread(function, *args, **kwargs))
