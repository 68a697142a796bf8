"""`TreeGRPOTrainer`: TRL's trainer base, where one training step is one streamed batch of units.

The stock loop of transformers clips, steps the optimizer and the schedule, logs, and saves checkpoints. This class
replaces what happens inside a step: units are taken one at a time as they are sealed, their gradients are added up
un-normalised, and the sum is divided when the batch is closed. A batch without units leaves every gradient at None:
the optimizer then changes nothing, the step is reported as skipped, and the schedule goes on.

With one process this gives, on the same rows, the gradients of TRL's `GRPOTrainer` for `dapo` and `dr_grpo`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from trl.trainer.base_config import _BaseConfig
from trl.trainer.base_trainer import _BaseTrainer
from trl.trainer.utils import disable_dropout_in_model

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.attention.budget import Budget
from gyre_sdk.trainer.attention.executor import Objective, linearised
from gyre_sdk.trainer.attention.flat import FlatExecutor
from gyre_sdk.trainer.config import TrainConfig
from gyre_sdk.trainer.loss import LossOptions, LossSums, Targets, Totals, denominator, describe, loss, loss_sum
from gyre_sdk.trainer.units import Unit

Batches = Callable[[int], Iterable[Unit]]
"""Step number, from 1 -> the units of its batch, as they are sealed; ends when the batch is closed."""


@dataclass
class TreeGRPOConfig(_BaseConfig):
    """Settings of the trainer. Names are those of TRL's `GRPOConfig` where it has them."""

    learning_rate: float = field(default=1e-6, metadata={"help": "Initial learning rate."})
    per_device_train_batch_size: int = field(default=1, metadata={"help": "A step is one streamed batch: 1."})
    gradient_checkpointing: bool | None = field(default=None, metadata={"help": "See `activation_checkpointing`."})
    bf16: bool | None = field(default=False, metadata={"help": "Mixed precision in bfloat16."})
    remove_unused_columns: bool | None = field(default=False, metadata={"help": "There are no columns."})
    disable_dropout: bool = field(default=True, metadata={"help": "Dropout would make the ratio to sampling noisy."})
    loss_type: str = field(default="run", metadata={"help": "See `gyre_sdk.trainer.loss`."})
    epsilon: float = field(default=0.2, metadata={"help": "Lower (and upper) clip range of the ratio."})
    epsilon_high: float | None = field(default=None, metadata={"help": "Upper clip range; None: as `epsilon`."})
    max_completion_length: int = field(default=1024, metadata={"help": "Constant of `dr_grpo`."})
    importance_sampling: str = field(default="bypass", metadata={"help": "`bypass` or `truncate`."})
    importance_sampling_cap: float = field(default=2.0, metadata={"help": "Cap of `truncate`."})
    negative_advantage_scale: float = field(default=1.0, metadata={"help": "Factor on negative advantages."})
    micro_batch_tokens: int = field(default=8192, metadata={"help": "Tokens of a forward pass, padding included."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gradient_accumulation_steps != 1 or self.per_device_train_batch_size != 1:
            raise ValueError("a step is one streamed batch: leave gradient_accumulation_steps and the batch size at 1")
        if self.max_steps < 1:
            raise ValueError(f"max_steps is {self.max_steps}; give the number of steps, at least 1")

    def loss_options(self) -> LossOptions:
        """Return what the loss needs."""
        return LossOptions(
            loss_type=self.loss_type,  # type: ignore[arg-type]
            epsilon_low=self.epsilon,
            epsilon_high=self.epsilon if self.epsilon_high is None else self.epsilon_high,
            importance_sampling=self.importance_sampling,  # type: ignore[arg-type]
            importance_sampling_cap=self.importance_sampling_cap,
            negative_advantage_scale=self.negative_advantage_scale,
            max_completion_length=self.max_completion_length,
        )


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did."""

    step: int
    units: list[str]
    totals: Totals
    metrics: dict[str, float]
    """Empty for a skipped step."""

    @property
    def skipped(self) -> bool:
        """True when there was nothing to train: no weight has changed."""
        return not self.units


class _Steps(IterableDataset):  # type: ignore[type-arg]
    """One placeholder per step: the work itself is taken inside the step."""

    def __iter__(self) -> Iterator[dict[str, int]]:
        while True:
            yield {"step": 0}


class _Reporter(TrainerCallback):  # type: ignore[misc]
    """Hands on what a step did, once the optimizer has stepped."""

    def __init__(self, trainer: TreeGRPOTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer._report()


class TreeGRPOTrainer(_BaseTrainer):  # type: ignore[misc]
    """Trains a causal LM on units.

    Args:
        model: transformers causal LM, or one with peft adapters.
        args: the settings.
        batches: gives the units of a step.
        on_step: called after every step, before its checkpoint.
        on_saved: called with step and folder when a checkpoint's files are written.
    """

    loss_is_scaled_for_ga = True
    _name = "TreeGRPO"

    def __init__(
        self,
        model: Any,
        args: TreeGRPOConfig,
        batches: Batches,
        *,
        on_step: Callable[[StepReport], None] = lambda report: None,
        on_saved: Callable[[int, Path], None] = lambda step, path: None,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        if args.disable_dropout:
            disable_dropout_in_model(model)
        super().__init__(model=model, args=args, train_dataset=_Steps(), callbacks=callbacks)
        for noisy in (PrinterCallback, ProgressCallback):
            self.remove_callback(noisy)
        if self.accelerator.num_processes > 1:
            raise TrainerError("several training processes are not supported yet; start gyre-train without torchrun")
        self.add_callback(_Reporter(self))
        self._batches = batches
        self._on_step = on_step
        self._on_saved = on_saved
        self._options = args.loss_options()
        autocast = torch.bfloat16 if args.bf16 else None
        self._executor = FlatExecutor(self.model, Budget(tokens=args.micro_batch_tokens, autocast=autocast))
        self._done: StepReport | None = None
        self._grad_norm = 0.0
        self._learning_rate = 0.0

    def _send_telemetry(self) -> None:
        """Send nothing."""

    # -- the stock loop's seams --------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:  # type: ignore[type-arg]
        return DataLoader(self.train_dataset, batch_size=1)

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["step"]

    def floating_point_ops(self, inputs: Any) -> int:
        return 0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Accumulate a whole batch into the gradients; return its loss."""
        model.train()
        step = self.state.global_step + 1
        totals = Totals()
        found = LossSums()
        units: list[str] = []
        for unit in self._batches(step):
            found.add(self._accumulate(unit, totals))
            units.append(unit.id)
        divide_by = denominator(self._options, totals, found.sums)
        if divide_by == 0:
            model.zero_grad()  # nothing to train: every gradient is None, and the optimizer passes over all weights
            self._done = StepReport(step, [], totals, {})
            return torch.zeros((), device=self.args.device)
        self._close(divide_by)
        metrics = describe(self._options, found, divide_by)
        self._done = StepReport(step, units, totals, metrics)
        return torch.tensor(metrics["loss"], device=self.args.device)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        found = super()._get_grad_norm(model, grad_norm=grad_norm)
        self._grad_norm = 0.0 if found is None else float(found)
        self._learning_rate = self._get_learning_rate()  # once the schedule has stepped, it is the next step's
        return found

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        self._on_saved(self.state.global_step, folder)

    # -- inside a step -----------------------------------------------------------------------------------------------

    def _accumulate(self, unit: Unit, totals: Totals) -> LossSums:
        """Add a unit's summed gradient, and count it; return what was found of its loss."""
        targets = Targets.of(unit.rows, device=self.args.device)
        totals.add(runs=unit.runs, rows=len(unit.rows), targets=unit.tokens, calls=targets.calls)

        def whole(logp_K: torch.Tensor, entropy_K: torch.Tensor) -> torch.Tensor:
            return loss_sum(self._options, targets, logp_K, entropy_K)

        if self._options.separable:
            objective: Objective = partial(loss_sum, self._options, targets)
        else:
            _, objective = linearised(whole, self._executor.forward(unit.rows))
        scores = self._executor.forward_backward(unit.rows, objective)
        found = LossSums()
        found.add(loss(self._options, targets, scores.logp_K, scores.entropy_K))
        return found

    def _close(self, divide_by: float) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(divide_by)

    def _report(self) -> None:
        assert self._done is not None
        report, self._done = self._done, None
        if not report.skipped:
            report.metrics["grad_norm"] = self._grad_norm
            report.metrics["learning_rate"] = self._learning_rate
        self._on_step(report)


def make_trainer(config: TrainConfig, model: Any, folder: Path, batches: Any, **callbacks: Any) -> TreeGRPOTrainer:
    """Return the trainer that a config describes."""
    if config.threads:
        torch.set_num_threads(config.threads)
    schedule: dict[str, tuple[str, dict[str, float]]] = {
        "constant": ("constant", {}),
        "constant_with_warmup": ("constant_with_warmup", {}),
        # with power 1, transformers' polynomial schedule is the linear one with an end above 0
        "linear": ("polynomial", {"lr_end": config.learning_rate * config.final_learning_rate, "power": 1.0}),
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": config.final_learning_rate}),
    }
    kind, options = schedule[config.schedule]
    args = TreeGRPOConfig(
        output_dir=str(folder),
        max_steps=config.steps,
        learning_rate=config.learning_rate,
        lr_scheduler_type=kind,
        lr_scheduler_kwargs=options,
        warmup_steps=config.warmup_steps,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        epsilon=config.epsilon,
        epsilon_high=config.epsilon_high,
        loss_type=config.loss_type,
        max_completion_length=config.max_completion_length,
        importance_sampling=config.importance_sampling,
        importance_sampling_cap=config.importance_sampling_cap,
        negative_advantage_scale=config.negative_advantage_scale,
        micro_batch_tokens=config.micro_batch_tokens,
        seed=config.seed,
        save_strategy="steps",
        save_steps=config.save_every,
        save_total_limit=config.keep_checkpoints,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ignore_data_skip=True,
        dataloader_pin_memory=False,
        use_cpu=not torch.cuda.is_available(),
    )
    return TreeGRPOTrainer(model, args, batches, **callbacks)
