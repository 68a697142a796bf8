"""What gyre adds to a vLLM worker: a weight-transfer backend that reads files, and a look at the weights that it serves.

vLLM imports this in its own processes (`vllm.py` names it there); nothing of gyre imports it.

`FileEngine` is the backend `gyre_file`: a file is checked as it is announced (`update_weights`) and loaded when the
update is finished, so that a refusal leaves what is served untouched and generation pauses for the load alone.
`Readings` answers `/collective_rpc`: fingerprints of the weights as the layers hold them, under the checkpoint's names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from gyre_sdk.errors import PublishError
from gyre_sdk.trainer.engines.fence import REFUSED, Fence
from gyre_sdk.trainer.engines.fingerprint import fingerprint

_COLUMNS = 256
"""Input columns that are read at a time from a layer that keeps its weight packed."""


@dataclass
class Claim(WeightTransferInitInfo):
    """Who will publish here from now on."""

    owner: str = ""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """One file of a version."""

    path: str = ""
    version: int | None = None
    owner: str = ""
    digest: str = ""
    """Of the file (`weights.file_digest`); empty: not compared."""


class FileEngine(WeightTransferEngine[Claim, FileUpdate]):
    """Loads versions from safetensors files."""

    init_info_cls = Claim
    update_info_cls = FileUpdate

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._fence = Fence()
        self._files: list[FileUpdate] = []

    def init_transfer_engine(self, init_info: Claim) -> None:
        """Note who publishes here."""
        self._fence.claim(init_info.owner)

    def start_weight_update(self) -> None:
        """Begin a set of files. The model is touched when it is complete."""
        self._files = []

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Check one file; raise when it must not be served."""
        self._fence.check(update_info.owner, update_info.version)
        if update_info.digest and (found := _file_digest(Path(update_info.path))) != update_info.digest:
            raise PublishError(f"{REFUSED}the file has digest {found}, announced was {update_info.digest}")
        with safe_open(update_info.path, framework="pt") as file:
            if not list(file.keys()):
                raise PublishError(f"{REFUSED}the file holds no tensor")
        self._files.append(update_info)

    def finish_weight_update(self) -> None:
        """Load the files into the model, layer by layer."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        files, self._files = self._files, []
        if not files:
            raise PublishError(f"{REFUSED}no file was sent in this weight update")
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(_tensors(Path(file.path) for file in files))
        except (KeyError, ValueError, AssertionError, RuntimeError) as error:
            raise PublishError(f"{REFUSED}the model cannot load these weights: {error!r}") from error
        finalize_layerwise_reload(self.model, self.model_config)
        _pack_again(self.model)
        self._fence.passed(files[-1].version)

    def shutdown(self) -> None:
        """Let another trainer publish here."""
        self._fence.release()


class Readings:
    """Mixed into vLLM's worker (`--worker-extension-cls`)."""

    def gyre_fingerprints(self) -> dict[str, str]:
        """Return the fingerprint of every weight of the base model that this rank holds whole."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        whole = self.parallel_config.world_size == 1  # type: ignore[attr-defined]
        return {name: fingerprint(tensor) for name, tensor in base_weights(model, sharded=not whole)}

    def gyre_adapters(self) -> list[dict[str, str]]:
        """Return the fingerprints of the adapters in the slots that the layers compute with."""
        manager = self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]
        return [
            {name: fingerprint(tensor) for name, tensor in _adapter(manager, slot, lora)}
            for slot, lora in enumerate(manager.lora_index_to_id)
            if lora is not None
        ]


def base_weights(model: torch.nn.Module, *, sharded: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's weights under the names of its checkpoint; fused ones in their parts.

    Args:
        model: of vLLM.
        sharded: the model is spread over ranks; only what layers without a split hold is yielded.
    """
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules():
        path = path.removesuffix(".base_layer")
        split = hasattr(module, "tp_size") or hasattr(module, "num_embeddings_per_partition")
        if sharded and split:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            tensor = _unpacked(module, name, parameter.detach())
            parent, _, last = path.rpartition(".")
            if last not in packed or not hasattr(module, "output_sizes"):
                yield f"{path}.{name}", tensor
                continue
            for part, piece in zip(packed[last], tensor.split(module.output_sizes), strict=True):
                yield f"{parent}.{part}.{name}", piece


def _unpacked(module: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter as in the checkpoint: without padding, and read back where a CPU kernel has packed it away."""
    if name == "weight" and hasattr(module, "cpu_linear") and tensor.dim() <= 2:
        tensor = _computed(module, tensor)
    return tensor[: module.org_vocab_size] if hasattr(module, "org_vocab_size") else tensor


def _computed(module: Any, weight: torch.Tensor) -> torch.Tensor:
    """Return the weight that a layer computes with. On a CPU that is a packed copy, and `weight` is empty or beside it.

    What the layer makes of a unit vector is a column of its weight, exactly.
    """
    size = weight.shape[1] if weight.numel() else getattr(module, "input_size_per_partition", 0) or module.input_size
    columns = []
    for start in range(0, size, _COLUMNS):
        count = min(_COLUMNS, size - start)
        units = torch.zeros(count, size, dtype=weight.dtype)
        units[torch.arange(count), start + torch.arange(count)] = 1
        columns.append(module.cpu_linear(units, weight, None).t())
    return torch.cat(columns, dim=1)


def _pack_again(model: torch.nn.Module) -> None:
    """Renew the packed copies of weights that layers share.

    On a CPU an output layer that is tied to the embedding computes with a packed copy of the embedding's weight. The
    checkpoint has no tensor of its own for it, so a reload passes it by and it would keep the old weights.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and isinstance(weight, torch.Tensor) and weight.numel():
            module.quant_method.process_weights_after_loading(module)


def _adapter(manager: Any, slot: int, lora: int) -> Iterator[tuple[str, torch.Tensor]]:
    rank = manager._registered_adapters[lora].rank
    for path, module in manager.modules.items():
        if not isinstance(module.lora_a_stacked, tuple):
            continue  # an embedding: adapters of ours have none
        parent, _, last = path.rpartition(".")
        parts = manager.packed_modules_mapping.get(last, [last])
        for part, a_stack, b_stack in zip(parts, module.lora_a_stacked, module.lora_b_stacked, strict=True):
            a, b = a_stack[slot, 0, :rank], b_stack[slot, 0, :, :rank]
            if a.any() or b.any():
                yield f"{parent}.{part}.lora_A", a
                yield f"{parent}.{part}.lora_B", b


def _tensors(paths: Iterator[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)


def _file_digest(path: Path) -> str:
    from gyre_sdk.trainer.weights import file_digest

    return file_digest(path)
