"""Who gets how much credit: group-relative advantages, and loss weights under which every run weighs the same."""

from gyre_sdk.credit.filters import CallFacts, Filters, Lag, Mask, staleness
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
from gyre_sdk.credit.rewards import CreditHook, OwnCredit, Rewards, ask, own_credit
from gyre_sdk.credit.rows import Row, batch_scale, seed_of, trajectories
from gyre_sdk.credit.weights import run_weights

__all__ = [
    "Baseline",
    "CallFacts",
    "Comparison",
    "CreditHook",
    "Dropped",
    "Filters",
    "GroupCredit",
    "Lag",
    "Mask",
    "OwnCredit",
    "Rewards",
    "Row",
    "Tally",
    "advantages",
    "ask",
    "batch_scale",
    "compare",
    "group_credit",
    "own_credit",
    "run_weights",
    "scored",
    "seed_of",
    "staleness",
    "tally",
    "trajectories",
]
