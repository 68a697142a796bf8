"""The call's state machine: every cell of its table, plays, and random orders of events."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gyre_sdk.harness.proxy import exchange as x
from gyre_sdk.harness.proxy.exchange.events import Event
from gyre_sdk.records import CallId, CallStatus, Sampling, VersionSpan

PLAIN = Sampling(max_tokens=16, stop_token_ids=(260,))
R, D, S = CallStatus.RECEIVED, CallStatus.DISPATCHED, CallStatus.STREAMING
C, OK, A, F = CallStatus.COMPLETE, CallStatus.DELIVERED, CallStatus.ABORTED, CallStatus.FAILED


def routed(name: str = "a", version: int = 7) -> x.Routed:
    return x.Routed(f"http://{name}", version, f"id-{name}")


def sampled(*ids: int) -> x.Sampled:
    return x.Sampled(list(ids), [-0.5] * len(ids))


def machine(*events: Event, sampling: Sampling = PLAIN) -> x.Exchange:
    made = x.Exchange(CallId("c"), sampling)
    made.start()
    for event in events:
        made.handle(event)
    return made


SAMPLES: dict[type[Event], Event] = {
    x.Routed: routed(),
    x.Sampled: sampled(1),
    x.Finished: x.Finished("stop"),
    x.Broken: x.Broken("lost"),
    x.Rejected: x.Rejected(400, "no"),
    x.Unserved: x.Unserved(3.0),
    x.Stored: x.Stored(1),
    x.Ended: x.Ended(),
    x.StoreFailed: x.StoreFailed("full"),
    x.Delivered: x.Delivered(),
    x.AgentGone: x.AgentGone(),
    x.Cancelled: x.Cancelled("run closed"),
}
TO_STREAMING: list[Event] = [routed(), sampled(1)]
TO_COMPLETE: list[Event] = [*TO_STREAMING, x.Finished("stop"), x.Ended()]
REACH: dict[CallStatus, list[Event]] = {
    R: [],
    D: [routed()],
    S: TO_STREAMING,
    C: TO_COMPLETE,
    OK: [*TO_COMPLETE, x.Delivered()],
    A: [x.Cancelled("closed"), x.Ended()],
    F: [x.Unserved(3.0), x.Ended()],
}
NEEDS: dict[tuple[CallStatus, type[Event]], list[Event]] = {
    (R, x.Ended): [x.Unserved(1.0)],
    (D, x.Routed): [x.Broken("lost")],
    (D, x.Unserved): [x.Broken("lost")],
    (D, x.Ended): [x.Finished("length")],
    (S, x.Routed): [x.Broken("lost")],
    (S, x.Unserved): [x.Broken("lost")],
    (S, x.Ended): [x.Finished("stop")],
}
"""What must happen first, within the state, for an event to be possible."""


def test_every_event_has_a_sample() -> None:
    assert set(SAMPLES) == set(get_args(Event))


@pytest.mark.parametrize("kind", list(SAMPLES), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("status", list(CallStatus))
def test_every_cell(status: CallStatus, kind: type[Event]) -> None:
    """Legal events lead to a state of the table, all others raise and change nothing."""
    made = machine(*REACH[status])
    assert made.status is status
    legal = x.TRANSITIONS[status].get(kind)
    if legal is None:
        before = (made.status, list(made.ids), made.released)
        with pytest.raises(x.IllegalTransition, match=kind.__name__):
            made.handle(SAMPLES[kind])
        assert (made.status, made.ids, made.released) == before
        return
    for event in NEEDS.get((status, kind), []):
        made.handle(event)
    assert made.status is status
    made.handle(SAMPLES[kind])
    assert made.status in legal


def test_every_target_of_the_table_is_reached() -> None:
    """No cell claims a state that nothing leads to."""
    others: list[tuple[list[Event], Event, CallStatus]] = [
        ([*TO_STREAMING], x.Broken("lost"), S),
        ([x.Cancelled("c")], x.Ended(), A),
        ([x.Unserved(1.0)], x.Ended(), F),
        ([routed(), x.Cancelled("c")], x.Ended(), A),
        ([routed(), x.Rejected(400, "no")], x.Ended(), F),
        ([*TO_STREAMING, x.Cancelled("c")], x.Ended(), A),
        ([*TO_STREAMING, x.Rejected(400, "no")], x.Ended(), F),
    ]
    for before, event, want in others:
        made = machine(*before)
        made.handle(event)
        assert made.status is want
    restarted = machine(*TO_STREAMING, x.Broken("lost"), sampling=Sampling(max_tokens=9, seed=3))
    assert restarted.status is D


def test_plain_play() -> None:
    """The whole play, command by command."""
    call = x.Exchange(CallId("c"), PLAIN)
    assert call.start() == [x.PersistIntent(), x.FindReplica()]
    [attempt, send] = call.handle(routed())
    assert isinstance(attempt, x.PersistAttempt)
    assert isinstance(send, x.Send)
    assert (send.sampled, send.max_tokens, send.version) == ((), 16, 7)
    assert call.handle(sampled(1, 2)) == [x.PersistTokens(0)]
    assert call.handle(x.Stored(2)) == [x.Release(2)]
    assert call.handle(x.AgentGone()) == []
    assert call.handle(sampled(260)) == [x.PersistTokens(2)]
    ended, end = call.handle(x.Finished("stop", spans=(VersionSpan(8, 0, 3),)))
    assert isinstance(ended, x.PersistAttemptEnd)
    assert (ended.attempt.end, ended.attempt.tokens_to) == ("finished", 3)
    assert end == x.PersistEnd(C, finish="stop")
    assert call.released == 2
    assert call.handle(x.Ended()) == [x.Deliver()]
    assert call.released == 3
    assert call.handle(x.Delivered()) == [x.PersistDelivered()]
    assert call.spans == [VersionSpan(8, 0, 3)]


def test_a_broken_attempt_is_continued_and_labelled() -> None:
    call = machine(*TO_STREAMING, sampled(2))
    end, find = call.handle(x.Broken("lost"))
    assert isinstance(end, x.PersistAttemptEnd)
    assert (end.attempt.end, end.keep, end.lost_ids) == ("broken", 2, ())
    assert find == x.FindReplica("http://a", 0.0)
    [_, send] = call.handle(routed("b", 8))
    assert isinstance(send, x.Send)
    assert (send.sampled, send.max_tokens) == ((1, 2), 14)
    call.handle(sampled(3))
    call.handle(x.Finished("stop"))
    assert call.spans == [VersionSpan(7, 0, 2), VersionSpan(8, 2, 3)]


@pytest.mark.parametrize("extra", [{"presence_penalty": 1.0}, {"min_tokens": 3}, {"bad_words": ["x"]}])
def test_what_cannot_be_continued_restarts_unseen(extra: dict[str, object]) -> None:
    call = machine(*TO_STREAMING, x.Stored(1), sampling=Sampling(max_tokens=9, extra=extra))
    assert call.released == 0
    end, _ = call.handle(x.Broken("aborted", aborted=True))
    assert isinstance(end, x.PersistAttemptEnd)
    assert (end.attempt.end, end.keep, end.lost_ids, end.lost_spans) == ("abandoned", 0, (1,), (VersionSpan(7, 0, 1),))
    assert (call.ids, call.spans, call.status) == ([], [], D)


def test_a_begun_stop_string_is_sampled_again() -> None:
    """Unseen, the call restarts; where text was shown, from the last token that ends before the stop string."""
    unseen = machine(*TO_STREAMING, sampled(2, 3))
    end, _ = unseen.handle(x.Broken("lost", clean=2))
    assert isinstance(end, x.PersistAttemptEnd) and end.keep == 0
    seen = machine(*TO_STREAMING, sampled(2, 3), x.Stored(3))
    end, _ = seen.handle(x.Broken("lost", clean=2))
    assert isinstance(end, x.PersistAttemptEnd)
    assert (end.keep, end.lost_ids, end.attempt.end, seen.released) == (2, (3,), "abandoned", 2)


def test_tokens_that_are_complete_need_no_engine() -> None:
    """A stop token or the limit was reached, only the engine's word for it is missing."""
    for last, limit, want in ((260, 16, "stop"), (5, 2, "length")):
        call = machine(routed(), sampled(1, last), sampling=Sampling(max_tokens=limit, stop_token_ids=(260,)))
        assert call.handle(x.Broken("lost"))[-1] == x.PersistEnd(C, finish=want)
        again = x.Exchange(CallId("c"), call.sampling, status=S, ids=[1, last], logprobs=[None] * 2, resumed=True)
        assert again.start() == [x.PersistEnd(C, finish=want)]


