"""Seconds of a publication on a GPU by phase: write, fingerprint, send, load, check; a model shaped as Qwen2.5-0.5B.

    python benchmarks/gpu/publication.py [--rounds N] [--layers N] [--transport file|nccl]

Needs a GPU and the training extra. Without vLLM in this environment the trainer's part is measured alone: what is written, what a
fingerprint costs on the CPU and on the GPU, beside blake2b over the same bytes. With vLLM a server is started on the same GPU (on
the second one for NCCL) and the whole publication is measured. Figures are medians over rounds. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from gyre_sdk.trainer.engines.fingerprint import fingerprint
from gyre_sdk.trainer.weights import PolicyFiles, WeightFolder, full_weights


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--transport", choices=("file", "nccl"), default="file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("publication: needs a GPU: none is visible to torch\n")
        return 1
    model = half_billion(options.layers)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as place:
        base = Path(place) / "model"
        model.save_pretrained(base)
        folder = WeightFolder(base, Path(place) / "out", size)
        try:
            result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "gigabytes": round(size / 1e9, 3)}
            result["trainer"] = trainer_part(model, folder, options.rounds)
            if importlib.util.find_spec("vllm") is None:
                result["problems"] = {"vllm": "not installed here: the engine's part is not measured"}
            else:
                result["publication"] = whole(model, base, folder, Path(place), options.transport, options.rounds)
        finally:
            folder.remove()
    print(json.dumps(result, indent=1))
    return 0


def half_billion(layers: int) -> Any:
    """A random model in bfloat16 on the GPU."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).to(device="cuda", dtype=torch.bfloat16)


def trainer_part(model: Any, folder: WeightFolder, rounds: int) -> dict[str, float]:
    """Seconds of what the trainer does by itself."""
    on_gpu = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    on_cpu = full_weights(model)
    version = iter(range(1, 10_000))
    work: dict[str, Callable[[], object]] = {
        "collect": lambda: full_weights(model),
        "write": lambda: folder.write(next(version), on_cpu),
        "fingerprint on the GPU": lambda: [fingerprint(tensor) for tensor in on_gpu.values()],
        "fingerprint on the CPU": lambda: [fingerprint(tensor) for tensor in on_cpu.values()],
        "blake2b on the CPU": lambda: [_blake2b(tensor) for tensor in on_cpu.values()],
    }
    if any(fingerprint(tensor) != fingerprint(on_cpu[name]) for name, tensor in on_gpu.items()):
        raise SystemExit("publication: fingerprints differ between the GPU and the CPU")
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, act in work.items():
            torch.cuda.synchronize()
            began = time.monotonic()
            act()
            torch.cuda.synchronize()
            seconds[name].append(time.monotonic() - began)
        folder.prune(set())
    return {name: round(statistics.median(found), 4) for name, found in seconds.items()}


def _blake2b(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()


def whole(model: Any, base: Path, folder: WeightFolder, place: Path, name: str, rounds: int) -> dict[str, float]:
    """Seconds by phase of publications to a vLLM server."""
    from gyre_sdk.trainer.config import EngineConfig
    from gyre_sdk.trainer.engines import vllm
    from gyre_sdk.trainer.processes import Child, ChildSpec
    from gyre_sdk.trainer.transports import Replica, make

    config = EngineConfig(
        kind="vllm", transport=name, options=["--skip-tokenizer-init", "--gpu-memory-utilization", "0.3"]
    )
    transport, start = make(name, folder, base, "benchmark"), PolicyFiles(0, base, "")
    spec = ChildSpec(
        "engine",
        lambda port: vllm.command(config, start, port, transport=name),
        "/health",
        place / "engine.log",
        python=Path(sys.executable),
        environment={**vllm.ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "1" if name == "nccl" else "0"},
        patience=vllm.PATIENCE,
    )
    child = Child(spec, lambda event: None)
    child.begin()
    phases: list[dict[str, float]] = []
    try:
        url = child.wait()
        for version in range(rounds + 1):
            began = time.monotonic()
            files = transport.write(1000 + version, transport.collect(model))
            written = time.monotonic() - began
            with Replica(url, files.version) as replica:
                phases.append({"write": written, **transport.bring(replica, files)})
    finally:
        child.stop()
    return {name: round(statistics.median(found[name] for found in phases[1:]), 4) for name in phases[-1]}


if __name__ == "__main__":
    raise SystemExit(main())
