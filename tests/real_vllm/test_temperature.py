"""What real vLLM reports at a temperature: the log-probs of the distribution that it sampled from, which is what is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import gyre_sdk as gyre
from gyre_sdk.journal import Journal

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_logprobs_are_of_the_logits_divided_by_the_temperature(
    service: gyre.ServiceClient, tmp_path: Path, demo_policy: Path
) -> None:
    task = gyre.Task(instruction="set fox to red in oak.conf", name="warm", scorer=lambda workspace: 1.0)
    with gyre.session(task, service=service, workspace="local") as agent:
        client = agent.openai()
        for temperature in (0.4, 1.0, 1.6):
            client.chat.completions.create(
                model="policy",
                messages=[{"role": "user", "content": task.instruction}],
                temperature=temperature,
                max_tokens=12,
            )
    model = AutoModelForCausalLM.from_pretrained(demo_policy, dtype=torch.float32)
    with Journal(tmp_path / "s.db", "r") as journal:
        calls = list(journal.calls())
    assert [call.sampling.temperature for call in calls] == [0.4, 1.0, 1.6]
    for call in calls:
        ids = torch.tensor([call.prompt_ids + call.sampled_ids])
        with torch.no_grad():
            logits_KV = model(input_ids=ids).logits[0, len(call.prompt_ids) - 1 : -1]
        sampled_K1 = torch.tensor(call.sampled_ids)[:, None]
        for temperature in (call.sampling.temperature, call.sampling.temperature + 0.3):
            mine = (logits_KV / temperature).log_softmax(-1).gather(-1, sampled_K1)[:, 0].tolist()
            assert (mine == pytest.approx(call.logprobs, abs=2e-3)) is (temperature == call.sampling.temperature)
