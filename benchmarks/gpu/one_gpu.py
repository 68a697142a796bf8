"""Cells that share one GPU: a policy, and the settings of a training whose replicas have a share of the memory each.

With vLLM a replica sleeps while its cell trains. Without it, and on a CPU, the embedded engine is paused and keeps its
memory: that is said in the result, and shows the switches' other phases.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent
ROOT = BENCHMARKS.parent
AGENTS = BENCHMARKS / "cells"
sys.path[:0] = [str(BENCHMARKS), str(ROOT / "tests" / "trainer")]

from training_kit import make_model  # noqa: E402

from gyre_sdk.trainer.config import TrainerConfig, load_config  # noqa: E402
from gyre_sdk.trainer.main import quiet_libraries  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "half": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
    },
    "tiny": {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64},
}
"""`half`: the layers of Qwen3-0.6B with the tests' small vocabulary, 0.44 billion parameters. `tiny`: does it run? Its heads
have a size that every attention kernel of vLLM knows."""

_PACKAGES = ("trl", "peft", "accelerate", "aiohttp", "openai", "renderers")
"""What a training needs beside torch and transformers."""
_CONFIG = """
[policy]
model = "policy"
[tasks]
loader = "talker:load"
options = { count = 64 }
[agent]
function = "talker:solve"
[store]
path = "store.db"
[output]
dir = "training"
[proxy]
renderer = "qwen3"
[rollout]
workspace = "local"
timeout_s = 600.0
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what both benchmarks of cells take."""
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, whose figures say nothing of GPUs")
    add("--engine", choices=("vllm", "embedded"), default="vllm")
    add("--vllm-python", type=Path, help="Python of vLLM's environment, with gyre-sdk; default: this one")
    add("--shape", choices=tuple(SHAPES), default="half")
    add("--cells", type=int, default=2)
    add("--share", type=float, default=0.2, help="of the GPU's memory for a replica (--gpu-memory-utilization)")
    add("--kv-gib", type=float, default=4.0, help="of it, for a replica's keys and values")
    add("--eager", action="store_true", help="vLLM without CUDA graphs: starts sooner")
    add("--threads", type=int, default=1, help="of the trainer, a worker and an embedded engine, each")
    add("--tokens", type=int, default=64, help="that a call of an agent samples, at most")
    add("--turns", type=int, default=4, help="of an agent")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the config")
    add("--json", type=Path, help="file for the result, beside standard output")


def problems(options: argparse.Namespace) -> dict[str, str]:
    """Return what is missing here, by name; empty when all can be measured. Prepares this process for the device."""
    quiet_libraries()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # of GiB, for the keys and values of a replica of vLLM: each would take half of the machine's memory
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    else:  # all processes of all cells see this one
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    import torch

    absent = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    found = {"packages": f"{', '.join(absent)}: pip install 'gyre-sdk[train]'"} if absent else {}
    if options.cells < 1:
        found["cells"] = f"--cells {options.cells}: there must be one at least"
    if options.device == "cuda" and not torch.cuda.is_available():
        found["gpu"] = "none is visible to torch; --device cpu is a dry run without one"
    if options.device == "cuda" and options.engine == "vllm" and not 0 < options.share * options.cells < 1:
        found["share"] = f"{options.cells} replicas with {options.share:g} of the memory each leave none for training"
    if options.engine == "vllm":
        where = options.vllm_python or Path(sys.executable)
        if not _has_vllm(options.vllm_python):
            found["vllm"] = f"not installed for {where}: give --vllm-python, or --engine embedded, which does not sleep"
    return found


def _has_vllm(python: Path | None) -> bool:
    if python is None:
        return importlib.util.find_spec("vllm") is not None
    asked = "import sys; from importlib.util import find_spec as f; sys.exit(not (f('vllm') and f('gyre_sdk')))"
    try:
        return subprocess.run([str(python), "-P", "-c", asked]).returncode == 0
    except OSError:
        return False


def make_policy(folder: Path, options: argparse.Namespace) -> None:
    """Write a random policy with a tokenizer."""
    make_model(folder, **SHAPES[options.shape])


def settings(folder: Path, policy: Path, options: argparse.Namespace, more: Sequence[str]) -> TrainerConfig:
    """Return the settings of a training in a folder; `more` are keys of them, and `--set` has the last word."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train.toml"
    path.write_text(_CONFIG)
    python = [f"engine.python={options.vllm_python.absolute()}"] if options.vllm_python else []
    return load_config(
        path,
        [
            f"policy.model={policy.resolve()}",
            f"agent.options.turns={options.turns}",
            f"agent.options.tokens={options.tokens}",
            f"train.threads={options.threads}",
            f"train.bf16={str(options.device == 'cuda').lower()}",
            f"engine.kind={options.engine}",
            f"engine.threads={options.threads}",
            f"engine.options={_toml(_engine_options(options))}",
            *(python if options.engine == "vllm" else []),
            f"cells.count={options.cells}",
            *more,
            *options.set,
        ],
    )


def _engine_options(options: argparse.Namespace) -> list[str]:
    if options.engine == "embedded":
        dtype = "bfloat16" if options.device == "cuda" else "float32"
        return ["--device", options.device, "--dtype", dtype, "--kv-gib", f"{options.kv_gib:g}"]
    if options.device == "cpu":  # vLLM's CPU build has no sleep
        return ["--dtype", "float32"]
    # the cache's size is given: what another process takes while vLLM measures would count as its own
    cache = ["--kv-cache-memory-bytes", str(int(options.kv_gib * 2**30))]
    share = ["--gpu-memory-utilization", f"{options.share:g}"]
    eager = ["--enforce-eager"] if options.eager else []
    return ["--enable-sleep-mode", "--dtype", "bfloat16", *share, *cache, *eager]


def _toml(words: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{word}"' for word in words) + "]"


def device_name(device: str) -> str:
    """Return what a result is of."""
    import torch

    return str(torch.cuda.get_device_name()) if device == "cuda" else "cpu, a dry run: no figure here is of a GPU"


def used_gib(device: str) -> float | None:
    """Return the GPU memory that all processes use together; None without a GPU."""
    import torch

    if device == "cpu":
        return None
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return float(total - free) / 2**30


def plain(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options as JSON has them."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
