"""Continuous batching: one thread owns the model, requests join and leave between its steps.

A row is always described by two numbers: how many ids it has and how many of them are in the KV cache. A decode step is
the case of one missing id, a prefill the case of many; new weights set the second number to 0, and the row is computed
again under them before its next token. So keys and values never outlive the weights that made them.

The outside talks to the thread by closures put on its inbox, run between steps; it answers through futures and, for
tokens, through one `deliver` call per step.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from enum import StrEnum
from typing import TypeVar

import numpy as np

from gyre_sdk.errors import EngineError
from gyre_sdk.trainer.engines.fingerprint import fingerprint
from gyre_sdk.trainer.engines.ledger import RequestLog, Tally
from gyre_sdk.trainer.engines.runner import Chunk, ModelRunner
from gyre_sdk.trainer.engines.sampling import Sampler
from gyre_sdk.trainer.engines.sequence import Delta, Sequence
from gyre_sdk.trainer.engines.slots import SlotTable
from gyre_sdk.trainer.engines.weights import Weights, expected_shapes

__all__ = ["Batcher", "Deliveries", "PauseMode", "State"]

log = logging.getLogger(__name__)
T = TypeVar("T")
Deliveries = list[tuple[Callable[[Delta], None], Delta]]


class PauseMode(StrEnum):
    """What `/pause` does to requests that are running."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class State(StrEnum):
    """Whether the batcher steps. `QUEUING`: running rows go on, nothing new starts; `FROZEN`: nothing moves."""

    RUNNING = "running"
    QUEUING = "queuing"
    FROZEN = "frozen"


