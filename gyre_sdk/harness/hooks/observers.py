"""Observers watch; unlike hooks they decide nothing and can fail nothing."""

from __future__ import annotations

import logging

from gyre_sdk.events import Event
from gyre_sdk.harness.ports import Observer

_log = logging.getLogger("gyre.observer")


def unobserved(event: Event) -> None:
    """Observe nothing."""


class Fanout:
    """Calls an observer that can never fail a run: one that raises is dropped and said so once."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def __call__(self, event: Event) -> None:
        try:
            self._observer(event)
        except Exception:  # boundary: an observer never fails a run
            _log.warning("observer failed on %s and is dropped", type(event).__name__, exc_info=True)
            self._observer = unobserved
