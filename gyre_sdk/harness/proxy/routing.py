"""Which replica serves a call: a table and a choice. Pure; the shell reports loads, failures and recoveries.

A run stays with the replica that has its prefix in cache, unless that one carries much more than the least loaded. Any
replica that serves may take any call of a run; an attempt that continues a cut one prefers the version that sampled the
first part, so that an answer has one version where that costs nothing.

Load is counted in tokens by the proxy itself: what an attempt's prompt costs to fill in, and what it may still sample.
It is counted from the choice on, so that calls which arrive together spread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

SLACK = 4096
"""Tokens by which the chosen replica may exceed twice the load of the least loaded one."""

_CACHED_SHARE = 8
"""A prompt token that the replica has in cache counts as one eighth of one that it has not."""


class ReplicaState(StrEnum):
    """Whether new attempts may go to a replica."""

    SERVING = "serving"
    DRAINING = "draining"
    """Finishes what it has, takes nothing new, until it is announced again."""
    PAUSED = "paused"
    """Answers, but queues what it is sent without a word; serves again when it is resumed."""
    GONE = "gone"
    """Does not answer; comes back when its health check does."""


class Health(StrEnum):
    """What a health check says of a replica."""

    LIVE = "live"
    PAUSED = "paused"
    GONE = "gone"


class ReplicaSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A replica as it is announced."""

    url: str
    version: int = 0
    """Weights that it serves."""
    model: str | None = None
    """What requests name there, for example the adapter that is this version; None: nothing."""


@dataclass(slots=True, eq=False)
class Replica:
    """A replica as the proxy sees it."""

    url: str
    version: int
    model: str | None = None
    health: Health = Health.LIVE
    draining: bool = False
    """Whether it was asked to take nothing new. Independent of its health: a drained replica that restarts stays out."""
    calls: int = 0
    """Attempts in flight."""
    tokens: int = 0
    """Load of the attempts in flight."""

    @property
    def state(self) -> ReplicaState:
        """Return what health and draining come to."""
        if self.health is Health.GONE:
            return ReplicaState.GONE
        if self.draining:
            return ReplicaState.DRAINING
        return ReplicaState.PAUSED if self.health is Health.PAUSED else ReplicaState.SERVING


class Need(msgspec.Struct, frozen=True):
    """What an attempt asks of a replica."""

    run: str
    prompt: int
    """Tokens that it sends."""
    left: int
    """Tokens that it may sample at most."""
    shared: int = 0
    """Of `prompt`, those that an earlier attempt of the run has sent or sampled already."""
    avoid: str | None = None
    """Replica that just failed: take another one where there is one."""
    version: int | None = None
    """Version that sampled the call's first tokens; None for a call that has none."""


@dataclass(slots=True, eq=False)
class Load:
    """What one attempt adds to its replica's load, from the choice to its end."""

    replica: Replica
    version: int
    """What the replica served at the choice."""
    run: str
    tokens: int
    left: int
    """Tokens that may still be sampled."""
    closed: bool = False
    model: str | None = None
    """What requests named at the choice."""


@dataclass(frozen=True, slots=True)
class Room:
    """What is kept for an attempt at the replica where it will go on if it does not end where it is."""

    replica: Replica
    tokens: int


@dataclass(slots=True)
class _Home:
    """Where a run's latest attempt went."""

    url: str
    warm: int | None = None
    """Version under which an attempt there has begun to sample: its prefix is in that replica's cache."""


