"""The executor that walks a forest depth first: the memory of one path, however many branches it has.

Shapes: U tokens of a piece, K targets, D hidden size.

Every piece is run on the keys and values that the pieces above it left. Its backward pass adds to *their* gradients,
and when all pieces below are done, a piece's own backward pass takes in what was added to its keys and values: the
chain rule, in another order. The graph of a piece with others below is kept meanwhile where there is room for it, and
else made a second time: never more than two forward passes of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gyre_sdk.trainer.attention.attend import Pass, Path, attending
from gyre_sdk.trainer.attention.budget import Budget
from gyre_sdk.trainer.attention.executor import Objective, Scores
from gyre_sdk.trainer.attention.layout import plant
from gyre_sdk.trainer.attention.pieces import Parts, Piece, pieces
from gyre_sdk.trainer.attention.policy import Policy, Targets, in_row_order
from gyre_sdk.trainer.attention.policy import supports as supports

if TYPE_CHECKING:
    from gyre_sdk.trainer.units import Row


class DfsExecutor:
    """Runs the rows of a unit in pieces of at most `budget.segment` tokens.

    Activations of more tokens than `budget.tokens`, or than those of the longest path where that is less, do not exist
    at once.
    """

    name = "dfs"

    def __init__(self, model: Any, budget: Budget | None = None) -> None:
        """`model` is a transformers causal LM for which `supports` gives no reason, or one with peft adapters."""
        self._budget = budget or Budget()
        self._policy = Policy(model, self._budget)

    def forward(self, rows: Sequence[Row]) -> Scores:
        """Score the targets without a gradient."""
        with torch.no_grad(), attending(self._policy.model):
            return in_row_order(_Walk(self._policy, rows, self._budget).scores())

    def forward_backward(self, rows: Sequence[Row], objective: Objective) -> Scores:
        """Score the targets and add the gradient of the summed objective into the parameters' `.grad`."""
        with torch.enable_grad(), attending(self._policy.model):
            return in_row_order(_Walk(self._policy, rows, self._budget).gradients(objective))


@dataclass(frozen=True, slots=True)
class _Open:
    """A piece whose backward pass is still to come."""

    place: int
    graph: tuple[Tensor, Tensor] | None
    """States of its targets and the objective's slope by them; None where the graph has to be made again."""


class _Walk:
    """One walk over the forest of some rows."""

    def __init__(self, policy: Policy, rows: Sequence[Row], budget: Budget) -> None:
        self._policy = policy
        self._rows = rows
        forest = plant(rows)
        self._parts = Parts(forest)
        self._pieces = pieces(forest, budget.segment)
        length = max((piece.before + piece.kept for piece in self._pieces if piece.kept), default=0)
        self._path = Path(length) if length else None
        longest = int(forest.position_U.max()) + 1 if forest.unique else 0
        self._room = min(budget.tokens, longest)
        """Tokens whose activations may exist at once."""
        self._live = 0
        """Tokens of the open pieces whose graph is kept."""
        self._below = _largest_below(self._pieces)
        self._found: list[tuple[Targets, Tensor, Tensor]] = []

    def scores(self) -> list[tuple[Targets, Tensor, Tensor]]:
        """Return targets, log-probs and entropies, piece by piece."""
        for piece in self._pieces:
            targets, states_KD = self._states(piece)
            self._found.append((targets, *self._policy.scores(states_KD, targets)))
        return self._found

    def gradients(self, objective: Objective) -> list[tuple[Targets, Tensor, Tensor]]:
        """Add the gradients and return what `scores` does."""
        waiting: list[_Open] = []
        for place, piece in enumerate(self._pieces):
            while waiting and waiting[-1].place != piece.above:
                self._close(waiting.pop(), objective)
            waiting.append(self._open(place, objective))
        while waiting:
            self._close(waiting.pop(), objective)
        return self._found

    def _open(self, place: int, objective: Objective) -> _Open:
        """Run a piece so far that those below it can be run."""
        piece = self._pieces[place]
        if not piece.kept:
            return _Open(place, None)
        assert self._path is not None
        self._path.clear(piece.before, piece.before + piece.kept)
        if self._live + piece.size + self._below[place] <= self._room:
            self._live += piece.size
            return _Open(place, self._graph(piece, objective))
        stretch = self._parts.part(piece.stretch)
        with torch.no_grad():
            self._policy.states(stretch, Pass(stretch, piece.before, self._path, piece.kept))
        return _Open(place, None)

    def _close(self, opened: _Open, objective: Objective) -> None:
        """Run a piece backward; all that hang from it are done."""
        piece = self._pieces[opened.place]
        if opened.graph is None:
            states_KD, slope_KD = self._graph(piece, objective)
        else:
            states_KD, slope_KD = opened.graph
            self._live -= piece.size
        if states_KD.requires_grad:
            # without targets of its own (K = 0) too: the gradients that those below left in the path go through it
            states_KD.backward(slope_KD)

    def _graph(self, piece: Piece, objective: Objective) -> tuple[Tensor, Tensor]:
        targets, states_KD = self._states(piece)
        logp_K, entropy_K, slope_KD = self._policy.gradients(states_KD, targets, objective)
        self._found.append((targets, logp_K, entropy_K))
        return states_KD, slope_KD

    def _states(self, piece: Piece) -> tuple[Targets, Tensor]:
        forest = self._parts.part(piece.ranges)
        targets = self._policy.targets(self._rows, forest)
        states_UD = self._policy.states(forest, Pass(forest, piece.before, self._path, piece.kept))
        return targets, states_UD.index_select(0, targets.at_K)


def _largest_below(found: Sequence[Piece]) -> list[int]:
    """Return the size of the largest piece that hangs from each one, at any depth."""
    below = [0] * len(found)
    for place, piece in reversed(list(enumerate(found))):
        if piece.above >= 0:
            below[piece.above] = max(below[piece.above], below[place], piece.size)
    return below
