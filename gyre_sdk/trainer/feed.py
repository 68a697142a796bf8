"""Tells an observer of the calls that the proxy recorded: they happen in another process and meet in the store."""

from __future__ import annotations

import logging
import threading

from gyre_sdk.errors import JournalError
from gyre_sdk.events import CallRecorded
from gyre_sdk.harness.ports import Observer
from gyre_sdk.journal import Journal
from gyre_sdk.records import CallStatus

_OPEN = (CallStatus.RECEIVED, CallStatus.DISPATCHED, CallStatus.STREAMING)
_PERIOD = 0.5

_log = logging.getLogger("gyre.trainer")


class CallFeed:
    """A thread that asks the store for complete calls, and tells each once. Calls from before the start are left out."""

    def __init__(self, journal: Journal, observer: Observer) -> None:
        self._journal = journal
        self._observer = observer
        self._told = max((call.seq for call in journal.call_summaries()), default=0)
        self._late: set[int] = set()
        """Calls below `_told` that were not complete when they were first seen."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="call feed", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Tell what is there, then end. Idempotent."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _follow(self) -> None:
        try:
            while not self._stopping.wait(_PERIOD):
                self._poll()
            self._poll()
        except JournalError:
            _log.warning("calls are not shown any more", exc_info=True)

    def _poll(self) -> None:
        for call in self._journal.call_summaries(self._told, also=self._late):
            self._told = max(self._told, call.seq)
            if call.status in _OPEN:
                self._late.add(call.seq)
                continue
            self._late.discard(call.seq)
            self._observer(
                CallRecorded(
                    at=call.ended_at or 0.0,
                    run=call.run,
                    lane=call.lane,
                    role=call.role,
                    call=call.call,
                    prompt_tokens=call.prompt_tokens,
                    sampled_tokens=call.sampled_tokens,
                    version=call.version,
                )
            )
