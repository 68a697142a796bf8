"""Weights as safetensors files that the replica reads: from shared memory on one machine, or from a shared disk.

A file is checked as it is announced, before the model is touched; the pause is for the load alone. It works with the embedded
engine and with vLLM, whose backend `gyre_file` is in `engines/vllm_worker.py`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gyre_sdk.errors import PublishError
from gyre_sdk.trainer.transports.checks import Expected, Verdict
from gyre_sdk.trainer.transports.replica import Replica
from gyre_sdk.trainer.weights import PolicyFiles, WeightFolder, full_weights

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Clock", "FileTransport", "newer"]


class FileTransport:
    """Publishes full weights, adapters merged."""

    name = "file"
    keep = 1

    def __init__(self, folder: WeightFolder, owner: str) -> None:
        self._folder = folder
        self._owner = owner
        self._expected = Expected()

    def collect(self, model: Any) -> Mapping[str, Tensor]:
        """Return the full weights."""
        return full_weights(model)

    def write(self, version: int, weights: Mapping[str, Tensor]) -> PolicyFiles:
        """Write a model folder."""
        return self._folder.write(version, weights)

    def request_name(self, files: PolicyFiles) -> str | None:
        """Return None: whoever asks gets the weights that are served."""
        return None

    def bring(self, replica: Replica, files: PolicyFiles) -> dict[str, float]:
        """Send the files where they are not served yet, and compare fingerprints."""
        clock = Clock()
        version, label = str(files.version), replica.version()
        if label is not None and label.isdigit():
            newer(replica, int(label), files.version)
        started_so = label is not None and not label.isdigit()
        if label != version:
            self._claim(replica)
        clock.next("check")
        served = (label == version or started_so) and self.compare(replica, files).good
        if not served:
            self._send(replica, files, clock)
        elif started_so:
            replica.rename(version)
        if replica.is_paused():  # a trainer that died in the middle left it so
            replica.resume()
        return clock.stop()

    def compare(self, replica: Replica, files: PolicyFiles) -> Verdict:
        """Compare what a replica computes with and the files."""
        return self._expected.compare(files, replica.fingerprints())

    def _claim(self, replica: Replica) -> None:
        replica.claim(self._owner)

    def _send(self, replica: Replica, files: PolicyFiles, clock: Clock) -> None:
        clock.next("send")
        replica.start()
        for path in files.model_files:
            replica.update({"path": str(path), "version": files.version, "owner": self._owner})
        self._expected.prepare(files)
        clock.next("pause")
        with replica.paused():
            clock.next("load")
            replica.finish(str(files.version))
            clock.next("check")
            self.compare(replica, files).require(replica, files.version)


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._name = "ask"
        self._since = time.monotonic()

    def next(self, name: str) -> None:
        """End a phase and begin the next."""
        now = time.monotonic()
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + now - self._since
        self._name, self._since = name, now

    def stop(self) -> dict[str, float]:
        """Return the seconds of each phase."""
        self.next("")
        return self._seconds


def newer(replica: Replica, served: int, version: int) -> None:
    """Refuse to publish over a newer version.

    Raises:
        PublishError: another trainer publishes there.
    """
    if served > version:
        raise PublishError(
            f"replica {replica.url} serves version {served}, newer than version {version}: another trainer publishes to"
            " it; end that one, or restart the replica"
        )
