"""`gyre serve --model local:PATH`: the embedded engine as a child of the service."""

from __future__ import annotations

import os
import select
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from proxy_kit import Proxy
from test_serve import Served

from gyre_sdk.records import CallStatus

torch = pytest.importorskip("torch", reason="the embedded engine needs gyre-sdk[train]")
ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def policy(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with the small tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("policy")
    config = Qwen3Config(
        vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for file in model.iterdir():
        if file.name != "config.json":
            shutil.copy(file, folder)
    return folder


@pytest.fixture
def served(policy: Path, tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path, "--model", f"local:{policy}", "--store", str(tmp_path), GYRE_SERVICE_KEY="k") as process:
        yield process


def engine_of(served: Served) -> int:
    pid = served.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(children) == 1
    return int(children[0])


def gone(handle: int) -> bool:
    return bool(select.select([handle], [], [], 60)[0])


def test_the_engine_serves_comes_back_and_ends_with_the_service(served: Served, tmp_path: Path) -> None:
    proxy = Proxy(served.url, "k", tmp_path / "gyre.db")
    access = proxy.run()
    assert proxy.chat(access, ASK).status_code == 200
    first = engine_of(served)
    handle = os.pidfd_open(first)
    os.kill(first, signal.SIGKILL)
    assert gone(handle)
    assert proxy.chat(access, {**ASK, "user": "again"}).status_code == 200, "waits for the engine"
    second = engine_of(served)
    assert second != first
    handle = os.pidfd_open(second)
    served.process.terminate()
    assert served.process.wait(60) == 0 and gone(handle)
    calls = proxy.calls()
    assert len(calls) == 2 and all(0 < len(call.sampled_ids) <= 4 for call in calls)
    assert all(call.status in (CallStatus.COMPLETE, CallStatus.DELIVERED) for call in calls)


def test_the_engine_does_not_outlive_a_service_that_is_killed(served: Served) -> None:
    assert served.url
    handle = os.pidfd_open(engine_of(served))
    served.process.kill()
    assert gone(handle)
