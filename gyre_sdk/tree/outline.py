"""A tree as plain values: its stretches of tokens, its calls and the chosen trajectories. What `gyre tree --json` prints.

The shape is stable: keys are added, never renamed or dropped. Positions count tokens from the start of a path, 0-based;
a range is `start` to `stop`, `stop` left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gyre_sdk.records import CallId, CallStatus, ForkReason, VersionSpan
from gyre_sdk.tree.calls import Untrained
from gyre_sdk.tree.radix import Node
from gyre_sdk.tree.run import RunTree, Span

NOT_SELECTED = "not_selected"
"""Why a call is not trained that could be: no trajectory that was chosen runs through it."""


class ForkOutline(msgspec.Struct, frozen=True):
    """See `gyre_sdk.tree.Fork`."""

    reason: ForkReason
    origin: CallId | None
    shared: int


class CallOutline(msgspec.Struct, frozen=True):
    """A call in its tree."""

    call: CallId
    lane: str
    role: str
    status: CallStatus
    node: int | None
    """The node whose last token is the call's last one; None for a call without tokens."""
    parent: CallId | None
    """The call that it continues."""
    fork: ForkOutline | None
    prompt_tokens: int
    """Its answer begins at this position of its path."""
    sampled_tokens: int
    versions: tuple[VersionSpan, ...]
    """Policy versions of its answer."""
    trained_in: CallId | None
    """Leaf of the trajectory that owns its sampled tokens; None where none does."""
    untrained: str | None
    """Why none does: a reason of `gyre_sdk.tree.Untrained`, of a mask, or `not_selected`. None also for a call that sampled
    nothing."""
    given_up: tuple[int, ...] = ()
    """Tokens that each engine attempt had sampled which was given up; they are in no path."""


class NodeOutline(msgspec.Struct, frozen=True):
    """A stretch of tokens that the same calls go through. A node comes after the one above it."""

    node: int
    above: int | None
    """The node whose end it starts from; None at the start of paths."""
    start: int
    stop: int
    calls: tuple[CallId, ...]
    """Calls that end with its last token, in the order they were inserted."""
    ids: list[int] | None = None
    """Its token ids, where they were asked for."""


class StretchOutline(msgspec.Struct, frozen=True):
    """Tokens of a trajectory that a call sampled; what lies between stretches is context."""

    call: CallId
    start: int
    stop: int
    owned: bool
    """True where they are targets of this trajectory, false where they are context of it too."""


class TrajectoryOutline(msgspec.Struct, frozen=True):
    """A chosen path."""

    leaf: CallId
    role: str
    """Class it was drawn from."""
    tokens: int
    owned: int
    """Targets."""
    stretches: tuple[StretchOutline, ...]


class TreeOutline(msgspec.Struct, frozen=True):
    """A whole tree."""

    raw_tokens: int
    """Prompt + sampled ids, summed over calls."""
    unique_tokens: int
    sampled_tokens: int
    trained_tokens: int
    untrained: dict[str, int]
    """Calls that are not trained, by reason."""
    trajectories: tuple[TrajectoryOutline, ...]
    """In the order they were chosen."""
    nodes: tuple[NodeOutline, ...]
    calls: tuple[CallOutline, ...]
    """In the order they were inserted."""


def outline(
    tree: RunTree,
    chosen: Sequence[tuple[CallId, str, Sequence[Span]]] = (),
    *,
    masks: Mapping[CallId, str] | None = None,
    given_up: Mapping[CallId, Sequence[int]] | None = None,
    with_ids: bool = False,
) -> TreeOutline:
    """Return a tree as plain values.

    Args:
        chosen: leaf, class and owned spans of each trajectory.
        masks: call -> why whoever built the tree excluded it.
        given_up: call -> tokens that each of its given-up engine attempts had sampled.
        with_ids: whether nodes tell their token ids.
    """
    nodes, ends = _nodes(tree.roots(), with_ids)
    owner = {span.call: leaf for leaf, _, spans in chosen for span in spans}
    calls = tuple(
        _call(tree, call, ends.get(call), owner.get(call), (masks or {}).get(call), (given_up or {}).get(call, ()))
        for call in tree.inserted()
    )
    trained = sum(call.sampled_tokens for call in calls if call.trained_in is not None)
    return TreeOutline(
        raw_tokens=tree.raw_tokens,
        unique_tokens=tree.unique_tokens,
        sampled_tokens=sum(call.sampled_tokens for call in calls),
        trained_tokens=trained,
        untrained=dict(sorted(Counter(call.untrained for call in calls if call.untrained is not None).items())),
        trajectories=tuple(_trajectory(tree, leaf, role, spans) for leaf, role, spans in chosen),
        nodes=nodes,
        calls=calls,
    )


def _nodes(roots: Iterable[Node], with_ids: bool) -> tuple[tuple[NodeOutline, ...], dict[CallId, int]]:
    """Return all nodes with tokens, parents first, and where each call ends."""
    found: list[NodeOutline] = []
    ends: dict[CallId, int] = {}
    pending: list[tuple[Node, int | None]] = []
    pending += [(root, None) for root in reversed(list(roots))]
    while pending:
        node, above = pending.pop()
        if node.parent is not None:
            ids = node.tokens.tolist() if with_ids else None
            ends.update(dict.fromkeys(node.ends, len(found)))
            found.append(NodeOutline(len(found), above, node.start, node.depth, tuple(node.ends), ids))
            above = found[-1].node
        # Symbols order children the same way whatever arrived first.
        children = sorted(node.children.items(), key=lambda item: item[0] if isinstance(item[0], tuple) else (item[0],))
        pending += [(child, above) for _, child in reversed(children)]
    return tuple(found), ends


def _call(
    tree: RunTree, call: CallId, node: int | None, owner: CallId | None, mask: str | None, given_up: Sequence[int]
) -> CallOutline:
    fork, reason, sampled = tree.fork(call), tree.untrained(call), tree.sampled_tokens(call)
    why: str | None = NOT_SELECTED if sampled and owner is None else None
    if reason is not None:
        why = mask if reason is Untrained.EXCLUDED and mask is not None else str(reason)
    return CallOutline(
        call=call,
        lane=tree.lane(call),
        role=tree.role(call),
        status=tree.status(call),
        node=node,
        parent=tree.parent(call),
        fork=None if fork is None else ForkOutline(fork.reason, fork.origin, fork.shared),
        prompt_tokens=tree.prompt_tokens(call),
        sampled_tokens=sampled,
        versions=tree.version_spans(call),
        trained_in=owner,
        untrained=None if owner is not None else why,
        given_up=tuple(given_up),
    )


def _trajectory(tree: RunTree, leaf: CallId, role: str, owned: Sequence[Span]) -> TrajectoryOutline:
    mine = {span.call for span in owned}
    return TrajectoryOutline(
        leaf=leaf,
        role=role,
        tokens=tree.prompt_tokens(leaf) + tree.sampled_tokens(leaf),
        owned=sum(span.stop - span.start for span in owned),
        stretches=tuple(
            StretchOutline(span.call, span.start, span.stop, span.call in mine) for span in tree.spans(leaf)
        ),
    )
