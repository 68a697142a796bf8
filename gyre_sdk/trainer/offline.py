"""Batches for `TreeGRPOTrainer` from what is recorded already: a store, or a table that `gyre export` wrote.

    trainer = TreeGRPOTrainer(model, TreeGRPOConfig(..., max_steps=20), store_batches(journal, Sealer(), 8))

Groups are taken in the order in which their first runs were opened, so many at a step, and from the start again when there
are no more. Samples are as old as they are: choose the importance correction accordingly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from gyre_sdk.errors import TrainerError
from gyre_sdk.journal.reader import Reader
from gyre_sdk.trainer.trainer import Batches
from gyre_sdk.trainer.units import Row, Sealer, Unit, digest

_ARRAYS = {
    "ids": np.int32,
    "targets": np.int32,
    "weights": np.float64,
    "logprobs": np.float64,
    "versions": np.int32,
    "calls": np.int32,
    "advantages": np.float64,
    "temperatures": np.float64,
}


def store_batches(journal: Reader, sealer: Sealer, groups_per_step: int) -> Batches:
    """Return batches of a store's groups, sealed as they are needed.

    Args:
        journal: open for as long as training goes on.
        sealer: how rows are selected, weighed and filtered.

    Raises:
        TrainerError: the store has no groups.
    """
    members: dict[str, list[str]] = {}
    for run in journal.runs():
        if run.group is not None:
            members.setdefault(run.group, []).append(run.run)
    names = list(members)
    if not names:
        raise TrainerError("the store has no groups of runs, and without siblings no run has an advantage")

    def batches(step: int) -> Iterator[Unit]:
        for name in _turn(names, step, groups_per_step):
            yield from sealer.seal(journal, name, members[name]).units

    return batches


def table_batches(rows: Iterable[Mapping[str, Any]], groups_per_step: int) -> Batches:
    """Return batches of a table of trajectories (`gyre export --format parquet`), a unit for each group.

    Args:
        rows: with the columns of that table, for example what `datasets.load_dataset("parquet", ...)` gives.

    Raises:
        TrainerError: no row of the table can be trained.
    """
    groups: dict[str, list[Row]] = {}
    for one in rows:
        if one["advantage"] is not None and len(one["targets"]):
            groups.setdefault(one["group"], []).append(_row(one))
    units = [
        Unit(digest(own), name, tuple(own), len({row.run for row in own}), sum(len(row.targets) for row in own))
        for name, own in groups.items()
    ]
    if not units:
        raise TrainerError("no row of the table has an advantage and a target; look at `gyre samples STORE`")
    return lambda step: _turn(units, step, groups_per_step)


def _row(columns: Mapping[str, Any]) -> Row:
    found: dict[str, Any] = {name: np.asarray(columns[name], dtype) for name, dtype in _ARRAYS.items()}
    found |= {name: str(columns[name]) for name in ("run", "leaf", "role")}
    found |= {name: tuple(columns[name]) for name in ("call_ids", "call_roles")}
    return Row(advantage=float(columns["advantage"]), **found)


def _turn(all_: list[Any], step: int, count: int) -> list[Any]:
    """Return what falls to a step; at most everything once."""
    first = (step - 1) * count
    return [all_[(first + place) % len(all_)] for place in range(min(count, len(all_)))]