class Routes:
    """The table of replicas."""

    def __init__(self, specs: Iterable[ReplicaSpec] = ()) -> None:
        self._replicas: dict[str, Replica] = {}
        self._left: dict[str, Replica] = {}
        self._homes: dict[str, _Home] = {}
        self.set(specs)

    @property
    def replicas(self) -> list[Replica]:
        """Replicas in the order announced."""
        return list(self._replicas.values())

    @property
    def watched(self) -> list[Replica]:
        """Replicas whose health matters: those announced, and those taken out that still have attempts."""
        self._left = {url: replica for url, replica in self._left.items() if replica.calls}
        return [*self._replicas.values(), *self._left.values()]

    @property
    def version(self) -> int:
        """Newest version that a replica serves; 0 without replicas."""
        return max((replica.version for replica in self._replicas.values()), default=0)

    def get(self, url: str) -> Replica | None:
        """Return an announced replica, or None."""
        return self._replicas.get(_plain(url))

    def set(self, specs: Iterable[ReplicaSpec]) -> None:
        """Replace the table. Replicas that stay keep their load; those left out get no new attempts."""
        before, self._replicas = self._replicas, {}
        for spec in specs:
            url = _plain(spec.url)
            self._announce(spec, before.pop(url, None))
        for replica in before.values():
            self._take_out(replica)

    def put(self, spec: ReplicaSpec) -> None:
        """Add a replica, or tell its new version; it serves, even if it was draining."""
        self._announce(spec, self._replicas.get(_plain(spec.url)))

    def remove(self, url: str) -> Replica | None:
        """Take a replica out of the table; None when it is not there."""
        replica = self._replicas.pop(_plain(url), None)
        if replica is not None:
            self._take_out(replica)
        return replica

    def drain(self, url: str) -> Replica | None:
        """Send a replica nothing new until it is announced again; None when it is not in the table, and carries nothing."""
        replica = self.get(url) or next((left for left in self.watched if left.url == _plain(url)), None)
        if replica is not None:
            replica.draining = True
        return replica

    def mark(self, url: str, health: Health) -> bool:
        """Note what a health check found; True when that changed something."""
        replica = self._replicas.get(url) or self._left.get(url)
        if replica is None or replica.health is health:
            return False
        replica.health = health
        if health is Health.GONE:
            self._homes = {run: home for run, home in self._homes.items() if home.url != url}
        return True

    def choose(self, need: Need) -> Load | None:
        """Choose the replica for an attempt and count its load there; None when none serves."""
        serving = [replica for replica in self._replicas.values() if replica.state is ReplicaState.SERVING]
        others = [replica for replica in serving if replica.url != need.avoid] or serving
        if not others:
            return None
        least = _least(others)
        bound = 2 * least.tokens + SLACK
        home = self._homes.get(need.run)
        near = [replica for replica in others if replica.tokens <= bound]
        same = [replica for replica in near if replica.version == need.version] if need.version is not None else []
        pool = same or near
        chosen = next((replica for replica in pool if home and replica.url == home.url), None) or _least(pool)
        warm = home is not None and home.url == chosen.url and home.warm == chosen.version
        if home is None or home.url != chosen.url:
            self._homes[need.run] = _Home(chosen.url)
        cached = min(need.shared, need.prompt) if warm else 0
        load = Load(
            chosen,
            chosen.version,
            need.run,
            need.prompt - cached + cached // _CACHED_SHARE + need.left,
            need.left,
            model=chosen.model,
        )
        chosen.calls += 1
        chosen.tokens += load.tokens
        return load

    def sampled(self, load: Load, count: int) -> None:
        """Note that an attempt has sampled `count` more tokens."""
        count = min(count, load.left)
        load.left -= count
        load.tokens -= count
        load.replica.tokens -= count
        home = self._homes.get(load.run)
        if home is not None and home.url == load.replica.url:
            home.warm = load.version

    def close(self, load: Load) -> None:
        """Note an attempt's end; once is enough."""
        if not load.closed:
            load.closed = True
            load.replica.calls -= 1
            load.replica.tokens -= load.tokens

    def reserve(self, load: Load) -> Room | None:
        """Choose where an attempt would go on, and count its load there, so that others spread; None when none serves.

        Its run is at home there from now on. To be freed when the attempt has ended, however it did.
        """
        there = self.choose(Need(load.run, load.tokens - load.left, load.left, version=load.version))
        if there is None:
            return None
        there.replica.calls -= 1  # nothing runs there yet
        return Room(there.replica, there.tokens)

    def free(self, room: Room) -> None:
        """Count what was kept no more."""
        room.replica.tokens -= room.tokens

    def forget(self, run: str) -> None:
        """Drop what is known of a run that ended."""
        self._homes.pop(run, None)

    def _announce(self, spec: ReplicaSpec, known: Replica | None) -> None:
        url = _plain(spec.url)
        replica = known or self._left.pop(url, None) or Replica(url, spec.version)
        replica.version, replica.model = spec.version, spec.model
        replica.health, replica.draining = Health.LIVE, False
        self._replicas[url] = replica

    def _take_out(self, replica: Replica) -> None:
        replica.draining = True
        if replica.calls:
            self._left[replica.url] = replica


def _least(replicas: Sequence[Replica]) -> Replica:
    return min(replicas, key=lambda replica: (replica.tokens, replica.calls))


def _plain(url: str) -> str:
    return url.rstrip("/")
