"""`TreeGRPOConfig`: TRL's `GRPOConfig`, for batches that are streamed in as units.

What generates completions, scores them or cuts them into batches in TRL has happened before a unit is made: those
settings are refused when they are set, so that none is silently without effect.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)
from trl.trainer.base_config import _BaseConfig
from trl.trainer.grpo_config import GRPOConfig

from gyre_sdk.errors import SettingsError
from gyre_sdk.trainer.attention.budget import Budget
from gyre_sdk.trainer.config import TrainConfig
from gyre_sdk.trainer.loss_options import LossOptions
from gyre_sdk.trainer.team import NO_DEEPSPEED

_USED = frozenset(
    {
        "learning_rate",
        "disable_dropout",
        "remove_unused_columns",
        "num_generations",
        "generation_batch_size",
        "steps_per_generation",
        "max_completion_length",
        "loss_type",
        "epsilon",
        "epsilon_high",
        "delta",
        "importance_sampling_level",
        "sapo_temperature_neg",
        "sapo_temperature_pos",
        "vespo_k_pos",
        "vespo_lambda_pos",
        "vespo_k_neg",
        "vespo_lambda_neg",
        "off_policy_mask_threshold",
        "top_entropy_quantile",
        "beta",
        "use_bias_correction_kl",
        "sync_ref_model",
        "ref_model_mixup_alpha",
        "ref_model_sync_steps",
        "entropy_coef",
    }
)
"""Fields of TRL's `GRPOConfig` itself that mean here what they mean there. `num_generations` and what follows from it are
only for its own checks."""
_INSTEAD = {
    "vllm_importance_sampling_correction": "importance_sampling",
    "vllm_importance_sampling_mode": "importance_sampling",
    "vllm_importance_sampling_clip_max": "importance_sampling_cap",
    "vllm_importance_sampling_clip_min": "importance_sampling_floor",
    "vllm_importance_sampling_cap": "importance_sampling_cap",
    "scale_rewards": "Sealer(baseline=...), where the rows are made",
    "mask_truncated_completions": "Sealer(mask_truncated=...), where the rows are made",
    "temperature": "the temperature recorded with each call",
}


@dataclass
class TreeGRPOConfig(GRPOConfig):
    """Settings of `TreeGRPOTrainer`. Names, meanings and defaults are TRL's, unless a field below says otherwise.

    Raises:
        ValueError: a setting cannot work with streamed batches.
        SettingsError: settings of the loss contradict each other.
    """

    per_device_train_batch_size: int = field(default=1, metadata={"help": "A step is one streamed batch: 1."})
    gradient_checkpointing: bool | None = field(default=None, metadata={"help": "See `activation_checkpointing`."})
    bf16: bool | None = field(default=False, metadata={"help": "Mixed precision in bfloat16."})
    disable_dropout: bool = field(default=True, metadata={"help": "Dropout would make the ratio to sampling noisy."})
    num_generations: int | None = field(
        default=2, metadata={"help": "For TRL's own checks: groups are sealed already."}
    )
    steps_per_generation: int | None = field(default=None, metadata={"help": "For TRL's own checks."})
    logging_steps: float = field(default=1, metadata={"help": "Steps between two logs."})
    max_completion_length: int | None = field(default=1024, metadata={"help": "Constant of `dr_grpo`."})
    loss_type: str = field(default="run", metadata={"help": "See `gyre_sdk.trainer.loss`: `run`, or as in TRL."})
    importance_sampling: str = field(default="bypass", metadata={"help": "Correction against behaviour log-probs."})
    importance_sampling_cap: float | None = field(default=2.0, metadata={"help": "Upper bound of `truncate`, `mask`."})
    importance_sampling_floor: float | None = field(default=None, metadata={"help": "Lower bound of the same."})
    proximal: str = field(default="current", metadata={"help": "Policy that a corrected ratio is taken against."})
    negative_advantage_scale: float = field(default=1.0, metadata={"help": "Factor on negative advantages."})
    mismatch_threshold: float | None = field(
        default=None, metadata={"help": "Mean difference to the engine's log-probs (nats) that ends training."}
    )
    executor: str = field(default="auto", metadata={"help": "`auto`, `flat`, `gather` or `dfs`."})
    micro_batch_tokens: int = field(default=8192, metadata={"help": "Tokens of a forward pass, padding included."})

    def __post_init__(self) -> None:
        """Check what cannot work, then what TRL and transformers check."""
        if self.gradient_accumulation_steps != 1 or self.per_device_train_batch_size != 1:
            raise ValueError("a step is one streamed batch: leave gradient_accumulation_steps and the batch size at 1")
        if self.max_steps < 1:
            raise ValueError(f"max_steps is {self.max_steps}; give the number of steps, at least 1")
        if self.deepspeed:
            raise SettingsError(NO_DEEPSPEED)
        self._refuse_what_would_do_nothing()
        if self.generation_batch_size is None and self.steps_per_generation is None:
            self.steps_per_generation = self.num_generations  # TRL wants whole groups in its batch of generations
        super().__post_init__()
        self.loss_options()

    def _refuse_what_would_do_nothing(self) -> None:
        inherited = {one.name for one in fields(_BaseConfig)}
        own = {one.name for one in fields(GRPOConfig)} - inherited - _USED
        for one in fields(GRPOConfig):
            if one.name in own and getattr(self, one.name) != one.default:
                instead = _INSTEAD.get(one.name)
                raise ValueError(
                    f"{one.name} = {getattr(self, one.name)!r} has no effect on units, whose completions are sampled and"
                    f" scored already: {'use ' + instead if instead else 'leave it out'}"
                )

    @property
    def n_gpu(self) -> int:
        """At most 1: several GPUs take several processes, not torch's DataParallel."""
        return min(super().n_gpu, 1)

    def loss_options(self) -> LossOptions:
        """Return what the loss needs.

        Raises:
            SettingsError: values are impossible, or do not go together.
        """
        return LossOptions.of(self)

    def budget(self) -> Budget:
        """Return what a forward pass may use."""
        return Budget(tokens=self.micro_batch_tokens, autocast=torch.bfloat16 if self.bf16 else None)


