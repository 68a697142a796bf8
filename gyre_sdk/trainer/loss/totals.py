"""What a batch's summed loss is divided by when it is closed.

Everything before is a sum: the division happens once, so that no split of the work over micro-batches, units and
processes changes the gradient. What leaves a loss by its scores (masks) leaves the denominator by its share, which is a
sum too (`masked_share` of `SUMS`)::

    run                     R - masked shares      R runs; the shares (weights) of a run's targets sum to 1
    grpo, sapo              rows - masked shares
    gspo, luspo             calls - masked shares
    bnpo, dapo, cispo, vespo    targets - masked targets
    dr_grpo                 (rows - masked shares) * max_completion_length
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.loss.metrics import SUMS
from gyre_sdk.trainer.loss_options import Counted, Inner, LossOptions


@dataclass(slots=True)
class Totals:
    """Counts of a batch, before any mask; additive over units and processes."""

    runs: int = 0
    rows: int = 0
    targets: int = 0
    calls: int = 0

    def add(self, *, runs: int, rows: int, targets: int, calls: int = 0) -> None:
        """Count a unit; a run or call counts in one unit only. `calls`: see `Targets.calls`."""
        self.runs += runs
        self.rows += rows
        self.targets += targets
        self.calls += calls


def denominator(options: LossOptions, totals: Totals, sums: Tensor | None = None) -> float:
    """Return what the summed loss of a batch is divided by at close.

    Args:
        sums: the batch's `SUMS`. Only what can mask needs them.

    Returns:
        The divisor; 0 where every target was masked: there is nothing to train, and nothing to divide.

    Raises:
        TrainerError: something was left out that this loss needs.
    """
    counts = {
        Counted.RUNS: totals.runs,
        Counted.ROWS: totals.rows,
        Counted.CALLS: totals.calls,
        Counted.TARGETS: totals.targets,
    }
    over = options.definition.over
    count = float(counts[over])
    if totals.targets and not count:
        raise TrainerError(
            f"{totals.targets} targets in 0 {over}; count {over} in Totals.add: {options.loss_type} divides by it"
        )
    if options.correction_masks or options.off_policy_mask_threshold is not None:
        if sums is None:
            raise TrainerError("this loss masks targets: give the batch's sums to denominator(), they leave it too")
        found = dict(zip(SUMS, sums.tolist(), strict=True))
        count = 0.0 if found["masked"] >= found["targets"] else count - found["masked_share"]
    return count * options.max_completion_length if options.definition.inner is Inner.CONSTANT else count
