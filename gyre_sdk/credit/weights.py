"""Loss weights under which every run weighs the same, whatever its number of trajectories.

The loss is a two-level mean (arXiv:2609.33848): over the owned tokens inside a run, then over runs,
`L = 1/R * sum_run sum_t w_t l_t` with `sum_t w_t = 1` in each run. Here are the inner weights; `rows.batch_scale`
gives 1/R.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum, isfinite

import numpy as np
from numpy.typing import NDArray

from gyre_sdk.errors import SettingsError
from gyre_sdk.records import CallId
from gyre_sdk.select import Selected


def run_weights(
    selection: Sequence[Selected], *, role_weights: Mapping[str, float] | None = None
) -> list[NDArray[np.float64]]:
    """Return the loss weight of each target, (K,), for each trajectory of a run; they sum to 1 over the run.

    Every target weighs the same, or as the role of the call that sampled it says (default 1).

    Raises:
        SettingsError: a role that owns a target has a weight that is not a positive finite number.
    """
    factors = role_weights or {}

    def factor_of(row: Selected, call: CallId) -> float:
        role = row.tree.role(call)
        factor = factors.get(role, 1.0)
        if not (isfinite(factor) and factor > 0):
            raise SettingsError(f"role weight of {role!r} is {factor}; give a positive number")
        return factor

    spans = [
        (row, [(factor_of(row, span.call), span.stop - span.start) for span in row.owned_spans]) for row in selection
    ]
    total = fsum(factor * size for _, parts in spans for factor, size in parts)
    return [
        np.repeat(np.array([factor / total for factor, _ in parts], np.float64), [size for _, size in parts])
        for _, parts in spans
    ]
