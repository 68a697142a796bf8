"""Low-rank adapters under versioned names: small files, and no pause, since each request names the version it wants.

A call keeps the adapter that it began with; calls that begin later name the newer one. vLLM keeps the cached keys and
values of each name apart. The weights below the adapters never change.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gyre_sdk.errors import PublishError
from gyre_sdk.trainer.transports.checks import Expected, Verdict, adapter_fingerprints
from gyre_sdk.trainer.transports.file import Clock, newer
from gyre_sdk.trainer.transports.replica import Replica
from gyre_sdk.trainer.weights import AdapterWeights, PolicyFiles, WeightFolder, adapter_weights

__all__ = ["BASE_LABEL", "LoraTransport"]

BASE_LABEL = "adapters"
"""Label of the weights below. No number: what sampled a call is told by the name that its request gave."""


class LoraTransport:
    """Publishes adapters to vLLM."""

    name = "lora"
    keep = 7
    """As many as vLLM holds beside the current one: it reads an adapter again that it has dropped while a call uses it."""

    def __init__(self, folder: WeightFolder, base: Path, owner: str) -> None:
        self._folder = folder
        self._base = PolicyFiles(0, base, "")
        self._prefix = re.sub(r"[^A-Za-z0-9_.-]", "-", owner) + "-v"
        self._expected = Expected()

    def collect(self, model: Any) -> AdapterWeights:
        """Return the adapter."""
        return adapter_weights(model)

    def write(self, version: int, weights: AdapterWeights) -> PolicyFiles:
        """Write an adapter's folder."""
        if not isinstance(weights, AdapterWeights):
            raise PublishError(
                "engine.transport = 'lora' publishes adapters, not full weights: publish the peft model itself, or set"
                " engine.transport = 'file'"
            )
        return self._folder.write_adapter(version, weights)

    def request_name(self, files: PolicyFiles) -> str | None:
        """Return the adapter's name; None for the policy below."""
        return None if files.adapter is None else f"{self._prefix}{files.version}"

    def bring(self, replica: Replica, files: PolicyFiles) -> dict[str, float]:
        """Load the adapter where it is not loaded yet, compare fingerprints, and unload those long out of use."""
        clock = Clock()
        if replica.version() != BASE_LABEL:
            clock.next("check")
            self._expected.compare(self._base, replica.fingerprints()).require(replica, self._base.version)
            replica.rename(BASE_LABEL)
        name = self.request_name(files)
        if name is None or files.adapter is None:
            return clock.stop()
        loaded = self._loaded(replica)
        newer(replica, max(loaded, default=0), files.version)
        if files.version not in loaded:
            clock.next("load")
            replica.load_adapter(name, str(files.adapter))
        clock.next("check")
        self.compare(replica, files).require(replica, files.version)
        for old in sorted(loaded)[:-1] if files.version not in loaded else sorted(loaded)[:-2]:
            replica.unload_adapter(f"{self._prefix}{old}")  # the one before may be named by requests on their way
        return clock.stop()

    def compare(self, replica: Replica, files: PolicyFiles) -> Verdict:
        """Compare the adapters that a replica holds and the files: the one among them that fits best."""
        assert files.adapter is not None
        verdicts = [Verdict(0, [])]
        for found in replica.adapters():
            dtype = next(iter(found.values()), "float32:").partition(":")[0]
            wanted = adapter_fingerprints(files.adapter, dtype)
            names = wanted.keys() | found.keys()
            verdicts.append(Verdict(len(names), sorted(n for n in names if wanted.get(n) != found.get(n))))
        return min(verdicts, key=lambda verdict: (not verdict.compared, len(verdict.differing)))

    def _loaded(self, replica: Replica) -> list[int]:
        numbers = (name.removeprefix(self._prefix) for name in replica.models() if name.startswith(self._prefix))
        return [int(number) for number in numbers if number.isdigit()]
