"""The ranks of a satellite's worker: rank 0 starts the others on the same machine, one on each device.

They run the same module with the same arguments, and are told their place. All end together: the others are on a leash
(`leash.py`) that ends them with rank 0, and rank 0 ends when one of them does, at once, whatever it waits for.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from gyre_sdk.errors import SettingsError
from gyre_sdk.trainer.leashed import Leashed

__all__ = ["Companions", "Meeting", "devices_of", "meet"]

_HOST = "127.0.0.1"
_MEET = timedelta(minutes=10)
"""That a rank may take to import what it needs, on a busy machine."""
_FAILED = 1
"""Exit status of rank 0 when another rank has ended."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where a rank finds the others."""

    rank: int
    size: int
    port: int
    """Of rank 0's store, on this machine."""


class Companions:
    """The processes of ranks 1 to `size - 1`, started by rank 0 from its main thread.

    Args:
        arguments: module and arguments of this process.
        size: ranks, this one included.
        environments: added to each rank's environment, by rank.
    """

    def __init__(self, arguments: Sequence[str], size: int, environments: Sequence[Mapping[str, str]]) -> None:
        from torch.distributed import TCPStore

        self._ending = False
        self._store: Any = TCPStore(_HOST, 0, None, True, _MEET, wait_for_workers=False)
        sys.stderr.flush()
        self._processes = {
            rank: Leashed(
                [*arguments, "--rank", f"{rank}/{size}", "--meet", str(self._store.port)],
                sys.stderr.fileno(),
                environment=environments[rank],
            )
            for rank in range(1, size)
        }
        self.meeting = Meeting(0, size, int(self._store.port))
        for rank, process in self._processes.items():
            watch = threading.Thread(target=self._watch, args=(rank, process), name=f"watch rank {rank}", daemon=True)
            watch.start()

    def end(self) -> None:
        """End them. Idempotent."""
        self._ending = True
        for process in self._processes.values():
            process.kill()

    def _watch(self, rank: int, process: Leashed) -> None:
        """Wait for a rank's end, which is everybody's. This thread alone is sure not to wait for that rank."""
        process.process.wait()
        if not self._ending:
            sys.stderr.write(
                f"gyre-worker: rank {rank} ended with {process.ended()}, and with it all ranks of the cell\n"
            )
            sys.stderr.flush()
            os._exit(_FAILED)


def devices_of(size: int, gpus: int, visible: str | None) -> list[dict[str, str]]:
    """Return what each rank must have in its environment to see its own device alone; rank 0 sees all, and takes the first.

    Args:
        gpus: that this process sees; 0: ranks compute on the CPU.
        visible: value of CUDA_VISIBLE_DEVICES; None where it is not set.

    Raises:
        SettingsError: there are fewer GPUs than ranks.
    """
    if not gpus:
        return [{} for _ in range(size)]
    if size > gpus:
        raise SettingsError(
            f"cells.ranks = {size}, and this cell sees {gpus} GPUs; one process takes one: set cells.ranks = {gpus} or less,"
            " give the cell more (cells.resources), or set CUDA_VISIBLE_DEVICES= to train on CPUs"
        )
    names = visible.split(",") if visible else [str(number) for number in range(gpus)]
    return [{} if rank == 0 else {"CUDA_VISIBLE_DEVICES": names[rank].strip()} for rank in range(size)]


def meet(meeting: Meeting) -> None:
    """Wait for all ranks, and make torch's process group of them: NCCL on GPUs, else gloo."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore(_HOST, meeting.port, None, False, _MEET)
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=dist.PrefixStore("ranks", store),
        rank=meeting.rank,
        world_size=meeting.size,
        timeout=_MEET,
    )
