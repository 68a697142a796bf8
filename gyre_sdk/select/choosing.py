"""From a tree and a rule to the paths that were taken, each with the targets that it owns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from gyre_sdk.errors import SettingsError
from gyre_sdk.records import CallId
from gyre_sdk.select.rules import J_MAX, ROLES, RULES, Candidate, Choices, Claims, Role, Rule, ordered_roles
from gyre_sdk.tree import Path, RunTree, Span

Seed = int | Sequence[int]
_Number = TypeVar("_Number", np.int32, np.float64)


@dataclass(frozen=True, slots=True)
class Selected:
    """A path that was taken. The spans are the truth; arrays are made of them when they are asked for. K targets."""

    tree: RunTree = field(repr=False, compare=False)
    leaf: CallId
    """The call that ends the path."""
    role: str
    """Class it was drawn from."""
    owned_spans: tuple[Span, ...]
    """Sampled stretches that this trajectory trains, from the root."""

    @property
    def targets(self) -> int:
        """K: the number of owned tokens."""
        return sum(span.stop - span.start for span in self.owned_spans)

    @property
    def path(self) -> Path:
        """The whole path, with what was sampled on it by whom."""
        return self.tree.path(self.leaf)

    @property
    def ids(self) -> NDArray[np.int32]:
        """Token ids of the path."""
        return self.tree.ids(self.leaf)

    @property
    def positions(self) -> NDArray[np.int32]:
        """Path positions of the owned tokens, (K,), ascending."""
        return _joined([np.arange(span.start, span.stop, dtype=np.int32) for span in self.owned_spans], np.int32)

    @property
    def calls(self) -> NDArray[np.int32]:
        """Index into `owned_spans` of the stretch that each target lies in, (K,)."""
        sizes = [span.stop - span.start for span in self.owned_spans]
        return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)

    @property
    def logprobs(self) -> NDArray[np.float64]:
        """Behaviour log-prob (nats) per target, (K,)."""
        return _joined([self.tree.logprobs(span.call) for span in self.owned_spans], np.float64)

    @property
    def versions(self) -> NDArray[np.int32]:
        """Policy version per target, (K,)."""
        return _joined([self.tree.versions(span.call) for span in self.owned_spans], np.int32)


def role_of_leaf(tree: RunTree, leaf: CallId) -> str:
    """Classify a path by the role of the call that ends it."""
    return tree.role(leaf)


def select(
    tree: RunTree,
    *,
    rule: Rule | str = "paper",
    j_max: int | None = J_MAX,
    seed: Seed = 0,
    roles: Iterable[Role | str] = ROLES,
    classify: Callable[[RunTree, CallId], str] = role_of_leaf,
) -> list[Selected]:
    """Choose the trajectories of a run, in the order in which they claim. A path that owns nothing is left out.

    Args:
        tree: the run's tree.
        rule: a name in `RULES`, or a rule of your own.
        j_max: at most this many; None for no bound.
        seed: decides the draws. Mix the run's id in, so that runs draw independently.
        roles: roles or their names in order of priority; one that is not listed comes after all that are, in order of
            name, with weight 1 and no bound of its own.
        classify: the hook that gives a path its role, for harnesses whose roles are named or found differently.

    Raises:
        SettingsError: `j_max` is below 1, there is no such rule, or a rule returned what is no candidate.
    """
    if j_max is not None and j_max < 1:
        raise SettingsError(f"j_max is {j_max}; a run needs at least 1 trajectory (or None for no bound)")
    choose = _named(rule)
    candidates = tuple(_candidate(tree, leaf, classify(tree, leaf)) for leaf in tree.candidates())
    choices = Choices(tree, candidates, ordered_roles(roles), j_max, np.random.default_rng(seed))
    by_leaf = {candidate.leaf: candidate for candidate in candidates}
    claims = Claims(candidates)
    taken: list[Selected] = []
    seen: set[CallId] = set()
    for leaf in choose(choices):
        if leaf not in by_leaf or leaf in seen:
            what = "a second time" if leaf in seen else "which ends no candidate path"
            raise SettingsError(f"selection rule {_name(rule)} took {leaf!r} {what}; return each candidate's leaf once")
        seen.add(leaf)
        owned = claims.claim(by_leaf[leaf])
        if owned:
            taken.append(Selected(tree, leaf, by_leaf[leaf].role, owned))
    return taken


def _named(rule: Rule | str) -> Rule:
    if not isinstance(rule, str):
        return rule
    if rule not in RULES:
        raise SettingsError(f"selection rule {rule!r} is unknown; use one of {', '.join(RULES)}, or module:function")
    return RULES[rule]


def _name(rule: Rule | str) -> str:
    return repr(rule if isinstance(rule, str) else getattr(rule, "__qualname__", type(rule).__name__))


def _candidate(tree: RunTree, leaf: CallId, role: str) -> Candidate:
    targets = tuple(span for span in tree.spans(leaf) if tree.untrained(span.call) is None)
    return Candidate(leaf, role, targets)


def _joined(parts: list[NDArray[_Number]], dtype: type[_Number]) -> NDArray[_Number]:
    return np.concatenate(parts, dtype=dtype) if parts else np.empty(0, dtype)
