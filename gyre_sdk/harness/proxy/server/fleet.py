"""The replicas at run time: the routing table, who runs where, health checks, drains, and those who wait for a replica.

A replica that refuses connections is out at once: each is asked when it is announced. One that is silent while attempts run there is asked for its health
every 0.2 s; after two checks without an answer it is gone: its attempts are broken off and go on elsewhere, in less
than a second from its last byte.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from gyre_sdk.harness.proxy.routing import Health, Load, Need, Replica, ReplicaSpec, ReplicaState, Room, Routes
from gyre_sdk.harness.proxy.upstream import Probe, Upstream
from gyre_sdk.harness.proxy.wire import without_password

log = logging.getLogger(__name__)
_PERIOD = 0.2
"""Seconds between checks of replicas that are silent with attempts in flight, paused or gone."""
_IDLE_EVERY = 10
"""Other replicas are checked every so many periods."""
_TIMEOUT = 0.25
"""Seconds that a silent replica has to answer a check."""
_MISSES = 2
"""Checks in a row without an answer after which a replica is gone."""
_LONE_PATIENCE = 30.0
"""Seconds that a replica may be silent while no other one serves: moving its attempts would gain nothing."""
_ABORT_GRACE = 2.0
"""Seconds that an engine has to end attempts that it was asked to abort."""
_AILMENTS = {
    Probe.REFUSED: "refuses connections",
    Probe.UNWELL: "answers that it is not well",
    Probe.SILENT: "does not answer its health check",
}


@dataclass(slots=True, eq=False)
class Running:
    """An attempt from the choice of its replica to its end."""

    load: Load
    request_id: str
    task: asyncio.Task[object] | None = None
    """Who reads the engine's answer; None before the request is sent."""
    broken: str | None = None
    """Why the attempt was broken off from our side."""
    finished: bool = False
    """Whether the engine brought it to an end of its own."""
    room: Room | None = None
    """Kept for it elsewhere, while its replica is drained."""

    @property
    def url(self) -> str:
        """Return the replica's address."""
        return self.load.replica.url

    def break_off(self, message: str) -> None:
        """Stop reading: whoever reads gets a cancellation, and finds the reason in `broken`."""
        if self.broken is None:
            self.broken = message
            if self.task is not None:
                self.task.cancel()


@dataclass(frozen=True, slots=True)
class Drained:
    """What came of the attempts that a drained replica had."""

    finished: int
    """Ended there."""
    moved: int
    """Cut, to go on elsewhere."""


