"""Publication: new weights reach every replica under a new version, checked, and the proxy learns of it.

Order: allocate the version durably -> write it -> bring each replica to it, all at a time -> tell the proxy -> record it
as published -> remove old ones. What a replica computes with is compared with what was written before calls go to it.

A replica that dies takes no calls until it has been brought to `Publisher.current` again. One that misses a publication
for longer than `patience` is left behind as long as another one took it, and is brought later.

A replica whose devices are needed for something else is withdrawn: it takes no calls and no publications, and nothing but
`restore` brings it back. While all are withdrawn, a publication writes and records, and brings nobody.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import httpx

from gyre_sdk.errors import PublishError, ServiceError, TrainerError
from gyre_sdk.events import ReplicaBrought, ReplicaLost, VersionPublished
from gyre_sdk.harness.ports import Observer
from gyre_sdk.harness.service import Drained, ServiceClient
from gyre_sdk.trainer import ledger as durable
from gyre_sdk.trainer.routes import Routes
from gyre_sdk.trainer.transports import Replica, Transport, Unready
from gyre_sdk.trainer.transports.bringing import PAUSE, at_once, bring_patiently, still_serves
from gyre_sdk.trainer.weights import AdapterWeights, PolicyFiles, WeightFolder

if TYPE_CHECKING:
    from gyre_sdk.trainer.terms import Mandate

PATIENCE = 120.0
RELEASED = "released"
"""Label of weights that belong to no training any more."""
_WATCH = 1.0
"""Seconds between looks at replicas that gyre did not start."""

_log = logging.getLogger("gyre.trainer")


class Publisher:
    """Sends weights out. `current` is the version that a replica must serve now."""

    def __init__(
        self,
        ledger: durable.Ledger,
        folder: WeightFolder,
        start: PolicyFiles,
        *,
        observer: Observer,
        transport: Transport | None = None,
        check: Callable[[], None] = lambda: None,
        patience: float = PATIENCE,
        mandate: Mandate | None = None,
    ) -> None:
        """`check` raises when a replica was given up by its supervisor. Without a transport, files are sent."""
        if transport is None:
            from gyre_sdk.trainer.transports.file import FileTransport

            transport = FileTransport(folder, "")
        self.current = start
        self._transport: Transport = transport
        self._ledger = ledger
        self._folder = folder
        self._observer = observer
        self._check = check
        self._patience = patience
        self._mandate = mandate
        self._routes = Routes()
        self._locks: dict[str, threading.Lock] = {}
        """One per replica: it is brought by one thread at a time."""
        self._serving: dict[str, PolicyFiles] = {}
        """Replicas that calls may go to, and what they were seen to serve."""
        self._withdrawn: set[str] = set()
        """Replicas that take neither calls nor publications."""
        self._table = threading.Lock()
        """Guards `current` and the tables of who serves, who is withdrawn and who is being caught up; held for no I/O."""
        self._catching_up: set[str] = set()
        self._kept: list[int] = []
        self._closed = threading.Event()
        self._borrowed = False

    def connect(self, replicas: list[str], service: ServiceClient | None, *, watch: bool = False) -> None:
        """Say where to publish to, and which proxy routes calls there.

        Args:
            replicas: their addresses.
            watch: look after replicas that nobody else does: one that was started anew must not serve what it has.
        """
        self._locks = {url.rstrip("/"): threading.Lock() for url in replicas}
        self._withdrawn.clear()
        self._routes = Routes(service)
        self._borrowed = watch
        if watch:
            threading.Thread(target=self._watch, name="watch replicas", daemon=True).start()

    def start(self) -> None:
        """Bring every replica to `current` and route calls to them.

        Raises:
            PublishError: none could be brought, or the proxy was not told.
        """
        self._bring_all(self.current, self._urls())
        self.route()

    def assume(self) -> None:
        """Route calls to every replica as if it served `current`, unseen: where publication is off.

        Raises:
            PublishError: the proxy was not told.
        """
        self._serving = dict.fromkeys(self._locks, self.current)
        self.route()

    def close(self) -> None:
        """Stop looking after replicas, and let other trainers publish to those that go on."""
        self._closed.set()
        for url in list(self._serving) if self._borrowed else ():
            try:
                with self._locks[url], self.replica(url) as replica:
                    replica.release()
                    replica.rename(RELEASED)
            except (httpx.TransportError, Unready, TrainerError) as error:
                _log.warning("replica %s was not released: %s", url, error)

    def replica(self, url: str) -> Replica:
        """Return one to steer."""
        return Replica(url, self.current.version, self._mandate)

    def collect(self, model: Any) -> Any:
        """Return what the transport sends of a model. Of a sharded model every process must call this."""
        return self._transport.collect(model)

    def publish(self, weights: Any, step: int) -> int:
        """Publish weights that `step` optimizer steps are behind; return their version.

        Args:
            weights: a model, which is sent as its transport does: adapters alone, or full weights with adapters merged;
                or what `collect` returned: tensors by name, or an adapter.
            step: of the ledger.

        Raises:
            PublishError: no replica, or not the proxy, could be brought to the version.
        """
        began = time.monotonic()
        version = self._ledger.allocate_version(step, at=time.time())
        if not isinstance(weights, Mapping | AdapterWeights):
            weights = self._transport.collect(weights)
        collected = time.monotonic()
        previous = self.current
        fresh = self._transport.write(version, weights)
        written = time.monotonic()
        with self._table:
            self.current = fresh  # from here on a replica that is started again is brought to these weights
            urls = self._urls()
        phases = self._bring_all(fresh, urls)
        brought = time.monotonic()
        self.route()
        self._ledger.add(durable.VersionPublished(version, fresh.digest), at=time.time())
        self._kept = [*self._kept, previous.version][-self._transport.keep :]
        self._folder.prune({version, *self._kept})
        ended = time.monotonic()
        self._observer(VersionPublished(time.time(), version, ended - began))
        slowest = ", ".join(f"{name} {seconds:.3f}" for name, seconds in phases.items())
        spent = f"collect {collected - began:.3f}, write {written - collected:.3f}, replicas {brought - written:.3f}"
        spent = f"{spent} (slowest: {slowest}), route {ended - brought:.3f}"
        _log.info("version %d is served after %.3f s by %s: %s", version, ended - began, self._transport.name, spent)
        return version

    def route(self) -> None:
        """Tell the proxy which replica serves which version. Replicas that are behind are left out.

        Raises:
            PublishError: the proxy cannot be told.
        """
        try:
            self._routes.tell(self._rows)
        except ServiceError as error:
            raise PublishError(
                f"version {self.current.version} is served, but the proxy was not told: {error}"
            ) from error

    # -- replicas that do something else for a while -----------------------------------------------------------------

    def can_route(self) -> bool:
        """Tell whether the proxy answers now; asked once, for a second."""
        return self._routes.answer()

    def withdraw(self, url: str, seconds: float) -> Drained:
        """Take a replica out of routing and of publication; return when nothing of ours runs there any more.

        What runs there may end within `seconds`; then it goes on elsewhere.

        Raises:
            PublishError: nothing is published to it, or the proxy was not told. It is withdrawn all the same.
        """
        url = url.rstrip("/")
        with self._table:
            if url not in self._locks:
                raise PublishError(f"nothing is published to replica {url}; it cannot be withdrawn")
            self._withdrawn.add(url)
            self._serving.pop(url, None)
        try:
            drained = self._routes.drain(url, seconds)
        except ServiceError as error:
            raise PublishError(f"replica {url} was withdrawn, but the proxy was not told: {error}") from error
        with self._lock(url):  # a publication that was on its way there has ended
            return drained

    def restore(
        self, url: str, *, awake: Callable[[], None] = lambda: None, patience: float | None = None
    ) -> dict[str, float]:
        """Bring a replica to `current`, checked, and route calls to it; return seconds by phase.

        One that is not known is added. Where a newer version was published meanwhile, it is brought again.

        Args:
            awake: called when it holds the weights, before calls go there.
            patience: seconds that it may be unable to take them; None: as long as in a publication.

        Raises:
            PublishError: it could not be brought or the proxy was not told; it stays withdrawn.
        """
        url = url.rstrip("/")
        with self._table:
            self._withdrawn.add(url)
            self._locks.setdefault(url, threading.Lock())
        sums: dict[str, float] = {}
        while True:
            files = self.current
            try:
                phases = self._bring(url, files, self._patience if patience is None else patience)
            except PublishError:
                if files is self.current:
                    raise
                continue  # of a version that is gone
            for name, seconds in phases.items():
                sums[name] = sums.get(name, 0.0) + seconds
            began = time.monotonic()
            awake()
            sums["awake"] = sums.get("awake", 0.0) + time.monotonic() - began
            with self._table:
                if files is not self.current:
                    continue
                self._withdrawn.discard(url)
                self._serving[url] = files
            break
        began = time.monotonic()
        try:
            self.route()
        except PublishError:
            with self._table:
                self._withdrawn.add(url)
                self._serving.pop(url, None)
            raise
        return sums | {"route": time.monotonic() - began}

    def forget(self, url: str) -> None:
        """Publish to a replica no more, for good; what runs there goes on elsewhere."""
        url = url.rstrip("/")
        self.lost(url)
        with self._table:
            self._locks.pop(url, None)
            self._withdrawn.discard(url)
            self._serving.pop(url, None)

    # -- replicas that come and go -----------------------------------------------------------------------------------

    def lost(self, url: str) -> None:
        """Note that a replica died: calls may not go there before it was brought to `current` again."""
        url = url.rstrip("/")
        with self._table:
            if self._serving.pop(url, None) is None:
                return
        self._observer(ReplicaLost(time.time(), url))
        try:
            self._routes.drain(url, 0.0)
        except ServiceError as error:
            _log.warning("the proxy was not told that replica %s died: %s", url, error)
        if url in self._serving:
            self._tell(url)  # it was brought meanwhile, and may have been announced before it was drained

    def returned(self, url: str, *, known: bool = True) -> None:
        """Bring a replica that was started again, in a thread of its own, and route calls to it; not `known`: a new one."""
        url = url.rstrip("/")
        with self._table:
            if not known:
                self._withdrawn.discard(url)
                self._locks.setdefault(url, threading.Lock())
            if url in self._catching_up or url not in self._locks or url in self._withdrawn:
                return
            self._catching_up.add(url)
        threading.Thread(target=self._catch_up, args=(url,), name=f"catch up {url}", daemon=True).start()

    def _catch_up(self, url: str) -> None:
        try:
            while not self._closed.is_set() and not self._caught_up(url):
                files = self.current
                try:
                    with self._lock(url), self.replica(url) as replica:
                        if url in self._withdrawn:
                            continue
                        self._transport.bring(replica, files)
                        self._note(url, files)
                except (httpx.TransportError, Unready):
                    self._closed.wait(PAUSE)
                else:
                    if files is self.current:
                        self._tell(url)
        except TrainerError as error:
            _log.error("replica %s stays out of service: %s", url, error)
        finally:
            with self._table:
                self._catching_up.discard(url)

    def _caught_up(self, url: str) -> bool:
        """Tell whether a replica needs no catching up any more, and let go of it if so: who dies again is begun with anew."""
        with self._table:
            over = url in self._withdrawn or url not in self._locks or self._serving.get(url) is self.current
            if over:
                self._catching_up.discard(url)
            return over

    def _tell(self, url: str) -> None:
        try:
            self.route()
        except PublishError as error:  # a proxy that is away takes the table when it is back
            _log.warning("the proxy was not told of replica %s: %s", url, error)

    def _watch(self) -> None:
        while not self._closed.wait(_WATCH):
            for url, files in list(self._serving.items()):
                if self._lock(url).locked() or files is not self.current:
                    continue
                if not still_serves(self.replica(url), files.version) and files is self.current:
                    _log.warning("replica %s does not serve version %d any more", url, files.version)
                    self.lost(url)
                    self.returned(url)

    # -- bringing ----------------------------------------------------------------------------------------------------

    def _rows(self) -> list[dict[str, Any]]:
        """Return the table as the proxy takes it."""
        name = self._transport.request_name
        with self._table:
            return [{"url": url, "version": one.version, "model": name(one)} for url, one in self._serving.items()]

    def _urls(self) -> list[str]:
        return [url for url in self._locks if url not in self._withdrawn]

    def _lock(self, url: str) -> threading.Lock:
        return self._locks.get(url) or threading.Lock()  # of its own once it is forgotten

    def _note(self, url: str, files: PolicyFiles) -> None:
        """Note what a replica serves, unless it was withdrawn meanwhile."""
        with self._table:
            if url not in self._locks or url in self._withdrawn:
                return
            known = url in self._serving
            self._serving[url] = files
        if not known:
            self._observer(ReplicaBrought(time.time(), url, files.version))

    def _bring_all(self, files: PolicyFiles, urls: list[str]) -> dict[str, float]:
        """Bring these replicas, at the same time; return the phases of the slowest."""
        phases, behind = at_once(lambda url: self._update(url, files), urls)
        for url in behind:
            self.lost(url)
        if behind and len(behind) == len(urls):
            raise behind[urls[0]]
        for url in urls:
            if url not in self._serving and url not in self._withdrawn:
                _log.warning("replica %s misses version %d, and is brought when it is back", url, files.version)
                self.returned(url)
        return phases

    def _update(self, url: str, files: PolicyFiles) -> dict[str, float]:
        how = {"wanted": lambda: url not in self._withdrawn, "brought": lambda: self._note(url, files)}
        return self._bring(url, files, self._patience, **how)

    def _bring(self, url: str, files: PolicyFiles, patience: float, **how: Callable[[], Any]) -> dict[str, float]:
        return bring_patiently(
            self._transport,
            url,
            files,
            lock=self._lock(url),
            mandate=self._mandate,
            patience=patience,
            refused=lambda: self.lost(url),  # it must not serve what it comes back with
            check=self._check,
            **how,
        )
