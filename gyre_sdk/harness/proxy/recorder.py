"""Durability of one call on the asyncio side: what is written when, and who waits for it.

What nobody waits for waits itself: the intent, the first attempt and tokens that nobody watches are written after
`interval` seconds, or with the first tokens that an agent waits for. A call that ends before that is written once, whole.
So an engine may be asked before its call is on record; what it samples is never shown before. Tokens are written one write
at a time, so that a slow disk makes larger writes and not a longer queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from gyre_sdk.errors import GyreError, JournalError
from gyre_sdk.harness.proxy.exchange import Exchange, PersistAttemptEnd, PersistEnd, cut_spans
from gyre_sdk.harness.proxy.wire import without_password
from gyre_sdk.journal import CallEnd, CallIntent, Journal, TokenChunk, Write
from gyre_sdk.records import AttemptRecord, CallId

T = TypeVar("T")


class CallLog:
    """Writes one call into the store.

    Args:
        journal: the store.
        call: whose record this is.
        stored: called in the event loop with the number of tokens that have become durable.
        failed: called in the event loop when a write of tokens was refused.
        interval: seconds that what nobody waits for may wait to be written.
    """

    def __init__(
        self,
        journal: Journal,
        call: CallId,
        stored: Callable[[int], None],
        failed: Callable[[str], None],
        interval: float,
    ) -> None:
        self._journal = journal
        self._call = call
        self._stored = stored
        self._failed = failed
        self._interval = interval
        self._loop = asyncio.get_running_loop()
        self._intent: CallIntent | None = None
        self._attempt: AttemptRecord | None = None
        """The first attempt, with an intent that is not written yet."""
        self._attempt_end: AttemptRecord | None = None
        self._waiting: list[Write[Any]] = []
        self._problem: GyreError | None = None
        self._written = 0
        self._writing = False
        self._wrote_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False

    def intent(self, intent: CallIntent, exchange: Exchange) -> None:
        """Take the intent; it is written in a while."""
        self._intent = intent
        self._timer = self._loop.call_later(self._interval, self._write_late, exchange)

    def intent_at_once(self, intent: CallIntent) -> None:
        """Write a large intent, in a thread of the caller's."""
        self._waiting.append(self._journal.call_received(intent))

    def attempt(self, attempt: AttemptRecord) -> None:
        """Take an attempt. What goes wrong with it is raised where somebody waits."""
        attempt = _as_kept(attempt)
        if self._intent is not None and self._attempt is None:
            self._attempt = attempt
        else:
            self._write_held()
            self._waiting.append(self._journal.call_dispatched(attempt))

    def attempt_end(self, end: PersistAttemptEnd, exchange: Exchange) -> None:
        """Write an attempt's end, and what the call keeps when tokens are given up."""
        ended = _as_kept(end.attempt)
        if not end.lost_ids:
            self._attempt_end = ended  # held back: the call's end may come along
            if ended.end != "finished":
                self._loop.call_soon(self._write_end)
            return
        self._write_held()
        lost = TokenChunk(end.keep, list(end.lost_ids), list(end.lost_logprobs), list(end.lost_spans))
        kept = None
        if end.keep:
            kept = TokenChunk(0, list(exchange.ids), list(exchange.logprobs), list(exchange.spans))
        self._written = end.keep
        self._waiting.append(self._journal.attempt_ended(ended, lost, kept))

    def resume(self, written: int) -> None:
        """Take over a call of which `written` tokens are durable."""
        self._written = written

    def tokens(self, exchange: Exchange, *, watched: bool) -> None:
        """Write the call's tokens beyond those written, at once when an agent watches, else after a while."""
        if self._writing or self._ended or len(exchange.ids) <= self._written:
            return
        wait = 0.0 if watched else self._interval - (self._loop.time() - self._wrote_at)
        if wait <= 0:
            self._write_held()
            self._write_tokens(exchange)
        elif self._timer is None:
            self._timer = self._loop.call_later(wait, self._write_late, exchange)

    async def end(
        self, end: PersistEnd, exchange: Exchange, *, at: float, finish: str | None, answer: Any | None
    ) -> None:
        """Write the terminal record and wait until it is durable."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        intent, attempt = self._intent, self._attempt_end
        sampled = TokenChunk(0, exchange.ids, exchange.logprobs, exchange.known_spans())
        if intent is not None and (self._attempt is None or attempt is not None):
            self._intent = self._attempt = self._attempt_end = None
            whole = CallEnd(end.status, at, sampled, finish, answer, end.error, attempt)
            self._waiting.append(self._journal.call_recorded(intent, whole))
        else:
            self._attempt_end = None
            self._write_held()
            self._waiting.append(
                self._journal.call_ended(
                    self._call,
                    end.status,
                    at=at,
                    sampled=sampled,
                    finish_reason=finish,
                    answer=answer,
                    error=end.error,
                    attempt=attempt,
                )
            )
        await self.settle()

    def _write_held(self) -> None:
        """Write what was held back. What goes wrong is raised where somebody waits."""
        intent, self._intent = self._intent, None
        attempt, self._attempt = self._attempt, None
        end, self._attempt_end = self._attempt_end, None
        try:
            if intent is not None:
                self._waiting.append(self._journal.call_received(intent, attempt))
            if end is not None:
                self._waiting.append(self._journal.attempt_ended(end))
        except (GyreError, ValueError) as error:
            self._problem = error if isinstance(error, GyreError) else JournalError(str(error))

    def _write_end(self) -> None:
        """Write the end of an attempt that the call's end did not follow."""
        if self._attempt_end is not None:
            self._write_held()

    def _write_late(self, exchange: Exchange) -> None:
        self._timer = None
        if self._ended:
            return
        self._write_held()
        if not self._writing and len(exchange.ids) > self._written:
            self._write_tokens(exchange)

    def _write_tokens(self, exchange: Exchange) -> None:
        start, upto = self._written, len(exchange.ids)
        self._written, self._writing, self._wrote_at = upto, True, self._loop.time()
        spans = cut_spans(exchange.known_spans(), start, upto)
        chunk = TokenChunk(start, exchange.ids[start:], exchange.logprobs[start:], spans)
        write = self._journal.tokens_sampled(self._call, chunk)
        write.add_done_callback(lambda done: self._token_write_done(done, upto))

    async def settle(self) -> None:
        """Wait until everything written is durable.

        Raises:
            JournalError: the store refused one of the writes.
        """
        if self._problem is not None:
            raise self._problem
        waiting, self._waiting = self._waiting, []
        if waiting:
            await durable(waiting[-1])
            for future in waiting:
                problem = future.exception()
                if problem is not None:
                    raise problem

    def _token_write_done(self, done: Write[None], upto: int) -> None:
        self._writing = False
        problem = done.exception()
        if problem is None:
            self._stored(upto)
        elif isinstance(problem, GyreError):
            self._failed(str(problem))


async def durable(write: Write[T]) -> T:
    """Wait for a write. Cancelling the wait does not cancel the write.

    Raises:
        JournalError: the store refused it.
    """
    if isinstance(write, asyncio.Future):
        found: T = await write
        return found
    assert isinstance(write, Future)
    return await asyncio.shield(asyncio.wrap_future(write))


def _as_kept(attempt: AttemptRecord) -> AttemptRecord:
    """Return an attempt as it goes into the store: without what its replica's address keeps secret."""
    address = without_password(attempt.replica)
    return attempt if address == attempt.replica else msgspec.structs.replace(attempt, replica=address)
