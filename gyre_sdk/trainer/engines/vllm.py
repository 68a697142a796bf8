"""vLLM as gyre's engine: its plugin entry point, and the command line of a server that gyre starts.

The plugin (`vllm.general_plugins`) makes the backend `gyre_file` known wherever vLLM is installed beside gyre-sdk; the
server runs under the Python of vLLM's own environment, which needs gyre-sdk without its `train` extra.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from gyre_sdk.trainer.engines import kv

if TYPE_CHECKING:
    from pathlib import Path

    from gyre_sdk.trainer.config import EngineConfig
    from gyre_sdk.trainer.weights import PolicyFiles

__all__ = ["BACKEND", "ENVIRONMENT", "MODEL_NAME", "PATIENCE", "command", "register"]

BACKEND = "gyre_file"
"""Name of our backend in `--weight-transfer-config`."""
MODEL_NAME = "policy"
"""What requests may call the policy without an adapter."""
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # pause, weight updates, collective_rpc
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""What the server needs besides its arguments."""
PATIENCE = 1800.0
"""Seconds that a server may take to load a model and compile for it."""

_WORKER = "gyre_sdk.trainer.engines.vllm_worker"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that `--max-lora-rank` takes."""
_ADAPTERS = 4
"""Adapters that may compute in one batch: the one being served, and older ones for calls that began with them."""
_KEPT_ADAPTERS = 8
"""Adapters that the server holds; as many stay on disk (`transports.lora.KEEP`)."""


def register() -> None:
    """Make the backend known to vLLM; called by vLLM in each of its processes, possibly more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _WORKER, "FileEngine")


def command(
    config: EngineConfig, files: PolicyFiles, port: int, *, transport: str, rank: int = 0, shared: Path | None = None
) -> list[str]:
    """Return module and arguments of a server that starts with these weights.

    Args:
        config: of the engine.
        files: what it starts with.
        port: where it listens.
        transport: `file`, `lora` or `nccl`.
        rank: of the adapters, for `lora`.
        shared: folder of this training's keys and values, for `[engine.kv]`.
    """
    arguments = ["vllm.entrypoints.openai.api_server", "--model", str(files.folder)]
    arguments += ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--enable-prefix-caching"]
    arguments += ["--enable-prompt-tokens-details"]
    arguments += ["--max-num-seqs", str(config.max_batch), "--worker-extension-cls", f"{_WORKER}.Readings"]
    if transport == "lora":
        arguments += ["--enable-lora", "--max-loras", str(_ADAPTERS), "--max-cpu-loras", str(_KEPT_ADAPTERS)]
        arguments += ["--max-lora-rank", str(_rank(rank))]
    backend = "nccl" if transport == "nccl" else BACKEND
    arguments += ["--weight-transfer-config", json.dumps({"backend": backend})]
    if config.kv is not None and shared is not None:
        arguments += kv.arguments(config.kv, shared)
    return [*arguments, "--disable-uvicorn-access-log", *config.options]


def _rank(rank: int) -> int:
    return next((size for size in _RANKS if size >= rank), rank)
