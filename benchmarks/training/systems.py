"""What is compared: gyre's executors, sequences one by one, and TRL's packing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gyre_sdk.trainer.attention.budget import Budget
from gyre_sdk.trainer.attention.choose import choose
from gyre_sdk.trainer.attention.dfs import DfsExecutor
from gyre_sdk.trainer.attention.executor import Objective, Scores
from gyre_sdk.trainer.attention.flat import FlatExecutor
from gyre_sdk.trainer.attention.flex import FlexExecutor
from gyre_sdk.trainer.attention.gather import GatherExecutor
from gyre_sdk.trainer.units import Row

SEPARATE, FLAT, GATHER, DFS, AUTO, TRL = "separate", "flat", "gather", "dfs", "auto", "TRL"
OURS = (FLAT, GATHER, DFS, AUTO)
SYSTEMS = (SEPARATE, *OURS, TRL)


@dataclass(frozen=True, slots=True)
class System:
    """A way to train rows."""

    step: Callable[[Sequence[Row], Objective], Scores]
    prepare: Callable[[Sequence[Row]], None] = lambda rows: None
    """What is not counted as the step's time."""


def objective(logp_C: Tensor, entropy_C: Tensor, index_C: Tensor) -> Tensor:
    """Return a policy gradient's loss with advantage 1."""
    return -logp_C.sum()


def system(name: str, model: Any) -> System:
    """Return a system for a model."""
    budget = Budget()
    match name:
        case "separate":
            return System(FlatExecutor(model, Budget(tokens=1)).forward_backward)
        case "flat":
            return System(FlatExecutor(model, budget).forward_backward)
        case "gather":
            return System(GatherExecutor(model, budget).forward_backward)
        case "dfs":
            return System(DfsExecutor(model, budget).forward_backward)
        case "auto":
            return System(choose(model, "auto", budget).forward_backward)
        case "flex":
            return System(FlexExecutor(model, budget).forward_backward)
    from peers.trl_tree_training import TrlTree

    peer = TrlTree(model, budget, own_kernel=name != TRL)
    return System(peer.forward_backward, peer.prepare)
