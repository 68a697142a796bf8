"""The self-check: an executor that shares prefixes is compared with `flat` before anything is trained with it.

Shapes: K targets of some rows, in row order.

Every mistake that was ever made in this place leaves the loss almost right: wrong positions, siblings that see each
other, windows counted in the wrong order, a first token that is not trained. What tells is the gradient. So log-probs,
entropies and gradients of a few rows are compared, and again as soon as a unit has what no unit had before: a branch, a
branch below a branch, a path longer than a layer's window, more tokens than one pass takes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.attention.budget import Budget
from gyre_sdk.trainer.attention.executor import Executor, Objective, Scores
from gyre_sdk.trainer.attention.layout import groups, plant
from gyre_sdk.trainer.units import Row

_log = logging.getLogger("gyre.trainer")

_MOST_ELEMENTS = 1 << 27
"""Elements of gradients that are kept for comparison; of a larger model every n-th parameter is."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far an executor may be from `flat`: rounding, and nothing else.

    Sharing changes the order in which sums are taken. Over two dozen families of random models that costs at most 5e-7
    of the gradient in float32 and 1.3e-2 in bfloat16; the least visible of the known mistakes costs 4e-2 and 0.18.
    """

    logp: float
    """Root mean square of the differences of log-probs and entropies, nats."""
    gradient: float
    """Norm of the difference relative to the norm, over all compared parameters."""

    @classmethod
    def of(cls, dtype: torch.dtype) -> Tolerance:
        """Return the tolerance of a dtype in which a model computes."""
        if dtype == torch.float64:  # transformers computes norms and rotations in float32 all the same
            return cls(1e-6, 1e-6)
        if dtype == torch.float32:
            return cls(1e-4, 1e-3)
        return cls(5e-2, 5e-2)


@dataclass(frozen=True, slots=True)
class Difference:
    """What was measured."""

    logp: float
    gradient: float

    def within(self, tolerance: Tolerance) -> bool:
        """Tell whether this is rounding. A NaN is not."""
        return self.logp <= tolerance.logp and self.gradient <= tolerance.gradient


def compare(executor: Executor, reference: Executor, model: nn.Module, rows: Sequence[Row]) -> Difference:
    """Run both on the same rows and return how they differ; gradients that are there already stay as they are."""
    objective = _uneven(sum(len(row.targets) for row in rows))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    every = 1 + sum(parameter.numel() for parameter in parameters) // _MOST_ELEMENTS
    with _set_aside(parameters):
        wanted = reference.forward_backward(rows, objective)
        wanted_slopes = [_slope(parameter) for parameter in parameters[::every]]
        for parameter in parameters:
            parameter.grad = None
        found = executor.forward_backward(rows, objective)
        slopes = [_slope(parameter) for parameter in parameters[::every]]
        without = executor.forward(rows)
    logp = _largest(_apart(found, wanted), _apart(without, wanted))
    return Difference(logp, _relative(slopes, wanted_slopes))


def news(rows: Sequence[Row], budget: Budget, window: int | None) -> frozenset[str]:
    """Return what of these rows may go wrong in a way of its own.

    Args:
        rows: of a unit.
        budget: of the executor that will run them.
        window: the shortest sliding window of the model; None without one.
    """
    forest = plant(rows)
    found = {"path"}
    branching = set(forest.parent_S[forest.parent_S >= 0].tolist())
    if branching:
        found.add("branch")
    if any(forest.parent_S[segment] >= 0 for segment in branching):
        found.add("branches below branches")
    if window is not None and len(forest.position_U) and int(forest.position_U.max()) >= window:
        found.add("path beyond the window")
    if forest.unique > budget.tokens:
        found.add("several passes")
    if len(forest.start_S) and int((forest.stop_S - forest.start_S).max()) > budget.segment:
        found.add("long segment")
    if any(np.any(row.temperatures != 1.0) for row in rows):
        found.add("temperature")
    return frozenset(found)


class Checked:
    """An executor that is compared with `flat` on the first rows of each kind, and replaced by it if they differ."""

    def __init__(
        self,
        executor: Executor,
        reference: Executor,
        model: nn.Module,
        budget: Budget,
        tolerance: Tolerance | None = None,
        *,
        instead: Executor | None = None,
        tokens: int = 8192,
    ) -> None:
        """Keep both.

        Args:
            executor: the one to check.
            reference: `flat`, on the same model.
            model: whose gradients are compared.
            budget: of the executor.
            tolerance: by default that of the dtype in which the model computes.
            instead: takes over if the executor is not exact; by default the reference.
            tokens: most tokens of a comparison, where it can be had with fewer rows of a unit.
        """
        self._executor = executor
        self._reference = reference
        self._instead = reference if instead is None else instead
        self._given_up = False
        self._model = model
        self._budget = budget
        self._tokens = tokens
        self._tolerance = tolerance or Tolerance.of(budget.autocast or next(model.parameters()).dtype)
        self._proven: frozenset[str] = frozenset()
        self._window = _shortest_window(model)

    @property
    def name(self) -> str:
        """Name of the executor in use."""
        return self._executor.name

    def forward(self, rows: Sequence[Row]) -> Scores:
        """Score the targets without a gradient."""
        self._check(rows)
        return self._executor.forward(rows)

    def forward_backward(self, rows: Sequence[Row], objective: Objective) -> Scores:
        """Score the targets and add the gradient of the summed objective into the parameters' `.grad`."""
        self._check(rows)
        return self._executor.forward_backward(rows, objective)

    def _check(self, rows: Sequence[Row]) -> None:
        if self._given_up or not any(len(row.targets) for row in rows):
            return
        new = news(rows, self._budget, self._window) - self._proven
        if not new:
            return
        chosen = self._sample(rows, new)
        try:
            difference = compare(self._executor, self._reference, self._model, chosen)
        except torch.OutOfMemoryError:
            raise
        except (TrainerError, RuntimeError) as error:  # a kernel that this device or shape has not
            self._fall_back(str(error))
            return
        if difference.within(self._tolerance):
            self._proven |= new
        else:
            self._fall_back(
                f"its log-probs differ by {difference.logp:.1e} nats (limit {self._tolerance.logp:.0e}) and its gradient "
                f"by {difference.gradient:.1e} of its norm (limit {self._tolerance.gradient:.0e})"
            )

    def _sample(self, rows: Sequence[Row], new: frozenset[str]) -> Sequence[Row]:
        """Return neighbouring rows of a unit that have all that is new, as few as can be found."""
        tokens = self._tokens
        while True:
            parts = [[rows[place] for place in part] for part in groups(rows, tokens)]
            fit = [part for part in parts if new <= news(part, self._budget, self._window)]
            if fit:
                return min(fit, key=lambda part: sum(len(row.ids) for row in part))
            if len(parts) == 1:
                return rows
            tokens *= 2

    def _fall_back(self, reason: str) -> None:
        _log.warning(
            "the executor %s is not exact for %s: %s. Training goes on with %s, which may be slower; please report it",
            self._executor.name,
            type(self._model).__name__,
            reason,
            self._instead.name,
        )
        self._executor, self._given_up = self._instead, True


