"""Calls the user's agent, a plain function or an async one, for as long as it has time."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from contextvars import copy_context
from typing import Any

from gyre_sdk.errors import LimitExceeded

__all__ = ["OVERTIME", "call"]

OVERTIME = 60.0
"""Seconds that an agent may go on when its time is over and its calls are refused: to clean up, and to come to an end."""


def call(agent: Callable[[], Any], seconds: float | None) -> None:
    """Call an agent, and wait until it has come to its end.

    One that hangs is left to itself after a while: its thread goes on, but its run, its workspace and its keys are closed
    to it, and its place is free for another.

    Args:
        seconds: of wall time that it has; None: as long as it takes.

    Raises:
        LimitExceeded: it had not come back `OVERTIME` after its time was over.
        BaseException: what the agent raised.
    """
    ended: Future[None] = Future()

    def run() -> None:
        try:
            found = agent()
            if inspect.isawaitable(found):
                asyncio.run(_awaited(found))
        except BaseException as error:  # boundary: who waits raises it
            ended.set_exception(error)
        else:
            ended.set_result(None)

    if seconds is None:
        run()
    else:
        name = threading.current_thread().name
        threading.Thread(target=copy_context().run, args=(run,), name=name, daemon=True).start()
        wait([ended], seconds + OVERTIME)
        if not ended.done():
            raise LimitExceeded(
                f"the agent has not come back {OVERTIME:g} s after its {seconds:g} s of wall time: it hangs, and is left"
                " to itself; give what it waits for a time limit"
            )
    ended.result()


async def _awaited(found: Awaitable[Any]) -> Any:
    return await found
