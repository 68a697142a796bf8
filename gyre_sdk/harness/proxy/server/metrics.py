"""What the proxy counts, as Prometheus' text format 0.0.4: `GET /metrics`, and `GET /healthz` beside it.

`/healthz` is open. `/metrics` is open on a proxy that listens on loopback only; on any other address it needs the
service key. Counting is an addition in a dictionary: it cannot fail a call. Counts start at 0 with the process.
"""

from __future__ import annotations

import ipaddress
import platform
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from importlib.metadata import version

from aiohttp import web

from gyre_sdk.harness.proxy.routing import ReplicaState, Routes
from gyre_sdk.harness.proxy.wire import without_password

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_DURATION = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_DURABLE = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Counter:
    """A count per combination of labels that only grows."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._values: Tally[tuple[str, ...]] = Tally()

    def add(self, *values: str, by: int = 1) -> None:
        """Add to the count of these label values."""
        self._values[values] += by

    def lines(self) -> Iterator[str]:
        """Yield the exposition's lines."""
        yield from _head(self._name, self._text, "counter")
        values = self._values if self._labels else {(): self._values[()]}
        for key, count in sorted(values.items()):
            yield f"{self._name}{_labels(dict(zip(self._labels, key, strict=True)))} {count}"


class Histogram:
    """Observations in seconds, counted by upper bounds."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def lines(self) -> Iterator[str]:
        """Yield the exposition's lines."""
        yield from _head(self._name, self._text, "histogram")
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f"{self._name}_bucket{_labels({'le': bound})} {total}"
        yield f"{self._name}_sum {self._sum!r}"
        yield f"{self._name}_count {total}"


class Metrics:
    """Everything that is counted."""

    def __init__(self) -> None:
        self.calls = Counter("gyre_calls_total", "Calls that ended.", "dialect", "status")
        self.attempts = Counter("gyre_attempts_total", "Engine requests that ended.", "end")
        self.tokens = Counter("gyre_tokens_total", "Tokens of calls that ended.", "kind")
        self.forks = Counter("gyre_forks_total", "Calls that do not continue a recorded path.", "reason")
        self.retries = Counter("gyre_retries_total", "Requests answered by an earlier one's calls.", "how")
        self.refusals = Counter("gyre_refusals_total", "Requests answered with an error.", "status", "code")
        self.first_token = Histogram(
            "gyre_first_token_seconds", "From a call's start to its first token.", _FIRST_TOKEN
        )
        self.duration = Histogram("gyre_call_seconds", "From a call's start to its end.", _DURATION)
        self.durable = Histogram("gyre_durable_seconds", "Wait until a call's end is durable.", _DURABLE)

    def attempt_ended(self, end: str) -> None:
        """Count an engine request."""
        self.attempts.add(end)

    def call_ended(self, dialect: str, status: str, seconds: float, prompt: int, sampled: int) -> None:
        """Count a call: prompt and sampled tokens, and how long it took."""
        self.calls.add(dialect, status)
        self.tokens.add("prompt", by=prompt)
        self.tokens.add("sampled", by=sampled)
        self.duration.observe(seconds)

    def lines(self) -> Iterator[str]:
        """Yield the exposition's lines."""
        for item in (self.calls, self.attempts, self.tokens, self.forks, self.retries, self.refusals):
            yield from item.lines()
        for histogram in (self.first_token, self.duration, self.durable):
            yield from histogram.lines()


class MetricsPage:
    """Handlers of `/metrics` and `/healthz`.

    Args:
        metrics: the counts.
        routes: the replicas.
        in_flight: gives the number of calls in flight.
        guard: makes a handler ask for the service key; None leaves `/metrics` open.
    """

    def __init__(
        self,
        metrics: Metrics,
        routes: Routes,
        in_flight: Callable[[], int],
        guard: Callable[[Handler], Handler] | None,
    ) -> None:
        self._metrics = metrics
        self._routes = routes
        self._in_flight = in_flight
        self._guard = guard

    def pages(self) -> list[web.RouteDef]:
        """Return the routes."""
        metrics = self._guard(self.metrics) if self._guard is not None else self.metrics
        return [web.get("/metrics", metrics), web.get("/healthz", self.healthz)]

    async def metrics(self, request: web.Request) -> web.Response:
        """Give the counts."""
        lines = [*self._metrics.lines(), *self._now()]
        return web.Response(body=("\n".join(lines) + "\n").encode(), headers={"Content-Type": CONTENT_TYPE})

    async def healthz(self, request: web.Request) -> web.Response:
        """Tell that the process serves, and how its replicas are; where none of them serves, calls wait."""
        states = Tally(replica.state.value for replica in self._routes.replicas)
        serving = states[ReplicaState.SERVING.value]
        status = "waiting" if states and not serving else "ok"
        return web.json_response({"status": status, "replicas_serving": serving, "replicas": states})

    def _now(self) -> Iterator[str]:
        replicas = self._routes.replicas
        yield from _gauge("gyre_calls_in_flight", "Calls in flight.", [({}, self._in_flight())])
        states = [
            ({"replica": without_password(item.url), "state": state}, int(item.state is state))
            for item in replicas
            for state in ReplicaState
        ]
        yield from _gauge("gyre_replica_state", "1 for the state that a replica is in.", states)
        attempts = [({"replica": without_password(item.url)}, item.calls) for item in replicas]
        yield from _gauge("gyre_replica_attempts", "Attempts in flight on a replica.", attempts)
        tokens = [({"replica": without_password(item.url)}, item.tokens) for item in replicas]
        yield from _gauge("gyre_replica_tokens", "Load of a replica in tokens.", tokens)
        versions = [({"replica": without_password(item.url)}, item.version) for item in replicas]
        yield from _gauge("gyre_replica_version", "Weights that a replica serves.", versions)
        build = {"version": version("gyre-sdk"), "python": platform.python_version()}
        yield from _gauge("gyre_build_info", "The build that answers.", [(build, 1)])


def loopback(host: str) -> bool:
    """Return whether an address to listen on can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _gauge(name: str, text: str, values: Iterable[tuple[Mapping[str, str], int]]) -> Iterator[str]:
    yield from _head(name, text, "gauge")
    for labels, value in values:
        yield f"{name}{_labels(labels)} {value}"


def _head(name: str, text: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _labels(values: Mapping[str, str]) -> str:
    if not values:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
