"""Who gets how much credit: group-relative advantages, and loss weights under which every run weighs the same."""

from gyre_sdk.credit.groups import (
    Baseline,
    Comparison,
    Dropped,
    GroupCredit,
    Tally,
    advantages,
    compare,
    group_credit,
    scored,
    tally,
)
from gyre_sdk.credit.rows import Row, batch_scale, seed_of, trajectories
from gyre_sdk.credit.weights import run_weights

__all__ = [
    "Baseline",
    "Comparison",
    "Dropped",
    "GroupCredit",
    "Row",
    "Tally",
    "advantages",
    "batch_scale",
    "compare",
    "group_credit",
    "run_weights",
    "scored",
    "seed_of",
    "tally",
    "trajectories",
]
