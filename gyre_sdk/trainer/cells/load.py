"""What a serving cell can hold and do and what runs ask of it, measured: its cache and speed, contexts and calls of runs."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection
from dataclasses import replace

import httpx

from gyre_sdk.harness.ports import Clock
from gyre_sdk.journal import Journal
from gyre_sdk.records import RunStatus
from gyre_sdk.trainer.cells.capacity import Load
from gyre_sdk.trainer.cells.rates import RateMeter

__all__ = ["LoadMeter", "kv_tokens"]

_PERIOD_S = 5.0
"""Seconds between two looks at the store."""
_TIMEOUT_S = 5.0
_REMEMBERED = 60
"""Looks that the calls of a run are a mean of."""
_CACHE = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_PAIR = re.compile(r'(\w+)="([^"]*)"')

_log = logging.getLogger("gyre.trainer")


class LoadMeter:
    """Gives the manager what was measured; asks the store at most every few seconds.

    A run's context is that of its newest call and, where a sub-agent made that, of its main conversation too.
    """

    def __init__(
        self, journal: Journal, url: Callable[[], str], clock: Clock = time, *, rates: RateMeter | None = None
    ) -> None:
        """Begin.

        Args:
            url: of a replica; all are alike.
            rates: of all replicas; without, speed bounds nothing.
        """
        self._journal = journal
        self._url = url
        self._rates = rates
        self._clock = clock
        self._seen = max((call.seq for call in journal.call_summaries()), default=0)
        self._contexts: dict[str, dict[str, int]] = {}
        """Run -> lane -> tokens of its newest call."""
        self._newest: dict[str, str] = {}
        """Run -> lane of its newest call."""
        self._kv: float | None = None
        self._asked = False
        self._per_run: float | None = None
        """Calls that a live run has at a replica, mean."""
        self._looks = 0
        self._looked = float("-inf")
        self._load = Load()

    def __call__(self) -> Load:
        """Return what is known now."""
        now = self._clock.monotonic()
        if now - self._looked >= _PERIOD_S:
            self._looked = now
            self._load = self._look()
        return self._load

    def _look(self) -> Load:
        if not self._asked:
            metrics = _metrics(self._url())
            if metrics is not None:
                self._kv, self._asked = parsed(metrics), True
        rates = self._rates
        if self._kv is None and rates is None:
            return Load()
        live = {run.run for run in self._journal.runs(status=RunStatus.RUNNING)}
        found = Load(kv_tokens=self._kv, context_tokens=None if self._kv is None else self._mean_context(live))
        if rates is None:
            return found
        self._count_calls(rates, len(live))
        return replace(found, useful_calls=rates.rates.knee, calls_per_run=self._per_run)

    def _count_calls(self, rates: RateMeter, live: int) -> None:
        """Take in how many calls runs have: beyond the knee they have more, since each takes longer."""
        knee = rates.rates.knee
        if rates.calls is None or not live or (self._per_run and knee is not None and rates.busiest > knee):
            return
        self._looks = min(self._looks + 1, _REMEMBERED)
        before = self._per_run or 0.0
        self._per_run = before + (rates.calls / live - before) / self._looks

    def _mean_context(self, live: Collection[str]) -> float | None:
        """Return the tokens of a live run's context, mean; None without runs."""
        for call in self._journal.call_summaries(self._seen):
            self._seen = call.seq
            self._contexts.setdefault(call.run, {})[call.lane] = call.prompt_tokens + call.sampled_tokens
            self._newest[call.run] = call.lane
        for run in [run for run in self._contexts if run not in live]:
            del self._contexts[run], self._newest[run]
        sizes = [self._context(run) for run in self._contexts]
        return sum(sizes) / len(sizes) if sizes else None

    def _context(self, run: str) -> int:
        lanes = self._contexts[run]
        main = next(iter(lanes))  # the lane of a run's first call
        return sum(lanes[lane] for lane in {main, self._newest[run]})


def kv_tokens(url: str) -> float | None:
    """Return for how many tokens a replica holds keys and values at most; None where it does not say.

    vLLM says so in `/metrics`; the embedded engine is bounded by its slots.
    """
    metrics = _metrics(url)
    return None if metrics is None else parsed(metrics)


def _metrics(url: str) -> str | None:
    try:
        return httpx.get(f"{url}/metrics", timeout=_TIMEOUT_S, trust_env=False).text
    except httpx.HTTPError as error:
        _log.warning("replica %s does not tell the size of its cache: %s", url, error)
        return None


def parsed(metrics: str) -> float | None:
    """Return blocks times block size of vLLM's metrics; None where they are not there."""
    found = _CACHE.search(metrics)
    if found is None:
        return None
    labels = dict(_PAIR.findall(found.group(1)))
    try:
        return float(labels["num_gpu_blocks"]) * float(labels["block_size"])
    except (KeyError, ValueError):
        return None
