"""From a unit to gradients: scores, loss, and the passes of the model that they need.

A loss whose targets stand alone takes one forward and one backward pass. One that couples targets (the ratio of a call)
takes another forward pass first: its value and slopes come from all scores of the unit, and are then linear in them.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gyre_sdk.trainer.attention.executor import Executor, Objective, linearised
from gyre_sdk.trainer.loss import LossOptions, LossSums, Targets, Totals, loss, loss_sum
from gyre_sdk.trainer.mismatch import Mismatch
from gyre_sdk.trainer.reference import Reference
from gyre_sdk.trainer.units import Unit


def accumulate(
    unit: Unit | None,
    totals: Totals,
    mismatch: Mismatch,
    options: LossOptions,
    executor: Executor,
    reference: Reference | None,
    *,
    version: int | None = None,
    device: torch.device | str = "cpu",
) -> LossSums:
    """Add a unit's summed gradient into the parameters' `.grad`, and count the unit; return what was found of its loss.

    Args:
        unit: None takes part in the passes of other ranks, where an executor needs that.
        mismatch: takes the log-probs in.
        reference: of the KL term, if the loss has one.
        version: number that the policy in training has or would get; None takes the newest among the rows.
    """
    rows = () if unit is None else unit.rows
    reference_K = reference.logp(rows) if reference is not None else None
    first = executor.forward(rows) if options.needs_proximal or not options.separable else None
    if unit is None:
        executor.forward_backward((), _nothing)
        return LossSums()
    targets = Targets.of(
        rows,
        version=version,
        reference_K=reference_K,
        proximal_K=first.logp_K if first is not None and options.needs_proximal else None,
        device=device,
    )
    totals.add(runs=unit.runs, rows=len(rows), targets=unit.tokens, calls=targets.calls)
    objective: Objective = partial(loss_sum, options, targets)
    if first is not None and not options.separable:
        _, objective = linearised(lambda logp_K, entropy_K: loss_sum(options, targets, logp_K, entropy_K), first)
    scores = executor.forward_backward(rows, objective)
    mismatch.add(rows, scores.logp_K)
    found = LossSums()
    found.add(loss(options, targets, scores.logp_K, scores.entropy_K))
    return found


def _nothing(logp_C: Tensor, entropy_C: Tensor, index_C: Tensor) -> Tensor:
    return logp_C.sum() * 0.0
