"""Weights from GPU to GPU with vLLM's own NCCL engine, for replicas whose machine shares no disk with the trainer's.

The trainer's side is vLLM's (`vllm.distributed.weight_transfer`), so vLLM must be importable where the trainer runs:
`pip install 'gyre-sdk[train,serve]'`. The version is also written as a folder: a replica that is started again by gyre
starts from it. vLLM's engine knows no owner; a newer version that is served there is all that is refused.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

from gyre_sdk.errors import PublishError, SettingsError
from gyre_sdk.trainer.transports.file import Clock, FileTransport
from gyre_sdk.trainer.transports.replica import Replica
from gyre_sdk.trainer.weights import PolicyFiles, WeightFolder

__all__ = ["NcclTransport"]

_PATIENCE = 600.0
"""Seconds that a transfer may take: a peer that died leaves NCCL waiting for ever."""


class NcclTransport(FileTransport):
    """Publishes full weights over NCCL, beside the files of each version."""

    name = "nccl"

    def __init__(self, folder: WeightFolder, owner: str) -> None:
        """Check that this machine can.

        Raises:
            SettingsError: torch sees no GPU, or vLLM is not installed beside gyre.
        """
        import torch

        if not torch.cuda.is_available():
            raise SettingsError(
                "engine.transport = 'nccl' sends from GPU to GPU, and torch sees no GPU here; use engine.transport = 'file'"
            )
        try:
            import vllm.distributed.weight_transfer  # noqa: F401
        except ImportError as error:
            raise SettingsError(
                "engine.transport = 'nccl' needs vLLM where the trainer runs: pip install 'gyre-sdk[train,serve]', or use"
                f" engine.transport = 'file' ({error})"
            ) from error
        super().__init__(folder, owner)
        self._lines: dict[str, _Line] = {}

    def _claim(self, replica: Replica) -> None:
        """Do nothing: vLLM's engine knows no owner."""

    def _send(self, replica: Replica, files: PolicyFiles, clock: Clock) -> None:
        clock.next("connect")
        line = self._lines.pop(replica.url, None) or _Line(replica)
        self._expected.prepare(files)
        clock.next("pause")
        with replica.paused():
            clock.next("load")
            line.send(replica, files)
            clock.next("check")
            self.compare(replica, files).require(replica, files.version)
        self._lines[replica.url] = line  # one that failed is made anew: its group is of no use any more


class _Line:
    """An NCCL group of this process and one replica's workers."""

    def __init__(self, replica: Replica) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        self._source = _source()
        self._client = _Client(replica)
        info = NCCLTrainerInitInfo(
            rank=0, master_address=_address(replica), master_port=_port(), world_size=1 + replica.world_size()
        )
        self._engine = _within(
            lambda: WeightTransferTrainerFactory.trainer_init(info, client=self._client, source=self._source), replica
        )

    def send(self, replica: Replica, files: PolicyFiles) -> None:
        """Send a version and finish it there under its label."""
        self._source.files = files.model_files
        self._client.replica, self._client.label = replica, str(files.version)
        _within(self._engine.send_weights, replica)


class _Client:
    """What vLLM's trainer engine says to the replica (`VLLMWeightSyncClient`)."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.label = ""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.replica.post("/init_weight_transfer_engine", {"init_info": init_info}, timeout=_PATIENCE)

    def start_weight_update(self) -> None:
        self.replica.start()

    def update_weights(self, update_info: Any) -> None:
        self.replica.update(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.replica.finish(weight_version or self.label)


def _source() -> Any:
    """Return a source over the files of a version, tensor by tensor on the GPU."""
    import torch
    from safetensors import safe_open
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class FilesSource(WeightSource):  # type: ignore[misc]
        def __init__(self) -> None:
            self.files: list[Any] = []

        def metadata(self) -> list[Any]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors("cpu")]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from self._tensors("cuda")

        def _tensors(self, device: str) -> Iterator[tuple[str, torch.Tensor]]:
            for path in self.files:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - not a mapping
                        yield name, file.get_tensor(name).to(device)

    return FilesSource()


def _within(act: Any, replica: Replica) -> Any:
    """Do what may never come back, in a thread that is left behind then."""
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(act())
        except BaseException as error:  # boundary: of the thread; raised below
            failure.append(error)

    thread = threading.Thread(target=run, name=f"nccl {replica.url}", daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    if failure:
        raise failure[0]
    if not outcome:
        raise PublishError(
            f"NCCL transfer to replica {replica.url} has not ended after {_PATIENCE:.0f} s; restart the replica, then run"
            " the same command again: it resumes"
        )
    return outcome[0]


def _address(replica: Replica) -> str:
    """Return the address under which the replica's machine reaches this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((replica.host, 9))  # sends nothing: asks the routing table
        return str(probe.getsockname()[0])


def _port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])
