"""Carries out one call: executes the commands of its `Exchange` against replicas and the store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np

from gyre_sdk.errors import GyreError, ProtocolError
from gyre_sdk.harness.proxy.answers.deltas import joined
from gyre_sdk.harness.proxy.dialects import Answer, Choice, Delta, ModelRequest, TokenText
from gyre_sdk.harness.proxy.dialects.history import Ids, Origin, ids_text
from gyre_sdk.harness.proxy.exchange import (
    REJECTED,
    AbortAttempt,
    Cancelled,
    Command,
    Deliver,
    Delivered,
    Ended,
    Event,
    Exchange,
    Fail,
    FindReplica,
    PersistAttempt,
    PersistAttemptEnd,
    PersistDelivered,
    PersistEnd,
    PersistIntent,
    PersistTokens,
    Release,
    Sampled,
    Send,
    Stored,
    StoreFailed,
)
from gyre_sdk.harness.proxy.recorder import CallLog
from gyre_sdk.harness.proxy.render import Template
from gyre_sdk.harness.proxy.render.grammar import field_refused
from gyre_sdk.harness.proxy.server.attempts import Attempts
from gyre_sdk.harness.proxy.server.fleet import Fleet
from gyre_sdk.harness.proxy.server.metrics import Metrics
from gyre_sdk.harness.proxy.server.model_call import OPEN, ModelCall
from gyre_sdk.harness.proxy.server.settings import ProxySettings
from gyre_sdk.harness.proxy.server.speech import Speech, whole_answer
from gyre_sdk.harness.proxy.server.templates import Templates
from gyre_sdk.journal import CallIntent, Journal
from gyre_sdk.records import CallStatus

log = logging.getLogger(__name__)

_NOTHING: Ids = np.empty(0, dtype=np.int32)
LARGE = 50_000
"""Prompts of more tokens are written in a thread, so that other streams go on."""


@dataclass(frozen=True, slots=True)
class Services:
    """What carrying out a call needs."""

    settings: ProxySettings
    journal: Journal
    templates: Templates
    """How the model writes conversations."""
    fleet: Fleet
    spawn: Callable[[Any], asyncio.Task[None]]
    """Starts a supervised task."""
    metrics: Metrics = field(default_factory=Metrics)

    @property
    def template(self) -> Template:
        """Return the template for what does not depend on the policy: text, limits, stop tokens."""
        return self.templates.base


class LiveCall(ModelCall):
    """A call that replicas of the policy answer."""

    def __init__(
        self,
        services: Services,
        request: ModelRequest,
        intent: CallIntent,
        exchange: Exchange,
        template: Template,
        origin: Origin,
    ) -> None:
        super().__init__(request, intent)
        self.exchange = exchange
        self.prompt = origin.prompt
        self.prompt_text = b""
        """The prompt's ids as JSON without brackets, once they were sent."""
        self._parent = origin.parent if origin.fork is None else None
        self.speech = Speech(template, request, origin.prompt, exchange.call.removeprefix("c-"))
        self._services = services
        interval = 1 if request.stream else services.settings.gather
        settings, candidates = services.settings, request.candidates
        self._attempts = Attempts(services.fleet, services.metrics, exchange, settings.patience, interval, candidates)
        self._began = time.monotonic()
        self._log: CallLog | None = None
        self._cancelled: Cancelled | None = None
        self._failure: Fail | None = None

    # -- what connections see ----------------------------------------------------------------------------------------

    @property
    def status(self) -> CallStatus:
        """State of the call."""
        return self.exchange.status

    @property
    def begun(self) -> bool:
        """Whether there is anything to show."""
        return self.exchange.released > 0

    @property
    def sampled(self) -> int:
        """Sampled tokens so far."""
        return len(self.exchange.ids)

    @property
    def deltas(self) -> list[Delta]:
        """What may be seen so far, in order."""
        return self.speech.deltas

    @property
    def heard(self) -> int:
        """Sampled tokens behind `deltas`."""
        return self.speech.heard

    @property
    def done(self) -> bool:
        """Whether the call has ended, well or badly, for the agent."""
        return self._failure is not None or self.exchange.status in (CallStatus.COMPLETE, CallStatus.DELIVERED)

    @property
    def error(self) -> ProtocolError | None:
        """What the agent is told when the call ended badly."""
        fail = self._failure
        if fail is None:
            return None
        message, param = fail.message, None
        if fail.code == REJECTED:
            param = field_refused(self.request, message)
            message = f"{param}: {message}" if param else message
        return ProtocolError(message, status=fail.status, code=fail.code, retryable=fail.retryable, param=param)

    @property
    def cost(self) -> float:
        """What the sampled tokens cost the run's budget, in US dollars."""
        return self._services.settings.prices.of(0, len(self.exchange.ids))

    def advance(self) -> None:
        """Bring `deltas` to what may be shown by now."""
        if not self.done:
            self.speech.hear(self.exchange.ids, self.exchange.released)

    def compact(self) -> None:
        """Keep `deltas` as few: nobody reads them piece by piece any more."""
        self.speech.deltas = joined(self.speech.deltas)

    def choice(self) -> Choice:
        """Return the finished answer."""
        tokens = self.token_texts(0, len(self.exchange.ids)) if self.request.logprobs else None
        reason = self.exchange.stop_reason
        sequence = reason if isinstance(reason, str) else None
        ids, answer = self.exchange.ids, self.answer or Answer()
        thought = self.speech.thought(ids, answer)
        cached = self._attempts.cached
        cached = None if cached is None else min(cached, self.prompt_tokens)
        return Choice(answer, self.finish or "stop", len(ids), tokens, sequence, thought, cached)

    def token_texts(self, start: int, end: int) -> tuple[TokenText, ...]:
        """Return sampled tokens as agents may ask to see them."""
        ids, logprobs = self.exchange.ids[start:end], self.exchange.logprobs[start:end]
        return self.speech.tokens(ids, logprobs, self._attempts.candidates(start, end))

    # -- life --------------------------------------------------------------------------------------------------------

    @property
    def left_open(self) -> bool:
        """Whether another process left the call unfinished and it does not run here yet."""
        return self.exchange.resumed and self.status in OPEN and not self.started

    def start(self, ended: Callable[[], object]) -> None:
        """Begin; the call runs to its end whatever happens to the agent's connection, then `ended` is called."""
        self._log = CallLog(
            self._services.journal, self.exchange.call, self._stored, self._store_failed, self._services.settings.flush
        )
        self._log.resume(len(self.exchange.ids))
        self._task = self._services.spawn(self._run())
        self._task.add_done_callback(lambda _: ended())

    def restore(self, answer: Answer, finish: str) -> None:
        """Take a recorded end instead of running."""
        self.answer, self.finish = answer, finish
        self.speech.recall(whole_answer(answer), len(self.exchange.ids))

    def cancel(self, message: str, code: str = "run_closed") -> None:
        """End the call without an answer; the agent is told `code`."""
        if self._task is not None and not self.exchange.ending and self._cancelled is None:
            self._cancelled = Cancelled(message, code)
            self._cancel_task()

    def delivered(self) -> None:
        """Note that the end of the answer reached a connection."""
        if self.exchange.handle(Delivered()):
            self._services.journal.call_delivered(self.exchange.call)

    async def _run(self) -> None:
        try:
            self._enter()
            await self._steps()
        except Exception:  # boundary: top of a supervised task; the agent must not wait for ever
            log.exception("call %s failed", self.exchange.call)
            self._failure = Fail(500, "internal_error", "the service failed to carry out the call", True)
            self._notify()
        finally:
            self._attempts.over()
            self._count()

    def _count(self) -> None:
        if self.done:
            seconds, sampled = time.monotonic() - self._began, len(self.exchange.ids)
            self._services.metrics.call_ended(
                self.request.dialect, self.exchange.status, seconds, self.prompt_tokens, sampled
            )

    async def _steps(self) -> None:
        todo: deque[Command] = deque(self.exchange.start())
        while todo:
            command = todo.popleft()
            try:
                event = await self._execute(command)
            except asyncio.CancelledError:
                if self._cancelled is None or self.exchange.ending:
                    raise
                task = asyncio.current_task()
                if task is not None:
                    task.uncancel()
                event = self._cancelled
                todo.clear()  # what was to come of the call does not any more
            except GyreError as error:
                log.error("call %s: %s", self.exchange.call, error)
                event = StoreFailed(str(error))
                todo.clear()
            if event is not None:
                todo.extend(self.exchange.handle(event))

    async def _execute(self, command: Command) -> Event | None:
        writes = self._log
        assert writes is not None
        exchange = self.exchange
        match command:
            case PersistIntent():
                if self.intent.fork_reason is not None:
                    self._services.metrics.forks.add(self.intent.fork_reason)
                if self.prompt_tokens > LARGE:
                    await _whole(asyncio.to_thread(writes.intent_at_once, self.intent))
                else:
                    writes.intent(self.intent, exchange)
            case FindReplica():
                return await self._attempts.find(command, self.intent)
            case PersistAttempt():
                writes.attempt(command.attempt)
            case Send():
                return await self._attempts.send(command, await self._text(), self._take, self._clean)
            case PersistTokens():
                writes.tokens(exchange, watched=self.watchers > 0 and exchange.live)
            case PersistAttemptEnd():
                writes.attempt_end(command, exchange)
            case PersistEnd():
                await self._end(command)
                return Ended()
            case AbortAttempt():
                attempt = command.attempt
                self._services.spawn(self._services.fleet.upstream.abort(attempt.replica, attempt.request_id))
            case Fail():
                self._failure = command
                self._notify()
            case Deliver() | Release():
                self._notify()
            case PersistDelivered():
                pass  # asked for by `delivered`, outside the run of the call
        return None

    async def _text(self) -> bytes:
        if not self.prompt_text:
            new = len(self.prompt) - (len(self._parent.whole) if self._parent is not None and self._parent.text else 0)
            make = partial(ids_text, self.prompt, self._parent)
            self.prompt_text = await asyncio.to_thread(make) if new > LARGE else make()
        return self.prompt_text

    async def _take(self, tokens: Sampled) -> None:
        for write in self.exchange.handle(tokens):
            await self._execute(write)

    async def _end(self, command: PersistEnd) -> None:
        writes, exchange = self._log, self.exchange
        assert writes is not None
        if command.status is CallStatus.COMPLETE:
            reason = exchange.stop_reason
            self.answer = self.speech.end(exchange.ids, reason if isinstance(reason, str) else None)
            calls = bool(self.answer.tool_calls) and command.finish == "stop"
            self.finish = "tool_calls" if calls else command.finish
        asked = time.monotonic()
        await writes.end(
            command,
            exchange,
            at=time.time(),
            finish=self.finish,
            answer=self.answer.message(self.request.prefill) if self.answer is not None else None,
        )
        self._services.metrics.durable.observe(time.monotonic() - asked)
        if command.status is CallStatus.COMPLETE:
            self.speech.release(len(exchange.ids))
            self._complete()
        self._forget_prompt()

    def _forget_prompt(self) -> None:
        """Drop what only a running call needs: a long run would keep its history once per call."""
        self.prompt, self.prompt_text, self._parent = _NOTHING, b"", None
        self.intent = msgspec.structs.replace(self.intent, prompt_ids=[], messages=[], raw=[])

    def _clean(self) -> int:
        return self.speech.settled(self.exchange.ids)

    def _stored(self, upto: int) -> None:
        if not self.done:
            for command in self.exchange.handle(Stored(upto)):
                if isinstance(command, Release):
                    self._notify()
            if self._log is not None and not self.exchange.ending and self.watchers and self.exchange.live:
                self._log.tokens(self.exchange, watched=True)

    def _store_failed(self, message: str) -> None:
        log.error("call %s: tokens could not be stored: %s", self.exchange.call, message)


async def _whole(writing: Coroutine[Any, Any, None]) -> None:
    """Wait for a write in a thread, to its end also where the wait is cancelled: the call's end is written after it."""
    task = asyncio.ensure_future(writing)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