def _uneven(count: int) -> Objective:
    """Return a linear objective in which no two targets weigh the same, so that none can stand in for another."""
    draw = np.random.default_rng(0)
    logp_weight_K = torch.from_numpy(draw.standard_normal(count))
    entropy_weight_K = torch.from_numpy(0.1 * draw.standard_normal(count))

    def objective(logp_C: Tensor, entropy_C: Tensor, index_C: Tensor) -> Tensor:
        at_C = index_C.cpu()
        to_logp_C = logp_weight_K[at_C].to(logp_C.device, logp_C.dtype)
        to_entropy_C = entropy_weight_K[at_C].to(entropy_C.device, entropy_C.dtype)
        return (to_logp_C * logp_C).sum() + (to_entropy_C * entropy_C).sum()

    return objective


@contextmanager
def _set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, slope in zip(parameters, kept, strict=True):
            parameter.grad = slope


def _slope(parameter: nn.Parameter) -> Tensor | None:
    return None if parameter.grad is None else parameter.grad.detach().clone()


def _apart(found: Scores, wanted: Scores) -> float:
    """Root mean square of the differences of two scores."""
    pairs = ((found.logp_K, wanted.logp_K), (found.entropy_K, wanted.entropy_K))
    return _largest(*(float((ours.double() - theirs.double()).square().mean().sqrt()) for ours, theirs in pairs))


def _largest(*numbers: float) -> float:
    """Return the largest number; NaN where there is one, which Python's `max` may pass over."""
    return float(np.max(numbers))


def _relative(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> float:
    apart = total = 0.0
    for ours, theirs in zip(found, wanted, strict=True):
        zero = torch.zeros(())
        ours, theirs = (zero if slope is None else slope.double() for slope in (ours, theirs))
        apart += float((ours - theirs.to(ours.device)).square().sum())
        total += float(theirs.square().sum())
    return 0.0 if apart == 0 else (apart / total) ** 0.5 if total else float("inf")


def _shortest_window(model: Any) -> int | None:
    text = model.config.get_text_config()
    layers = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    return window if layers is None or "sliding_attention" in layers else None
