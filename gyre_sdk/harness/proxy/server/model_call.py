"""A call in this process as its request, its connections and its run see it, whoever samples the answer."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects import Answer, Choice, Delta, ModelRequest, TokenText
from gyre_sdk.journal import CallIntent
from gyre_sdk.records import CallStatus

OPEN = (CallStatus.RECEIVED, CallStatus.DISPATCHED, CallStatus.STREAMING)
"""States of a call that has not ended."""


def _nobody(call: ModelCall) -> None:
    """Need not know that a call is complete."""


class ModelCall(ABC):
    """A call in flight, or ended and kept for its retries."""

    def __init__(self, request: ModelRequest, intent: CallIntent) -> None:
        self.request = request
        self.intent = intent
        self.prompt_tokens = len(intent.prompt_ids)
        self.answer: Answer | None = None
        self.finish: str | None = None
        self.watchers = 0
        """Connections that stream this call now."""
        self.on_complete: Callable[[ModelCall], None] = _nobody
        """Called once, before anyone learns that the call is complete."""
        self._task: asyncio.Task[None] | None = None
        self._entered = self._cut = False
        self._changed: asyncio.Event = asyncio.Event()

    # -- what connections see ----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def status(self) -> CallStatus:
        """State of the call."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether the call has ended, well or badly, for the agent."""

    @property
    @abstractmethod
    def error(self) -> ProtocolError | None:
        """What the agent is told when the call ended badly."""

    @property
    @abstractmethod
    def begun(self) -> bool:
        """Whether there is anything to show."""

    @property
    @abstractmethod
    def sampled(self) -> int:
        """Sampled tokens so far; of a hosted model they are known at the end."""

    @property
    @abstractmethod
    def deltas(self) -> Sequence[Delta]:
        """What may be seen so far, in order."""

    @property
    @abstractmethod
    def heard(self) -> int:
        """Sampled tokens behind `deltas`."""

    @property
    @abstractmethod
    def cost(self) -> float:
        """What the sampled tokens cost the run's budget, in US dollars."""

    @abstractmethod
    def advance(self) -> None:
        """Bring `deltas` to what may be shown by now."""

    @abstractmethod
    def choice(self) -> Choice:
        """Return the finished answer."""

    @abstractmethod
    def token_texts(self, start: int, end: int) -> tuple[TokenText, ...]:
        """Return sampled tokens as agents may ask to see them."""

    @abstractmethod
    def compact(self) -> None:
        """Keep `deltas` as few: nobody reads them piece by piece any more."""

    def changes(self) -> asyncio.Event:
        """Return what is set at the next change; take it before looking."""
        return self._changed

    # -- life --------------------------------------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """Whether the call runs, or has run, in this process."""
        return self._task is not None

    @property
    @abstractmethod
    def left_open(self) -> bool:
        """Whether another process left the call unfinished and it does not run here yet."""

    @abstractmethod
    def start(self, ended: Callable[[], object]) -> None:
        """Begin; the call runs to its end whatever happens to the agent's connection, then `ended` is called."""

    @abstractmethod
    def cancel(self, message: str, code: str = "run_closed") -> None:
        """End the call without an answer; the agent is told `code`."""

    @abstractmethod
    def delivered(self) -> None:
        """Note that the end of the answer reached a connection."""

    async def ended(self) -> None:
        """Wait for the end, whatever it is."""
        while not self.done:
            await self._changed.wait()

    async def stopped(self) -> None:
        """Wait until the call's own task has ended; its record is durable then."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _cancel_task(self) -> None:
        """Cancel the call's task. One that has not run a step would end without a word: it is cancelled in its first."""
        self._cut = True
        if self._task is not None and self._entered:
            self._task.cancel()

    def _enter(self) -> None:
        """Begin the call's task."""
        self._entered = True
        task = asyncio.current_task()
        if self._cut and task is not None:
            task.cancel()

    def _complete(self) -> None:
        """Tell that the call is complete, and let go of whoever is told: it holds the whole conversation."""
        told, self.on_complete = self.on_complete, _nobody
        told(self)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
