"""Looks at replicas again and again, in a thread of its own."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import httpx

from gyre_sdk.errors import TrainerError

__all__ = ["AT_ONCE", "Lookout"]

AT_ONCE = 32
"""Replicas that are asked at the same time, at most."""

_Said = TypeVar("_Said")
_log = logging.getLogger("gyre.trainer")


class Lookout(ABC):
    """Looks every `period_s` seconds until it is stopped. What a look raises ends it, which `check` tells.

    Args:
        name: of the thread.
        period_s: seconds between two looks.
        http: what it asks with; closed when it is stopped.
    """

    def __init__(self, name: str, period_s: float, http: httpx.Client) -> None:
        self._name = name
        self._period_s = period_s
        self._http = http
        self._askers = ThreadPoolExecutor(AT_ONCE, thread_name_prefix=name)
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End. Idempotent."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._askers.shutdown()
        self._http.close()

    def check(self) -> None:
        """Raise what ended it.

        Raises:
            TrainerError: naming it: what would be seen from now on is old.
        """
        if self._failure is not None:
            raise TrainerError(
                f"the look at the {self._name} ended: {type(self._failure).__name__}: {self._failure}"
            ) from self._failure

    @abstractmethod
    def beat(self) -> None:
        """Look at each replica once."""

    def each(self, ask: Callable[[str], _Said], urls: Iterable[str]) -> list[_Said]:
        """Ask replicas at the same time, so that one that is silent holds up no other; return what came of it, in order."""
        return list(self._askers.map(ask, urls))

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._period_s):
                self.beat()
        except Exception as error:  # boundary: top of the thread; `check` raises it
            _log.exception("the look at the %s ended", self._name)
            self._failure = error
