"""The proxy's routing table, as this trainer tells it: an older table never arrives after a newer one, or after a drain."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from gyre_sdk.harness.service import Drained, ServiceClient

__all__ = ["Routes"]


class Routes:
    """Tells one proxy. Without one, everything is as if it had heard.

    All methods raise `ServiceError` when the proxy cannot be told.
    """

    def __init__(self, service: ServiceClient | None = None) -> None:
        self._service = service
        self._telling = threading.Lock()
        """Held while a table is on its way; never taken by who holds another lock."""

    def answer(self) -> bool:
        """Tell whether the proxy answers now; asked once, for a second."""
        return self._service is None or self._service.answers()

    def tell(self, table: Callable[[], list[dict[str, Any]]]) -> None:
        """Send a table. `table`: gives it as it is when its turn has come."""
        if self._service is None:
            return
        with self._telling:
            self._service.set_replicas(table())

    def drain(self, url: str, seconds: float) -> Drained:
        """Drain a replica that is in the table no more; see `ServiceClient.drain`."""
        if self._service is None:
            return Drained()
        with self._telling:
            pass  # a table with it that was on its way has arrived
        return self._service.drain(url, seconds=seconds)
