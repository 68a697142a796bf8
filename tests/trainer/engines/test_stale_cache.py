"""elastic-stale-cache-after-weight-update: cached keys and values never outlive the weights, whatever the salt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_process import Engine
from test_generate import metric

CASE = Path(__file__).parents[4] / "shared" / "cases" / "elastic" / "elastic-stale-cache-after-weight-update.json"


@pytest.mark.parametrize("salt", [None, "the same for all"])
def test_a_prefix_is_reused_within_a_version_only(
    engine: Engine, model_a: tuple[Path, Any], model_b: tuple[Path, Any], salt: str | None
) -> None:
    expected = json.loads(CASE.read_text())["expected"]["cached_prompt_tokens"]
    first, second = list(range(1, 65)), [*range(1, 65), *range(65, 81)]
    more = {} if salt is None else {"cache_salt": salt}
    found: dict[str, float] = {}

    def ask(name: str, prompt: list[int]) -> str:
        before = metric(engine, "vllm:prompt_tokens_cached_total")
        answer = engine.generate(prompt, max_tokens=1, request=more)
        found[name] = metric(engine, "vllm:prompt_tokens_cached_total") - before
        return answer.spans[0][0]

    engine.load_weights(model_a[0] / "model.safetensors", "81")
    assert [ask("r1", first), ask("r2", second)] == ["81", "81"]
    engine.load_weights(model_b[0] / "model.safetensors", "82")
    assert [ask("r4", first), ask("r5", second)] == ["82", "82"]
    assert found == {name: expected[name] for name in found}
