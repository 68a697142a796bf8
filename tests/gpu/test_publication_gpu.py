"""Publication on GPUs: fingerprints are those of the CPU, and vLLM takes versions from files and over NCCL.

The first test needs a GPU. The others need vLLM beside the training extra, and NCCL a second GPU for the trainer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
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


def test_fingerprints_are_the_same_on_any_device() -> None:
    from gyre_sdk.trainer.engines.fingerprint import fingerprint

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in ((7,), (33, 65), (3000, 1111)):
            tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
            assert fingerprint(tensor.cuda()) == fingerprint(tensor)
            assert fingerprint(tensor.cuda().t().contiguous().t()) == fingerprint(tensor)


def make_model(folder: Path) -> Any:
    """A random policy with heads of a size that every attention kernel knows."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=128,
            hidden_size=128,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.1,
        )
    ).eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture(params=["file", "nccl"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, str, Any]]:
    """A vLLM server in float32 and a publisher to it; with NCCL they are on a GPU each."""
    from gpu_kit import published

    from gyre_sdk.trainer.config import EngineConfig

    name = request.param
    if name == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL takes a GPU for the trainer and another one for the engine")
    model = make_model(tmp_path / "model")
    config = EngineConfig(
        kind="vllm",
        transport=name,
        options=["--dtype", "float32", "--skip-tokenizer-init", "--gpu-memory-utilization", "0.3"],
    )
    gpu = "1" if name == "nccl" else "0"
    with published(tmp_path, tmp_path / "model", config, gpu=gpu) as (publisher, url, _):
        yield publisher, url, model


@WITH_VLLM
def test_what_is_published_is_what_is_sampled_from(served: tuple[Any, str, Any]) -> None:
    import httpx

    publisher, url, model = served
    for step in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        version = publisher.publish(model, step=step)
        for _ in range(2):  # the second time from the cache
            params = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}
            body = {"token_ids": PROMPT, "sampling_params": params, "cache_salt": "the same for all"}
            choice = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=600).json()["choices"][0]
            ids = choice["token_ids"]
            with torch.no_grad():
                logp = model.cpu()(input_ids=torch.tensor([PROMPT + ids])).logits[0].log_softmax(-1)
            own = [logp[len(PROMPT) - 1 + place, token].item() for place, token in enumerate(ids)]
            given = [content["logprob"] for content in choice["logprobs"]["content"]]
            assert given == pytest.approx(own, abs=2e-3)
            assert [span["version"] for span in choice["weight_versions"]] == [str(version)]
