"""Publication: new weights reach every replica under a new version, and the proxy learns of it.

Order: allocate the version durably -> write the model folder -> for each replica start, update, finish, check -> tell the
proxy -> record it as published -> remove old folders. A replica that dies on the way is started again by its supervisor
from `Publisher.current`, and the publication is tried again there, within `PATIENCE` seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import httpx

from gyre_sdk.errors import PublishError, ServiceError
from gyre_sdk.events import VersionPublished
from gyre_sdk.harness.ports import Observer
from gyre_sdk.harness.service import ServiceClient
from gyre_sdk.trainer import ledger as durable
from gyre_sdk.trainer.weights import PolicyFiles, WeightFolder

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE = 120.0
_PAUSE = 0.5

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
        check: Callable[[], None] = lambda: None,
        patience: float = PATIENCE,
    ) -> None:
        """`check` raises when a replica was given up by its supervisor."""
        self.current = start
        self._ledger = ledger
        self._folder = folder
        self._observer = observer
        self._check = check
        self._patience = patience
        self._replicas: list[str] = []
        self._service: ServiceClient | None = None

    def connect(self, replicas: list[str], service: ServiceClient | None) -> None:
        """Say where to publish to."""
        self._replicas, self._service = replicas, service

    def publish(self, tensors: Mapping[str, Tensor], step: int) -> int:
        """Publish weights that `step` optimizer steps are behind; return their version.

        Raises:
            PublishError: a replica or the proxy could not be brought to the version.
        """
        began = time.monotonic()
        version = self._ledger.allocate_version(step, at=time.time())
        previous = self.current
        fresh = self._folder.write(version, tensors)
        self.current = fresh  # from here on a replica that is started again starts with these weights
        with httpx.Client(timeout=60.0) as http:
            for replica in self._replicas:
                self._update(http, replica, fresh)
        self.route()
        self._ledger.add(durable.VersionPublished(version, fresh.digest), at=time.time())
        self._folder.prune({version, previous.version})
        self._observer(VersionPublished(time.time(), version, time.monotonic() - began))
        return version

    def route(self) -> None:
        """Tell the proxy which replica serves which version.

        Raises:
            PublishError: the proxy cannot be told.
        """
        if self._service is None:
            return
        version = self.current.version
        try:
            self._service.set_replicas([{"url": url, "version": version} for url in self._replicas])
        except ServiceError as error:
            raise PublishError(f"version {version} is served, but the proxy was not told: {error}") from error

    def _update(self, http: httpx.Client, replica: str, files: PolicyFiles) -> None:
        give_up = time.monotonic() + self._patience
        while True:
            try:
                _drive(http, replica, files)
                return
            except (httpx.TransportError, _TryAgain) as error:
                self._check()
                if time.monotonic() > give_up:
                    raise PublishError(
                        f"version {files.version} did not reach replica {replica} in {self._patience:.0f} s:"
                        f" {type(error).__name__}: {error}; look at the engine's log, then run the same command again:"
                        " it resumes"
                    ) from error
                _log.warning("replica %s did not take version %d (%s); trying again", replica, files.version, error)
                time.sleep(_PAUSE)


class _TryAgain(Exception):
    """The replica is not ready for a weight update now."""


def _drive(http: httpx.Client, replica: str, files: PolicyFiles) -> None:
    """Run one weight-update session (vLLM's protocol) and check what is served afterwards."""
    version = str(files.version)
    if _served(http, replica) == version:
        return
    started = http.post(f"{replica}/start_weight_update", json={})
    if started.status_code == 400 and "already active" in started.text:
        # a session that a dead trainer left open: a file that does not exist ends it
        http.post(f"{replica}/update_weights", json={"update_info": {"path": f"{files.file}.end-of-session"}})
        raise _TryAgain("another weight update was open")
    _expect(started, replica, files, "start_weight_update")
    _expect(
        http.post(f"{replica}/update_weights", json={"update_info": {"path": str(files.file)}}),
        replica,
        files,
        "update_weights",
    )
    _expect(
        http.post(f"{replica}/finish_weight_update", json={"weight_version": version}),
        replica,
        files,
        "finish_weight_update",
    )
    served = _served(http, replica)
    if served != version:
        raise _TryAgain(f"it serves version {served} after the update")


def _served(http: httpx.Client, replica: str) -> str | None:
    response = http.get(f"{replica}/weight_info")
    if response.status_code != 200:
        raise _TryAgain(f"weight_info answered {response.status_code}")
    body: dict[str, Any] = response.json()
    version = body.get("weight_version")
    return None if version is None else str(version)


def _expect(response: httpx.Response, replica: str, files: PolicyFiles, route: str) -> None:
    if response.status_code >= 500:
        raise _TryAgain(f"{route} answered {response.status_code}: {response.text[:200]}")
    if response.status_code >= 400:
        raise PublishError(
            f"replica {replica} refused version {files.version} at {route} ({response.status_code}):"
            f" {response.text[:300]}; the policy in training and the one it serves must be the same model"
        )
