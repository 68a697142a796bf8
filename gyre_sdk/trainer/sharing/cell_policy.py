"""The policy of a config on one rank of a satellite's worker: what `TreeGRPOTrainer` trains, without an optimizer."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from gyre_sdk.errors import SettingsError
from gyre_sdk.trainer.arguments import arguments
from gyre_sdk.trainer.attention.choose import choose
from gyre_sdk.trainer.attention.executor import Executor
from gyre_sdk.trainer.attention.noise import silence
from gyre_sdk.trainer.config import TrainerConfig
from gyre_sdk.trainer.policy import load_policy
from gyre_sdk.trainer.ranks import Ranks
from gyre_sdk.trainer.reference import AdapterOff, FrozenCopy, Reference
from gyre_sdk.trainer.sharded import ShardedExecutor, is_sharded, shard
from gyre_sdk.trainer.sharing.part import Part
from gyre_sdk.trainer.sharing.wire import Counted
from gyre_sdk.trainer.team import reference_of
from gyre_sdk.trainer.unit_step import accumulate
from gyre_sdk.trainer.units import Unit

__all__ = ["CellPolicy"]


class CellPolicy(Part):
    """It is loaded whole, on the CPU of every rank, and sharded when it first goes to the devices."""

    def __init__(self, config: TrainerConfig, ranks: Ranks) -> None:
        """Load it.

        Raises:
            SettingsError: the settings cannot be shared by several cells.
            TrainerError: the policy cannot be loaded.
        """
        train = msgspec.structs.replace(config.train, report_to=[], fsdp=False)  # nothing is left to accelerate here
        if train.sync_ref_model:
            raise SettingsError("sync_ref_model moves the trainer's reference only: satellites need it to be false")
        if train.threads:
            torch.set_num_threads(train.threads)
        self._args = arguments(train, config.output.dir)
        self._options = self._args.loss_options()
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._in_shards = config.train.fsdp and ranks.size > 1
        model = load_policy(config.policy)
        if self._args.disable_dropout:
            silence(model)
        if train.activation_checkpointing:
            model.activation_checkpointing_enable()
        model.train()
        self._beside = reference_of(config.policy, config.train)
        self._executor: Executor | None = None
        self._reference: Reference | None = None
        super().__init__(model, ranks)

    def occupy(self) -> None:
        """Go where it computes."""
        for model in self._models():
            if self._in_shards and not is_sharded(model):
                shard(model, self._device, self.ranks.size)
            elif self._device.type != "cpu":
                model.to(self._device)

    def free(self) -> None:
        """Free the GPU."""
        if self._device.type == "cpu":
            return
        for model in self._models():
            model.to("cpu")
        torch.cuda.empty_cache()

    def compute(self, unit: Unit | None, version: int | None, counted: Counted) -> None:
        """Add a unit's gradient, and count it."""
        if self._executor is None:
            self._executor = self._runs(self.model)
            self._reference = self._make_reference(self._executor) if self._options.needs_reference else None
        found = accumulate(
            unit,
            counted.totals,
            counted.mismatch,
            self._options,
            self._executor,
            self._reference,
            version=version,
            device=self._device,
        )
        counted.found.add(found)

    def _models(self) -> list[Any]:
        return [self.model] if self._beside is None else [self.model, self._beside]

    def _runs(self, model: Any) -> Executor:
        """Return what runs a model, which is where it computes."""
        if is_sharded(model):
            return ShardedExecutor(model, self._args.budget(), self.ranks)
        wanted: Any = self._args.executor
        return choose(model, wanted, self._args.budget())

    def _make_reference(self, executor: Executor) -> Reference:
        if self._beside is None:
            return AdapterOff(self.model, executor)
        return FrozenCopy(self._beside, self._runs)
