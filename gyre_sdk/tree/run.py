"""The tree of a run: calls over a radix tree of their tokens, who continues whom, and which paths may be trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from gyre_sdk.errors import TreeError
from gyre_sdk.records import CallId, CallRecord, CallStatus, VersionSpan
from gyre_sdk.tree.calls import SampledCall, Untrained
from gyre_sdk.tree.radix import Ids, Node, Radix


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a call hangs at the time of its insertion; a call that arrives later may still be its parent."""

    parent: CallId | None
    """The call that it continues, or None."""
    known: int
    """Leading tokens of prompt + sampled ids that the tree had already."""
    new: int
    """Tokens that the tree did not have."""


@dataclass(frozen=True, slots=True)
class Span:
    """The sampled tokens of one call on a path."""

    call: CallId
    start: int
    """Path position of the call's first sampled token."""
    stop: int
    """One past the path position of its last one."""


@dataclass(frozen=True, slots=True)
class Path:
    """A root-to-call walk: token ids, and who sampled which of them."""

    leaf: CallId
    role: str
    """Role of the call that ends the path."""
    ids: Ids
    """Token ids from the root; equal to the leaf's prompt + sampled ids."""
    spans: tuple[Span, ...]
    """Sampled stretches from the root, disjoint and in order; everything between them is context."""

    def owner(self, position: int) -> tuple[CallId, int] | None:
        """Return the sampling event `(call, offset)` at a path position, or None for context."""
        for span in self.spans:
            if span.start <= position < span.stop:
                return span.call, position - span.start
        return None


@dataclass(slots=True)
class _Placed:
    """A call in the tree; its tokens are the path to `end`."""

    role: str
    lane: str
    status: CallStatus
    hint: CallId | None
    prompt_len: int
    sampled_len: int
    logprobs: NDArray[np.float64]
    versions: tuple[VersionSpan, ...]
    defect: Untrained | None
    """Why the call is no target whatever the other calls are; None when that is open."""
    end: Node


@dataclass(slots=True)
class _Families:
    """Which call continues which, for all calls inserted so far."""

    parent: dict[CallId, CallId | None] = field(default_factory=dict)
    children: dict[CallId | None, list[CallId]] = field(default_factory=dict)


