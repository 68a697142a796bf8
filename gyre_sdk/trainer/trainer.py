"""`TreeGRPOTrainer`: TRL's trainer base, where one training step is one streamed batch of units.

The stock loop of transformers clips, steps the optimizer and the schedule, logs, and saves checkpoints. This class
replaces what happens inside a step: units are taken one at a time as they are sealed, their gradients are added up
un-normalised, and the sum is divided when the batch is closed. A batch without units leaves every gradient at None:
the optimizer then changes nothing, the step is reported as skipped, and the schedule goes on.

Several processes (torchrun, `accelerate launch`) train together: units fall to ranks, gradients are summed over them at
close, with whole copies of the weights or with FSDP2's shards. DistributedDataParallel has no part in this: it takes the
mean of gradients, in every backward pass.

Or several cells do (`gyre_sdk.trainer.sharing`): these processes, the core, compute units of their own, and satellites push
the gradients of others.

With one process this gives, on the same rows, the gradients of TRL's `GRPOTrainer` for `dapo` and `dr_grpo`; with several,
those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from trl.trainer.base_trainer import _BaseTrainer

from gyre_sdk.errors import SettingsError
from gyre_sdk.trainer.arguments import TreeGRPOConfig, arguments
from gyre_sdk.trainer.attention.choose import choose
from gyre_sdk.trainer.attention.executor import Executor
from gyre_sdk.trainer.attention.noise import silence
from gyre_sdk.trainer.checkpoints import whole_or_gone
from gyre_sdk.trainer.config import TrainConfig
from gyre_sdk.trainer.loss import LossSums, Totals, denominator, describe
from gyre_sdk.trainer.mismatch import Mismatch
from gyre_sdk.trainer.ranks import Ranks
from gyre_sdk.trainer.reference import AdapterOff, FrozenCopy, Reference, frozen_copy
from gyre_sdk.trainer.sharded import (
    ShardedExecutor,
    is_sharded,
    prepare_sharding,
    sum_gradients,
    whole_weights,
)
from gyre_sdk.trainer.stepping import as_set, check_gradient, check_weights
from gyre_sdk.trainer.team import NO_DEEPSPEED
from gyre_sdk.trainer.unit_step import accumulate
from gyre_sdk.trainer.units import Unit

if TYPE_CHECKING:
    from gyre_sdk.trainer.sharing.core import Core

__all__ = ["Batches", "StepReport", "TreeGRPOConfig", "TreeGRPOTrainer", "make_trainer"]

Batches = Callable[[int], Iterable[Unit]]
"""Step number, from 1 -> the units of its batch, as they are sealed; ends when the batch is closed."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did, on all ranks together."""

    step: int
    units: list[str]
    totals: Totals
    metrics: dict[str, float]
    """Empty for a step without units. What `on_step` adds is logged with it."""
    mismatch: Mismatch = field(default_factory=Mismatch)
    """The trainer's log-probs against those recorded at sampling."""

    @property
    def skipped(self) -> bool:
        """True when there was nothing to train, no unit or only masked targets: no weight has changed."""
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
        model: transformers causal LM, or one with peft adapters; the same on every rank.
        args: the settings.
        batches: gives the units of a step. On rank 0 only: it deals them out to the others.
        reference_model: policy of the KL term when `beta` is above 0; None takes `model` without its adapters, or a copy
            of it as it is now.
        version: gives the version number that the policy in training has, or would get; staleness counts from it. On rank
            0 only.
        on_step: called after every step, before its checkpoint. On every rank.
        on_saved: called with step and folder when a checkpoint's files are written. On rank 0.
        ranks: the processes that train together; None finds them.
        core: shares every batch with other cells. On rank 0 only.
        callbacks: transformers' own.

    Raises:
        SettingsError: the model, or the way in which processes were started, does not allow what `args` say.
        TrainerError: from `train`: a step's gradient is not finite, or it has spoilt the weights.
    """

    loss_is_scaled_for_ga = True
    _name = "TreeGRPO"

    def __init__(
        self,
        model: Any,
        args: TreeGRPOConfig,
        batches: Batches,
        *,
        reference_model: Any = None,
        version: Callable[[], int | None] = lambda: None,
        on_step: Callable[[StepReport], None] = lambda report: None,
        on_saved: Callable[[int, Path], None] = lambda step, path: None,
        ranks: Ranks | None = None,
        core: Core | None = None,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        if args.disable_dropout:
            silence(model)
        self._options = args.loss_options()
        super().__init__(model=model, args=args, train_dataset=_Steps(), callbacks=callbacks)
        for noisy in (PrinterCallback, ProgressCallback):
            self.remove_callback(noisy)
        self.add_callback(_Reporter(self))
        self.ranks = Ranks() if ranks is None else ranks
        self._core = core
        self._check_sharing()
        self._reference_model = _reference_model(model, args, reference_model)
        self._reference: Reference | None = None
        self._executor: Executor | None = None
        self._batches = batches
        self._version = version
        self._in_training: int | None = None
        self._on_step = on_step
        self._on_saved = on_saved
        self._mismatch = Mismatch()
        self._resumed_from: Path | None = None
        self._done: StepReport | None = None
        self._unlogged: list[dict[str, float]] = []
        self._grad_norm = 0.0
        self._learning_rate = 0.0

    # -- the stock loop's seams --------------------------------------------------------------------------------------

    def _send_telemetry(self) -> None:
        """Send nothing."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled:
            raise SettingsError(NO_DEEPSPEED)
        prepare_sharding(self.accelerator, self.args.fsdp_plugin_args)
        self.is_fsdp_enabled = getattr(self.accelerator.state, "fsdp_plugin", None) is not None
        if self.is_fsdp_enabled and self.args.executor not in ("auto", "flat"):
            raise SettingsError(
                f"executor = {self.args.executor!r} makes as many passes as its rows have segments, and FSDP needs as many"
                " on every rank: use executor = 'flat' with FSDP, or no FSDP"
            )

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        self.ranks.copy_weights(model)
        if self.ranks.size > 1 and not self.is_fsdp_enabled:
            self.accelerator.prepare_model(model, evaluation_mode=True)  # from here on it is taken for wrapped already
        return super()._wrap_model(model, training, dataloader)

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
        totals, found, units = Totals(), LossSums(), list[str]()
        self._mismatch = Mismatch()
        self._in_training = self.ranks.share(self._version() if self.ranks.leads else None)
        if self._shared:
            self._share(step, totals, found, units)
        else:
            for dealt in self.ranks.deal(self._batches(step) if self.ranks.leads else ()):
                units += dealt.names
                if dealt.mine is not None or is_sharded(self.model):
                    found.add(self._accumulate(dealt.mine, totals))
        totals, found = self._together(totals, found)
        divide_by = denominator(self._options, totals, found.sums)
        if self.args.mismatch_threshold is not None:
            self._mismatch.check(self.args.mismatch_threshold)
        metrics = describe(self._options, found, divide_by) | self._mismatch.metrics() if totals.targets else {}
        if divide_by == 0:
            model.zero_grad()  # nothing to train: every gradient is None, and the optimizer passes over all weights
            self._done = StepReport(step, [], totals, metrics, self._mismatch)
            return torch.zeros((), device=self.args.device)
        self._close(divide_by)
        self._done = StepReport(step, units, totals, metrics, self._mismatch)
        return torch.tensor(metrics["loss"], device=self.args.device)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with as_set(self.optimizer, self.lr_scheduler):
            super()._load_optimizer_and_scheduler(checkpoint)
        self._resumed_from = None if checkpoint is None else Path(checkpoint)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        found = super()._get_grad_norm(model, grad_norm=grad_norm)
        found = found.full_tensor() if isinstance(found, DTensor) else found
        self._grad_norm = 0.0 if found is None else float(found)
        check_gradient(self._grad_norm, self.state.global_step + 1)
        self._learning_rate = self._get_learning_rate()  # once the schedule has stepped, it is the next step's
        return found

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the mean of what the steps since the last log reported."""
        names = {name for metrics in self._unlogged for name in metrics}
        for name in sorted(names):
            values = [metrics[name] for metrics in self._unlogged if name in metrics]
            logs.setdefault(name, sum(values) / len(values))
        self._unlogged.clear()
        super().log(logs, start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as a folder that can be loaded anywhere. Every rank has to call this."""
        if not is_sharded(self.model):
            super().save_model(output_dir, _internal_call)
            return
        weights = whole_weights(self.model, keep=self.args.should_save)
        if self.args.should_save:
            self._save(output_dir, state_dict=weights)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        with whole_or_gone(folder):
            super()._save_checkpoint(model, trial)
            if self.args.sync_ref_model and self.args.should_save:
                self._prepare()
                assert isinstance(self._reference, FrozenCopy)
                self._reference.save(folder)
            self.ranks.wait()  # each rank writes the state of its random numbers
            if self.ranks.leads:
                self._on_saved(self.state.global_step, folder)

    # -- inside a step -----------------------------------------------------------------------------------------------

    def _share(self, step: int, totals: Totals, found: LossSums, units: list[str]) -> None:
        """Compute what the core leaves to this rank, and put what satellites computed to it."""
        from gyre_sdk.trainer.sharing.core_ranks import share_batch

        others = share_batch(
            self._core,
            self.ranks,
            self.model,
            self._batches(step) if self.ranks.leads else (),
            lambda unit: found.add(self._accumulate(unit, totals)),
            step=step,
            version=self._in_training,
            base=self._base,
        )
        more = others.totals
        totals.add(runs=more.runs, rows=more.rows, targets=more.targets, calls=more.calls)
        found.add(others.found)
        self._mismatch.merge(others.mismatch)
        units += others.names

    def _check_sharing(self) -> None:
        self._base = ""
        self._shared = self.ranks.share(self._core is not None)
        if self._core is not None and self.is_fsdp_enabled:
            from gyre_sdk.trainer.sharing.tensors import fingerprint, frozen

            self._base = fingerprint(frozen(self.model))  # now that it is whole
        if self._shared and self.args.sync_ref_model:
            raise SettingsError(
                "sync_ref_model moves this process's reference only, and satellites have one each: set it to false, or"
                " train without cells"
            )

    def _accumulate(self, unit: Unit | None, totals: Totals) -> LossSums:
        """Add a unit's summed gradient, and count it; return what was found of its loss."""
        self._prepare()
        assert self._executor is not None
        return accumulate(
            unit,
            totals,
            self._mismatch,
            self._options,
            self._executor,
            self._reference,
            version=self._in_training,
            device=self.args.device,
        )

    def _together(self, totals: Totals, found: LossSums) -> tuple[Totals, LossSums]:
        """Put together what the ranks counted and found."""
        counts = self.ranks.add(torch.tensor([totals.runs, totals.rows, totals.targets, totals.calls]))
        runs, rows, targets, calls = counts.tolist()
        both = LossSums(self.ranks.add(found.sums), self.ranks.most(found.maxima))
        own, self._mismatch = self._mismatch, Mismatch()
        for one in self.ranks.all(own):
            self._mismatch.merge(one)
        return Totals(runs=runs, rows=rows, targets=targets, calls=calls), both

    def _close(self, divide_by: float) -> None:
        self.ranks.add_gradients(self.model.parameters())
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(divide_by)

    def _prepare(self) -> None:
        """Make what runs the model, once the stock loop has put it where it trains."""
        if self._executor is None:
            self._executor = self._make_executor(self.model)
        if self._reference is None and self._options.needs_reference:
            self._reference = self._make_reference(self._executor)

    def _make_executor(self, model: Any) -> Executor:
        if is_sharded(model):
            sum_gradients(model)
            return ShardedExecutor(model, self.args.budget(), self.ranks)
        return choose(model, self.args.executor, self.args.budget())

    def _make_reference(self, executor: Executor) -> Reference:
        if self._reference_model is None:
            return AdapterOff(self.model, executor)
        model = self._reference_model
        if is_sharded(self.model):
            return FrozenCopy(fsdp2_prepare_model(self.accelerator, model), self._make_executor)
        reference = FrozenCopy(model.to(self.args.device), self._make_executor)
        if self.args.sync_ref_model and self._resumed_from is not None:
            reference.load(self._resumed_from)
        return reference

    def _report(self) -> None:
        assert self._done is not None
        report, self._done = self._done, None
        if not report.skipped:
            check_weights(self.model, report.step)
            report.metrics["grad_norm"] = self._grad_norm
            report.metrics["learning_rate"] = self._learning_rate
        if self.args.sync_ref_model and report.step % self.args.ref_model_sync_steps == 0:
            self._prepare()
            assert isinstance(self._reference, FrozenCopy)
            self._reference.follow(self.model, self.args.ref_model_mixup_alpha)
        self._on_step(report)
        self._unlogged.append(report.metrics)


class _LastLog(TrainerCallback):  # type: ignore[misc]
    """Keeps the last log alone: each checkpoint would hold all of them, and the ledger does."""

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del state.log_history[:-1]


def make_trainer(config: TrainConfig, model: Any, folder: Path, batches: Any, **more: Any) -> TreeGRPOTrainer:
    """Return the trainer that a config describes; `more` as of `TreeGRPOTrainer`."""
    if config.threads:
        torch.set_num_threads(config.threads)
    return TreeGRPOTrainer(model, arguments(config, folder), batches, callbacks=[_LastLog()], **more)


def _reference_model(model: Any, args: TreeGRPOConfig, given: Any) -> Any:
    """Return the model that the reference policy is; None for the one in training without its adapters."""
    if not args.beta:
        return None
    adapters = hasattr(model, "disable_adapter")
    if args.sync_ref_model and adapters and given is None:
        raise SettingsError(
            "sync_ref_model moves a copy's weights, and with adapters there is none: train full weights"
        )
    if given is None:
        return None if adapters else frozen_copy(model)
    return given
