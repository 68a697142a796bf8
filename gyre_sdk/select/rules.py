"""Rules: which candidate paths are taken, in which order, as functions of what there is to choose from.

`paper` (arXiv:2609.33848) is the default: from the first role in order that still has unclaimed targets, draw a path with
probability proportional to its unclaimed targets; claim its whole path; repeat until nothing is unclaimed or the bounds
are reached. A rule of your own is any function with the signature of `Rule`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Protocol

import numpy as np

from gyre_sdk.errors import SettingsError
from gyre_sdk.records import ROLE_ORDER, CallId
from gyre_sdk.tree import RunTree, Span

J_MAX = 5
"""Default bound on trajectories per run: matches uncapped training at 74.8% of its time (arXiv:2609.33848)."""


@dataclass(frozen=True, slots=True)
class Role:
    """What a role counts in selection and in the loss."""

    name: str
    weight: float = 1.0
    """Factor on the loss weight of its tokens inside their run; 0 leaves them as context."""
    j_max: int | None = None
    """Trajectories of this role at most; None: only the run's bound holds."""

    def __post_init__(self) -> None:
        """Check."""
        if not (isfinite(self.weight) and self.weight >= 0):
            raise SettingsError(f"weight of role {self.name!r} is {self.weight}; give a finite number, 0 or more")
        if self.j_max is not None and self.j_max < 0:
            raise SettingsError(f"j_max of role {self.name!r} is {self.j_max}; give 0 or more, or None for no bound")


ROLES: tuple[Role, ...] = tuple(Role(name) for name in ROLE_ORDER)
"""The roles that sessions give, in the paper's order."""


def ordered_roles(roles: Iterable[Role | str]) -> tuple[Role, ...]:
    """Return roles from names and roles, in the order given.

    Raises:
        SettingsError: one is named twice.
    """
    found = tuple(role if isinstance(role, Role) else Role(role) for role in roles)
    names = [role.name for role in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SettingsError(f"role {twice!r} is listed twice; its place and weight must be one")
    return found


@dataclass(frozen=True, slots=True)
class Candidate:
    """A path that may become a trajectory."""

    leaf: CallId
    """The call that ends it."""
    role: str
    """Class it is drawn from."""
    spans: tuple[Span, ...]
    """Its targets, from the root, before anybody claims them."""

    @property
    def targets(self) -> int:
        """Number of targets on the path."""
        return sum(span.stop - span.start for span in self.spans)


@dataclass(frozen=True, slots=True)
class Choices:
    """What a rule chooses from, and the settings that bound it."""

    tree: RunTree
    candidates: tuple[Candidate, ...]
    """Ordered by leaf."""
    roles: tuple[Role, ...]
    """In order of priority."""
    j_max: int | None
    """Trajectories of the run at most; None for no bound."""
    generator: np.random.Generator
    """Seeded; the only randomness that a rule may use."""

    def classes(self) -> Iterator[tuple[Role, list[Candidate]]]:
        """Yield the roles that have candidates, in order of priority: listed ones, then others by name."""
        rank = {role.name: place for place, role in enumerate(self.roles)}
        members: dict[str, list[Candidate]] = {}
        for candidate in self.candidates:
            members.setdefault(candidate.role, []).append(candidate)
        for name in sorted(members, key=lambda name: (rank.get(name, len(rank)), name)):
            yield (self.roles[rank[name]] if name in rank else Role(name)), members[name]

    def claims(self) -> Claims:
        """Return the claims on the targets, none made yet."""
        return Claims(self.candidates)


class Claims:
    """Which targets of which candidates are still unclaimed. A claim costs what it changes, not the whole table."""

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        self._size: dict[CallId, int] = {}
        """Leaf -> unclaimed targets on its path."""
        self._through: dict[CallId, list[CallId]] = {}
        """Unclaimed call -> leaves whose paths run through it."""
        self._calls: dict[CallId, int] = {}
        for candidate in candidates:
            self._size[candidate.leaf] = candidate.targets
            for span in candidate.spans:
                self._calls[span.call] = span.stop - span.start
                self._through.setdefault(span.call, []).append(candidate.leaf)

    def unclaimed(self, candidate: Candidate) -> int:
        """Return how many targets of a path nobody has claimed."""
        return self._size[candidate.leaf]

    def claim(self, candidate: Candidate) -> tuple[Span, ...]:
        """Give a path every target on it that is unclaimed; return these."""
        owned = tuple(span for span in candidate.spans if span.call in self._through)
        for span in owned:
            for leaf in self._through.pop(span.call):
                self._size[leaf] -= self._calls[span.call]
        return owned


class Rule(Protocol):
    """Chooses the paths of a run: their leaves, in the order in which they claim."""

    def __call__(self, choices: Choices, /) -> Iterable[CallId]:
        """Return leaves of candidates, each at most once."""
        ...


def paper(choices: Choices) -> list[CallId]:
    """Draw by role, then with probability proportional to unclaimed targets (arXiv:2609.33848)."""
    return _bounded(choices, choices.classes(), _drawn)


def longest(choices: Choices) -> list[CallId]:
    """Take by role, then always the path with the most unclaimed targets; of equal ones the first leaf by id."""
    return _bounded(choices, choices.classes(), _largest)


def main_only(choices: Choices) -> list[CallId]:
    """Draw as `paper` does, from the first role alone."""
    first = choices.roles[0].name if choices.roles else ROLE_ORDER[0]
    return _bounded(choices, ((role, members) for role, members in choices.classes() if role.name == first), _drawn)


def all_paths(choices: Choices) -> list[CallId]:
    """Take every path, whatever the bounds: by role, then the most targets first, then by id of the leaf."""
    return [
        candidate.leaf
        for _, members in choices.classes()
        for candidate in sorted(members, key=lambda one: (-one.targets, one.leaf))
    ]


RULES: Mapping[str, Rule] = {"paper": paper, "all": all_paths, "longest": longest, "main_only": main_only}
"""Rules that have a name."""


def _bounded(
    choices: Choices,
    classes: Iterable[tuple[Role, list[Candidate]]],
    pick: Callable[[np.random.Generator, Sequence[int]], int],
) -> list[CallId]:
    claims, taken = choices.claims(), list[CallId]()
    for role, members in classes:
        start = len(taken)
        while (choices.j_max is None or len(taken) < choices.j_max) and (
            role.j_max is None or len(taken) - start < role.j_max
        ):
            sizes = [claims.unclaimed(member) for member in members]
            if not any(sizes):
                break
            member = members[pick(choices.generator, sizes)]
            claims.claim(member)
            taken.append(member.leaf)
    return taken


def _drawn(generator: np.random.Generator, sizes: Sequence[int]) -> int:
    """Return an index with probability exactly proportional to its integer size."""
    ticket = int(generator.integers(sum(sizes)))
    return int(np.searchsorted(np.cumsum(sizes), ticket, side="right"))


def _largest(generator: np.random.Generator, sizes: Sequence[int]) -> int:
    return max(range(len(sizes)), key=sizes.__getitem__)
