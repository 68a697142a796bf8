"""The machine itself: a table of transitions and what each event does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

from gyre_sdk.errors import GyreError
from gyre_sdk.harness.proxy.exchange.commands import (
    REJECTED,
    AbortAttempt,
    Command,
    Deliver,
    Fail,
    FindReplica,
    PersistAttempt,
    PersistAttemptEnd,
    PersistDelivered,
    PersistEnd,
    PersistIntent,
    PersistTokens,
    Release,
    Send,
)
from gyre_sdk.harness.proxy.exchange.events import (
    AgentGone,
    Broken,
    Cancelled,
    Delivered,
    Ended,
    Event,
    Finished,
    Rejected,
    Routed,
    Sampled,
    Stored,
    StoreFailed,
    Unserved,
)
from gyre_sdk.harness.proxy.exchange.spans import cut_spans, join_spans
from gyre_sdk.records import AttemptRecord, CallId, CallStatus, Sampling, VersionSpan

FINISHES = {"stop": "stop", "length": "length", "tool_calls": "tool_calls", "repetition": "stop"}
"""Finish reasons of an engine that mean success, and what the agent is told."""

_BLOCKING = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "bad_words",
    "structured_outputs",
)


class IllegalTransition(GyreError):
    """An event came in a state that cannot have it: a defect of the shell, not of the agent or the engine."""


_R, _D, _S = CallStatus.RECEIVED, CallStatus.DISPATCHED, CallStatus.STREAMING
_C, _OK, _A, _F = CallStatus.COMPLETE, CallStatus.DELIVERED, CallStatus.ABORTED, CallStatus.FAILED

TRANSITIONS: dict[CallStatus, dict[type[Event], frozenset[CallStatus]]] = {
    _R: {
        Routed: frozenset({_D}),
        Unserved: frozenset({_R}),
        Ended: frozenset({_A, _F}),
        StoreFailed: frozenset({_F}),
        AgentGone: frozenset({_R}),
        Cancelled: frozenset({_R}),
    },
    _D: {
        Routed: frozenset({_D}),
        Sampled: frozenset({_S}),
        Finished: frozenset({_D}),
        Broken: frozenset({_D}),
        Rejected: frozenset({_D}),
        Unserved: frozenset({_D}),
        Stored: frozenset({_D}),
        Ended: frozenset({_C, _A, _F}),
        StoreFailed: frozenset({_F}),
        AgentGone: frozenset({_D}),
        Cancelled: frozenset({_D}),
    },
    _S: {
        Routed: frozenset({_S}),
        Sampled: frozenset({_S}),
        Finished: frozenset({_S}),
        Broken: frozenset({_S, _D}),
        Rejected: frozenset({_S}),
        Unserved: frozenset({_S}),
        Stored: frozenset({_S}),
        Ended: frozenset({_C, _A, _F}),
        StoreFailed: frozenset({_F}),
        AgentGone: frozenset({_S}),
        Cancelled: frozenset({_S}),
    },
    _C: {
        Stored: frozenset({_C}),
        Delivered: frozenset({_OK}),
        AgentGone: frozenset({_C}),
        Cancelled: frozenset({_C}),
    },
    _OK: {
        Stored: frozenset({_OK}),
        Delivered: frozenset({_OK}),
        AgentGone: frozenset({_OK}),
        Cancelled: frozenset({_OK}),
    },
    _A: {Stored: frozenset({_A}), AgentGone: frozenset({_A}), Cancelled: frozenset({_A})},
    _F: {Stored: frozenset({_F}), AgentGone: frozenset({_F}), Cancelled: frozenset({_F})},
}
"""Every legal event in every state, and the states that it may lead to. Anything else raises `IllegalTransition`."""


@dataclass(slots=True)
class Exchange:
    """The state of one call."""

    call: CallId
    sampling: Sampling
    """Resolved: `max_tokens` is the call's limit, `stop_token_ids` holds every token that ends it."""
    fruitless_limit: int = 6
    """Attempts in a row that may end without a token before the call fails."""
    pause: float = 0.05
    """Seconds to wait after the first of them; four times as long after each further one."""
    status: CallStatus = CallStatus.RECEIVED
    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    """Cover `ids` without gaps as far as attempts have ended."""
    released: int = 0
    """Tokens that may have been shown to the agent."""
    stop_reason: str | int | None = None
    attempts: int = 0
    """Attempts opened so far."""
    resumed: bool = False
    """True when the intent is in the store already."""
    _attempt: AttemptRecord | None = None
    _version: int = 0
    _open: bool = False
    _fruitless: int = 0
    _ending: PersistEnd | None = None
    _failure: Fail | None = None

    @property
    def continuable(self) -> bool:
        """Whether a new attempt from the sampled tokens samples from the same distribution as an uncut one."""
        return self.sampling.seed is None and not any(name in self.sampling.extra for name in _BLOCKING)

    @property
    def live(self) -> bool:
        """Whether tokens may be shown before the end. A call that may have to restart is shown when it is complete."""
        return self.continuable

    @property
    def failure(self) -> Fail | None:
        """The error that ended the call, once it has ended badly."""
        return self._failure if self.status in (_A, _F) else None

    @property
    def ending(self) -> bool:
        """Whether the call's end has been decided: no attempt runs and none will."""
        return self._ending is not None or self.status in (_C, _OK, _A, _F)

    def start(self) -> list[Command]:
        """Return the first commands. A resumed call may turn out to be at its end already."""
        if self.resumed:
            return [self._full() or FindReplica()]
        return [PersistIntent(), FindReplica()]

    def known_spans(self) -> list[VersionSpan]:
        """Return spans over all of `ids`, taking the version that a running attempt was sent to for its tokens."""
        return join_spans(self.spans, len(self.ids), (), len(self.ids), self._version)

    def handle(self, event: Event) -> list[Command]:
        """Take an event.

        Raises:
            IllegalTransition: the event cannot happen in this state.
        """
        before = self.status
        legal = TRANSITIONS[before].get(type(event))
        if legal is None:
            raise IllegalTransition(f"call {self.call}: {type(event).__name__} cannot happen while {before}")
        commands = _HANDLERS[type(event)](self, event)
        if self.status not in legal:
            raise IllegalTransition(f"call {self.call}: {type(event).__name__} led from {before} to {self.status}")
        return commands

    # -- attempts ----------------------------------------------------------------------------------------------------

    def _on_routed(self, event: Routed) -> list[Command]:
        if self._ending is not None or self._open:
            raise IllegalTransition(f"call {self.call}: a replica was chosen while an attempt runs or the call ends")
        self._version, self._open = event.version, True
        self._attempt = AttemptRecord(
            self.call, self.attempts, event.replica, event.request_id, len(self.ids), len(self.ids), "open"
        )
        self.attempts += 1
        if self.status is _R:
            self.status = _D
        send = Send(self._attempt, self._version, tuple(self.ids), self.sampling.max_tokens - len(self.ids))
        return [PersistAttempt(self._attempt), send]

    def _on_sampled(self, event: Sampled) -> list[Command]:
        self._running("Sampled")
        if not event.ids or len(event.ids) != len(event.logprobs):
            raise IllegalTransition(
                f"call {self.call}: {len(event.ids)} tokens came with {len(event.logprobs)} log-probs"
            )
        start = len(self.ids)
        self.ids += event.ids
        self.logprobs += event.logprobs
        self._fruitless = 0
        self.status = _S
        return [PersistTokens(start)]

    def _on_finished(self, event: Finished) -> list[Command]:
        attempt = self._running("Finished")
        if event.reason not in FINISHES:
            raise IllegalTransition(f"call {self.call}: {event.reason!r} is not a finish")
        self.stop_reason = event.stop_reason
        return [self._close_attempt(attempt, "finished", event.spans), self._finish(FINISHES[event.reason])]

    def _on_broken(self, event: Broken) -> list[Command]:
        attempt = self._running("Broken")
        if len(self.ids) == attempt.tokens_from:
            self._fruitless += 1
        keep = self._keep(len(self.ids) if event.clean is None else event.clean)
        end = "aborted" if event.aborted else "broken"
        commands: list[Command] = [self._close_attempt(attempt, end, event.spans, keep)]
        if full := self._full():
            return [*commands, full]
        if self._fruitless >= self.fruitless_limit:
            problem = f"no replica answered in {self._fruitless} attempts; the last one: {event.message}"
            return [*commands, self._fail(_F, Fail(503, "replicas_failing", problem, retryable=True))]
        delay = self.pause * 4 ** (self._fruitless - 1) if self._fruitless else 0.0
        return [*commands, FindReplica(attempt.replica, delay)]

    def _on_rejected(self, event: Rejected) -> list[Command]:
        attempt = self._running("Rejected")
        return [
            self._close_attempt(attempt, "broken", ()),
            self._fail(_F, Fail(event.status, REJECTED, event.message, retryable=False)),
        ]

    def _on_unserved(self, event: Unserved) -> list[Command]:
        if self._ending is not None or self._open:
            raise IllegalTransition(f"call {self.call}: no replica was asked for")
        problem = f"no replica was serving for {event.waited:.0f} s: {event.why}"
        return [self._fail(_F, Fail(503, "no_replica", problem, retryable=True))]

    # -- the store ---------------------------------------------------------------------------------------------------

    def _on_stored(self, event: Stored) -> list[Command]:
        if not self.live or self.status not in (_D, _S) or event.upto <= self.released:
            return []
        self.released = min(event.upto, len(self.ids))
        return [Release(self.released)]

    def _on_ended(self, event: Ended) -> list[Command]:
        if self._ending is None:
            raise IllegalTransition(f"call {self.call}: the end of the call is durable but was never asked for")
        self.status = self._ending.status
        if self.status is _C:
            self.released = len(self.ids)
            return [Deliver()]
        return [self._failure] if self._failure is not None else []

    def _on_storefailed(self, event: StoreFailed) -> list[Command]:
        running = self._attempt if self._open else None
        self.status, self._open = _F, False
        self._failure = Fail(500, "store_failed", f"the call could not be recorded: {event.message}", True)
        return [*([AbortAttempt(running)] if running else []), self._failure]

    # -- the agent and the run ---------------------------------------------------------------------------------------

    def _on_delivered(self, event: Delivered) -> list[Command]:
        if self.status is _OK:
            return []
        self.status = _OK
        return [PersistDelivered()]

    def _on_agentgone(self, event: AgentGone) -> list[Command]:
        return []

    def _on_cancelled(self, event: Cancelled) -> list[Command]:
        if self.ending:
            return []
        commands: list[Command] = []
        if self._open and self._attempt is not None:
            commands = [AbortAttempt(self._attempt), self._close_attempt(self._attempt, "aborted", ())]
        return [*commands, self._fail(_A, Fail(403, event.code, event.message, retryable=False))]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _running(self, event: str) -> AttemptRecord:
        if self._attempt is None or not self._open or self._ending is not None:
            raise IllegalTransition(f"call {self.call}: {event} came while no attempt was running")
        return self._attempt

    def _full(self) -> Command | None:
        """Return the end of a call whose tokens are complete though no engine said so."""
        if self.ids and self.ids[-1] in self.sampling.stop_token_ids:
            return self._finish("stop")
        return self._finish("length") if len(self.ids) >= self.sampling.max_tokens else None

    def _keep(self, clean: int) -> int:
        """Return how many sampled tokens a new attempt may continue from."""
        if not self.continuable:
            return 0
        if clean >= len(self.ids):
            return len(self.ids)
        return clean if self.released else 0

    def _close_attempt(
        self, attempt: AttemptRecord, end: str, spans: tuple[VersionSpan, ...], keep: int | None = None
    ) -> PersistAttemptEnd:
        total = len(self.ids)
        self.spans = join_spans(self.spans, attempt.tokens_from, spans, total, self._version)
        self._open = False
        keep = total if keep is None else keep
        lost_spans = tuple(cut_spans(self.spans, keep, total))
        record = AttemptRecord(
            attempt.call,
            attempt.number,
            attempt.replica,
            attempt.request_id,
            attempt.tokens_from,
            total,
            end if keep == total else "abandoned",
        )
        command = PersistAttemptEnd(record, keep, tuple(self.ids[keep:]), tuple(self.logprobs[keep:]), lost_spans)
        if keep < total:
            del self.ids[keep:], self.logprobs[keep:]
            self.spans = cut_spans(self.spans, 0, keep)
            self.released = min(self.released, keep)
            self.status = _S if keep else _D
        return command

    def _finish(self, reason: str) -> Command:
        self._ending = PersistEnd(_C, finish=reason)
        return self._ending

    def _fail(self, status: CallStatus, failure: Fail) -> Command:
        self._ending, self._failure = PersistEnd(status, error=failure.message), failure
        return self._ending


_HANDLERS: dict[type[Event], Callable[[Exchange, Any], list[Command]]] = {
    kind: getattr(Exchange, f"_on_{kind.__name__.lower()}") for kind in get_args(Event)
}
