"""Looks at replicas again and again, in a thread of its own."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

import httpx

__all__ = ["Lookout"]


class Lookout(ABC):
    """Looks every `period_s` seconds until it is stopped.

    Args:
        name: of the thread.
        period_s: seconds between two looks.
        http: what it asks with; closed when it is stopped.
    """

    def __init__(self, name: str, period_s: float, http: httpx.Client) -> None:
        self._period_s = period_s
        self._http = http
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._http.close()

    @abstractmethod
    def beat(self) -> None:
        """Look at each replica once."""

    def _run(self) -> None:
        while not self._stopping.wait(self._period_s):
            self.beat()
