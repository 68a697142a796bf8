"""Cells on GPUs: sleep frees memory, what is woken computes with the newest weights, links between GPUs, one shared GPU.

All need a GPU; the switches need vLLM beside the training extra, and NCCL's link a second GPU for the satellite.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: none is visible to torch"),
]
WITH_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM in this environment")
PROMPT = list(range(3, 60))
CACHE = 2 << 30
"""Bytes of keys and values."""
CORE = """
import sys, msgspec, torch
from gyre_sdk.trainer.sharing.link import LinkLost, choose, invite
assert choose("auto", torch.nn.Linear(2, 2, device="cuda")) == "nccl"
meeting, build = invite("nccl", "127.0.0.1", 60.0, None)
print(msgspec.json.encode(meeting).decode(), flush=True)
link = build()
sent = {"a": torch.randn(3000, 1111, device="cuda").to(torch.bfloat16), "b": torch.arange(7.0, device="cuda")}
link.send(sent)
found = {name: torch.empty_like(tensor) for name, tensor in sent.items()}
link.receive(found)
print(all(torch.equal(found[name], 2 * tensor) for name, tensor in sent.items()), flush=True)
sys.stdin.readline()  # the other end is dead now
try:
    link.receive(found)
except LinkLost:
    print("lost", flush=True)
link.close()
torch.cuda.synchronize()
print("alive", flush=True)
"""
SATELLITE = """
import sys, msgspec, torch
from gyre_sdk.trainer.sharing.link import Meeting, come
link = come(msgspec.json.decode(sys.argv[1].encode(), type=Meeting), "127.0.0.1")
tensors = {"a": torch.empty(3000, 1111, dtype=torch.bfloat16, device="cuda"), "b": torch.empty(7, device="cuda")}
link.receive(tensors)
link.send({name: 2 * tensor for name, tensor in tensors.items()})
torch.cuda.synchronize()
sys.stdin.read()
"""


@dataclass(frozen=True)
class Served:
    """A cell whose replica is a vLLM server with sleep, a publisher to it, and a core that trains nothing.

    It computes in float32; with adapters in bfloat16, which their kernels ask for.
    """

    cell: Any
    publisher: Any
    core: Any
    model: Any
    transport: Any

    def to_training(self) -> Any:
        from gyre_sdk.trainer.cells.switch import Patience, to_training

        return to_training(self.cell, True, self.publisher, self.core, Patience(1.0), lambda event: None)

    def to_serving(self) -> Any:
        from gyre_sdk.trainer.cells.switch import Patience, to_serving

        return to_serving(self.cell, True, self.publisher, self.core, Patience(1.0), lambda event: None)

    def check_log_probs(self) -> None:
        """What is sampled has the trainer's log-probs, twice: the second time from the cache."""
        import httpx

        for _ in range(2):
            params = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}
            body = {"token_ids": PROMPT, "sampling_params": params, "cache_salt": str(self.publisher.current.version)}
            name = self.transport.request_name(self.publisher.current)
            body |= {"model": name} if name else {}
            answer = httpx.post(f"{self.cell.url}/inference/v1/generate", json=body, timeout=600)
            assert answer.status_code == 200, answer.text
            choice = answer.json()["choices"][0]
            ids = choice["token_ids"]
            with torch.no_grad():
                logp = self.model(input_ids=torch.tensor([PROMPT + ids])).logits[0].log_softmax(-1)
            own = [logp[len(PROMPT) - 1 + place, token].item() for place, token in enumerate(ids)]
            given = [content["logprob"] for content in choice["logprobs"]["content"]]
            if self.transport.name == "file":
                assert given == pytest.approx(own, abs=2e-3)
            else:  # bfloat16 is off by 0.02, the weights before by 1.3
                assert statistics.mean(abs(a - b) for a, b in zip(given, own, strict=True)) < 0.1


