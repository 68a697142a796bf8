"""Which replica serves: load stays bounded, runs stay where their prefix is, and who does not serve gets nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gyre_sdk.harness.proxy.routing import SLACK, Health, Load, Need, ReplicaSpec, ReplicaState, Routes

A, B, C = "http://a", "http://b", "http://c"


def routes(*urls: str, version: int = 0) -> Routes:
    return Routes([ReplicaSpec(url, version) for url in urls])


def place(table: Routes, run: str = "r", prompt: int = 10, left: int = 10, **more: object) -> Load:
    load = table.choose(Need(run, prompt, left, **more))  # type: ignore[arg-type]
    assert load is not None
    return load


def test_calls_that_arrive_together_spread() -> None:
    """The choice itself counts: nothing has been sent yet when the next call comes."""
    table = routes(A, B, C)
    for number in range(30):
        place(table, f"r{number}", prompt=SLACK, left=SLACK)
    assert [replica.calls for replica in table.replicas] == [10, 10, 10]


def test_a_run_stays_and_its_cached_prompt_counts_less() -> None:
    table = routes(A, B)
    first = place(table, "r", prompt=800)
    assert first.tokens == 810
    table.sampled(first, 4)
    assert (first.tokens, first.replica.tokens) == (806, 806)
    table.close(first)
    assert first.replica.tokens == 0
    again = place(table, "r", prompt=1000, shared=804)
    assert again.replica is first.replica
    assert again.tokens == 196 + 804 // 8 + 10
    table.put(ReplicaSpec(first.replica.url, 1))
    table.close(again)
    other = place(table, "r", prompt=1000, shared=804)
    assert other.tokens == 1010, "cached keys and values never cross versions"


def test_a_prompt_is_not_cached_where_nothing_was_sampled() -> None:
    table = routes(A)
    place(table, "r", prompt=800)
    assert place(table, "r", prompt=1000, shared=800).tokens == 1010


def test_a_run_leaves_a_replica_that_carries_much_more() -> None:
    table = routes(A, B)
    home = place(table, "r").replica
    table.choose(Need("x", 2, 2))
    heavy = place(table, "r", prompt=3 * SLACK)
    assert heavy.replica is home
    assert place(table, "r").replica is not home


def test_more_sampled_than_allowed_does_not_go_below_zero() -> None:
    table = routes(A)
    load = place(table, prompt=5, left=3)
    table.sampled(load, 50)
    assert load.replica.tokens == 5
    table.close(load)
    table.close(load)
    assert (load.replica.tokens, load.replica.calls) == (0, 0)


def test_what_continues_prefers_its_version() -> None:
    table = Routes([ReplicaSpec(A, 1), ReplicaSpec(B, 2), ReplicaSpec(C, 1)])
    assert place(table, "r", avoid=A, version=1).replica.url == C
    assert place(table, "s", avoid=A, version=2).replica.url == B
    assert place(table, "t", avoid=B, version=2).replica.url in (A, C), "no other one has it: any will do"
    place(table, "u", prompt=20 * SLACK, avoid=A, version=1)
    assert place(table, "v", avoid=A, version=1).replica.url == B, "not at any price"


@pytest.mark.parametrize(
    ("change", "state", "back"),
    [
        (lambda table: table.drain(A), ReplicaState.DRAINING, lambda table: table.put(ReplicaSpec(A))),
        (lambda table: table.mark(A, Health.GONE), ReplicaState.GONE, lambda table: table.mark(A, Health.LIVE)),
        (lambda table: table.mark(A, Health.PAUSED), ReplicaState.PAUSED, lambda table: table.mark(A, Health.LIVE)),
    ],
)
def test_who_does_not_serve(
    change: Callable[[Routes], object], state: ReplicaState, back: Callable[[Routes], object]
) -> None:
    table = routes(A)
    change(table)
    assert table.replicas[0].state is state
    assert table.choose(Need("r", 1, 1)) is None
    back(table)
    assert table.choose(Need("r", 1, 1)) is not None


def test_a_drained_replica_that_restarts_stays_out() -> None:
    table = routes(A)
    table.drain(A)
    table.mark(A, Health.GONE)
    table.mark(A, Health.LIVE)
    assert table.replicas[0].state is ReplicaState.DRAINING


def test_a_replica_taken_out_is_watched_until_it_is_empty_and_keeps_its_load() -> None:
    table = routes(A, B)
    loads = [place(table, f"r{number}") for number in range(2)]
    table.set([ReplicaSpec(B)])
    assert [replica.url for replica in table.watched] == [B, A]
    table.put(ReplicaSpec(A + "/", 3))
    assert {replica.url: replica.calls for replica in table.replicas} == {A: 1, B: 1}
    assert table.remove(A) is not None and table.remove(A) is None
    for load in loads:
        table.close(load)
    assert [replica.url for replica in table.watched] == [B]


class Fleet(RuleBasedStateMachine):
    """Any order of announcements, failures, calls and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Routes()
        self.open: list[Load] = []

    @rule(url=st.sampled_from([A, B, C]), version=st.integers(0, 2))
    def announce(self, url: str, version: int) -> None:
        self.table.put(ReplicaSpec(url, version))

    @rule(urls=st.lists(st.sampled_from([A, B, C]), unique=True))
    def replace(self, urls: list[str]) -> None:
        self.table.set([ReplicaSpec(url) for url in urls])

    @rule(url=st.sampled_from([A, B, C]), what=st.sampled_from(["drain", "remove"]))
    def withdraw(self, url: str, what: str) -> None:
        getattr(self.table, what)(url)

    @rule(url=st.sampled_from([A, B, C]), health=st.sampled_from(Health))
    def check(self, url: str, health: Health) -> None:
        self.table.mark(url, health)

    @rule(
        run=st.sampled_from("pqr"),
        prompt=st.integers(1, 20_000),
        shared=st.integers(0, 20_000),
        left=st.integers(1, 4_000),
        avoid=st.none() | st.sampled_from([A, B, C]),
        version=st.none() | st.integers(0, 2),
    )
    def call(self, run: str, prompt: int, shared: int, left: int, avoid: str | None, version: int | None) -> None:
        serving = [replica for replica in self.table.replicas if replica.state is ReplicaState.SERVING]
        before = {replica.url: replica.tokens for replica in serving}
        load = self.table.choose(Need(run, prompt, left, shared, avoid, version))
        assert (load is None) == (not serving)
        if load is None:
            return
        self.open.append(load)
        assert load.replica in serving
        others = {url: tokens for url, tokens in before.items() if url != avoid} or before
        assert load.replica.url in others
        assert before[load.replica.url] <= 2 * min(others.values()) + SLACK
        assert left <= load.tokens <= prompt + left

    @precondition(lambda self: self.open)
    @rule(place=st.integers(0, 99), count=st.integers(1, 5_000))
    def sample(self, place: int, count: int) -> None:
        self.table.sampled(self.open[place % len(self.open)], count)

    @precondition(lambda self: self.open)
    @rule(place=st.integers(0, 99))
    def end(self, place: int) -> None:
        self.table.close(self.open.pop(place % len(self.open)))

    @invariant()
    def loads_are_those_of_the_attempts_in_flight(self) -> None:
        for replica in {*self.table.watched, *(load.replica for load in self.open)}:
            mine = [load for load in self.open if load.replica is replica]
            assert (replica.calls, replica.tokens) == (len(mine), sum(load.tokens for load in mine))
        urls = [replica.url for replica in self.table.watched]
        assert len(urls) == len(set(urls))


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("pqrstu"), st.integers(1, 50)), min_size=1, max_size=60))
def test_runs_stay_while_loads_are_even(calls: list[tuple[str, int]]) -> None:
    """One call at a time: no replica is ever loaded when the next one comes, so no run ever moves."""
    table, homes = routes(A, B, C), dict[str, str]()
    for run, prompt in calls:
        load = place(table, run, prompt)
        assert homes.setdefault(run, load.replica.url) == load.replica.url
        table.sampled(load, 1)
        table.close(load)
