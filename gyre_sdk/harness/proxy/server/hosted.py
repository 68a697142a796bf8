"""Calls that a hosted model answers: recorded and replayed like all others, without token ids, so never trained.

The intent is durable before the provider is asked, the whole answer before its end is delivered. What comes between is
shown as it comes: there are no ids to store it as. A call that this process did not bring to an end is asked again when
the agent retries.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from gyre_sdk.errors import GyreError, ProtocolError
from gyre_sdk.harness.proxy.answers.deltas import joined
from gyre_sdk.harness.proxy.dialects import Answer, Choice, Delta, ModelRequest, TokenText
from gyre_sdk.harness.proxy.dialects.canonical import Message, answer_of
from gyre_sdk.harness.proxy.recorder import durable
from gyre_sdk.harness.proxy.server.conduct import Services
from gyre_sdk.harness.proxy.server.model_call import OPEN, ModelCall
from gyre_sdk.harness.proxy.server.provider import Provider, Reading, wire_messages
from gyre_sdk.harness.proxy.server.speech import whole_answer
from gyre_sdk.journal import CallIntent, TokenChunk
from gyre_sdk.records import CallStatus

log = logging.getLogger(__name__)
PROVIDER = "provider"
"""Key of the recorded answer under which the provider's own answer, its usage and its cost are."""