class Batcher:
    """The model thread."""

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        *,
        version: str,
        max_batch: int,
        step_tokens: int,
        prefix_cache: bool,
        deliver: Callable[[Deliveries], None],
        request_log: RequestLog,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._max_batch = min(max_batch, runner.limits.slots)
        self._step_tokens = step_tokens
        self._deliver = deliver
        self._log = request_log
        self._slots = SlotTable(runner.limits.slots, runner.limits.max_model_len, reuse=prefix_cache)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._drained: list[Future[None]] = []
        self._out: Deliveries = []
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self.version = version
        """The label of the weights that the next token is sampled from."""
        self.state = State.RUNNING
        self.tally = Tally()

    # -- called from the event loop ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the model thread still serves."""
        return self._thread.is_alive()

    @property
    def counts(self) -> tuple[int, int]:
        """Requests running and waiting, for metrics: a snapshot without a lock."""
        return len(self._running), len(self._waiting)

    def submit(self, sequence: Sequence) -> None:
        """Queue a request; its deltas arrive through `sequence.push`."""
        self._inbox.put(lambda: self._waiting.append(sequence))

    def abort(self, request_ids: Iterable[str] | None) -> Future[None]:
        """End requests by their prefixed ids, or all of them, with finish reason `abort` and the tokens so far."""
        ids = None if request_ids is None else frozenset(request_ids)
        return self._call(lambda: self._abort(lambda sequence: ids is None or sequence.request_id in ids))

    def abandon(self, sequence: Sequence) -> None:
        """End one request whose client is gone."""
        self._inbox.put(lambda: self._abort(lambda other: other is sequence))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop sampling; the future is done when no token will be sampled any more."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # a caller that goes away must not cancel it under the thread

        def act() -> None:
            self.state = State.FROZEN if mode is PauseMode.KEEP else State.QUEUING
            if mode is PauseMode.ABORT:
                self._abort(lambda _: True)
            if mode is PauseMode.WAIT and self._running:
                self._drained.append(done)
            else:
                done.set_result(None)

        self._inbox.put(act)
        return done

    def resume(self) -> Future[None]:
        """Sample again."""

        def act() -> None:
            self.state = State.RUNNING
            self._settle_drains()

        return self._call(act)

    def switch(self, version: str, weights: Weights | None) -> Future[None]:
        """Serve `version` from the next token on; `weights` None renames what is loaded. Drops every cached key."""

        def act() -> None:
            if weights is not None:
                self._runner.apply(weights)
            self._slots.forget()
            self.version = version

        return self._call(act)

    def fingerprints(self) -> Future[dict[str, str]]:
        """Return the fingerprints of the weights that the next token is sampled from."""

        def act() -> dict[str, str]:
            model = self._runner.model
            state = model.state_dict()
            return {name: fingerprint(state[name]) for name in expected_shapes(model)}

        return self._call(act)

    def stop(self) -> None:
        """End all requests as aborted and the thread with them."""

        def act() -> None:
            self._abort(lambda _: True)
            self._stopped = True

        self._inbox.put(act)
        self._thread.join(timeout=30)

    def _call(self, act: Callable[[], T]) -> Future[T]:
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()

        def run() -> None:
            try:
                done.set_result(act())
            except Exception as err:  # boundary: of the thread; the caller gets it
                done.set_exception(err)

        self._inbox.put(run)
        return done

    # -- the model thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped:
            self._serve_inbox()
            if self._stopped:
                break
            if self._can_step:
                try:
                    self._step()
                except Exception as err:  # boundary: of the model thread; the requests end with an error
                    log.exception("a step failed; every request ends with an error")
                    self._fail([*self._running.values(), *self._waiting], f"{type(err).__name__}: {err}")
                    self._waiting.clear()
            self._flush()
        self._flush()

    @property
    def _can_step(self) -> bool:
        if self.state is State.FROZEN:
            return False
        return bool(self._running) or (self.state is State.RUNNING and bool(self._waiting))

    def _serve_inbox(self) -> None:
        block = not self._can_step
        while True:
            try:
                act = self._inbox.get(block=block)
            except queue.Empty:
                return
            act()
            block = False

    def _flush(self) -> None:
        if self._out:
            out, self._out = self._out, []
            self._deliver(out)

    def _step(self) -> None:
        if self.state is State.RUNNING:
            self._admit()
        for move, old, new in self._slots.compact():
            self._runner.cache.apply(move)
            sequence = self._running[new] = self._running.pop(old)
            sequence.slot = new
        chunks = self._plan()
        logits_BV = self._runner.forward(chunks)
        for chunk in chunks:
            self._slots.cached_S[chunk.slot] += len(chunk.ids)
        self.tally.computed_tokens += sum(len(chunk.ids) for chunk in chunks)
        rows = [self._running[chunk.slot] for chunk in chunks if chunk.samples]
        if not rows:
            return
        for sequence, draw in zip(rows, self._sampler.draw(logits_BV, rows), strict=True):
            if math.isnan(draw.logprob):
                self._fail([sequence], f"the model gave logits that are not finite under weights {self.version!r}")
                continue
            self._slots.tokens_SC[sequence.slot, sequence.length] = draw.token
            reason, stop_reason = sequence.append(draw.token, draw.logprob, self.version)
            self.tally.generation_tokens += 1
            content = () if draw.content is None else (draw.content,)
            if reason is None:
                self._out.append((sequence.push, Delta((draw.token,), content, None, None, None)))
            else:
                self._finish(sequence, Delta((draw.token,), content, reason, stop_reason, None))

    def _admit(self) -> None:
        budget = self._step_tokens
        while self._waiting and len(self._running) < self._max_batch and budget > 0:
            sequence = self._waiting[0]
            ids = np.array([*sequence.prompt_ids, *sequence.sampled], np.int32)
            slot, moves = self._slots.place(ids, sequence.cache_salt)
            sequence.slot = slot
            self._running[slot] = self._waiting.popleft()
            for move in moves:
                self._runner.cache.apply(move)
            cached = int(self._slots.cached_S[slot])
            budget -= len(ids) - cached
            self.tally.prompt_tokens += len(ids)
            self.tally.cached_tokens += cached
            if not sequence.sampled:
                sequence.cached_tokens = cached

    def _plan(self) -> list[Chunk]:
        """Every row one id behind decodes; longer stretches share what is left of the step's tokens."""
        cached_S, tokens_SC = self._slots.cached_S, self._slots.tokens_SC
        decodes, prefills = [], []
        budget = self._step_tokens
        for slot in sorted(self._running):
            sequence = self._running[slot]
            start, length = int(cached_S[slot]), sequence.length
            if length - start == 1:
                decodes.append(Chunk(slot, start, (int(tokens_SC[slot, start]),), True))
            elif budget > 1:
                end = min(length, start + budget)
                if end - start > 1:
                    prefills.append(Chunk(slot, start, tokens_SC[slot, start:end].tolist(), end == length))
                    budget -= end - start
        return decodes + prefills

    def _abort(self, chosen: Callable[[Sequence], bool]) -> None:
        for sequence in [s for s in (*self._running.values(), *self._waiting) if chosen(s)]:
            if sequence.slot < 0:
                self._waiting.remove(sequence)
            self._finish(sequence, Delta((), (), "abort", None, None))

    def _fail(self, sequences: list[Sequence], message: str) -> None:
        """End requests with an error and clear their slots: whatever broke may sit in their keys and values."""
        slots = [sequence.slot for sequence in sequences if sequence.slot >= 0]
        self._slots.cached_S[slots] = 0
        self._runner.cache.wipe(slots)
        for sequence in sequences:
            self._finish(sequence, Delta((), (), "error", None, message))

    def _finish(self, sequence: Sequence, delta: Delta) -> None:
        if delta.finish_reason is None:
            raise EngineError(f"request {sequence.request_id!r} cannot finish without a reason")
        sequence.finished = True
        if sequence.slot >= 0:
            del self._running[sequence.slot]
            self._slots.release(sequence.slot)
            sequence.slot = -1
        self.tally.finished[delta.finish_reason] += 1
        self._log.write(sequence, delta.finish_reason)
        self._out.append((sequence.push, delta))
        self._settle_drains()

    def _settle_drains(self) -> None:
        if self.state is State.RUNNING or not self._running:
            for done in self._drained:
                done.set_result(None)
            self._drained.clear()
