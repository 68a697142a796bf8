"""Publication: new weights reach every replica under a new version, checked, and the proxy learns of it.

Order: allocate the version durably -> write it -> bring each replica to it, all at a time -> tell the proxy -> record it
as published -> remove old ones. What a replica computes with is compared with what was written before calls go to it.

A replica that dies takes no calls until it has been brought to `Publisher.current` again. One that misses a publication
for longer than `patience` is left behind as long as another one took it, and is brought later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx

from gyre_sdk.errors import PublishError, ServiceError, TrainerError
from gyre_sdk.events import VersionPublished
from gyre_sdk.harness.ports import Observer
from gyre_sdk.harness.service import ServiceClient
from gyre_sdk.trainer import ledger as durable
from gyre_sdk.trainer.transports import Replica, Transport, Unready
from gyre_sdk.trainer.weights import AdapterWeights, PolicyFiles, WeightFolder

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE = 120.0
_PAUSE = 0.5
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
        self._service: ServiceClient | None = None
        self._locks: dict[str, threading.Lock] = {}
        """One per replica: it is brought by one thread at a time."""
        self._serving: dict[str, PolicyFiles] = {}
        """Replicas that calls may go to, and what they were seen to serve."""
        self._table = threading.Lock()
        self._catching_up: set[str] = set()
        self._kept: list[int] = []
        self._closed = threading.Event()
        self._borrowed = False

    def connect(self, replicas: list[str], service: ServiceClient | None, *, watch: bool = False) -> None:
        """Say where to publish to.

        Args:
            replicas: their addresses.
            service: the proxy that routes calls to them.
            watch: look after replicas that nobody else does: one that was started anew must not serve what it has.
        """
        self._locks = {url.rstrip("/"): threading.Lock() for url in replicas}
        self._service = service
        self._borrowed = watch
        if watch:
            threading.Thread(target=self._watch, name="watch replicas", daemon=True).start()

    def start(self) -> None:
        """Bring every replica to `current` and route calls to them.

        Raises:
            PublishError: none could be brought, or the proxy was not told.
        """
        self._bring_all(self.current)
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
        for url in self._serving if self._borrowed else ():
            try:
                with self._locks[url], Replica(url, self.current.version) as replica:
                    replica.release()
                    replica.rename(RELEASED)
            except (httpx.TransportError, Unready, PublishError) as error:
                _log.warning("replica %s was not released: %s", url, error)

    def collect(self, model: Any) -> Any:
        """Return what the transport sends of a model. Of a sharded model every process must call this."""
        return self._transport.collect(model)

    def publish(self, weights: Any, step: int) -> int:
        """Publish weights that `step` optimizer steps are behind; return their version.

        Args:
            weights: a model, or what `collect` returned: tensors by name, or an adapter.
            step: of the ledger.

        Raises:
            PublishError: no replica, or not the proxy, could be brought to the version.
        """
        if not isinstance(weights, Mapping | AdapterWeights):
            return self.publish_model(weights, step)
        return self._publish(lambda: weights, step)

    def publish_model(self, model: Any, step: int) -> int:
        """Publish a model as its transport sends it: adapters alone, or full weights with adapters merged."""
        return self._publish(lambda: self._transport.collect(model), step)

    def _publish(self, collect: Callable[[], Mapping[str, Tensor] | AdapterWeights], step: int) -> int:
        began = time.monotonic()
        version = self._ledger.allocate_version(step, at=time.time())
        weights = collect()
        collected = time.monotonic()
        previous = self.current
        fresh = self._transport.write(version, weights)
        written = time.monotonic()
        self.current = fresh  # from here on a replica that is started again starts with these weights
        phases = self._bring_all(fresh)
        brought = time.monotonic()
        self.route()
        self._ledger.add(durable.VersionPublished(version, fresh.digest), at=time.time())
        self._kept = [*self._kept, previous.version][-self._transport.keep :]
        self._folder.prune({version, *self._kept})
        ended = time.monotonic()
        self._observer(VersionPublished(time.time(), version, ended - began))
        _log.info(
            "version %d is served after %.3f s by %s: collect %.3f, write %.3f, replicas %.3f (slowest: %s), route %.3f",
            version,
            ended - began,
            self._transport.name,
            collected - began,
            written - collected,
            brought - written,
            ", ".join(f"{name} {seconds:.3f}" for name, seconds in phases.items()),
            ended - brought,
        )
        return version

    def route(self) -> None:
        """Tell the proxy which replica serves which version. Replicas that are behind are left out.

        Raises:
            PublishError: the proxy cannot be told.
        """
        if self._service is None:
            return
        with self._table:
            rows = [
                {"url": url, "version": files.version, "model": self._transport.request_name(files)}
                for url, files in self._serving.items()
            ]
            try:
                self._service.set_replicas(rows)
            except ServiceError as error:
                raise PublishError(
                    f"version {self.current.version} is served, but the proxy was not told: {error}"
                ) from error

    # -- replicas that come and go -----------------------------------------------------------------------------------

    def lost(self, url: str) -> None:
        """Note that a replica died: calls may not go there before it was brought to `current` again."""
        with self._table:
            if self._serving.pop(url.rstrip("/"), None) is None or self._service is None:
                return
            try:
                self._service.drain(url.rstrip("/"), seconds=0.0)
            except ServiceError as error:  # a proxy that is away takes the table when it is back
                _log.warning("the proxy was not told that replica %s died: %s", url, error)

    def returned(self, url: str) -> None:
        """Bring a replica that was started again, in a thread of its own; then route calls to it."""
        url = url.rstrip("/")
        with self._table:
            if url in self._catching_up or url not in self._locks:
                return
            self._catching_up.add(url)
        threading.Thread(target=self._catch_up, args=(url,), name=f"catch up {url}", daemon=True).start()

    def _catch_up(self, url: str) -> None:
        try:
            while not self._closed.is_set():
                files = self.current
                try:
                    with self._locks[url], Replica(url, files.version) as replica:
                        self._transport.bring(replica, files)
                        self._serving[url] = files
                    if files is self.current:
                        self.route()
                        return
                except (httpx.TransportError, Unready):
                    self._closed.wait(_PAUSE)
        except TrainerError as error:
            _log.error("replica %s stays out of service: %s", url, error)
        finally:
            with self._table:
                self._catching_up.discard(url)

    def _watch(self) -> None:
        while not self._closed.wait(_WATCH):
            for url, files in list(self._serving.items()):
                if self._locks[url].locked() or files is not self.current:
                    continue
                try:
                    with Replica(url, files.version) as replica:
                        label = replica.version()
                    same = label is not None and (not label.isdigit() or int(label) == files.version)
                    same = same and label != "default"
                except (httpx.TransportError, Unready, PublishError):
                    same = False
                if not same and files is self.current:
                    _log.warning("replica %s does not serve version %d any more", url, files.version)
                    self.lost(url)
                    self.returned(url)

    # -- bringing ----------------------------------------------------------------------------------------------------

    def _bring_all(self, files: PolicyFiles) -> dict[str, float]:
        """Bring all replicas, at the same time; return the phases of the slowest."""
        urls = list(self._locks)
        if not urls:
            return {}
        with ThreadPoolExecutor(len(urls), thread_name_prefix="publish") as pool:
            running = {url: pool.submit(self._update, url, files) for url in urls}
        failures: list[PublishError] = []
        phases: dict[str, float] = {}
        for url, future in running.items():
            error = future.exception()
            if error is None:
                found = future.result()
                phases = found if sum(found.values()) > sum(phases.values()) else phases
            elif isinstance(error, _Behind):
                failures.append(error)
                self.lost(url)
            else:
                raise error
        if len(failures) == len(urls):
            raise failures[0]
        for url in urls:
            if url not in self._serving:
                _log.warning(
                    "replica %s is left behind at version %d, and is brought when it is back", url, files.version
                )
                self.returned(url)
        return phases

    def _update(self, url: str, files: PolicyFiles) -> dict[str, float]:
        give_up = time.monotonic() + self._patience
        while True:
            try:
                with self._locks[url], Replica(url, files.version) as replica:
                    phases = self._transport.bring(replica, files)
                    self._serving[url] = files
                return phases
            except (httpx.TransportError, Unready) as error:
                if isinstance(error, httpx.ConnectError):
                    self.lost(url)  # it must not serve what it comes back with
                self._check()
                if time.monotonic() > give_up:
                    raise _Behind(
                        f"version {files.version} did not reach replica {url} in {self._patience:.0f} s:"
                        f" {type(error).__name__}: {error}; look at the engine's log, then run the same command again:"
                        " it resumes"
                    ) from error
                _log.warning("replica %s did not take version %d (%s); trying again", url, files.version, error)
                time.sleep(_PAUSE)


class _Behind(PublishError):
    """A replica could not be reached for longer than the publisher waits."""
