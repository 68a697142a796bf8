"""Keys and values of contexts outside of a replica: the section `[engine.kv]`, and what it becomes for vLLM.

This is the one place that knows vLLM's `--kv-transfer-config`. Without the section a context that goes on at another
replica is computed there again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

__all__ = ["OPTION", "KvConfig", "arguments", "environment", "problem"]

OPTION = "--kv-transfer-config"
_MODULE = "gyre_sdk.trainer.engines.vllm_kv"
_TAKEN = (OPTION, "--kv-offloading-size", "--kv-offloading-backend", "--no-enable-prefix-caching")
"""Options that would speak about the same as the section."""

_Gib = Annotated[float, msgspec.Meta(gt=0)]


class KvConfig(msgspec.Struct, frozen=True):
    """Replicas of vLLM share keys and values of contexts, so that a call that goes on at another one finds its prefix there.
    Only what the same version computed is used."""

    connector: Literal["folder"] = "folder"
    """`folder`: files in a folder that all replicas see; vLLM's `OffloadingConnector` with a tier of gyre's."""
    folder: Path | None = None
    """Where; each training has a folder of its own there. None: `output.dir`. On several machines a shared disk."""
    gib: _Gib = 16.0
    """Files at most; the oldest go first, and those of older versions."""
    memory_gib: _Gib = 1.0
    """Main memory (`/dev/shm`) of each replica for what is on its way, and for what was used last."""
    blocks_per_chunk: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Blocks of vLLM's cache in one file. More make fewer files, and whole files only are found."""


def problem(kv: KvConfig | None, *, vllm: bool, started: bool, publish: bool, options: Sequence[str]) -> str | None:
    """Return in words what is wrong with how keys and values are shared; None where nothing is.

    Args:
        kv: the section, where there is one.
        vllm: the engine is vLLM.
        started: gyre starts it.
        publish: its weights change.
        options: its further arguments.
    """
    given = [option for option in options if option.partition("=")[0] in _TAKEN]
    if kv is None:
        if publish and any(option.startswith(OPTION) for option in given):
            return (
                f"engine.options has {OPTION}, and weights change: vLLM's connectors do not know by which version keys were"
                " computed, so a call in flight could go on from those of an older one; use the section [engine.kv], or set"
                " engine.publish = false"
            )
        return None
    if not vllm:
        return "engine.kv belongs to kind = 'vllm'; the embedded engine keeps keys and values to itself"
    if not started:
        return "engine.kv is for servers that gyre starts: leave engine.url out, or [engine.kv]"
    if given:
        return f"engine.options has {given[0]}, which [engine.kv] stands for: leave one of them out"
    return None


def arguments(kv: KvConfig, folder: Path) -> list[str]:
    """Return the arguments of a server.

    All replicas have the same; what must differ, the name of each engine's shared memory, vLLM draws itself.

    Args:
        kv: the section.
        folder: of this training.
    """
    tier = {"type": "FolderTier", "module_path": _MODULE, "root_dir": str(folder), "gib": kv.gib}
    extra = {
        "spec_name": "FolderSpec",
        "spec_module_path": _MODULE,
        "cpu_bytes_to_use": int(kv.memory_gib * 2**30),
        "blocks_per_chunk": kv.blocks_per_chunk,
        "offload_prompt_only": False,  # what was sampled is the prefix of the next call
        "secondary_tiers": [tier],
    }
    whole = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return [OPTION, json.dumps(whole)]


def environment(kv: KvConfig | None) -> Mapping[str, str]:
    """Return what a server's environment needs: the same tokens must have the same hash at all replicas."""
    return {} if kv is None else {"PYTHONHASHSEED": "0"}
