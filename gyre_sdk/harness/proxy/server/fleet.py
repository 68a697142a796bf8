"""The replicas at run time: the routing table, its health checks, and those who wait for a replica."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from gyre_sdk.harness.proxy.routing import Replica, ReplicaSpec, ReplicaState, Routes
from gyre_sdk.harness.proxy.upstream import Upstream

_PERIOD = 0.5
"""Seconds between checks of replicas that are gone."""
_SERVING_EVERY = 10
"""Replicas that serve are checked every so many periods."""


class Fleet:
    """Chooses replicas and learns which of them live."""

    def __init__(self, upstream: Upstream, specs: Iterable[ReplicaSpec]) -> None:
        self.routes = Routes(specs)
        self.upstream = upstream
        self._changed = asyncio.Event()
        self._probes: set[asyncio.Task[None]] = set()

    def set(self, specs: Iterable[ReplicaSpec]) -> None:
        """Replace the table."""
        self.routes.set(specs)
        self._wake()

    async def find(self, run: str, avoid: str | None, patience: float) -> Replica | None:
        """Return a replica for a run's next attempt; None when none came within `patience` seconds."""
        deadline = asyncio.get_running_loop().time() + patience
        while (replica := self.routes.choose(run, avoid)) is None:
            changed = self._changed
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return None
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                return self.routes.choose(run, avoid)
        return replica

    def suspect(self, url: str) -> None:
        """Take a replica out until it answers its health check; asked at once."""
        if self.routes.mark(url, ReplicaState.GONE):
            probe = asyncio.create_task(self._probe(url))
            self._probes.add(probe)
            probe.add_done_callback(self._probes.discard)

    async def watch(self) -> None:
        """Check health for ever."""
        beat = 0
        while True:
            await asyncio.sleep(_PERIOD)
            beat += 1
            for replica in self.routes.replicas:
                gone = replica.state is ReplicaState.GONE
                if gone or (replica.state is ReplicaState.SERVING and beat % _SERVING_EVERY == 0):
                    await self._probe(replica.url)

    async def close(self) -> None:
        """Stop the probes that run."""
        for probe in self._probes:
            probe.cancel()

    async def _probe(self, url: str) -> None:
        healthy = await self.upstream.healthy(url, 2.0)
        if self.routes.mark(url, ReplicaState.SERVING if healthy else ReplicaState.GONE):
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
