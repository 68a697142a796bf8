"""The policy in training: loading it, with adapters where they are asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from gyre_sdk.errors import SettingsError, TrainerError
from gyre_sdk.trainer.config import LoraConfig, PolicyConfig
from gyre_sdk.trainer.purpose import check_four_bits

_ADAPTER = "adapter_config.json"


def load_policy(config: PolicyConfig, checkpoint: Path | None = None) -> Any:
    """Return the model to train: the starting policy, or what a checkpoint holds.

    Raises:
        TrainerError: the folder does not hold such a model.
        SettingsError: 4-bit weights are asked for where they cannot be had, adapters on tied embeddings or on modules that are not there, or adapters of
            another rank than the checkpoint's.
    """
    disable_progress_bar()
    quantization = _four_bits() if config.lora is not None and config.lora.load_in_4bit else {}
    source = config.model if checkpoint is None or config.lora is not None else checkpoint
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source, **{"dtype": torch.float32, "local_files_only": True, **quantization}
        )
    except (OSError, ValueError, KeyError) as error:
        raise TrainerError(f"no causal language model can be loaded from {source}: {error}") from error
    model.config.use_cache = False
    if config.lora is None:
        if checkpoint is not None and (checkpoint / _ADAPTER).is_file():
            raise TrainerError(
                f"{checkpoint} holds adapters, but policy.lora is not set; set it again, or start with a new output.dir"
            )
        return model
    from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training

    if quantization:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if checkpoint is not None:
        if not (checkpoint / _ADAPTER).is_file():
            raise TrainerError(
                f"{checkpoint} holds full weights, but policy.lora is set; remove it, or start with a new output.dir"
            )
        _check_rank(config.lora, checkpoint)
        return PeftModel.from_pretrained(model, str(checkpoint), is_trainable=True)
    lora = config.lora
    adapters = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
    )
    try:
        policy = get_peft_model(model, adapters)
    except ValueError as error:
        raise SettingsError(f"policy.lora.target_modules = {lora.target_modules!r} does not fit: {error}") from error
    _check_tied(policy, lora.target_modules)
    return policy


def _check_tied(policy: Any, target_modules: object) -> None:
    """Refuse adapters on one of two tied tables: merged, it is no longer the other, and an engine has one for both."""
    base = policy.get_base_model()
    tables = [base.get_input_embeddings(), base.get_output_embeddings()]
    inner = [getattr(table, "base_layer", table) for table in tables]
    if None not in inner and inner[0].weight is inner[1].weight and inner != tables:
        raise SettingsError(
            f"policy.lora.target_modules = {target_modules!r} puts adapters on the input embeddings or the head, which"
            f" {type(base).__name__} ties to each other: leave them out"
        )


def _check_rank(lora: LoraConfig, checkpoint: Path) -> None:
    """Refuse other ranks than those of the adapters that training goes on with: they would have no effect."""
    saved = json.loads((checkpoint / _ADAPTER).read_text())
    for key, saved_as in (("r", "r"), ("alpha", "lora_alpha")):
        if getattr(lora, key) != saved[saved_as]:
            raise SettingsError(
                f"policy.lora.{key} = {getattr(lora, key)}, and the adapters in {checkpoint}, with which training goes on,"
                f" have {saved[saved_as]}; set it to that, or train anew with another store.path and output.dir"
            )


def _four_bits() -> dict[str, Any]:
    """Return how a model is loaded with its weights in 4 bits (NF4, arXiv:2305.14314).

    Raises:
        SettingsError: bitsandbytes or a GPU is not there.
    """
    check_four_bits()
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=True,
    )
    return {"quantization_config": settings, "dtype": torch.bfloat16, "device_map": {"": torch.cuda.current_device()}}
