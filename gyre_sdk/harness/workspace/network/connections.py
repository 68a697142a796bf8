"""HTTP connections from inside a workspace: what is not HTTP is answered, and none of it fills this process's log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web

log = logging.getLogger(__name__)
Broken = Callable[[int, str], web.Response]
"""Gives the answer to what is not HTTP, or to a defect of ours: HTTP status, reason."""
_OPTIONS: dict[str, Any] = {
    "access_log": None,
    "auto_decompress": False,
    "lingering_time": 1.0,
    "keepalive_timeout": 75.0,
}
"""Bodies pass as they are; a connection may be idle for 75 seconds between requests."""


class Connections(web.Server):
    """Makes the connections of one service.

    Args:
        answer: answers a request; cancelled when its client leaves.
        broken: see `Broken`.
    """

    def __init__(self, answer: Callable[[web.BaseRequest], Any], broken: Broken) -> None:
        super().__init__(answer, handler_cancellation=True, **_OPTIONS)
        self._broken = broken

    def __call__(self) -> web.RequestHandler:
        """Return what takes a new connection."""
        return _Connection(self, self._broken, loop=asyncio.get_running_loop(), **_OPTIONS)


class _Connection(web.RequestHandler):
    __slots__ = ("_broken",)

    def __init__(self, manager: web.Server, broken: Broken, **options: Any) -> None:
        super().__init__(manager, **options)
        self._broken = broken

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun; another one cannot take its place")
        if status >= 500:
            log.error("a request from inside a workspace failed: %s", type(exc).__name__)
            reason = "internal error"
        else:
            said = (message or type(exc).__name__).strip().split("\n")[0].rstrip(":")
            reason = f"the request is not valid HTTP: {said}"
        response = self._broken(status, reason)
        response.force_close()
        return response
