"""Real workers of a core, and what they and the core train."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sharing_kit import KEY
from tiny_policy import random_row, unit_of
from training_kit import CONFIG, make_training

from gyre_sdk import events
from gyre_sdk.trainer.config import TrainerConfig, load_config, save_config
from gyre_sdk.trainer.policy import load_policy
from gyre_sdk.trainer.sharing.core import Core
from gyre_sdk.trainer.trainer import StepReport, TreeGRPOTrainer
from gyre_sdk.trainer.units import Unit

HERE = Path(__file__).parent
START_S = 180.0
"""That a worker may take to import what it needs, on a busy machine."""
LORA = CONFIG.replace("[tasks]", "[policy.lora]\nr = 2\nalpha = 4\n[tasks]")
_MORE = """
loss_type = "dapo"
importance_sampling = "truncate"
entropy_coef = 0.1
beta = 0.05
executor = "flat"
[proxy]"""


def make_settings(folder: Path, text: str, sections: str = "") -> TrainerConfig:
    """Write a training, and its settings as a trainer saves them; return these. `sections` are added at the end."""
    config = load_config(make_training(folder, text.replace("[proxy]", _MORE.lstrip()) + sections))
    save_config(config, folder / "settings.json")
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_bytes(KEY)
    return config


def start_worker(folder: Path, core: Core, cell: str, **environment: str) -> subprocess.Popen[bytes]:
    """Start a worker on a leash; it says what it does in `cell.log`."""
    host, port = core.address
    arguments = ["--config", str(folder / "settings.json"), "--core", f"{host}:{port}"]
    arguments += ["--key-file", str(folder / "key"), "--cell", cell]
    with (folder / f"{cell}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "gyre_sdk.trainer.leash", "worker64", *arguments],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={"PYTHONPATH": f"{HERE}:{HERE.parent}", "OMP_NUM_THREADS": "1", **environment},
            start_new_session=True,
        )


@dataclass
class Cells:
    """A core and its workers."""

    config: TrainerConfig
    core: Core
    names: list[str]
    seen: list[events.Event]
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def committed(self, cell: str) -> int:
        return sum(one.units for one in self.seen if isinstance(one, events.UnitsCommitted) and one.cell == cell)


def policy_of(config: TrainerConfig) -> Any:
    """A policy that has moved away from the one that workers load."""
    torch.manual_seed(3)
    model = load_policy(config.policy).double()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.05 * torch.randn_like(weight))
    return model


def units_of(model: Any, count: int) -> list[Unit]:
    rng = np.random.default_rng(5)
    return [
        unit_of(
            [
                random_row(
                    rng,
                    f"r{number}-{member}",
                    prompt=int(rng.integers(3, 20)),
                    sampled=int(rng.integers(1, 25)),
                    advantage=float(rng.standard_normal()),
                    model=model,
                )
                for member in range(2)
            ],
            group=f"g{number}",
        )
        for number in range(count)
    ]


def step(trainer: TreeGRPOTrainer, units: Any) -> StepReport:
    trainer._batches = lambda step: units
    trainer.model.zero_grad()
    trainer.training_step(trainer.model, {"step": 0})
    assert trainer._done is not None
    return trainer._done