class HostedCall(ModelCall):
    """A call that a hosted model answers.

    Args:
        services: what it needs.
        request: the agent's.
        intent: what is recorded before the provider is asked; its request names the model and what is asked of it.
        resumed: whether the intent is in the store already.
    """

    def __init__(self, services: Services, request: ModelRequest, intent: CallIntent, *, resumed: bool = False) -> None:
        super().__init__(request, intent)
        asked = intent.request[PROVIDER]
        self._services = services
        self._provider = Provider(asked["model"])
        self._asked: dict[str, Any] = asked["parameters"]
        self._resumed = resumed
        self._reading = Reading()
        self._deltas: list[Delta] = []
        self._status = CallStatus.RECEIVED
        self._sampled = 0
        self._cached: int | None = None
        self._cost = 0.0
        self._began = time.monotonic()
        self._ending = False
        self._cancelled: ProtocolError | None = None
        self._failure: ProtocolError | None = None

    # -- what connections see ----------------------------------------------------------------------------------------

    @property
    def status(self) -> CallStatus:
        """State of the call."""
        return self._status

    @property
    def done(self) -> bool:
        """Whether the call has ended, well or badly, for the agent."""
        return self._failure is not None or self._status in (CallStatus.COMPLETE, CallStatus.DELIVERED)

    @property
    def error(self) -> ProtocolError | None:
        """What the agent is told when the call ended badly."""
        return self._failure

    @property
    def begun(self) -> bool:
        """Whether there is anything to show."""
        return bool(self._deltas)

    @property
    def sampled(self) -> int:
        """Tokens of the answer as the provider counts them; 0 until the end."""
        return self._sampled

    @property
    def deltas(self) -> list[Delta]:
        """What may be seen so far, in order."""
        return self._deltas

    @property
    def heard(self) -> int:
        """Tokens behind `deltas`: as many as are known."""
        return self._sampled

    @property
    def cost(self) -> float:
        """US dollars: litellm's price of the model, or the service's prices where it has none."""
        return self._cost

    def advance(self) -> None:
        """Nothing: what comes may be shown."""

    def compact(self) -> None:
        """Keep `deltas` as few: nobody reads them piece by piece any more."""
        self._deltas = joined(self._deltas)

    def choice(self) -> Choice:
        """Return the finished answer."""
        return Choice(self.answer or Answer(), self.finish or "stop", self._sampled, cached_tokens=self._cached)

    def token_texts(self, start: int, end: int) -> tuple[TokenText, ...]:
        """Return nothing: there are no tokens to show."""
        return ()

    # -- life --------------------------------------------------------------------------------------------------------

    @property
    def left_open(self) -> bool:
        """Whether another process left the call unfinished and it does not run here yet."""
        return self._resumed and self._status in OPEN and not self.started

    def start(self, ended: Callable[[], object]) -> None:
        """Begin; the call runs to its end whatever happens to the agent's connection, then `ended` is called."""
        self._task = self._services.spawn(self._run())
        self._task.add_done_callback(lambda _: ended())

    def restore(self, status: CallStatus, said: Message, finish: str) -> None:
        """Take a recorded end instead of running."""
        self._status = status
        self._take_end(answer_of(said, self.request.prefill), finish, said.extra.get(PROVIDER) or {})
        self._deltas = whole_answer(self.answer or Answer())

    def cancel(self, message: str, code: str = "run_closed") -> None:
        """End the call without an answer; the agent is told `code`."""
        if self._task is not None and not self._ending and self._cancelled is None:
            self._cancelled = ProtocolError(message, status=403, code=code)
            self._cancel_task()

    def delivered(self) -> None:
        """Note that the end of the answer reached a connection."""
        if self._status is CallStatus.COMPLETE:
            self._status = CallStatus.DELIVERED
            self._services.journal.call_delivered(self.intent.call)

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            self._enter()
            await self._ask()
        except asyncio.CancelledError:
            if self._cancelled is None:
                raise  # the service stops: the call stays open in the store
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            await self._fail(CallStatus.ABORTED, self._cancelled)
        except ProtocolError as error:
            await self._fail(CallStatus.FAILED, error)
        except GyreError as error:
            log.error("call %s: %s", self.intent.call, error)
            self._give_up(ProtocolError(str(error), status=500, code="store_failed", retryable=True))
        except Exception:  # boundary: top of a supervised task; the agent must not wait for ever
            log.exception("call %s failed", self.intent.call)
            problem = "the service failed to carry out the call"
            self._give_up(ProtocolError(problem, status=500, code="internal_error", retryable=True))
        finally:
            if self.done:
                seconds = time.monotonic() - self._began
                self._services.metrics.call_ended(
                    self.request.dialect, self._status, seconds, self.prompt_tokens, self._sampled
                )

    async def _ask(self) -> None:
        if not self._resumed:
            asked = time.monotonic()
            await durable(self._services.journal.call_received(self.intent))
            self._services.metrics.durable.observe(time.monotonic() - asked)
        messages = wire_messages(self.intent.messages, self.request.prefill)
        chunks = await self._listen(messages)
        if self._reading.finish is None:
            problem = f"{self._provider.model} broke off in the middle of its answer"
            raise ProtocolError(problem, status=502, code="provider_error", retryable=True)
        whole = await self._provider.whole(chunks, messages)
        self._ending = True
        self._take_end(self._reading.answer(), self._reading.finish, whole)
        await self._record(CallStatus.COMPLETE, whole)
        self._complete()
        self.intent = msgspec.structs.replace(self.intent, messages=[])
        self._notify()

    async def _listen(self, messages: list[dict[str, Any]]) -> list[Any]:
        chunks = []
        pieces = self._provider.ask(messages, self._asked)
        try:
            async for chunk in pieces:
                if not self.begun:
                    self._services.metrics.first_token.observe(time.monotonic() - self._began)
                chunks.append(chunk)
                fresh = self._reading.take(chunk)
                if fresh:
                    self._deltas += fresh
                    self._notify()
        finally:
            await pieces.aclose()
        return chunks

    def _take_end(self, answer: Answer, finish: str, whole: dict[str, Any]) -> None:
        usage = whole.get("usage") or {}
        self.answer = answer
        self.finish = "tool_calls" if answer.tool_calls and finish == "stop" else finish
        self.prompt_tokens, self._sampled = (
            int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")
        )
        self._cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        cost = whole.get("cost")
        prices = self._services.settings.prices
        self._cost = prices.of(self.prompt_tokens, self._sampled) if cost is None else float(cost)

    async def _record(self, status: CallStatus, whole: dict[str, Any] | None, error: str | None = None) -> None:
        answer = None
        if whole is not None and self.answer is not None:
            answer = msgspec.structs.replace(self.answer.message(self.request.prefill), extra={PROVIDER: whole})
        await durable(
            self._services.journal.call_ended(
                self.intent.call,
                status,
                at=time.time(),
                sampled=TokenChunk(0, [], [], []),
                finish_reason=self.finish,
                answer=answer,
                error=error,
            )
        )
        self._status = status

    async def _fail(self, status: CallStatus, error: ProtocolError) -> None:
        self._ending = True
        try:
            await self._record(status, None, str(error))
        except GyreError as problem:
            error = ProtocolError(str(problem), status=500, code="store_failed", retryable=True)
        self._give_up(error)

    def _give_up(self, error: ProtocolError) -> None:
        if self._status in OPEN:
            self._status = CallStatus.FAILED
        self._failure = error
        self._notify()


def spent_by(answer: Message) -> tuple[int, int, float | None]:
    """Return what a recorded answer of a hosted model took: prompt tokens, sampled tokens, US dollars if known."""
    whole = answer.extra.get(PROVIDER) or {}
    usage = whole.get("usage") or {}
    return int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0), whole.get("cost")
