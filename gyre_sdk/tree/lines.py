"""A tree as few lines: calls that continue each other, of one role and one fate, become one line; so do small branches.

At every fork the side with most calls goes on at the same depth, as the trunk does in a drawing of a tree, and the others
are set off from it. So a run of n calls is at most log2(n) deep, whatever it forked from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gyre_sdk.records import CallId
from gyre_sdk.tree.outline import CallOutline, NodeOutline, TreeOutline

_FEW = 3
"""Small branches of one kind up to this many are shown each by itself."""


@dataclass(slots=True)
class Line:
    """A stretch of a path and the calls that end on it; or, with `branches`, small branches that are told together."""

    role: str
    fate: str
    """`trained`, `sampled nothing`, or why not trained; empty for a stretch where no call ends."""
    start: int
    stop: int
    """Path positions; of several branches, the first start and the last stop."""
    calls: list[CallOutline] = field(default_factory=list)
    nodes: list[NodeOutline] = field(default_factory=list)
    shared_by: int = 0
    """Calls that go through it, where none ends."""
    branches: int = 0
    """Branches told together; 0 for a stretch."""
    below: list[Line] = field(default_factory=list)
    """What is set off from it, in the order of the first calls."""

    @property
    def sampled(self) -> int:
        """Tokens that its calls sampled."""
        return sum(call.sampled_tokens for call in self.calls)

    @property
    def versions(self) -> tuple[int, int] | None:
        """Lowest and highest policy version of its answers; None where none is known."""
        known = [span.version for call in self.calls for span in call.versions]
        return (min(known), max(known)) if known else None

    @property
    def forks(self) -> Counter[str]:
        """Its calls that left a recorded path, by reason."""
        return Counter(str(call.fork.reason) for call in self.calls if call.fork is not None)

    @property
    def trajectories(self) -> list[CallId]:
        """Leaves of the trajectories that train its calls, in order of first use."""
        return list(dict.fromkeys(call.trained_in for call in self.calls if call.trained_in is not None))

    @property
    def given_up(self) -> tuple[int, int]:
        """Engine attempts of its calls that were given up, and the tokens that they had sampled."""
        tokens = [size for call in self.calls for size in call.given_up]
        return len(tokens), sum(tokens)


def fate(call: CallOutline) -> str:
    """Return what became of a call's tokens in training, in a word."""
    if call.trained_in is not None:
        return "trained"
    return call.untrained or "sampled nothing"


def _continues(line: Line, call: CallOutline) -> bool:
    """Tell whether a line goes on with a call."""
    alike = (call.role, fate(call)) == (line.role, line.fate)
    return alike and bool(line.calls) and call.parent == line.calls[-1].call


def lines(tree: TreeOutline) -> list[Line]:
    """Return the lines of a tree, each with those set off from it."""
    return _Collapsing(tree).top()


class _Collapsing:
    def __init__(self, tree: TreeOutline) -> None:
        self._calls = {call.call: call for call in tree.calls}
        self._order = {call.call: place for place, call in enumerate(tree.calls)}
        self._loose = [call for call in tree.calls if call.node is None]
        self._children: dict[int | None, list[NodeOutline]] = {}
        self._weight = [len(node.calls) for node in tree.nodes]
        last = len(tree.calls)
        self._first = [min((self._order[call] for call in node.calls), default=last) for node in tree.nodes]
        for node in reversed(tree.nodes):  # below before above
            self._children.setdefault(node.above, []).append(node)
            if node.above is not None:
                self._weight[node.above] += self._weight[node.node]
                self._first[node.above] = min(self._first[node.above], self._first[node.node])
        for found in self._children.values():
            found.sort(key=lambda node: self._first[node.node])

    def top(self) -> list[Line]:
        """Return the lines that are set off from nothing."""
        loose = [Line(call.role, fate(call), 0, 0, calls=[call]) for call in self._loose]
        return self._told([*loose, *(line for node in self._children.get(None, []) for line in self._trunk(node))])

    def _trunk(self, node: NodeOutline) -> Iterator[Line]:
        """Yield the lines of a node and what is below it, in order along the trunk."""
        current: Line | None = None
        for step in self._steps(node):
            ending = [self._calls[call] for call in step.calls]
            if current is None or (ending and not _continues(current, ending[0])):
                if current is not None:
                    yield self._closed(current)
                current = self._opened(step, ending)
            assert current is not None
            current.stop = step.stop
            current.nodes.append(step)
            current.calls += ending[:1]  # others sampled the same tokens
            current.below += [Line(call.role, fate(call), step.stop, step.stop, calls=[call]) for call in ending[1:]]
            sides = self._sides(step)
            current.below += [line for side in sides for line in self._trunk(side)]
            if any(self._weight[side.node] > 1 for side in sides):
                yield self._closed(current)
                current = None
        if current is not None:
            yield self._closed(current)

    def _steps(self, node: NodeOutline) -> Iterator[NodeOutline]:
        step: NodeOutline | None = node
        while step is not None:
            yield step
            step = self._heaviest(step)

    def _heaviest(self, node: NodeOutline) -> NodeOutline | None:
        children = self._children.get(node.node, [])
        return max(children, key=lambda child: (self._weight[child.node], -self._first[child.node]), default=None)

    def _sides(self, node: NodeOutline) -> list[NodeOutline]:
        trunk = self._heaviest(node)
        return [child for child in self._children.get(node.node, []) if child is not trunk]

    def _opened(self, step: NodeOutline, ending: Sequence[CallOutline]) -> Line:
        if not ending:
            return Line("", "", step.start, step.stop, shared_by=self._weight[step.node])
        return Line(ending[0].role, fate(ending[0]), step.start, step.stop)

    def _closed(self, line: Line) -> Line:
        line.below = self._told(line.below)
        return line

    def _told(self, found: Sequence[Line]) -> list[Line]:
        """Tell small branches of one kind together where they are many."""
        kinds: dict[tuple[object, ...], list[Line]] = {}
        for line in found:
            small = len(line.calls) == 1 and not line.below
            key = (line.role, line.fate, tuple(line.forks)) if small else (id(line),)
            kinds.setdefault(key, []).append(line)
        told: list[Line] = []
        for alike in kinds.values():
            if len(alike) <= _FEW:
                told += alike
                continue
            first = alike[0]
            start, stop = min(line.start for line in alike), max(line.stop for line in alike)
            calls = [line.calls[0] for line in alike]
            told.append(Line(first.role, first.fate, start, stop, calls=calls, branches=len(alike)))
        return told
