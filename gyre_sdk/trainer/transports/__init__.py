"""How new weights reach the replicas: `file`, `lora` or `nccl`, behind one small protocol.

A transport writes a version, brings a replica to it, and checks by fingerprints that the replica computes with these
weights. Which one: `choose`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gyre_sdk.trainer.transports.replica import Replica, Unready

if TYPE_CHECKING:
    from gyre_sdk.trainer.config import TrainerConfig
    from gyre_sdk.trainer.weights import PolicyFiles, WeightFolder

__all__ = ["Replica", "Transport", "Unready", "choose", "make"]


class Transport(Protocol):
    """A way of publishing. Its replicas are brought by several threads at a time, each replica by one."""

    name: str
    keep: int
    """Versions before the current one that stay on disk."""

    def collect(self, model: Any) -> Any:
        """Return what `write` takes of a model. Of a sharded model every process must call this."""

    def write(self, version: int, weights: Any) -> PolicyFiles:
        """Write a version to disk.

        Raises:
            PublishError: these are not weights that this transport can send.
        """

    def bring(self, replica: Replica, files: PolicyFiles) -> dict[str, float]:
        """Make a replica serve these weights, checked; nothing is sent to one that does. Return seconds by phase.

        Raises:
            Unready: it cannot now; try again.
            PublishError: it refused, or does not compute with these weights.
            httpx.TransportError: it cannot be reached.
        """

    def request_name(self, files: PolicyFiles) -> str | None:
        """Return what requests must name to be served by these weights; None: nothing."""


def choose(config: TrainerConfig) -> str:
    """Return the transport that a config means: adapters to a vLLM that serves them, files else."""
    if config.engine.transport != "auto":
        return config.engine.transport
    return "lora" if config.engine.kind == "vllm" and config.policy.lora is not None else "file"


def make(name: str, folder: WeightFolder, base: Path, owner: str) -> Transport:
    """Return a transport.

    Args:
        name: `file`, `lora` or `nccl`.
        folder: where versions are written.
        base: model folder of the starting policy.
        owner: names this training to the replicas.

    Raises:
        SettingsError: this machine cannot do it.
    """
    if name == "lora":
        from gyre_sdk.trainer.transports.lora import LoraTransport

        return LoraTransport(folder, base, owner)
    if name == "nccl":
        from gyre_sdk.trainer.transports.nccl import NcclTransport

        return NcclTransport(folder, owner)
    from gyre_sdk.trainer.transports.file import FileTransport

    return FileTransport(folder, owner)