def test_attempts_without_a_token_end_the_call() -> None:
    call, delays = machine(), []
    for number in range(6):
        call.handle(routed(str(number)))
        command = call.handle(x.Broken("refused"))[-1]
        delays.append(command.delay if isinstance(command, x.FindReplica) else None)
    assert delays == [0.05, 0.2, 0.8, 3.2, 12.8, None]
    assert command == x.PersistEnd(F, error="no replica answered in 6 attempts; the last one: refused")
    [fail] = call.handle(x.Ended())
    assert isinstance(fail, x.Fail)
    assert (fail.status, fail.retryable) == (503, True)


def test_a_store_that_fails_delivers_nothing() -> None:
    call = machine(*TO_STREAMING, x.Finished("stop"))
    [fail] = call.handle(x.StoreFailed("disk full"))
    assert isinstance(fail, x.Fail) and fail.status == 500
    assert call.released == 0


NEXT: list[Callable[[int], Event]] = [
    lambda n: routed(str(n), n % 3),
    lambda n: sampled(*range(1, n % 4 + 1)) if n % 4 else sampled(260),
    lambda n: x.Finished("stop", spans=(VersionSpan(n, 0, n),)),
    lambda n: x.Finished("length"),
    lambda n: x.Broken("lost", aborted=bool(n % 2), clean=None if n % 3 else n),
    lambda n: x.Rejected(400, "no"),
    lambda n: x.Unserved(float(n)),
    lambda n: x.Stored(n),
    lambda n: x.Ended(),
    lambda n: x.Delivered(),
    lambda n: x.AgentGone(),
    lambda n: x.Cancelled("closed"),
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(NEXT) - 1), st.integers(0, 12)), max_size=60), st.booleans())
def test_any_order_of_events_keeps_the_promises(script: list[tuple[int, int]], exact: bool) -> None:
    """Whatever is legal: ids, log-probs and spans fit; nothing is released before it is stored; one end."""
    sampling = Sampling(max_tokens=20, stop_token_ids=(260,), seed=None if exact else 1)
    call = x.Exchange(CallId("c"), sampling)
    call.start()
    stored, ends, opened = 0, 0, 0
    for place, number in script:
        event = NEXT[place](number)
        if isinstance(event, x.Stored):
            event = x.Stored(min(number, len(call.ids)))
        try:
            commands = call.handle(event)
        except x.IllegalTransition:
            continue
        if isinstance(event, x.Stored):
            stored = max(stored, event.upto)
        for command in commands:
            if isinstance(command, x.PersistAttemptEnd):
                opened -= 1
                assert command.keep == len(call.ids)
                assert len(command.lost_ids) == len(command.lost_logprobs)
                stored = min(stored, command.keep)
            ends += isinstance(command, x.PersistEnd)
            opened += isinstance(command, x.PersistAttempt)
            if isinstance(command, x.Release):
                assert command.upto <= stored
                assert exact
        assert len(call.ids) == len(call.logprobs)
        covered = call.known_spans()
        assert [span.start for span in covered] == [0, *[span.end for span in covered[:-1]]][: len(covered)]
        assert (covered[-1].end if covered else 0) == len(call.ids)
        assert opened in (0, 1)
        assert ends <= 1
        if call.status in (C, OK):
            assert ends == 1