class Fleet:
    """Chooses replicas, knows what runs on each, and learns which of them live."""

    def __init__(self, upstream: Upstream, specs: Iterable[ReplicaSpec]) -> None:
        self.routes = Routes(specs)
        self.upstream = upstream
        self._changed = asyncio.Event()
        self._running: dict[Running, None] = {}
        self._ended = asyncio.Event()
        self._heard: dict[str, float] = {}
        self._silent: dict[str, float] = {}
        """When a replica that does not answer was first asked in vain."""
        self._ails: dict[str, str] = {}
        """What a replica that is gone does, in words."""
        self._probes: dict[str, asyncio.Task[None]] = {}

    # -- the table ---------------------------------------------------------------------------------------------------

    def set(self, specs: Iterable[ReplicaSpec]) -> None:
        """Replace the table."""
        self.routes.set(specs)
        self._look()

    def put(self, spec: ReplicaSpec) -> None:
        """Add a replica, or tell its new version."""
        self.routes.put(spec)
        self._look(spec.url)

    async def drain(self, url: str, seconds: float) -> Drained | None:
        """Take a replica out of service; return when nothing of ours runs there. None for an unknown one.

        Room for what runs there is kept elsewhere first. It may end within `seconds`; the rest is aborted, and goes on
        elsewhere from what it has sampled where that is exact. A replica that is announced again meanwhile keeps what it
        still has.
        """
        replica = self.routes.drain(url)
        return await self._empty(replica, seconds) if replica is not None else None

    async def remove(self, url: str) -> Drained | None:
        """Take a replica out of the table; what runs there goes on elsewhere. None for an unknown one."""
        replica = self.routes.remove(url)
        return await self._empty(replica, 0.0) if replica is not None else None

    def trouble(self) -> str:
        """Return what keeps each replica from serving, in words."""
        ails = [
            f"{without_password(item.url)} {self._ails.get(item.url) or f'is {item.state}'}"
            for item in self.routes.replicas
        ]
        return "; ".join(ails) or "none is announced"

    # -- attempts ----------------------------------------------------------------------------------------------------

    async def find(self, need: Need, request_id: str, patience: float) -> Running | None:
        """Return a place for an attempt, counted from now on; None when none came within `patience` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        while (load := self.routes.choose(need)) is None:
            changed, left = self._changed, deadline - loop.time()
            if left <= 0:
                return None
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                pass
        running = Running(load, request_id)
        self._running[running] = None
        return running

    def heard(self, running: Running, tokens: int) -> None:
        """Note that an attempt brought tokens: its replica lives."""
        self.routes.sampled(running.load, tokens)
        self._heard[running.url] = asyncio.get_running_loop().time()

    def over(self, running: Running) -> None:
        """Note that an attempt is over; once is enough."""
        if running in self._running:
            del self._running[running]
            self.routes.close(running.load)
            self._free(running)
            running.task = None
            if running.load.replica.draining:
                self._ended.set()
                self._ended = asyncio.Event()

    def on(self, replica: Replica) -> list[Running]:
        """Return the attempts on a replica."""
        return [running for running in self._running if running.load.replica is replica]

    # -- health ------------------------------------------------------------------------------------------------------

    def suspect(self, url: str) -> None:
        """Take a replica out until it answers its health check; asked at once."""
        if self.routes.mark(url, Health.GONE):
            self._check(url, patient=True)

    async def watch(self) -> None:
        """Check health for ever."""
        beat = 0
        loop = asyncio.get_running_loop()
        while True:
            watched = self.routes.watched
            if beat % _IDLE_EVERY == 0:
                self._keep({replica.url for replica in watched})
            for replica in watched:
                silent = replica.calls > 0 and loop.time() - self._heard.get(replica.url, 0.0) >= _PERIOD
                if silent or beat % _IDLE_EVERY == 0 or replica.health is not Health.LIVE:
                    self._check(replica.url, patient=not replica.calls)
            await asyncio.sleep(_PERIOD)
            beat += 1

    async def close(self) -> None:
        """Stop the checks that run."""
        probes = list(self._probes.values())
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)

    def _check(self, url: str, *, patient: bool) -> None:
        if url not in self._probes:
            probe = self._probes[url] = asyncio.create_task(self._probe(url, patient))
            probe.add_done_callback(lambda _: self._probes.pop(url, None))

    async def _probe(self, url: str, patient: bool) -> None:
        before = self._ails.get(url)
        health = await self.health(url, 2.0 if patient else _TIMEOUT)
        if health is None or (health is Health.GONE and self._is_waited_for(url)):
            return
        changed = self.routes.mark(url, health)
        if health is Health.GONE:
            if changed or before != self._ails[url]:
                self._tell(url)
            for running in list(self._running):
                if running.url == url:
                    running.break_off(f"replica {without_password(url)} {self._ails[url]}")
        elif changed:
            self._wake()

    def _is_waited_for(self, url: str) -> bool:
        """Tell whether a silent replica keeps its attempts: it is the only one, and may be busy with a huge prompt."""
        since = self._silent.get(url)
        if since is None or any(
            replica.url != url and replica.state is ReplicaState.SERVING for replica in self.routes.replicas
        ):
            return False
        return asyncio.get_running_loop().time() - max(since, self._heard.get(url, 0.0)) < _LONE_PATIENCE

    async def health(self, url: str, timeout: float) -> Health | None:
        """Ask a replica until it is clear how it is; None when the answers say nothing.

        A timeout longer than that of a silent replica is waited for once.
        """
        loop = asyncio.get_running_loop()
        misses = 0
        while True:
            asked = loop.time()
            match found := await self.upstream.probe(url, timeout):
                case Probe.LIVE | Probe.PAUSED:
                    self._silent.pop(url, None)
                    self._ails.pop(url, None)
                    return Health.LIVE if found is Probe.LIVE else Health.PAUSED
                case Probe.REFUSED | Probe.UNWELL:
                    self._silent.pop(url, None)
                    self._ails[url] = _AILMENTS[found]
                    return Health.GONE
                case Probe.UNASKED:
                    return None
                case Probe.SILENT:
                    if self._heard.get(url, 0.0) >= asked:
                        return None  # tokens came meanwhile
                    if loop.time() - asked > 2 * timeout:
                        return None  # this process was held up: its clock says nothing about the replica
                    self._silent.setdefault(url, asked)
                    misses += 1
                    if misses >= _MISSES or timeout > _TIMEOUT:
                        self._ails[url] = _AILMENTS[found]
                        return Health.GONE

    # -- inside ------------------------------------------------------------------------------------------------------

    def _look(self, url: str | None = None) -> None:
        """Check replicas that were just announced, or all, and tell those who wait for one."""
        for replica in self.routes.replicas:
            if url is None or replica is self.routes.get(url):
                self._check(replica.url, patient=True)
        self._wake()

    def _tell(self, url: str) -> None:
        replica = self.routes.get(url)
        if replica is not None and not replica.draining:
            log.warning("replica %s %s; calls go elsewhere, or wait", without_password(url), self._ails[url])

    def _keep(self, urls: Collection[str]) -> None:
        """Forget replicas that are there no more: every one that is started anew has an address of its own."""
        self._heard = {url: at for url, at in self._heard.items() if url in urls}
        self._silent = {url: at for url, at in self._silent.items() if url in urls}
        self._ails = {url: ailment for url, ailment in self._ails.items() if url in urls}
        self.upstream.keep(urls)

    async def _empty(self, replica: Replica, seconds: float) -> Drained:
        """Let a replica's attempts end, then cut what is left; return when none is left."""
        mine = self.on(replica)
        for running in mine:
            running.room = running.room or self.routes.reserve(running.load)
        try:
            return await self._emptied(mine, replica, seconds)
        finally:
            for running in mine:
                self._free(running)  # of those that stay: it was announced again

    async def _emptied(self, mine: list[Running], replica: Replica, seconds: float) -> Drained:
        await self._until_ended(mine, replica, seconds)
        if replica.draining:
            cut = [running for running in mine if running in self._running]
            await asyncio.gather(*(self._abort(running) for running in cut))
            await self._until_ended(cut, replica, _ABORT_GRACE)
            for running in cut:
                if running in self._running:
                    running.break_off(f"replica {without_password(replica.url)} was taken out of service")
            await self._until_ended(cut, replica, None)
        finished = sum(running.finished for running in mine)
        over = sum(running not in self._running for running in mine)
        return Drained(finished, over - finished)

    def _free(self, running: Running) -> None:
        room, running.room = running.room, None
        if room is not None:
            self.routes.free(room)

    async def _abort(self, running: Running) -> None:
        if running.task is None:
            running.break_off(f"replica {without_password(running.url)} was taken out of service")
        else:
            await self.upstream.abort(running.url, running.request_id)

    async def _until_ended(self, attempts: list[Running], replica: Replica, seconds: float | None) -> None:
        """Wait until attempts are over, for `seconds` at most, or until the replica is announced again."""
        try:
            async with asyncio.timeout(seconds):
                while replica.draining and any(running in self._running for running in attempts):
                    changed, ended = self._changed, self._ended
                    waits = [asyncio.ensure_future(event.wait()) for event in (changed, ended)]
                    try:
                        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for wait in waits:
                            wait.cancel()
        except TimeoutError:
            pass

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
