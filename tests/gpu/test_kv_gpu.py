"""Keys and values in a folder, on a GPU: found by an engine whose caches are empty, and never those of older weights.

Needs a GPU, and vLLM beside the training extra.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: none is visible to torch"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM in this environment"),
]
PROMPT = [3 + 7 * n % 60 for n in range(320)]


def sampled(url: str, salt: str) -> tuple[list[int], int]:
    """Return eight greedy tokens, and how many of the prompt were not computed."""
    import httpx

    params = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": params, "cache_salt": salt}
    answer = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=600)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["token_ids"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_keys_are_found_again_and_never_those_of_older_weights(tmp_path: Path) -> None:
    from gpu_kit import published
    from trainer.cells.cells_kit import until
    from training_kit import make_model
    from transformers import AutoModelForCausalLM

    from gyre_sdk.trainer.config import EngineConfig
    from gyre_sdk.trainer.engines.kv import KvConfig
    from gyre_sdk.trainer.transports import Replica
    from gyre_sdk.trainer.weights import full_weights

    base = tmp_path / "model"
    make_model(base, hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64, initializer_range=0.2)
    options = ["--dtype", "float32", "--gpu-memory-utilization", "0.3", "--enforce-eager"]
    config = EngineConfig(kind="vllm", transport="file", options=options, kv=KvConfig(memory_gib=0.25))
    with published(tmp_path, base, config) as (publisher, url, _), Replica(url, 0) as replica:
        first, _ = sampled(url, "s")
        until(lambda: len(list((tmp_path / "kv").rglob("*.bin"))) >= len(PROMPT) // 64, "the prompt is written")
        with replica.paused():
            pass  # its caches are empty
        again, found = sampled(url, "s")
        assert again == first and found >= len(PROMPT) // 2
        policy = dict(full_weights(AutoModelForCausalLM.from_pretrained(base)))
        changed = {name: tensor * 1.5 if "down_proj" in name else tensor for name, tensor in policy.items()}
        publisher.publish(changed, step=1)
        old_salt, found = sampled(url, "s")
        assert found == 0 and old_salt == sampled(url, "t")[0]
