"""What the agents' process has to know of a training."""

from __future__ import annotations

import hashlib
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

from gyre_sdk.errors import SettingsError
from gyre_sdk.harness.workspace.engine import engine_url
from gyre_sdk.trainer.config import AgentConfig, RolloutConfig, TasksConfig, TrainerConfig


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """The part of the settings that runs are made by."""

    agent: AgentConfig
    rollout: RolloutConfig
    tasks: TasksConfig
    base: Path
    """Folder of the config file, where the user's modules lie."""
    path: tuple[str, ...]
    """Where the trainer finds modules."""

    @staticmethod
    def of(config: TrainerConfig, base: Path) -> AgentSettings:
        """Return those of a config, for this process's modules."""
        return AgentSettings(config.agent, config.rollout, config.tasks, base, tuple(sys.path))

    def digest(self) -> str:
        """Return a fingerprint of what decides how a run goes on; more runs at a time, for example, do not."""
        rollout = self.rollout
        made = (rollout.workspace, rollout.recycle, rollout.timeout_s, rollout.turns, rollout.tokens, engine_url(None))
        return hashlib.sha256(repr((self.agent, made, self.tasks, self.base)).encode()).hexdigest()

    def packed(self) -> bytes:
        """Return it for the other process.

        Raises:
            SettingsError: an option is nothing that another process can have.
        """
        try:
            return pickle.dumps(self)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise SettingsError(
                f"agent.options and tasks.options go to the agents' process, and one of them cannot be pickled: {error};"
                " give strings, numbers, lists and tables"
            ) from error
