"""Which lane a request of a black box belongs to: a pure decision per request, replaceable by the user.

An agent that uses one key for everything mixes several conversations: its main loop, sub-agents, summaries of a
conversation that grew too long, side calls such as titles. A `Classifier` tells them apart. It sees the request
(`Asked`), the run's lanes (`LaneView`) and what recent calls answered (`CallView`); it keeps nothing itself, so the
same inputs give the same lane, also after a restart. `RuleClassifier` decides by what is recorded; what is special
to a program comes from a `Preset`, which is data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gyre_sdk.harness.proxy.dialects.canonical import Message, ToolCall
from gyre_sdk.records import CallId, LaneId

SIDE = "side"
"""Role of one-shot calls beside the work: titles, topics, checks."""


@dataclass(frozen=True, slots=True)
class LaneView:
    """A lane of the run as a classifier sees it."""

    lane: LaneId
    role: str
    name: str
    parent: LaneId | None = None
    last_call: CallId | None = None
    """None while nothing was asked in it."""
    last_used: int = 0
    """Orders lanes by their last request; larger is later."""
    opening: tuple[Message, ...] = ()
    """Messages of its first request."""
    latest: tuple[Message, ...] = ()
    """Messages of its last complete request, then the answer: what the next request is expected to begin with."""
    tools: bytes = b""
    """`tools_identity` of its last request."""
    thread: str = ""
    """`Assigned.thread` of its last request; empty where the program says nothing, and after a restart."""
    tool_call: str = ""
    """`Assigned.tool_call` of the request that opened it."""


@dataclass(frozen=True, slots=True)
class CallView:
    """What a complete call answered."""

    call: CallId
    lane: LaneId
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """A new request, and what it has in common with what is recorded."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The request but its messages, as sent."""
    dialect: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Names in lower case; never a key."""
    continues: CallId | None = None
    """The call whose answer the request repeats last."""
    continues_lane: LaneId | None = None
    """That call's lane."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """The lane of a request."""

    lane: LaneId | None
    """None: open a new lane with what follows; else the rest but `thread` and `reason` is that lane's own."""
    role: str
    name: str
    parent: LaneId | None = None
    parent_call: CallId | None = None
    """The call that started the lane: a sub-agent's tool call, the last call that a summary sums up."""
    reason: str = ""
    """Which rule decided, for people."""
    thread: str = ""
    """The program's own name of the conversation; to be kept as the lane's."""
    tool_call: str = ""
    """Id of the tool call that started a sub-agent; to be kept as the lane's, so that equal prompts get a lane each."""


class Classifier(ABC):
    """Decides lanes. `assign` must be pure and quick: it is called in the event loop, one request of a run at a time."""

    @abstractmethod
    def assign(self, asked: Asked, lanes: Sequence[LaneView], calls: Sequence[CallView]) -> Assigned:
        """Return the lane of a request.

        Args:
            asked: the request.
            lanes: the run's lanes under this key, in order of opening; the first is the key's own lane.
            calls: recent complete calls of the run, oldest first; at least those since the last request of each lane.
        """


__all__ = ["SIDE", "Asked", "Assigned", "CallView", "Classifier", "LaneView"]
