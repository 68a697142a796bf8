"""Rows as lines of a table, for trainers that take tokens."""

from __future__ import annotations

from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre_sdk.credit import Row
from gyre_sdk.records import RunRecord

Line = dict[str, Any]


def of_run(run: RunRecord, *, role: str, leaf: str) -> Line:
    """Return the columns that say where a line comes from."""
    return {
        "run": run.run,
        "group": run.group,
        "task": run.task,
        "reward": run.reward if run.reward is not None and isfinite(run.reward) else None,
        "role": role,
        "leaf": leaf,
    }


def trajectory(row: Row, run: RunRecord) -> Line:
    """Return a row with every number that its gradient depends on."""
    return {
        **of_run(run, role=row.role, leaf=row.leaf),
        "member": run.member,
        "advantage": row.advantage if isfinite(row.advantage) else None,
        "ids": row.ids,
        "targets": row.targets,
        "weights": row.weights,
        "logprobs": row.logprobs.astype(np.float32),
        "versions": row.versions,
        "advantages": row.advantages,
        "temperatures": row.temperatures,
        "calls": row.calls,
        "call_ids": list(row.call_ids),
        "call_roles": list(row.call_roles),
    }


def trl(row: Row, run: RunRecord, group_id: int) -> Line:
    """Return a row in the form of TRL 1.16: `SFTTrainer`'s tokenised examples and `RolloutSample` of its async trainer."""

    def along(values: NDArray[Any] | int, rest: float, dtype: type[np.generic]) -> NDArray[Any]:
        whole = np.full(len(row.ids), rest, dtype)
        whole[row.targets] = values
        return whole

    return {
        "input_ids": row.ids,
        "labels": along(row.ids[row.targets], -100, np.int32),
        "completion_mask": along(1, 0, np.int32),
        "old_log_probs": along(row.logprobs, 0.0, np.float32),
        "advantage": row.advantage,
        "advantages": along(row.advantages, 0.0, np.float64),
        "weights": along(row.weights, 0.0, np.float64),
        "model_version": int(row.versions.min()),
        "group_id": group_id,
        **of_run(run, role=row.role, leaf=row.leaf),
    }
