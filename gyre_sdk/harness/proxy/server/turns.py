"""One request of an agent as it is kept for its retries: which request repeats an earlier one, and which is new.

An agent's SDK repeats a request when its connection broke; an agent repeats a request to sample again. The difference
decides whether a recorded answer is served once more or a new one is sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects import ModelRequest
from gyre_sdk.harness.proxy.server.model_call import ModelCall


@dataclass(slots=True, eq=False)
class Turn:
    """A request and the calls made for it, one per choice."""

    request: ModelRequest
    name: str
    at: float
    """Seconds since the epoch when it was received."""
    key: str = ""
    """Digest of its `Idempotency-Key`."""
    calls: list[ModelCall] = field(default_factory=list)
    connections: set[object] = field(default_factory=set)
    """Transports of the agent that wait for the answer now."""
    delivered: bool = False
    """Whether an answer has reached a connection in full."""
    problem: ProtocolError | None = None
    """Why no call was made."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `calls` or `problem` is."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the request's prompt, or of all its prompts."""
        return sum(call.prompt_tokens for call in self.calls[:: self.request.n])

    @property
    def failed(self) -> bool:
        """Whether the request has no answer and never will."""
        return self.problem is not None or any(call.error is not None for call in self.calls)

    @property
    def watched(self) -> bool:
        """Whether a connection that is still open waits for the answer."""
        return any(not getattr(transport, "is_closing", lambda: True)() for transport in self.connections)


def repeated(turns: Sequence[Turn], *, retry: bool) -> Turn | None:
    """Return the turn that an equal request repeats, or None when it asks for a new sample.

    Args:
        turns: earlier turns of the lane with byte-identical bodies, oldest first.
        retry: whether the client says that it repeats (`x-stainless-retry-count` above 0, or an equal
            `Idempotency-Key`).

    A client that says so gets the latest turn that did not fail, delivered or not. One that does not say so repeats
    a turn only if nobody got its answer: not delivered in full, and no open connection waits for it.
    """
    usable = [turn for turn in turns if not turn.failed]
    if retry:
        return usable[-1] if usable else None
    lost = [turn for turn in usable if not turn.delivered and not turn.watched]
    return lost[0] if lost else None
