"""From log-probs to loss: pure functions of tensors.

Shapes: K targets of a unit, all its rows together; no padding. Everything is a *sum*: the division by
`denominator` happens once, when the batch is closed, so that no split of the work changes the gradient::

    LossOptions ---.
    rows -> Targets -> loss_sum(scores) -> gradient
                    -> loss(scores) -> LossSums -> denominator, describe

The modules: `surrogates` has one function from tensors to loss for each name of `loss_options`, `correction` says against
which policy and with what weight, `objective` puts them together, `totals` divides, `metrics` logs.
"""

from gyre_sdk.trainer.loss.metrics import MAXIMA, SUMS, LossSums, TokenLoss, describe
from gyre_sdk.trainer.loss.objective import loss, loss_sum
from gyre_sdk.trainer.loss.targets import Targets
from gyre_sdk.trainer.loss.totals import Totals, denominator
from gyre_sdk.trainer.loss_options import LOSSES, LossOptions, LossType

__all__ = [
    "LOSSES",
    "MAXIMA",
    "SUMS",
    "LossOptions",
    "LossSums",
    "LossType",
    "Targets",
    "TokenLoss",
    "Totals",
    "denominator",
    "describe",
    "loss",
    "loss_sum",
]
