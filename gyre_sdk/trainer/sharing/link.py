"""How tensors pass between the core and one satellite: a pair of its own, which can break without touching anything else.

No process group of training is involved: a pair is a group of two ranks that torch does not register, over a store of its
own, with its own timeout. `gloo` for CPUs, `nccl` for GPUs, `files` in a shared folder where neither can connect.

The core is rank 0, a satellite rank 1. Both know what passes, in which order; nothing is checked here.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol
from uuid import uuid4

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.sharing.tensors import buckets

Kind = Literal["gloo", "nccl", "files"]
_POLL = 0.005


class LinkLost(TrainerError):
    """A transfer did not come to its end: the other process is gone, or too slow."""


class Meeting(msgspec.Struct, frozen=True):
    """Where a satellite finds its end of a pair."""

    kind: Kind
    host: str
    port: int
    """Of the store; 0 for files."""
    folder: str
    """Of the files; empty otherwise."""
    seconds: float
    """That one bucket may take."""


class Link(Protocol):
    """One end of a pair. Both ends name the same shapes and types, in the same order."""

    @property
    def device(self) -> torch.device:
        """Where tensors are received best."""

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Send tensors.

        Raises:
            LinkLost: they did not arrive.
        """

    def receive(self, tensors: Mapping[str, Tensor], alive: Callable[[], None] = lambda: None) -> None:
        """Fill tensors with what is sent. `alive` is called for each bucket that came.

        Raises:
            LinkLost: they did not arrive; what is in them is of no use.
        """

    def close(self) -> None:
        """Break the pair. Idempotent."""


def choose(wanted: str, model: Any) -> Kind:
    """Return the kind of link for a model: `auto` takes NCCL for weights on a GPU, else gloo.

    Raises:
        TrainerError: there is no such kind.
    """
    if wanted not in ("auto", "gloo", "nccl", "files"):
        raise TrainerError(f"no link {wanted!r}; choose from auto, gloo, nccl, files")
    if wanted != "auto":
        return wanted  # type: ignore[return-value]
    on_gpu = any(one.device.type == "cuda" for one in model.parameters())
    return "nccl" if on_gpu and dist.is_nccl_available() else "gloo"


def invite(kind: Kind, host: str, seconds: float, folder: Path | None) -> tuple[Meeting, Callable[[], Link]]:
    """Open the core's end; return where the satellite is to come, and what waits for it.

    Args:
        host: address of this machine, as the satellite reaches it.
        seconds: that the meeting and each bucket may take.
        folder: shared by both; for files.

    Raises:
        TrainerError: files have no folder.
    """
    if kind == "files":
        if folder is None:
            raise TrainerError("link = 'files' needs a folder that core and satellites share")
        own = folder / f"link-{uuid4().hex}"
        own.mkdir(parents=True)
        return Meeting(kind, host, 0, str(own), seconds), lambda: _Files(own, 0, seconds)
    try:
        store = dist.TCPStore(host, 0, None, True, timedelta(seconds=seconds), wait_for_workers=False)
    except RuntimeError as error:
        raise LinkLost(f"no store for a pair can be opened on {host}: {error}") from error
    return Meeting(kind, host, store.port, "", seconds), lambda: _pair(kind, store, 0, host, seconds)


def come(meeting: Meeting, host: str) -> Link:
    """Open a satellite's end.

    Args:
        host: address of this machine, as the core reaches it.

    Raises:
        LinkLost: the core is not there.
    """
    if meeting.kind == "files":
        return _Files(Path(meeting.folder), 1, meeting.seconds)
    try:
        store = dist.TCPStore(meeting.host, meeting.port, None, False, timedelta(seconds=meeting.seconds))
    except RuntimeError as error:
        raise LinkLost(f"the core's store at {meeting.host}:{meeting.port} cannot be reached: {error}") from error
    return _pair(meeting.kind, store, 1, host, meeting.seconds)


def _pair(kind: Kind, store: Any, rank: int, host: str, seconds: float) -> Link:
    try:
        return (_Nccl if kind == "nccl" else _Gloo)(store, rank, host, seconds)
    except RuntimeError as error:
        raise LinkLost(f"the other end of a {kind} pair did not come in {seconds:.0f} s: {error}") from error