class RunTree:
    """The tree of one run. Not thread-safe; one owner inserts."""

    def __init__(self) -> None:
        self._radix = Radix()
        self._calls: dict[CallId, _Placed] = {}
        self._families: _Families | None = None
        self.raw_tokens = 0
        """Sum of prompt + sampled ids over all calls."""

    @classmethod
    def from_calls(cls, calls: Iterable[CallRecord | SampledCall]) -> Self:
        """Build the tree of recorded calls, given in any order."""
        tree = cls()
        for call in calls:
            tree.insert(call)
        return tree

    # -- building ------------------------------------------------------------------------------------------------

    def insert(self, call: CallRecord | SampledCall) -> Placement:
        """Add a call and return where it hangs.

        Raises:
            TreeError: the call is in the tree already, or its ids or log-probs are malformed. The tree is unchanged.
        """
        if isinstance(call, CallRecord):
            call = SampledCall.from_record(call)
        if call.call in self._calls:
            raise TreeError(
                f"call {call.call} is in the tree already; a call is inserted once, when its answer is complete"
            )
        prompt, sampled = call.prompt_ids, call.sampled_ids
        defect, logprobs = call.defect(), call.checked_logprobs()
        try:
            node, known = self._radix.insert(prompt, sampled)
        except ValueError as error:
            raise TreeError(f"call {call.call}: {error}; ids are positions in a vocabulary") from None
        total = len(prompt) + len(sampled)
        node.ends.append(call.call)
        self._calls[call.call] = _Placed(
            role=call.role,
            lane=call.lane,
            status=call.status,
            hint=call.parent,
            prompt_len=len(prompt),
            sampled_len=len(sampled),
            logprobs=logprobs,
            versions=tuple(call.versions),
            defect=defect,
            end=node,
        )
        self._families = None
        self.raw_tokens += total
        return Placement(self._find_parent(call.call), known, total - known)

    # -- asking --------------------------------------------------------------------------------------------------

    @property
    def unique_tokens(self) -> int:
        """Tokens in the tree."""
        return self._radix.size

    def __len__(self) -> int:
        """Return the number of calls."""
        return len(self._calls)

    def __contains__(self, call: object) -> bool:
        return call in self._calls

    def calls(self) -> list[CallId]:
        """Return all calls, ordered by id."""
        return sorted(self._calls)

    def role(self, call: CallId) -> str:
        """Return the role of a call."""
        return self._placed(call).role

    def sampled_tokens(self, call: CallId) -> int:
        """Return how many tokens a call sampled."""
        return self._placed(call).sampled_len

    def logprobs(self, call: CallId) -> NDArray[np.float64]:
        """Return the behaviour log-prob (nats) per sampled token; NaN where the engine gave none."""
        return self._placed(call).logprobs

    def versions(self, call: CallId) -> NDArray[np.int32]:
        """Return the policy version per sampled token; -1 where unknown."""
        placed = self._placed(call)
        versions = np.full(placed.sampled_len, -1, np.int32)
        for span in placed.versions:
            versions[span.start : span.end] = span.version
        return versions

    def parent(self, call: CallId) -> CallId | None:
        """Return the call that this one continues: the longest whole prompt + answer that its prompt starts with."""
        self._placed(call)
        return self._family().parent[call]

    def untrained(self, call: CallId) -> Untrained | None:
        """Return why a call's sampled tokens are no targets, or None when they are."""
        placed = self._placed(call)
        if placed.defect is not None:
            return placed.defect
        if placed.status is not CallStatus.DELIVERED and not self._family().children.get(call):
            return Untrained.ORPHAN
        return None

    def untrained_counts(self) -> Counter[Untrained]:
        """Count the calls that are no targets, by reason: they are recorded and shown, never trained silently."""
        return Counter(reason for call in self._calls if (reason := self.untrained(call)) is not None)

    def leaves(self) -> list[CallId]:
        """Return the calls that no other call continues, ordered by id."""
        children = self._family().children
        return sorted(call for call in self._calls if not children.get(call))

    def candidates(self) -> list[CallId]:
        """Return the calls whose paths may become trajectories, ordered by id.

        These are the leaves that remain when calls that are no targets are cut off first, so that a rejected branch
        never claims the prefix that it shares (PrimeIntellect-ai/prime-rl#3478). A leaf that sampled nothing stays,
        unless it failed and the same prompt was sampled again: then the retry stands for it.
        """
        family = self._family()
        alive = set(self._calls)
        found: list[CallId] = []
        pending = self.leaves()
        while pending:
            call = pending.pop()
            dead = self.untrained(call) is not None and (self._calls[call].sampled_len > 0 or self._superseded(call))
            if not dead:
                found.append(call)
                continue
            alive.discard(call)
            parent = family.parent[call]
            if parent is not None and not any(child in alive for child in family.children[parent]):
                pending.append(parent)
        return sorted(found)

    def spans(self, call: CallId) -> tuple[Span, ...]:
        """Return the sampled stretches on the path to a call, from the root."""
        found: list[Span] = []
        step: CallId | None = call
        parents = self._family().parent
        while step is not None:
            placed = self._placed(step)
            if placed.sampled_len:
                found.append(Span(step, placed.prompt_len, placed.prompt_len + placed.sampled_len))
            step = parents[step]
        return tuple(reversed(found))

    def ids(self, call: CallId) -> Ids:
        """Return prompt + sampled ids of a call, put together along its path."""
        return self._placed(call).end.path()

    def path(self, call: CallId) -> Path:
        """Return the path from the root to a call."""
        return Path(call, self.role(call), self.ids(call), self.spans(call))

    def paths(self) -> list[Path]:
        """Return the path of every leaf, ordered by the leaf's id."""
        return [self.path(call) for call in self.leaves()]

    # -- who continues whom --------------------------------------------------------------------------------------

    def _placed(self, call: CallId) -> _Placed:
        try:
            return self._calls[call]
        except KeyError:
            raise TreeError(f"call {call} is not in this run's tree") from None

    def _family(self) -> _Families:
        if self._families is None:
            families = _Families()
            for call in self._calls:
                parent = families.parent[call] = self._find_parent(call)
                families.children.setdefault(parent, []).append(call)
            self._families = families
        return self._families

    def _find_parent(self, call: CallId) -> CallId | None:
        """Return the deepest call that ends on the path to `call` within its prompt.

        Only calls that sampled something can be continued, so parents get strictly shorter and there is no cycle.
        Between several sampling events with the same tokens: the recorded parent, then the same lane, then one that
        was delivered, then the smallest id.
        """
        placed = self._calls[call]
        for node in placed.end.upward():
            if node.ends and node.depth <= placed.prompt_len:
                fits = [other for other in node.ends if self._calls[other].sampled_len and other != call]
                if fits:
                    return min(fits, key=lambda other: self._preference(placed, other))
        return None

    def _preference(self, placed: _Placed, other: CallId) -> tuple[bool, bool, bool, bool, CallId]:
        candidate = self._calls[other]
        return (
            other != placed.hint,
            candidate.lane != placed.lane,
            candidate.status is not CallStatus.DELIVERED,
            candidate.status in (CallStatus.FAILED, CallStatus.ABORTED),
            other,
        )

    def _superseded(self, call: CallId) -> bool:
        """Tell whether another call with the same parent goes through the whole prompt of this one, a spent leaf."""
        placed, family = self._calls[call], self._family()
        last = next((node for node in placed.end.upward() if node.start < placed.prompt_len), self._radix.root)
        for other in family.children[family.parent[call]]:
            rival = self._calls[other]
            if other == call or not any(node is last for node in rival.end.upward()):
                continue
            if rival.sampled_len and self.untrained(other) is None:
                return True
            if not rival.sampled_len and (rival.prompt_len, call) > (placed.prompt_len, other):
                return True
        return False
