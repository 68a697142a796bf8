"""Where adapters may be: what is trained can be published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_families import family

from gyre_sdk.errors import SettingsError
from gyre_sdk.trainer.config import LoraConfig, PolicyConfig
from gyre_sdk.trainer.policy import load_policy
from gyre_sdk.trainer.weights import full_weights


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapters_on_tied_tables_are_refused(tmp_path: Path, target: str) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj", target])
    family("qwen3", tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    with pytest.raises(SettingsError, match=f"target_modules = .*{target}.* ties to each other: leave them out"):
        load_policy(PolicyConfig(model=tmp_path / "tied", lora=lora))
    load_policy(PolicyConfig(model=tmp_path / "tied", lora=LoraConfig(r=2)))
    apart = family("qwen3", tie_word_embeddings=False)
    apart.save_pretrained(tmp_path / "apart")
    policy = load_policy(PolicyConfig(model=tmp_path / "apart", lora=lora)).eval()
    for parameter in policy.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter) * parameter.requires_grad
    ids = torch.arange(3, 19)[None]
    wanted = policy(input_ids=ids).logits.detach()
    apart.load_state_dict(full_weights(policy))
    torch.testing.assert_close(apart(input_ids=ids).logits.detach(), wanted, rtol=1e-4, atol=1e-5)
