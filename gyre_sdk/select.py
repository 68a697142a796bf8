"""Which paths of a run become trajectories: bounded selection by role (arXiv:2609.33848).

From the first role in order that still has unclaimed targets, draw a candidate path with probability proportional to
its unclaimed targets; claim its whole path; repeat until nothing is unclaimed or `j_max` paths are taken. A target that
several paths share is owned by the first that claimed it, so each sampling event is trained at most once.

Selection comes first, ownership second: a path that is not taken never owns anything. The outcome depends on the tree,
the seed and the order of roles, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyre_sdk.errors import SettingsError
from gyre_sdk.records import ROLE_ORDER, CallId
from gyre_sdk.tree import Path, RunTree, Span

__all__ = ["J_MAX", "Selected", "role_of_leaf", "select"]

J_MAX = 5
"""Default bound on trajectories per run: matches uncapped training at 74.8% of its time (arXiv:2609.33848)."""

Seed = int | Sequence[int]


@dataclass(frozen=True, slots=True)
class Selected:
    """A path that was taken, and which of its tokens it owns. Arrays are per path token."""

    path: Path
    role: str
    """Class it was drawn from."""
    owned_spans: tuple[Span, ...]
    """Sampled stretches that this trajectory trains."""
    owned: NDArray[np.bool_]
    """True where the token is a target of this trajectory."""
    logprobs: NDArray[np.float64]
    """Behaviour log-prob (nats); 0 where not owned."""
    versions: NDArray[np.int32]
    """Policy version; -1 where not owned."""

    @property
    def leaf(self) -> CallId:
        """The call that ends the path."""
        return self.path.leaf

    @property
    def targets(self) -> int:
        """Number of owned tokens."""
        return sum(span.stop - span.start for span in self.owned_spans)


def role_of_leaf(tree: RunTree, leaf: CallId) -> str:
    """Classify a path by the role of the call that ends it."""
    return tree.role(leaf)


def select(
    tree: RunTree,
    *,
    j_max: int | None = J_MAX,
    seed: Seed = 0,
    role_order: Sequence[str] = ROLE_ORDER,
    classify: Callable[[RunTree, CallId], str] = role_of_leaf,
) -> list[Selected]:
    """Draw the trajectories of a run, in the order taken.

    Args:
        tree: the run's tree.
        j_max: at most this many; None for no bound.
        seed: decides the draws. Mix the run's id in, so that runs draw independently.
        role_order: priority of roles; a role that is not listed comes after all that are, in order of name.
        classify: the hook that gives a path its role, for harnesses whose roles are named or found differently.

    Raises:
        SettingsError: `j_max` is below 1.
    """
    if j_max is not None and j_max < 1:
        raise SettingsError(f"j_max is {j_max}; a run needs at least 1 trajectory (or None for no bound)")
    generator = np.random.default_rng(seed)
    rank = {role: position for position, role in enumerate(role_order)}
    roles = {leaf: classify(tree, leaf) for leaf in tree.candidates()}
    classes = sorted(set(roles.values()), key=lambda role: (rank.get(role, len(rank)), role))
    spans = {leaf: _targets(tree, leaf) for leaf in roles}
    claimed: set[CallId] = set()
    taken: list[Selected] = []
    for role in classes:
        members = [leaf for leaf in roles if roles[leaf] == role]
        while j_max is None or len(taken) < j_max:
            sizes = [_unclaimed(spans[leaf], claimed) for leaf in members]
            if not sum(sizes):
                break
            leaf = members[_draw(generator, sizes)]
            owned = tuple(span for span in spans[leaf] if span.call not in claimed)
            claimed.update(span.call for span in owned)
            taken.append(_selected(tree, leaf, role, owned))
    return taken


def _targets(tree: RunTree, leaf: CallId) -> tuple[Span, ...]:
    return tuple(span for span in tree.spans(leaf) if tree.untrained(span.call) is None)


def _unclaimed(spans: tuple[Span, ...], claimed: set[CallId]) -> int:
    return sum(span.stop - span.start for span in spans if span.call not in claimed)


def _draw(generator: np.random.Generator, sizes: list[int]) -> int:
    """Return an index with probability exactly proportional to its integer size."""
    ticket = int(generator.integers(sum(sizes)))
    return int(np.searchsorted(np.cumsum(sizes), ticket, side="right"))


def _selected(tree: RunTree, leaf: CallId, role: str, owned_spans: tuple[Span, ...]) -> Selected:
    path = tree.path(leaf)
    owned = np.zeros(len(path.ids), np.bool_)
    logprobs = np.zeros(len(path.ids), np.float64)
    versions = np.full(len(path.ids), -1, np.int32)
    for span in owned_spans:
        owned[span.start : span.stop] = True
        logprobs[span.start : span.stop] = tree.logprobs(span.call)
        versions[span.start : span.stop] = tree.versions(span.call)
    return Selected(path, role, owned_spans, owned, logprobs, versions)
