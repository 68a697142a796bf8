"""What a loss is made of: its name and settings, and the table of the losses there are. No torch.

Names and defaults are those of TRL 1.16's `GRPOConfig`. Where TRL says *sequence*, gyre says *call*: a run of an agent is
one sequence of up to a million tokens, and a ratio over all of it is 0 or infinite.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Literal, Self

from gyre_sdk.errors import SettingsError

LossType = Literal["run", "run_mean", "grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "luspo", "vespo", "gspo"]
ImportanceSampling = Literal[
    "bypass", "off", "truncate", "mask", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]


class Surrogate(StrEnum):
    """The function of ratio and advantage that is summed."""

    CLIPPED = "clipped"
    CISPO = "cispo"
    SAPO = "sapo"
    VESPO = "vespo"


class Counted(StrEnum):
    """What a batch's loss is a mean over. Every target has a share in one of them; the shares of one sum to 1."""

    RUNS = "runs"
    ROWS = "rows"
    CALLS = "calls"
    TARGETS = "targets"


class Inner(StrEnum):
    """How targets are put together inside what is counted."""

    MEAN = "mean"
    """By their shares."""
    SUM = "sum"
    CONSTANT = "constant"
    """Their sum divided by `max_completion_length`."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A loss: which function, put together how."""

    surrogate: Surrogate
    over: Counted
    inner: Inner
    calls: bool = False
    """Its ratio is always that of a call."""


LOSSES: dict[str, Definition] = {
    "run": Definition(Surrogate.CLIPPED, Counted.RUNS, Inner.MEAN),
    "grpo": Definition(Surrogate.CLIPPED, Counted.ROWS, Inner.MEAN),
    "bnpo": Definition(Surrogate.CLIPPED, Counted.TARGETS, Inner.MEAN),
    "dapo": Definition(Surrogate.CLIPPED, Counted.TARGETS, Inner.MEAN),
    "dr_grpo": Definition(Surrogate.CLIPPED, Counted.ROWS, Inner.CONSTANT),
    "gspo": Definition(Surrogate.CLIPPED, Counted.CALLS, Inner.MEAN, calls=True),
    "luspo": Definition(Surrogate.CLIPPED, Counted.CALLS, Inner.SUM, calls=True),
    "cispo": Definition(Surrogate.CISPO, Counted.TARGETS, Inner.MEAN),
    "sapo": Definition(Surrogate.SAPO, Counted.ROWS, Inner.MEAN),
    "vespo": Definition(Surrogate.VESPO, Counted.TARGETS, Inner.MEAN),
}
_ALIASES = {"run_mean": "run"}
_RENAMED = ("epsilon_low", "epsilon_high")
"""Fields that TRL calls `epsilon`, and `epsilon_high` with None for the same."""
_ABOVE_ZERO = (
    "delta",
    "max_completion_length",
    "importance_sampling_cap",
    "off_policy_mask_threshold",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
)
_NOT_BELOW_ZERO = (
    "epsilon_low",
    "epsilon_high",
    "importance_sampling_floor",
    "beta",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
    "negative_advantage_scale",
)
_MODES: dict[str, tuple[Literal["token", "sequence"], Literal["truncate", "mask"]]] = {
    "truncate": ("token", "truncate"),
    "mask": ("token", "mask"),
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "mask"),
    "sequence_truncate": ("sequence", "truncate"),
    "sequence_mask": ("sequence", "mask"),
}


