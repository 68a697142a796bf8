"""The attempts of one call: a place on a replica, the engine's answer as events, and the ways in which it is cut."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from gyre_sdk.errors import ReplicaError
from gyre_sdk.harness.proxy.exchange import (
    FINISHES,
    Broken,
    Event,
    Exchange,
    FindReplica,
    Finished,
    Rejected,
    Routed,
    Sampled,
    Send,
    Unserved,
)
from gyre_sdk.harness.proxy.generate import Candidates, Refused
from gyre_sdk.harness.proxy.routing import Need
from gyre_sdk.harness.proxy.server.fleet import Fleet, Running
from gyre_sdk.harness.proxy.server.metrics import Metrics
from gyre_sdk.harness.proxy.server.names import fresh_name
from gyre_sdk.journal import CallIntent


class Attempts:
    """Finds replicas for a call and asks them, one at a time.

    Args:
        fleet: the replicas.
        metrics: where attempts are counted.
        exchange: the call.
        patience: seconds to wait for a replica that serves.
        interval: tokens per chunk that an engine may gather.
        candidates: likeliest tokens at each place that the engine is asked for.
    """

    def __init__(
        self, fleet: Fleet, metrics: Metrics, exchange: Exchange, patience: float, interval: int, candidates: int = 0
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._exchange = exchange
        self._patience = patience
        self._interval = interval
        self._candidates = candidates
        self._found: dict[int, Candidates] = {}
        """By place in the answer. They are not recorded: those of a process that died are not known."""
        self.cached: int | None = None
        """Tokens of the prompt that the engine which ended the answer had in its cache; None where it does not tell."""
        self._running: Running | None = None
        self._began = time.monotonic()

    def candidates(self, start: int, end: int) -> list[Candidates]:
        """Return the likeliest tokens at places `[start, end)` of the answer, none where they are not known."""
        return [self._found.get(place, ()) for place in range(start, end)] if self._found else []

    async def find(self, command: FindReplica, intent: CallIntent) -> Event:
        """Wait for a replica and take a place there, until `send` or `over`."""
        if command.delay:
            await asyncio.sleep(command.delay)
        exchange, sampled = self._exchange, len(self._exchange.ids)
        need = Need(
            intent.run,
            prompt=len(intent.prompt_ids) + sampled,
            left=exchange.sampling.max_tokens - sampled,
            shared=intent.shared if intent.parent else 0,
            avoid=command.avoid,
            version=exchange.spans[-1].version if exchange.spans else None,
        )
        request_id = f"{exchange.call}-{exchange.attempts}-{fresh_name()[-8:]}"
        self._running = await self._fleet.find(need, request_id, self._patience)
        if self._running is None:
            return Unserved(self._patience, self._fleet.trouble())
        return Routed(self._running.url, self._running.load.version, request_id)

    async def send(
        self,
        command: Send,
        prompt: bytes,
        take: Callable[[Sampled], Awaitable[None]],
        clean: Callable[[], int],
    ) -> Event:
        """Ask the engine; return how the attempt ended.

        Args:
            command: what to ask.
            prompt: the call's prompt ids as JSON, without brackets.
            take: gets sampled tokens as they come.
            clean: tells up to which sampled token no stop string has begun.
        """
        running = self._running
        assert running is not None
        try:
            event = await self._ask(running, command, prompt, take)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if running.broken is None or task is None or task.uncancel():
                raise  # somebody wants the call itself to stop
            event = Broken(running.broken)
        finally:
            self.over()
        if isinstance(event, Broken):
            event = Broken(event.message, event.aborted, event.spans, clean())
        self._metrics.attempt_ended(_NAMES[type(event)])
        return event

    def over(self) -> None:
        """Give the place on the replica back."""
        if self._running is not None:
            self._fleet.over(self._running)
            self._running = None

    async def _ask(
        self, running: Running, command: Send, prompt: bytes, take: Callable[[Sampled], Awaitable[None]]
    ) -> Event:
        if running.broken is not None:
            return Broken(running.broken)
        fleet, attempt, sampling = self._fleet, command.attempt, self._exchange.sampling
        pieces = fleet.upstream.generate(
            attempt.replica,
            request_id=attempt.request_id,
            prompt=prompt,
            sampled=command.sampled,
            sampling=sampling,
            stop_ids=sampling.stop_token_ids,
            max_tokens=command.max_tokens,
            salt=str(command.version),
            version=command.version,
            model=running.load.model,
            interval=self._interval,
            candidates=self._candidates,
        )
        running.task = asyncio.current_task()
        try:
            async for piece in pieces:
                if piece.ids:
                    if not self._exchange.ids:
                        self._metrics.first_token.observe(time.monotonic() - self._began)
                    fleet.heard(running, len(piece.ids))
                    if piece.candidates:
                        self._found.update(enumerate(piece.candidates, len(self._exchange.ids)))
                    await take(Sampled(piece.ids, piece.logprobs))
                if piece.finish in FINISHES:
                    running.finished, self.cached = True, piece.cached
                    return Finished(piece.finish, piece.stop_reason, piece.spans)
                if piece.finish is not None:
                    return Broken(f"the engine ended with {piece.finish}", piece.finish == "abort", piece.spans)
        except Refused as error:
            running.finished = True
            return Rejected(error.status, str(error))
        except ReplicaError as error:
            fleet.suspect(attempt.replica)
            return Broken(str(error))
        finally:
            running.task = None  # what follows must not be broken off
            await pieces.aclose()
        return Broken("the stream ended")


_NAMES: dict[type[Event], str] = {Finished: "finished", Broken: "broken", Rejected: "rejected"}