def arguments(config: TrainConfig, folder: Path, **more: Any) -> TreeGRPOConfig:
    """Return the trainer's settings for a config.

    Args:
        folder: where checkpoints go.
        more: further settings, as of `TreeGRPOConfig`.

    Raises:
        SettingsError: the config asks for what is not possible.
    """
    schedule: dict[str, tuple[str, dict[str, float]]] = {
        "constant": ("constant", {}),
        "constant_with_warmup": ("constant_with_warmup", {}),
        # with power 1, transformers' polynomial schedule is the linear one with an end above 0
        "linear": ("polynomial", {"lr_end": config.learning_rate * config.final_learning_rate, "power": 1.0}),
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": config.final_learning_rate}),
    }
    kind, options = schedule[config.schedule]
    alike = {one.name for one in fields(TreeGRPOConfig)} & set(TrainConfig.__struct_fields__)
    alike -= {"scale_rewards", "mask_truncated_completions", "fsdp"}  # the first two act where rows are made
    if config.fsdp and not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise SettingsError("train.fsdp = true needs several processes: start gyre-train with torchrun")
    found = {name: getattr(config, name) for name in alike}
    found |= {
        "output_dir": str(folder),
        "max_steps": config.steps,
        "lr_scheduler_type": kind,
        "lr_scheduler_kwargs": options,
        "adam_beta1": config.betas[0],
        "adam_beta2": config.betas[1],
        "save_strategy": "steps",
        "save_steps": config.save_every,
        "save_total_limit": config.keep_checkpoints,
        "logging_strategy": "steps" if config.report_to else "no",
        "report_to": list(config.report_to),
        "fsdp": config.fsdp,
        "fsdp_config": {"version": 2} if config.fsdp else None,
        "disable_tqdm": True,
        "ignore_data_skip": True,
        "dataloader_pin_memory": False,
        "use_cpu": not torch.cuda.is_available(),
    }
    check_trackers(config.report_to)
    try:
        return TreeGRPOConfig(**{**found, **more})
    except ValueError as error:
        raise SettingsError(f"[train]: {error}") from error


def check_trackers(names: list[str]) -> None:
    """Check that transformers knows these trackers, and that their packages are installed.

    Raises:
        SettingsError: one is not there.
    """
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            raise SettingsError(f"train.report_to = {names!r}: there is no {name!r}; known: {known}")
        if name not in get_available_reporting_integrations():
            raise SettingsError(
                f"train.report_to = {names!r}: the package of {name!r} is not installed; install it in the trainer's"
                " environment, or take it out"
            )
