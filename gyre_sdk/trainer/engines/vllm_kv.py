"""Keys and values that replicas share through a folder: what gyre adds to vLLM's `OffloadingConnector`.

vLLM imports this in its own processes (`kv.py` names it there); nothing of gyre imports it. A chunk of a context goes from
the device to main memory, from there to a file, and back; vLLM names it by the hash of all tokens up to its end, the
adapter and the request's salt.

None of that is what the keys were computed with. A request that was under way when weights changed keeps its salt, and one
that was routed a moment too early brings an old one. So files lie under the version of the weights that this engine holds
when it writes or reads, and memory is emptied by the pause that every change of weights needs. Before the engine was told
a version nothing is shared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingWorker,
    OffloadKey,
    ReqContext,
    TransferResult,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from gyre_sdk.trainer.engines.kv_files import SWEEP_S, layout_name, sweep


class FolderSpec(TieringOffloadingSpec):
    """Main memory before a folder, also on a CPU, where vLLM's own has no way between the two."""

    def get_manager(self) -> OffloadingManager:
        """Return what the scheduler asks; the name of the shared memory goes, so that a killed engine leaves none."""
        fresh = self._scheduler_mmap is None
        manager = super().get_manager()
        if fresh and self._scheduler_mmap is not None:
            with suppress(FileNotFoundError):
                Path(self._scheduler_mmap.mmap_path).unlink()
        return manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return what copies between the device and main memory."""
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return HostWorker(kv_caches, self.blocks_per_chunk, region)


class HostWorker(OffloadingWorker):
    """Copies at once: on a CPU the device's memory is main memory too."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = kv_caches.group_data_refs
        self._blocks: list[torch.Tensor] = []
        """Per tensor: bytes by block."""
        self._chunks: list[torch.Tensor] = []
        """Per tensor: bytes by chunk and block in it."""
        for found in kv_caches.tensors:
            self._blocks.append(found.tensor)
            view = region.create_next_worker_view(found.page_size_bytes * blocks_per_chunk)
            self._chunks.append(view.unflatten(1, (blocks_per_chunk, found.page_size_bytes)))
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        """Copy blocks of the device to chunks."""
        moved = 0
        for tensor, blocks, chunks, places in self._pairs(src_spec, dst_spec.block_ids):
            found = self._blocks[tensor][blocks]
            self._chunks[tensor][chunks, places] = found
            moved += found.numel()
        return self._note(job_id, moved)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy chunks to blocks of the device."""
        moved = 0
        for tensor, blocks, chunks, places in self._pairs(dst_spec, src_spec.block_ids):
            found = self._chunks[tensor][chunks, places]
            self._blocks[tensor][blocks] = found
            moved += found.numel()
        return self._note(job_id, moved)

    def get_finished(self) -> list[TransferResult]:
        """Return the copies since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing: they are done."""

    def shutdown(self) -> None:
        """Let go of the memory."""
        self._chunks.clear()
        self._region.cleanup()

    def _pairs(self, spec: GPULoadStoreSpec, chunk_ids: Any) -> list[tuple[int, Any, Any, Any]]:
        """Return per tensor the blocks, the chunks, and the places in these."""
        found, block, chunk = [], 0, 0
        for group, count, first in zip(self._groups, spec.group_sizes, spec.block_indices, strict=True):
            if not count:
                continue
            at = np.arange(count) + first % self._blocks_per_chunk
            chunks = chunk_ids[chunk + at // self._blocks_per_chunk]
            blocks = spec.block_ids[block : block + count]
            where = [torch.from_numpy(np.asarray(ids, dtype=np.int64)) for ids in (blocks, chunks)]
            places = torch.from_numpy(at % self._blocks_per_chunk)
            found += [(ref.tensor_idx, *where, places) for ref in group]
            block, chunk = block + count, chunk + int(at[-1]) // self._blocks_per_chunk + 1
        return found

    def _note(self, job_id: int, moved: int) -> bool:
        self._done.append(TransferResult(job_id, success=True, transfer_size=moved, transfer_time=0.0))
        return True


class FolderTier(FileSystemTierManager):
    """Files of chunks, each under the version of the weights that computed it."""

    file_mapper: Any

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, *, gib: float, **more: Any) -> None:
        """`gib`: of the folder's files at most; the oldest go first."""
        super().__init__(offloading_spec, primary_kv_view, **more)
        self._version = followed_version()
        self._root = Path(more["root_dir"]) / layout_name(self.file_mapper.fields)
        self.file_mapper = Names(self._root, self._version)
        self._limit = int(gib * 2**30)
        self._closing = threading.Event()
        threading.Thread(target=self._sweep, name="kv files", daemon=True).start()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Look for a chunk of the weights that are served."""
        return LookupResult.MISS if self._version() is None else super().lookup(key, req_context)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Write chunks."""
        if self._version() is not None:
            super().submit_store(job_metadata)
        else:
            self._pool.enqueue_store(job_metadata.job_id, 1, [lambda: None])

    def shutdown(self) -> None:
        """End."""
        self._closing.set()
        super().shutdown()

    def _sweep(self) -> None:
        while not self._closing.wait(SWEEP_S):
            with suppress(OSError):  # other replicas sweep too
                sweep(self._root, self._version(), self._limit)


class Names:
    """Names of files."""

    def __init__(self, root: Path, version: Callable[[], str | None]) -> None:
        self._root = root
        self._version = version

    def get_file_name(self, key: OffloadKey) -> str:
        """Return where a chunk's file lies."""
        name, group = get_offload_block_hash(key).hex(), get_offload_group_idx(key)
        return f"{self._root}/{self._version()}/{name[:3]}/{name}_{group}.bin"


@cache
def followed_version() -> Callable[[], str | None]:
    """Return what tells the version that this process's engine serves; None: it was not told one.

    vLLM sets it while generation is paused, after the weights have changed, and tells no connector.
    """
    told: list[str | None] = [None]
    told_first = EngineCore.set_weight_version

    def set_weight_version(self: EngineCore, weight_version: str) -> None:
        told_first(self, weight_version)
        told[0] = weight_version

    EngineCore.set_weight_version = set_weight_version
    return lambda: told[0]
