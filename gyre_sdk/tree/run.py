"""The tree of a run: calls over a radix tree of their tokens, who continues whom, and which paths may be trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from gyre_sdk.errors import TreeError
from gyre_sdk.records import CallId, CallRecord, CallStatus, ForkReason, VersionSpan
from gyre_sdk.tree.calls import SampledCall, Untrained
from gyre_sdk.tree.families import Families, Placed, families, find_parent, given_way, goes_through
from gyre_sdk.tree.radix import Ids, Node, Radix, Routes


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


@dataclass(frozen=True, slots=True)
class Fork:
    """Where a call left a recorded path: evidence of what the agent did, as the recorder saw it when the call came in."""

    reason: ForkReason
    origin: CallId | None
    """The call that shared most with its prompt."""
    shared: int
    """Tokens shared with the origin's prompt + sampled ids."""


class RunTree:
    """The tree of one run. Not thread-safe; one owner inserts."""

    def __init__(self) -> None:
        self._radixes: dict[int, Radix] = {}
        """By expert ids per token, 0 for calls without routes."""
        self._calls: dict[CallId, Placed] = {}
        self._families: Families | None = None
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
            TreeError: the call is in the tree already, or its ids, log-probs or routes are malformed. The tree is
                unchanged.
        """
        if isinstance(call, CallRecord):
            call = SampledCall.from_record(call)
        if call.call in self._calls:
            raise TreeError(
                f"call {call.call} is in the tree already; a call is inserted once, when its answer is complete"
            )
        prompt, sampled = call.prompt_ids, call.sampled_ids
        flaw, logprobs, routes = call.flaw(), call.checked_logprobs(), call.checked_routes()
        width = 0 if routes is None else routes.shape[1]
        radix = self._radixes.get(width) or Radix(width)
        try:
            node, known = radix.insert(prompt, sampled, routes)
        except ValueError as error:
            raise TreeError(f"call {call.call}: {error}; ids are positions in a vocabulary") from None
        self._radixes[width] = radix
        total = len(prompt) + len(sampled)
        node.ends.append(call.call)
        self._calls[call.call] = Placed(
            role=call.role,
            lane=call.lane,
            status=call.status,
            hint=call.parent,
            fork_reason=call.fork_reason,
            shared=call.shared,
            prompt_len=len(prompt),
            sampled_len=len(sampled),
            logprobs=logprobs,
            versions=tuple(call.versions),
            flaw=flaw,
            end=node,
        )
        self._families = None
        self.raw_tokens += total
        return Placement(find_parent(self._calls, call.call), known, total - known)

    def settle(self, call: CallId, status: CallStatus) -> None:
        """Take the state that a call came to have after its insertion: that it was delivered is known last.

        Raises:
            TreeError: the call is not in the tree.
        """
        self._placed(call).status = status
        self._families = None

    # -- asking --------------------------------------------------------------------------------------------------

    @property
    def unique_tokens(self) -> int:
        """Tokens in the tree; equal ones on different routes are different ones."""
        return sum(radix.size for radix in self._radixes.values())

    def __len__(self) -> int:
        """Return the number of calls."""
        return len(self._calls)

    def __contains__(self, call: object) -> bool:
        return call in self._calls

    def calls(self) -> list[CallId]:
        """Return all calls, ordered by id."""
        return sorted(self._calls)

    def inserted(self) -> list[CallId]:
        """Return all calls in the order they were inserted."""
        return list(self._calls)

    def roots(self) -> list[Node]:
        """Return the empty nodes that all paths start from: one for calls without routes, one for each width of routes."""
        return [radix.root for _, radix in sorted(self._radixes.items())]

    def role(self, call: CallId) -> str:
        """Return the role of a call."""
        return self._placed(call).role

    def lane(self, call: CallId) -> str:
        """Return the lane of a call."""
        return self._placed(call).lane

    def status(self, call: CallId) -> CallStatus:
        """Return the state of a call."""
        return self._placed(call).status

    def prompt_tokens(self, call: CallId) -> int:
        """Return how many ids a call's prompt has: the path position of its first sampled token."""
        return self._placed(call).prompt_len

    def sampled_tokens(self, call: CallId) -> int:
        """Return how many tokens a call sampled."""
        return self._placed(call).sampled_len

    def logprobs(self, call: CallId) -> NDArray[np.float64]:
        """Return the behaviour log-prob (nats) per sampled token; NaN where the engine gave none."""
        return self._placed(call).logprobs.astype(np.float64)

    def version_spans(self, call: CallId) -> tuple[VersionSpan, ...]:
        """Return the policy versions of a call's sampled tokens, as recorded."""
        return self._placed(call).versions

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

    def fork(self, call: CallId) -> Fork | None:
        """Return why a call left the recorded path that it is nearest to, or None when it continues it or is a root."""
        placed = self._placed(call)
        origin = self._calls.get(placed.hint) if placed.hint is not None else None
        if placed.fork_reason is not None:
            return Fork(placed.fork_reason, placed.hint, placed.shared)
        if placed.hint is None or origin is None or goes_through(placed, origin.end):
            return None
        whole = origin.end.path()
        same_tokens = np.array_equal(whole, placed.end.path()[: len(whole)])
        reason = ForkReason.ROUTES if same_tokens else ForkReason.UNKNOWN
        return Fork(reason, placed.hint, self.shared(call, placed.hint))

    def shared(self, one: CallId, other: CallId) -> int:
        """Return how many leading tokens of prompt + sampled ids two calls share in the tree."""
        above = {id(node) for node in self._placed(one).end.upward()}
        return next((node.depth for node in self._placed(other).end.upward() if id(node) in above), 0)

    def untrained(self, call: CallId) -> Untrained | None:
        """Return why a call's sampled tokens are no targets, or None when they are."""
        placed, family = self._placed(call), self._family()
        if placed.status is CallStatus.FAILED:
            return Untrained.FAILED
        if placed.status is CallStatus.ABORTED:
            return Untrained.ABORTED
        if placed.flaw is not None:
            return placed.flaw
        if placed.status is not CallStatus.DELIVERED and not family.children.get(call):
            return Untrained.ORPHAN
        return Untrained.REJECTED if call in family.rejected else None

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
        without = given_way(self._calls, family, lambda call: self.untrained(call) is None)
        alive = set(self._calls)
        found: list[CallId] = []
        pending = self.leaves()
        while pending:
            call = pending.pop()
            dead = self.untrained(call) is not None and (self._calls[call].sampled_len > 0 or call in without)
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

    def routes(self, call: CallId) -> Routes | None:
        """Return the experts that every token of a call's path but the last went through, (tokens - 1, W), if recorded."""
        return self._placed(call).end.routes()

    def path(self, call: CallId) -> Path:
        """Return the path from the root to a call."""
        return Path(call, self.role(call), self.ids(call), self.spans(call))

    def paths(self) -> list[Path]:
        """Return the path of every leaf, ordered by the leaf's id."""
        return [self.path(call) for call in self.leaves()]

    # -- who continues whom --------------------------------------------------------------------------------------

    def _placed(self, call: CallId) -> Placed:
        try:
            return self._calls[call]
        except KeyError:
            raise TreeError(f"call {call} is not in this run's tree") from None

    def _family(self) -> Families:
        if self._families is None:
            self._families = families(self._calls)
        return self._families
