"""The embedded engine on a GPU gives what it gives on the CPU. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

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
