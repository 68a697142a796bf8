"""Whether settings, and what is installed here, allow what they are to be used for: asked before anything is started."""

from __future__ import annotations

import importlib.util

from gyre_sdk.errors import SettingsError
from gyre_sdk.trainer.config import TrainerConfig

__all__ = ["check_four_bits", "check_packages", "check_purpose"]

_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors")
"""Of the extra `train`."""


def check_packages() -> None:
    """Check that what trains is installed.

    Raises:
        SettingsError: it is not.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingsError(f"training needs {', '.join(missing)}; run: pip install 'gyre-sdk[train]'")


def check_purpose(config: TrainerConfig, evaluation: str | None = None, *, processes: int = 1) -> None:
    """Check a training, or an evaluation of that name.

    torch and its like are loaded only where they have to be asked.

    Args:
        processes: that train together.

    Raises:
        SettingsError: it cannot be.
    """
    if evaluation is not None:
        if evaluation == "train":
            raise SettingsError("an evaluation cannot be named 'train': its runs would be taken for training data")
        if processes > 1:
            raise SettingsError(
                "an evaluation takes one process: start gyre-train without torchrun or accelerate launch"
            )
        return
    train, policy = config.train, config.policy
    if not config.engine.publish:
        raise SettingsError(
            "training needs engine.publish = true: without publication the policy that acts would never change"
        )
    if train.fsdp and processes == 1:
        raise SettingsError("train.fsdp = true needs several processes: start gyre-train with torchrun")
    if train.beta and train.reference is not None and not (train.reference / "config.json").is_file():
        raise SettingsError(
            f"train.reference = {str(train.reference)!r}: no model is there (config.json is missing); give a Hugging Face"
            " model folder, or leave it out for the policy at the start"
        )
    if policy.lora is not None and policy.lora.load_in_4bit:
        check_four_bits()
    if any(not name.isidentifier() or importlib.util.find_spec(name) is None for name in train.report_to):
        from gyre_sdk.trainer.arguments import check_trackers

        check_trackers(train.report_to)


def check_four_bits() -> None:
    """Check that weights can be loaded in 4 bits here.

    Raises:
        SettingsError: bitsandbytes or a GPU is not there.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise SettingsError(
            "policy.lora.load_in_4bit = true needs the package bitsandbytes, which is not installed: pip install"
            " bitsandbytes, or set it to false"
        )
    import torch

    if not torch.cuda.is_available():
        raise SettingsError("policy.lora.load_in_4bit = true needs a GPU, and torch sees none; set it to false")