@dataclass(frozen=True, slots=True)
class LossOptions:
    """What a loss depends on beside the numbers of its targets.

    Raises:
        SettingsError: a value is impossible, or two do not go together.
    """

    loss_type: LossType = "run"
    """A key of `LOSSES`; `run_mean` is another name of `run`."""
    epsilon_low: float = 0.2
    """TRL's `epsilon`: the ratio is cut at 1 - epsilon_low where the advantage is negative."""
    epsilon_high: float = 0.2
    """The ratio is cut at 1 + epsilon_high where the advantage is positive; in `cispo`, at epsilon_high itself."""
    delta: float | None = None
    """Upper bound of the ratio where the advantage is negative (INTELLECT-2's two-sided clipping); None: none."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """What a ratio is of: a token, or the targets of a call (their geometric mean). Always the call in `gspo`, `luspo`."""
    max_completion_length: int = 1024
    """Constant of `dr_grpo`."""
    importance_sampling: ImportanceSampling = "bypass"
    """How the difference between the policy that sampled and the one in training is corrected; see `correction`."""
    importance_sampling_cap: float | None = 2.0
    """TRL's `vllm_importance_sampling_clip_max`; None: no upper bound."""
    importance_sampling_floor: float | None = None
    """TRL's `vllm_importance_sampling_clip_min`; None: no lower bound."""
    proximal: Literal["current", "forward", "interpolated"] = "current"
    """The policy that the ratio is taken against, unless `importance_sampling` is `bypass`; see `correction`."""
    off_policy_mask_threshold: float | None = None
    """Calls with a negative advantage whose mean log-ratio to sampling (nats) is above leave (DeepSeek-V3.2); None: none."""
    top_entropy_quantile: float = 1.0
    """Only this share of a unit's targets, those of highest entropy, has a policy term (arXiv:2506.01939)."""
    beta: float = 0.0
    """Coefficient of the KL to the reference policy."""
    use_bias_correction_kl: bool = True
    """Multiply the KL by the ratio (DeepSeek-V3.2): its gradient is then the unbiased one of the reverse KL."""
    entropy_coef: float = 0.0
    """Coefficient of the mean entropy (nats), which is subtracted from the loss."""
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    negative_advantage_scale: float = 1.0
    """Factor on negative advantages."""

    def __post_init__(self) -> None:
        """Take aliases and refuse what does not go together."""
        object.__setattr__(self, "loss_type", _ALIASES.get(self.loss_type, self.loss_type))
        if self.loss_type not in LOSSES:
            raise SettingsError(f"loss_type = {self.loss_type!r} is none of {', '.join([*LOSSES, *_ALIASES])}")
        if self.importance_sampling not in ("bypass", "off", *_MODES):
            known = ", ".join(["bypass", "off", *_MODES])
            raise SettingsError(f"importance_sampling = {self.importance_sampling!r} is none of {known}")
        if not 0.0 <= self.top_entropy_quantile <= 1.0:
            raise SettingsError(f"top_entropy_quantile = {self.top_entropy_quantile} is not between 0 and 1")
        for name in (*_ABOVE_ZERO, *_NOT_BELOW_ZERO):
            value = getattr(self, name)
            if value is not None and not (value > 0 or (value == 0 and name in _NOT_BELOW_ZERO)):
                raise SettingsError(f"{name} = {value} is not {'0 or more' if name in _NOT_BELOW_ZERO else 'above 0'}")
        low, high = self.importance_sampling_floor, self.importance_sampling_cap
        if low is not None and high is not None and low > high:
            raise SettingsError(f"importance_sampling_floor = {low} is above importance_sampling_cap = {high}")
        if self.loss_type == "vespo" and "sequence" in (self.importance_sampling_level, self.correction_level):
            raise SettingsError(
                "vespo weighs whole calls by itself: set importance_sampling_level = 'token', and importance_sampling to"
                " bypass, off, truncate or mask"
            )

    @classmethod
    def of(cls, said: Any) -> Self:
        """Return what settings say that are named as in TRL: a `TreeGRPOConfig`, or `[train]`.

        Raises:
            SettingsError: values are impossible, or do not go together.
        """
        alike = {one.name: getattr(said, one.name) for one in fields(cls) if one.name not in _RENAMED}
        if said.max_completion_length is None:  # TRL's for no limit
            del alike["max_completion_length"]
        high = said.epsilon if said.epsilon_high is None else said.epsilon_high
        return cls(**alike, epsilon_low=said.epsilon, epsilon_high=high)

    @property
    def definition(self) -> Definition:
        """The entry of `LOSSES`."""
        return LOSSES[self.loss_type]

    @property
    def call_ratio(self) -> bool:
        """True where the ratio is that of a call."""
        return self.definition.calls or self.importance_sampling_level == "sequence"

    @property
    def corrected(self) -> bool:
        """True where targets are weighed by their ratio to sampling, or masked for it."""
        return self.importance_sampling in _MODES

    @property
    def correction_level(self) -> Literal["token", "sequence"]:
        """What the correction is of."""
        return _MODES[self.importance_sampling][0] if self.corrected else "token"

    @property
    def correction_masks(self) -> bool:
        """True where targets outside the bounds leave the loss, False where their weight is cut."""
        return self.corrected and _MODES[self.importance_sampling][1] == "mask"

    @property
    def separable(self) -> bool:
        """True where the loss of a target depends on no other: the targets of a unit may come in parts."""
        return not (
            self.call_ratio
            or self.definition.surrogate is Surrogate.VESPO
            or self.correction_level == "sequence"
            or self.off_policy_mask_threshold is not None
            or self.top_entropy_quantile < 1.0
        )

    @property
    def needs_reference(self) -> bool:
        """True where `Targets.reference_K` must be there."""
        return self.beta != 0.0

    @property
    def needs_proximal(self) -> bool:
        """True where `Targets.proximal_K` must be there."""
        return self.proximal == "forward" and self.importance_sampling != "bypass"
