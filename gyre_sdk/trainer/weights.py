"""Weights as model folders: what is published is a folder that any engine can be started from.

A version is one folder: `model.safetensors` and links to the configuration and tokenizer of the starting policy. It
lies in shared memory where there is room, so that a publication costs a copy in memory and not a disk's time.
torch loads when weights are first written, not with this module: processes can be started before it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gyre_sdk.errors import PublishError

if TYPE_CHECKING:
    from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")
_FILE = "model.safetensors"
_ADAPTER_FILE = "adapter_model.safetensors"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".msgpack", ".h5", ".index.json")


@dataclass(frozen=True, slots=True)
class PolicyFiles:
    """One version on disk."""

    version: int
    folder: Path
    """Model folder that an engine starts from."""
    digest: str
    """Of the weights file; empty for the starting policy."""
    adapter: Path | None = None
    """Folder of the adapter that makes `folder` this version; None: `folder` is it."""

    @property
    def file(self) -> Path:
        """The weights that were written."""
        return self.folder / _FILE if self.adapter is None else self.adapter / _ADAPTER_FILE

    @property
    def model_files(self) -> list[Path]:
        """The weights of the model folder: one file, or the shards that a policy was saved in."""
        return sorted(self.folder.glob("*.safetensors"))


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A low-rank adapter by itself."""

    tensors: Mapping[str, Tensor]
    """Under the names of peft's files."""
    config: dict[str, Any]
    """What peft writes as `adapter_config.json`."""


class WeightFolder:
    """Holds the published versions of one training."""

    def __init__(self, base: Path, output: Path, size: int, *, memory: bool = True) -> None:
        """`base` is the starting policy's folder, `size` the bytes of a version.

        The place is derived from `output`, so that the next start finds and clears what a killed one left. Without
        `memory` it is under `output`, where replicas on other machines can read it.
        """
        self._base = base
        name = f"gyre-{hashlib.blake2b(str(output.resolve()).encode(), digest_size=6).hexdigest()}"
        shared = SHARED_MEMORY / name
        roomy = memory and SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
        if roomy and shutil.disk_usage(SHARED_MEMORY).free < 4 * size:
            roomy = False
        self.root = shared if roomy else output / "weights"
        for stale in (shared, output / "weights"):
            shutil.rmtree(stale, ignore_errors=True)
        self.root.mkdir(parents=True)

    def write(self, version: int, tensors: Mapping[str, Tensor]) -> PolicyFiles:
        """Write a version. It is visible under its name only when it is whole."""
        from safetensors.torch import save_file

        folder, fresh = self._fresh(version)
        for path in self._base.iterdir():
            if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES):
                (fresh / path.name).symlink_to(path.resolve())
        with _writing(fresh):
            save_file(dict(tensors), fresh / _FILE, metadata={"format": "pt", "gyre_version": str(version)})
        digest = file_digest(fresh / _FILE)
        fresh.rename(folder)
        return PolicyFiles(version, folder, digest)

    def write_adapter(self, version: int, weights: AdapterWeights) -> PolicyFiles:
        """Write a version that is an adapter of the starting policy."""
        from safetensors.torch import save_file

        folder, fresh = self._fresh(version)
        (fresh / "adapter_config.json").write_text(json.dumps(weights.config, indent=1))
        with _writing(fresh):
            save_file(dict(weights.tensors), fresh / _ADAPTER_FILE, metadata={"format": "pt"})
        digest = file_digest(fresh / _ADAPTER_FILE)
        fresh.rename(folder)
        return PolicyFiles(version, self._base, digest, adapter=folder)

    def _fresh(self, version: int) -> tuple[Path, Path]:
        folder, fresh = self.root / f"v{version}", self.root / f"v{version}.partial"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        return folder, fresh

    def prune(self, keep: set[int]) -> None:
        """Remove all versions but these."""
        names = {f"v{version}" for version in keep}
        for path in self.root.iterdir():
            if path.name not in names:
                shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.root, ignore_errors=True)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Say which folder has no room.

    Raises:
        PublishError: a version's weights cannot be written.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        free = shutil.disk_usage(folder).free / 2**20
        raise PublishError(
            f"weights cannot be written to {folder} ({error}); {free:.0f} MiB are free there: make room, then run the same"
            " command again"
        ) from error


def file_digest(path: Path) -> str:
    """Return the blake2b hash of a file."""
    found = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def full_weights(model: Any) -> dict[str, Tensor]:
    """Return a causal LM's weights under the names of its folder: adapters merged (W + BA), tied tensors once.

    The model is left as it is. Of a sharded model every process must call this: the shards are gathered.
    """
    import torch

    model = _bare(model)
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    with torch.no_grad():
        merged = _merged(model) if plain is not model else {}
    found: dict[str, Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in plain.state_dict().items():
        if ".lora_" in name or name.startswith("lora_"):
            continue
        clean = name.replace(".base_layer.", ".")
        if clean not in merged and not hasattr(tensor, "full_tensor"):  # shards have no address to know them by
            key = (tensor.data_ptr(), tuple(tensor.shape))
            if key in seen:
                continue
            seen.add(key)
        found[clean] = _whole(merged.get(clean, tensor))
    return found


def adapter_weights(model: Any) -> AdapterWeights:
    """Return the adapter of a peft model. Of a sharded model every process must call this.

    Raises:
        PublishError: the model has none.
    """
    model = _bare(model)
    if not hasattr(model, "peft_config"):
        raise PublishError(
            f"engine.transport = 'lora' publishes adapters, and {type(model).__name__} has none: set policy.lora, or"
            " engine.transport = 'file'"
        )
    from peft import get_peft_model_state_dict

    (name,) = model.active_adapters
    tensors = {key: _whole(tensor) for key, tensor in get_peft_model_state_dict(model, adapter_name=name).items()}
    config = {key: _plain(value) for key, value in model.peft_config[name].to_dict().items()}
    return AdapterWeights(tensors, {**config, "inference_mode": True})


def _bare(model: Any) -> Any:
    """Return a model without what data parallelism wraps around it."""
    return model.module if type(model).__name__ == "DistributedDataParallel" else model


def _whole(tensor: Tensor) -> Tensor:
    gather = getattr(tensor, "full_tensor", None)  # of a shard: a collective
    return (tensor if gather is None else gather()).detach().to("cpu").contiguous()


def _plain(value: Any) -> Any:
    """Return a value of an adapter's configuration as JSON has it."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return getattr(value, "value", value)


def _merged(model: Any) -> dict[str, Tensor]:
    from peft.tuners.lora import LoraLayer

    found = {}
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            weight = module.get_base_layer().weight
            if not weight.is_floating_point():
                raise PublishError(
                    f"{name} is quantised ({weight.dtype}) and cannot be merged with its adapter: serve the same policy"
                    " with engine.kind = 'vllm' and engine.transport = 'lora'"
                )
            for adapter in module.active_adapters:
                weight = weight + module.get_delta_weight(adapter).to(weight.dtype)
            found[f"{name}.weight"] = weight
    return found