class Shell(RuleBasedStateMachine):
    """A shell that does what it is told, in any legal order, over one call's life and its restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: list[int] = []
        """What the call's own tokens must be."""
        self.call = x.Exchange(CallId("c"), Sampling(max_tokens=12, stop_token_ids=(260,)))
        self.todo: list[x.Command] = self.call.start()
        self.durable = 0
        self.running = self.ended = False
        self.next = 0

    def told(self, kind: type[x.Command]) -> bool:
        return any(isinstance(command, kind) for command in self.todo)

    def done(self, kind: type[x.Command], event: Event) -> None:
        self.todo = [command for command in self.todo if not isinstance(command, kind)]
        self.take(event)

    def take(self, event: Event) -> None:
        for command in self.call.handle(event):
            if isinstance(command, x.Send):
                assert list(command.sampled) == self.engine == self.call.ids
                assert command.max_tokens == 12 - len(self.engine) > 0
                self.running = True
            elif isinstance(command, x.PersistAttemptEnd):
                del self.engine[command.keep :]
                self.durable = min(self.durable, command.keep)
                self.running = False
            elif isinstance(command, x.Release):
                assert command.upto <= self.durable
            elif isinstance(command, x.Deliver):
                assert self.durable == len(self.engine)
            else:
                self.todo.append(command)

    @rule()
    def agent_goes_away(self) -> None:
        assert self.call.handle(x.AgentGone()) == []

    @precondition(lambda self: self.told(x.FindReplica))
    @rule(version=st.integers(1, 3))
    def route(self, version: int) -> None:
        self.done(x.FindReplica, routed("a", version))

    @precondition(lambda self: self.running and len(self.engine) < 12)
    @rule()
    def sample(self) -> None:
        self.next += 1
        self.engine.append(self.next)
        self.take(sampled(self.next))

    @precondition(lambda self: self.engine and not self.ended)
    @rule()
    def store(self) -> None:
        self.durable = len(self.engine)
        self.take(x.Stored(self.durable))

    @precondition(lambda self: self.running)
    @rule(aborted=st.booleans())
    def cut(self, aborted: bool) -> None:
        self.take(x.Broken("lost", aborted))

    @precondition(lambda self: self.running and self.engine)
    @rule(reason=st.sampled_from(sorted(x.FINISHES)))
    def finish(self, reason: str) -> None:
        self.take(x.Finished(reason))

    @precondition(lambda self: self.told(x.PersistEnd))
    @rule()
    def end(self) -> None:
        self.durable, self.ended = len(self.engine), True
        self.done(x.PersistEnd, x.Ended())

    @precondition(lambda self: not self.ended and self.call.attempts and not self.told(x.PersistEnd))
    @rule()
    def crash(self) -> None:
        """kill -9: what is durable is all that the next process knows."""
        del self.engine[self.durable :]
        spans = [VersionSpan(1, 0, self.durable)] if self.durable else []
        self.call = x.Exchange(
            CallId("c"), self.call.sampling, status=S if self.engine else D, ids=list(self.engine),
            logprobs=[-0.5] * self.durable, spans=spans, attempts=self.call.attempts, resumed=True,
        )  # fmt: skip
        self.running, self.todo = False, self.call.start()

    @invariant()
    def the_call_has_its_tokens(self) -> None:
        assert self.call.ids == self.engine
        assert self.call.released <= self.durable
        covered = self.call.known_spans()
        assert (covered[-1].end if covered else 0) == len(self.engine)


TestShell = Shell.TestCase
TestShell.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
