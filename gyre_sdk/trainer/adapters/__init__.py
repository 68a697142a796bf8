"""Adapters for TRL's own trainers: their loop and their loss, on gyre's runs.

    runs (sessions, recorded) -> sealed groups -> rows or samples in the form that TRL's trainer takes; its weights -> replicas

`RolloutFunc` is a `rollout_func` for `GRPOTrainer`: one row per run. `AsyncRollouts` is a rollout worker and a weight
transfer for `AsyncGRPOTrainer`: one sample per selected trajectory. `TreeGRPOTrainer` remains the one that weighs runs
exactly; what TRL's losses do otherwise is in the user guide.
"""

from gyre_sdk.trainer.adapters.async_grpo import AsyncRollouts
from gyre_sdk.trainer.adapters.grpo import RolloutFunc

__all__ = ["AsyncRollouts", "RolloutFunc"]
