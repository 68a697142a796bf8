"""The policy in training: loading it, with adapters where they are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.config import PolicyConfig

_ADAPTER = "adapter_config.json"


def load_policy(config: PolicyConfig, checkpoint: Path | None = None) -> Any:
    """Return the model to train: the starting policy, or what a checkpoint holds.

    Raises:
        TrainerError: the folder does not hold such a model.
    """
    disable_progress_bar()
    source = config.model if checkpoint is None or config.lora is not None else checkpoint
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise TrainerError(f"no causal language model can be loaded from {source}: {error}") from error
    model.config.use_cache = False
    if config.lora is None:
        if checkpoint is not None and (checkpoint / _ADAPTER).is_file():
            raise TrainerError(
                f"{checkpoint} holds adapters, but policy.lora is not set; set it again, or start with a new output.dir"
            )
        return model
    from peft import LoraConfig, PeftModel, get_peft_model

    if checkpoint is not None:
        if not (checkpoint / _ADAPTER).is_file():
            raise TrainerError(
                f"{checkpoint} holds full weights, but policy.lora is set; remove it, or start with a new output.dir"
            )
        return PeftModel.from_pretrained(model, str(checkpoint), is_trainable=True)
    lora = config.lora
    return get_peft_model(
        model,
        LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.r,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=lora.target_modules,
        ),
    )
