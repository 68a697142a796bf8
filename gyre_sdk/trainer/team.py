"""`gyre-train` in several processes: rank 0 runs everything around training, the others train what it deals them.

    torchrun --nproc-per-node 2 -m gyre_sdk.trainer.main config.toml
    accelerate launch --num_processes 2 -m gyre_sdk.trainer.main config.toml

Rank 0 has store, engine, proxy, workspaces and view. The other ranks load the same policy from the same folders and take
part in every step; where the weights are sharded, also in putting them together for a publication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gyre_sdk.errors import SettingsError, TrainerError
from gyre_sdk.trainer.config import PolicyConfig, TrainConfig, TrainerConfig
from gyre_sdk.trainer.transports import choose
from gyre_sdk.trainer.weights import adapter_weights, full_weights

if TYPE_CHECKING:
    from gyre_sdk.trainer.ranks import Ranks
    from gyre_sdk.trainer.trainer import StepReport

NO_DEEPSPEED = (
    "DeepSpeed keeps gradients to itself, and neither ranks nor cells can add them up: use FSDP2 (train.fsdp = true, or"
    " accelerate launch --use_fsdp --fsdp_version 2), or whole copies (torchrun)"
)
_NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Place:
    """Which of how many processes this one is."""

    rank: int = 0
    size: int = 1
    here: int = 1
    """Processes on this machine."""


def place(environ: Mapping[str, str]) -> Place:
    """Read the place that torchrun or `accelerate launch` gave this process.

    Raises:
        SettingsError: they gave half of what is needed, or DeepSpeed is to train.
    """
    if environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() in ("1", "true", "yes", "on"):
        raise SettingsError(NO_DEEPSPEED)
    size = _number(environ, "WORLD_SIZE", 1)
    if size == 1:
        return Place()
    missing = [name for name in _NEEDED if not environ.get(name)]
    if missing:
        raise SettingsError(
            f"WORLD_SIZE = {size}, and {', '.join(missing)} is not set: start several processes with torchrun or accelerate"
            " launch, or unset WORLD_SIZE"
        )
    return Place(_number(environ, "RANK", 0), size, _number(environ, "LOCAL_WORLD_SIZE", size))


def join(where: Place) -> Ranks:
    """Meet the other processes.

    Raises:
        SettingsError: there are more processes than GPUs.
    """
    import torch
    from accelerate import PartialState

    from gyre_sdk.trainer.ranks import Ranks

    gpus = torch.cuda.device_count()
    if gpus and where.here > gpus:
        raise SettingsError(
            f"{where.here} training processes on this machine, which has {gpus} GPUs; start one process for each GPU, or set"
            " CUDA_VISIBLE_DEVICES= to train on CPUs"
        )
    PartialState(cpu=not gpus)
    ranks = Ranks()
    if ranks.size != where.size:
        raise TrainerError(f"{where.size} processes were started, and {ranks.size} met")
    return ranks


@dataclass(frozen=True, slots=True)
class Start:
    """What rank 0 tells the others before the first step."""

    checkpoint: str | None
    """Folder of the checkpoint that training takes up at; None for the starting policy."""


class Burst:
    """Tells after which steps weights go out: at the end of a burst of steps, if one of them has trained."""

    def __init__(self, every: int, steps: int) -> None:
        self._every = every
        self._steps = steps
        self.changed = False
        """True when a step has trained since weights last went out."""

    def ends(self, report: StepReport) -> bool:
        """True at the last step of a burst."""
        return report.step % self._every == 0 or report.step == self._steps

    def left(self, step: int) -> int:
        """Return how many steps of the burst follow a step."""
        return min(-step % self._every, self._steps - step)

    def publishes(self, report: StepReport) -> bool:
        """Take in a step; true when the weights go out after it."""
        self.changed = self.changed or not report.skipped
        if not (self.ends(report) and self.changed):
            return False
        self.changed = False
        return True


def reference_of(policy: PolicyConfig, train: TrainConfig) -> Any:
    """Return the model of the KL's reference policy; None where there is none, or where it is the policy's own base."""
    from gyre_sdk.trainer.policy import load_policy

    if not train.beta or (policy.lora is not None and train.reference is None):
        return None
    return load_policy(PolicyConfig(model=train.reference or policy.model))


def follow(config: TrainerConfig, ranks: Ranks) -> None:
    """Train what rank 0 deals out, until it ends.

    Raises:
        TrainerError: rank 0 cannot go on.
    """
    start: Start | None = ranks.share()
    if start is None:
        return
    from gyre_sdk.trainer.policy import load_policy
    from gyre_sdk.trainer.sharded import is_sharded
    from gyre_sdk.trainer.trainer import make_trainer

    collect = adapter_weights if choose(config) == "lora" else full_weights
    burst = Burst(config.rollout.publish_every, config.train.steps)

    def on_step(report: StepReport) -> None:
        if burst.publishes(report) and is_sharded(trainer.model):
            collect(trainer.model)  # gathered with the other ranks, for what rank 0 publishes

    trainer = make_trainer(
        config.train,
        load_policy(config.policy, Path(start.checkpoint) if start.checkpoint else None),
        config.output.dir / "checkpoints",
        lambda step: (),
        reference_model=reference_of(config.policy, config.train),
        on_step=on_step,
        ranks=ranks,
    )
    try:
        trainer.train(resume_from_checkpoint=start.checkpoint)
    except RuntimeError as error:
        if "Connection closed" not in str(error) and "Connection reset" not in str(error):
            raise
        raise TrainerError("another rank has ended; what it says is the cause") from error


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    if not text.isdigit():
        raise SettingsError(
            f"{name} = {text!r} is not a number; start several processes with torchrun or accelerate launch"
        )
    return int(text)