class _Buckets:
    """Cuts tensors into buckets, the same way at both ends."""

    device = torch.device("cpu")

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        for pieces in buckets([tensor.detach().contiguous() for tensor in tensors.values()]):
            one = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            self._put(one.to(self.device))

    def receive(self, tensors: Mapping[str, Tensor], alive: Callable[[], None] = lambda: None) -> None:
        wanted = [tensor.detach() for tensor in tensors.values()]
        whole = [tensor if tensor.is_contiguous() else torch.empty_like(tensor).contiguous() for tensor in wanted]
        for pieces in buckets(whole):
            alive()
            if len(pieces) == 1 and pieces[0].device == self.device:
                self._take(pieces[0])
                continue
            sizes = [len(piece) for piece in pieces]
            bucket = torch.empty(sum(sizes), dtype=pieces[0].dtype, device=self.device)
            self._take(bucket)
            for piece, part in zip(pieces, bucket.split(sizes), strict=True):
                piece.copy_(part)
        for tensor, found in zip(wanted, whole, strict=True):
            if found is not tensor:
                tensor.copy_(found)

    def _put(self, bucket: Tensor) -> None:
        raise NotImplementedError

    def _take(self, bucket: Tensor) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Break the pair."""


class _Pair(_Buckets):
    """A process group of two ranks that no registry knows."""

    def __init__(self, group: Any, store: Any, rank: int) -> None:
        self._group = group
        self._store = store
        self._other = 1 - rank

    def _put(self, bucket: Tensor) -> None:
        self._finish(lambda group: group.send([bucket], self._other, 0))

    def _take(self, bucket: Tensor) -> None:
        self._finish(lambda group: group.recv([bucket], self._other, 0))

    def _finish(self, begin: Callable[[Any], Any]) -> None:
        group = self._group
        if group is None:
            raise LinkLost("the pair is broken")
        try:
            self._wait(begin(group))
        except RuntimeError as error:
            self.close()
            raise LinkLost(f"a pair broke: {error}") from error

    def _wait(self, work: Any) -> None:
        work.wait()

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()
        self._store = None


class _Gloo(_Pair):
    def __init__(self, store: Any, rank: int, host: str, seconds: float) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=seconds)
        super().__init__(dist.ProcessGroupGloo(store, rank, 2, options), store, rank)


class _Nccl(_Pair):
    def __init__(self, store: Any, rank: int, host: str, seconds: float) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._seconds = seconds
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")  # the death of a peer breaks the pair, not us
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=seconds)
        super().__init__(dist.ProcessGroupNCCL(store, rank, 2, options), store, rank)

    def _wait(self, work: Any) -> None:
        """Wait for the GPU too: NCCL's own wait only orders streams, and would hang with a peer that is gone."""
        give_up = time.monotonic() + self._seconds
        while not work.is_completed():
            if time.monotonic() > give_up:
                raise RuntimeError(f"nothing passed in {self._seconds:.0f} s")
            time.sleep(_POLL / 10)
        if (error := work.exception()) is not None:
            raise RuntimeError(str(error))
        work.wait()


class _Files(_Buckets):
    """Numbered files, each renamed into place when it is whole, and removed by its reader."""

    def __init__(self, folder: Path, rank: int, seconds: float) -> None:
        self._folder = folder
        self._rank = rank
        self._seconds = seconds
        self._sent = self._received = 0

    def _put(self, bucket: Tensor) -> None:
        self._sent += 1
        path = self._path(self._rank, self._sent)
        part = path.with_suffix(".part")
        try:
            bucket.view(torch.uint8).numpy().tofile(part)
            part.rename(path)
        except OSError as error:
            raise LinkLost(f"{path} cannot be written: {error}") from error

    def _take(self, bucket: Tensor) -> None:
        self._received += 1
        path = self._path(1 - self._rank, self._received)
        give_up = time.monotonic() + self._seconds
        while not path.exists():
            if time.monotonic() > give_up or not self._folder.is_dir():
                raise LinkLost(f"{path} did not come in {self._seconds:.0f} s")
            time.sleep(_POLL)
        found = np.fromfile(path, np.uint8)
        path.unlink(missing_ok=True)
        wanted = bucket.numel() * bucket.element_size()
        if len(found) != wanted:
            raise LinkLost(f"{path} has {len(found)} bytes in place of {wanted}")
        bucket.copy_(torch.from_numpy(found).view(bucket.dtype))

    def _path(self, rank: int, number: int) -> Path:
        return self._folder / f"{rank}-{number}.bin"

    def close(self) -> None:
        if self._rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
