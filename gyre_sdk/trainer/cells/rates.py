"""How fast replicas sample with how many requests: asked again and again, in a thread of its own."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from gyre_sdk.harness.ports import Clock
from gyre_sdk.trainer.cells.knee import Rates
from gyre_sdk.trainer.cells.lookout import AT_ONCE, Lookout

__all__ = ["RateMeter", "Reading", "between", "cache_tokens", "reading"]

_PERIOD_S = 2.0
"""Seconds between two looks."""
_LONGEST_S = 10.0
"""Seconds after which two readings tell nothing about what was in between."""
_TIMEOUT_S = 2.0
_SAMPLE = re.compile(
    r"^vllm:(generation_tokens_total|num_requests_running|num_requests_waiting)(?:\{.*\})? (\S+)$", re.MULTILINE
)


_CACHE = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_PAIR = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Reading:
    """What a replica said of itself."""

    at: float
    """Seconds of the clock."""
    sampled: float
    """Tokens since it started."""
    calls: float
    """Requests that it has, running and waiting."""


def reading(metrics: str, at: float) -> Reading | None:
    """Return what a replica's `/metrics` say, summed over its engines; None where they do not."""
    sums: dict[str, float] = {}
    for name, text in _SAMPLE.findall(metrics):
        try:
            sums[name] = sums.get(name, 0.0) + float(text)
        except ValueError:
            return None
    if len(sums) < 3:
        return None
    return Reading(at, sums["generation_tokens_total"], sums["num_requests_running"] + sums["num_requests_waiting"])


def cache_tokens(metrics: str) -> float | None:
    """Return for how many tokens a replica holds keys and values, as its `/metrics` say; None where they do not.

    vLLM's do; the embedded engine is bounded by its slots.
    """
    found = _CACHE.search(metrics)
    if found is None:
        return None
    labels = dict(_PAIR.findall(found.group(1)))
    try:
        return float(labels["num_gpu_blocks"]) * float(labels["block_size"])
    except (KeyError, ValueError):
        return None


def between(one: Reading, other: Reading) -> tuple[float, float] | None:
    """Return the requests and the tokens per second between two readings of a replica.

    None where they tell nothing: it had no requests, was started anew, or was not asked for a while.
    """
    seconds, sampled = other.at - one.at, other.sampled - one.sampled
    if not 0 < seconds <= _LONGEST_S or sampled < 0 or not (one.calls and other.calls):
        return None
    return (one.calls + other.calls) / 2, sampled / seconds


class RateMeter(Lookout):
    """Looks at replicas every two seconds until it is stopped."""

    def __init__(self, urls: Callable[[], Sequence[str]], clock: Clock = time) -> None:
        """`urls`: of the replicas, those that take no requests now among them."""
        super().__init__("rates of replicas", _PERIOD_S, httpx.Client(timeout=_TIMEOUT_S, trust_env=False))
        self.rates = Rates()
        """What was seen so far."""
        self.calls: float | None = None
        """Requests that all replicas had at the last look; None where none says."""
        self.busiest = 0.0
        """Requests that one replica had at most at the last look."""
        self.looked = float("-inf")
        """When the last look ended; seconds of the clock."""
        self.kv_tokens: float | None = None
        """Tokens whose keys and values a replica holds; None where none has said."""
        self._urls = urls
        self._clock = clock
        self._before: dict[str, Reading] = {}

    def beat(self) -> None:
        """Look at each replica once; of very many at some, since all are alike."""
        urls = list(self._urls())
        asked = urls[:AT_ONCE]
        read = zip(asked, self.each(self._read, asked), strict=True)
        found = {url: said for url, said in read if said is not None}
        for url, said in found.items():
            seen = between(self._before[url], said) if url in self._before else None
            if seen is not None:
                self.rates = self.rates.after(*seen)
        self._before = found
        self.busiest = max((said.calls for said in found.values()), default=0.0)
        self.calls = len(urls) * sum(said.calls for said in found.values()) / len(found) if found else None
        self.looked = self._clock.monotonic()

    def _read(self, url: str) -> Reading | None:
        try:
            page = self._http.get(f"{url}/metrics").text
        except httpx.HTTPError:
            return None
        self.kv_tokens = self.kv_tokens or cache_tokens(page)
        return reading(page, self._clock.monotonic())