@pytest.fixture(params=["file", "lora"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    from gpu_kit import published
    from training_kit import make_model

    from gyre_sdk.trainer.cells.switch import Cell, parking_of
    from gyre_sdk.trainer.config import EngineConfig, LoraConfig, PolicyConfig
    from gyre_sdk.trainer.policy import load_policy
    from gyre_sdk.trainer.sharing.core import Core

    name, base = request.param, tmp_path / "model"
    # heads of a size that every attention kernel knows
    make_model(base, hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64, initializer_range=0.1)
    lora = LoraConfig(r=8, alpha=8) if name == "lora" else None
    model = load_policy(PolicyConfig(base, lora=lora)).eval()
    dtype = "bfloat16" if lora else "float32"
    options = ["--dtype", dtype, "--enable-sleep-mode", "--gpu-memory-utilization", "0.3"]
    config = EngineConfig(
        kind="vllm", transport=name, options=[*options, "--kv-cache-memory-bytes", str(CACHE), "--enforce-eager"]
    )
    serving = published(tmp_path, base, config, rank=lora.r if lora else 0)
    with Core(key=b"a key of this test") as core, serving as (publisher, url, transport):
        yield Served(Cell("cell-0", url, parking_of(config.options, name)), publisher, core, model, transport)


def used() -> int:
    """Bytes of the first GPU that all processes use together."""
    free, total = torch.cuda.mem_get_info(0)
    return int(total - free)


def move(model: Any, seed: int) -> None:
    """Change what is trained, by as much as can be seen: an adapter by more, since it is seen through bfloat16."""
    size = 0.3 if hasattr(model, "peft_config") else 0.05
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn(parameter.shape, generator=generator)


@WITH_VLLM
def test_what_sleeps_frees_its_memory_and_wakes_with_the_newest_weights(served: Served) -> None:
    from gyre_sdk.trainer.transports import Replica

    move(served.model, 0)
    served.publisher.publish(served.model, step=1)
    served.check_log_probs()
    for step in (2, 3):
        before = used()
        gone = served.to_training()
        assert list(gone.phases) == ["drain", "park", "join"]
        with Replica(served.cell.url, 0) as replica:
            assert served.cell.parking.is_parked(replica)
        asleep = used()
        assert before - asleep > 0.9 * CACHE
        if step == 2:
            move(served.model, step)
            served.publisher.publish(served.model, step=step)  # to nobody: the only replica sleeps
            assert used() - asleep < 0.1 * CACHE
        back = served.to_serving()  # the second time the version is the one that it fell asleep with
        assert {"leave", "wake", "awake", "route"} <= set(back.phases)
        assert abs(used() - before) < 0.1 * CACHE
        served.check_log_probs()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a link over NCCL takes a GPU at each end")
def test_a_satellites_link_between_two_gpus() -> None:
    """Tensors pass whole, and a satellite that dies costs the core its link and nothing else."""
    core = on_gpu(0, CORE)
    assert core.stdin is not None and core.stdout is not None
    satellite = on_gpu(1, SATELLITE, core.stdout.readline().strip())
    try:
        assert core.stdout.readline() == "True\n"
        satellite.kill()
        satellite.wait()
        said, _ = core.communicate("\n", timeout=300)
        assert (core.returncode, said.split()) == (0, ["lost", "alive"])
    finally:
        for process in (core, satellite):
            process.kill()
            process.wait()


def on_gpu(number: int, program: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a program that sees one GPU."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": str(number)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("policy", ["elastic", "colocate"])
def test_two_cells_that_share_a_gpu_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """Embedded engines, trainer and worker on one GPU: every step trains, and the store is whole."""
    from training_kit import finish, make_training, start

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    config = make_training(tmp_path)
    more = ["cells.count=2", f"cells.policy={policy}", 'engine.options=["--device", "cuda"]']
    more += [f"rollout.staleness={0 if policy == 'colocate' else 1}"]
    report = finish(start(config, *(word for pair in more for word in ("--set", pair))), 900.0)
    assert report["steps"] == 3 and report["trained_tokens"] > 0
    checked = subprocess.run(
        [sys.executable, "-m", "gyre_sdk.cli", "fsck", str(tmp_path / "out" / "store.db")],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
