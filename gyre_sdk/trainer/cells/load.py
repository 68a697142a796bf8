"""What a serving cell can hold and do and what runs ask of it, measured: its cache and speed, contexts and calls of runs."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from gyre_sdk.harness.ports import Clock
from gyre_sdk.journal import CallSummary, Journal
from gyre_sdk.records import RunStatus
from gyre_sdk.trainer.cells.capacity import Load
from gyre_sdk.trainer.cells.rates import RateMeter

__all__ = ["LoadMeter"]

_PERIOD_S = 5.0
"""Seconds between two looks at the store."""
_OLD_S = 10.0
"""Seconds after which requests that replicas had tell nothing of the runs that are live now."""
_REMEMBERED = 60
"""Looks that the calls of a run are a mean of."""


class LoadMeter:
    """Gives the manager what was measured; asks the store at most every few seconds, and replicas never.

    A run's context is that of its newest call and, where a sub-agent made that, of its main conversation too.
    """

    def __init__(self, journal: Journal, rates: RateMeter, clock: Clock = time) -> None:
        """`rates`: of all replicas, which it asks in a thread of its own."""
        self._journal = journal
        self._rates = rates
        self._clock = clock
        self._read = 0
        """Calls up to this one are not looked at again: they had ended, or their runs have."""
        self._contexts: dict[str, dict[str, int]] = {}
        """Run -> lane -> tokens of its newest call."""
        self._newest: dict[str, str] = {}
        """Run -> lane of its newest call."""
        self._per_run: float | None = None
        """Calls that a live run has at a replica, mean."""
        self._looks = 0
        self._looked = float("-inf")
        self._load = Load()
        self._take(journal.call_summaries(), self._live())

    def __call__(self) -> Load:
        """Return what is known now."""
        now = self._clock.monotonic()
        if now - self._looked >= _PERIOD_S:
            self._looked = now
            self._load = self._look(now)
        return self._load

    def _look(self, now: float) -> Load:
        rates = self._rates
        # before the runs: each call's run is among them while it lives
        calls = self._journal.call_summaries(self._read)
        live = self._live()
        self._take(calls, live)
        if rates.calls is not None and now - rates.looked <= _OLD_S:
            self._count_calls(rates.calls, len(live))
        return Load(
            kv_tokens=rates.kv_tokens,
            context_tokens=None if rates.kv_tokens is None else self._mean_context(),
            useful_calls=rates.rates.knee,
            calls_per_run=self._per_run,
        )

    def _live(self) -> set[str]:
        return {run.run for run in self._journal.runs(status=RunStatus.RUNNING)}

    def _count_calls(self, calls: float, live: int) -> None:
        """Take in how many calls runs have: beyond the knee they have more, since each takes longer."""
        knee = self._rates.rates.knee
        if not live or (self._per_run and knee is not None and self._rates.busiest > knee):
            return
        self._looks = min(self._looks + 1, _REMEMBERED)
        before = self._per_run or 0.0
        self._per_run = before + (calls / live - before) / self._looks

    def _take(self, calls: Iterable[CallSummary], live: Collection[str]) -> None:
        """Note the contexts that calls have now; one that is open has more at the next look."""
        all_ended = True
        for call in calls:
            under_way = call.run in live
            all_ended = all_ended and not (under_way and call.ended_at is None)
            if all_ended:
                self._read = call.seq
            if under_way:
                self._contexts.setdefault(call.run, {})[call.lane] = call.prompt_tokens + call.sampled_tokens
                self._newest[call.run] = call.lane
        for run in [run for run in self._contexts if run not in live]:
            del self._contexts[run], self._newest[run]

    def _mean_context(self) -> float | None:
        """Return the tokens of a live run's context, mean; None without runs."""
        sizes = [self._context(run) for run in self._contexts]
        return sum(sizes) / len(sizes) if sizes else None

    def _context(self, run: str) -> int:
        lanes = self._contexts[run]
        main = next(iter(lanes))  # the lane of a run's first call
        return sum(lanes[lane] for lane in {main, self._newest[run]})
