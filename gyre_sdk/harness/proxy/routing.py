"""Which replica serves a call: a table and a choice. Pure; the shell reports loads, failures and recoveries.

A run stays with the replica that has its prefix in cache, unless that one carries much more than the least loaded.
Load is counted in tokens in flight, by the proxy itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import msgspec

_SLACK = 4096
"""Tokens in flight by which a run's own replica may exceed the least loaded one."""


class ReplicaState(StrEnum):
    """Whether new calls may go to a replica."""

    SERVING = "serving"
    DRAINING = "draining"
    """Finishes what it has, takes nothing new."""
    GONE = "gone"
    """Does not answer; comes back when its health check does."""


class ReplicaSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A replica as it is announced."""

    url: str
    version: int = 0
    """Weights that it serves."""


@dataclass(slots=True)
class Replica:
    """A replica as the proxy sees it."""

    url: str
    version: int
    state: ReplicaState = ReplicaState.SERVING
    calls: int = 0
    """Attempts in flight."""
    tokens: int = 0
    """Prompt tokens of the attempts in flight and the most that they may still sample."""


class Routes:
    """The table of replicas."""

    def __init__(self, specs: Iterable[ReplicaSpec] = ()) -> None:
        self._replicas: dict[str, Replica] = {}
        self._homes: dict[str, str] = {}
        self.set(specs)

    @property
    def replicas(self) -> list[Replica]:
        """Replicas in the order announced."""
        return list(self._replicas.values())

    @property
    def version(self) -> int:
        """Newest version that a replica serves; 0 without replicas."""
        return max((replica.version for replica in self._replicas.values()), default=0)

    def set(self, specs: Iterable[ReplicaSpec]) -> None:
        """Replace the table. Replicas that stay keep their load; those left out get no new calls."""
        table: dict[str, Replica] = {}
        for spec in specs:
            url = spec.url.rstrip("/")
            table[url] = self._replicas.get(url) or Replica(url, spec.version)
            table[url].version, table[url].state = spec.version, ReplicaState.SERVING
        self._replicas = table

    def mark(self, url: str, state: ReplicaState) -> bool:
        """Set a replica's state; True when that changed it."""
        replica = self._replicas.get(url)
        if replica is None or replica.state is state:
            return False
        replica.state = state
        return True

    def choose(self, run: str, avoid: str | None = None) -> Replica | None:
        """Return the replica for a run's next attempt, or None when none serves."""
        serving = [replica for replica in self._replicas.values() if replica.state is ReplicaState.SERVING]
        others = [replica for replica in serving if replica.url != avoid] or serving
        if not others:
            return None
        least = min(others, key=lambda replica: (replica.tokens, replica.calls))
        home = next((replica for replica in others if replica.url == self._homes.get(run)), least)
        chosen = home if home.tokens <= 2 * least.tokens + _SLACK else least
        self._homes[run] = chosen.url
        return chosen

    def opened(self, url: str, tokens: int) -> None:
        """Count an attempt."""
        self._count(url, 1, tokens)

    def closed(self, url: str, tokens: int) -> None:
        """Count an attempt's end."""
        self._count(url, -1, -tokens)

    def forget(self, run: str) -> None:
        """Drop what is known of a run that ended."""
        self._homes.pop(run, None)

    def _count(self, url: str, calls: int, tokens: int) -> None:
        replica = self._replicas.get(url)
        if replica is not None:
            replica.calls = max(0, replica.calls + calls)
            replica.tokens = max(0, replica.tokens + tokens)
