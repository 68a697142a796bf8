"""The embedded engine and the executor on a GPU give what they give on the CPU. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: none is visible to torch"),
]


def test_engine_on_cuda_equals_the_model_on_cpu(tmp_path: Path) -> None:
    from engine_process import make_model, running_engine

    model = make_model(tmp_path / "model", 0)
    with running_engine(tmp_path / "model", tmp_path / "log.jsonl", "--device", "cuda") as engine:
        for start in (5, 17, 40):
            prompt = list(range(start, start + 12))
            answer = engine.generate(prompt, max_tokens=16, ignore_eos=True)
            ids = torch.tensor([prompt + answer.ids])
            with torch.no_grad():
                logp = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            best, value = logp.argmax(-1)[len(prompt) - 1 :], logp.max(-1).values[len(prompt) - 1 :]
            assert answer.ids == best.tolist()
            assert answer.logprobs == pytest.approx(value.tolist(), abs=1e-3)


def test_executor_on_cuda_equals_cpu(tmp_path: Path) -> None:
    from engine_process import VOCAB, make_model

    from gyre_sdk.trainer.attention.flat import FlatExecutor, collate

    model = make_model(tmp_path / "model", 0)
    draw = np.random.default_rng(0)
    ids = [draw.integers(2, VOCAB, size).astype(np.int32) for size in (30, 12, 55)]
    targets = [np.arange(5, len(row), 3, dtype=np.int32) for row in ids]
    batch = collate(ids, targets, np.arange(3))
    on_cpu, _ = FlatExecutor(model)(batch)
    on_cpu.sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.cuda()
    on_gpu, _ = FlatExecutor(model)(batch)
    on_gpu.sum().backward()
    assert torch.allclose(on_gpu.cpu(), on_cpu, atol=1e-4)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad.cpu(), gradients[name], atol=1e-3, rtol=1e-3), name
