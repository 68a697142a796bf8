"""From a closed group to the samples of TRL's asynchronous trainer. Pure.

TRL's loss is `1/N * sum_t min(ratio_t A, clip(ratio_t) A)` over the N targets of a micro-batch, with one advantage A per
sample. The clipped objective is positively homogeneous in A, so a weight per sample can ride in it: a target's
coefficient is `weight * n * advantage`, where n is the mean number of targets of the group's runs. For runs of equal length
that is the advantage itself; otherwise it makes every run of the group weigh the same within a micro-batch. Between
micro-batches N differs: TRL averages them as if they held the same.

A row whose targets have different coefficients (roles with weights or advantages of their own) becomes several samples
on the same tokens with masks that do not overlap; TRL's packing computes their tokens once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from gyre_sdk.trainer.adapters.groups import WRONG_TEMPERATURE, ClosedGroup

NO_ADVANTAGE = "target_advantage_zero"
"""Counted targets: their gradient is 0, and in TRL's denominator they would only dilute the others."""


class Weighing(StrEnum):
    """What weighs the same."""

    RUN = "run"
    TOKEN = "token"


def samples_of(
    group: ClosedGroup,
    number: int,
    *,
    weighing: Weighing,
    temperature: float,
    version: Callable[[int], int],
) -> tuple[list[RolloutSample], Counter[str]]:
    """Return a group's samples, and what is recorded and not in them, by reason.

    Args:
        number: TRL's id of the group.
        temperature: the trainer's.
        version: from gyre's count to TRL's.
    """
    rows = [row for unit in group.sealed.units for row in unit.rows]
    dropped = Counter(group.sealed.dropped)
    rewards: dict[str, float | None] = {run.run: run.reward for run in group.runs}
    runs = {row.run for row in rows}
    length = sum(len(row.targets) for row in rows) / max(len(runs), 1)
    credit = group.sealed.credit
    samples = []
    for row in rows:
        right_K = np.isclose(row.temperatures, temperature)
        dropped[WRONG_TEMPERATURE] += int((~right_K).sum())
        coefficient_K = row.advantages * (row.weights * length if weighing is Weighing.RUN else 1.0)
        dropped[NO_ADVANTAGE] += int((right_K & (coefficient_K == 0)).sum())
        reward = rewards.get(row.run)
        metrics = {
            "reward": float("nan") if reward is None else reward,
            "reward_std": float("nan") if credit.std is None else credit.std,
            "advantage": row.advantage,
        }
        for coefficient, chosen_K in _parts(coefficient_K, right_K):
            last = int(row.targets[chosen_K][-1]) + 1
            mask_T = np.zeros(last, np.int64)
            mask_T[row.targets[chosen_K]] = 1
            logprobs_T = np.zeros(last, np.float32)
            logprobs_T[row.targets[chosen_K]] = row.logprobs[chosen_K]
            samples.append(
                RolloutSample(
                    prompt=[{"role": "user", "content": group.task.instruction}],
                    completion=[{"role": "assistant", "content": f"{row.role} of run {row.run}, to call {row.leaf}"}],
                    input_ids=row.ids[:last].astype(np.int64),
                    completion_mask=mask_T,
                    old_log_probs=logprobs_T,
                    advantage=coefficient,
                    model_version=version(int(row.versions[chosen_K].min())),
                    group_id=number,
                    metrics=metrics,
                )
            )
    return samples, +dropped


def _parts(coefficient_K: NDArray[np.float64], right_K: NDArray[np.bool_]) -> Iterator[tuple[float, NDArray[np.bool_]]]:
    """Yield each coefficient other than 0 with its targets."""
    for coefficient in np.unique(coefficient_K[right_K]).tolist():
        if coefficient != 0.0:
            yield coefficient, right_K & (coefficient_K == coefficient)
