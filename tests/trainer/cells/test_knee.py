"""How many requests a replica serves before a further one only slows the others, from what it was seen to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from cells_kit import ManualClock, Pages, answering
from export_kit import USER, Talk, says
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_sdk.journal import Journal
from gyre_sdk.trainer.cells.capacity import Capacity, Limit, Load, carried
from gyre_sdk.trainer.cells.knee import Rates
from gyre_sdk.trainer.cells.load import LoadMeter
from gyre_sdk.trainer.cells.rates import RateMeter, Reading, between, reading

seeds = st.integers(0, 2**32)


def seen(curve: Callable[[float], float], most: float, random: Random, looks: int = 300, noise: float = 0.1) -> Rates:
    """Return what is known after looks at a replica that had from one request to `most`."""
    rates = Rates()
    for _ in range(looks):
        calls = most ** random.random()
        rates = rates.after(calls, max(0.0, curve(calls) * random.gauss(1, noise)))
    return rates


@settings(max_examples=30, deadline=None)
@given(st.floats(4, 100), st.floats(1, 200), st.floats(2.5, 4), seeds)
def test_a_knee_that_was_passed_is_found(knee: float, speed: float, beyond: float, seed: int) -> None:
    rates = seen(lambda calls: speed * min(calls, knee), beyond * knee, Random(seed))
    assert rates.knee is not None and 0.7 * knee <= rates.knee <= 1.2 * knee


@settings(max_examples=30, deadline=None)
@given(st.floats(4, 100), st.floats(1, 200), seeds)
def test_a_replica_that_was_never_busy_has_no_knee(most: float, speed: float, seed: int) -> None:
    assert seen(lambda calls: speed * calls, most, Random(seed)).knee is None
    assert seen(lambda calls: speed * calls**0.8, most, Random(seed)).knee is None


@given(st.lists(st.tuples(st.floats(0.5, 200), st.floats(0, 1e4)), max_size=9))
def test_little_tells_nothing(looks: list[tuple[float, float]]) -> None:
    rates = Rates()
    for calls, rate in looks:
        rates = rates.after(calls, rate)
    assert rates.knee is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 200), st.floats(0, 1e4)), min_size=1, max_size=200))
def test_whatever_was_seen_a_knee_is_where_something_was_seen(looks: list[tuple[float, float]]) -> None:
    rates = Rates()
    for calls, rate in looks:
        rates = rates.after(calls, rate)
    assert rates.knee is None or min(calls for calls, _ in looks) <= rates.knee <= max(calls for calls, _ in looks)
    assert sum(level.looks for _, level in rates.levels) == len(looks)


def test_noise_does_not_move_a_knee() -> None:
    random = Random(3)
    rates, found = seen(lambda calls: 50 * min(calls, 20), 60, random), set[float | None]()
    for _ in range(1000):
        calls = random.uniform(1, 60)
        rates = rates.after(calls, 50 * min(calls, 20) * random.gauss(1, 0.2))
        found.add(rates.knee)
    assert len(found) <= 2 and None not in found


def test_a_knee_follows_what_changes() -> None:
    """Contexts grew: the replica is half as fast with many requests. Then it is faster than ever."""
    random = Random(4)
    rates = seen(lambda calls: 50 * min(calls, 40), 100, random)
    assert rates.knee is not None and 30 < rates.knee < 45
    for _ in range(4000):
        calls = random.uniform(1, 100)
        rates = rates.after(calls, 50 * min(calls, 20))
    assert rates.knee is not None and 15 < rates.knee < 24
    for _ in range(8000):
        calls = random.uniform(1, 100)
        rates = rates.after(calls, 50 * calls)
    assert rates.knee is None or rates.knee > 70


def test_one_more_request_than_pays_is_not_given_for_noise_of_one_level() -> None:
    """A rate that falls beyond its top, as where contexts push each other out of the cache, has its knee before that."""
    rates = seen(lambda calls: 50 * min(calls, 20) * (1 if calls < 30 else 0.6), 60, Random(5))
    assert rates.knee is not None and rates.knee < 20


PAGE = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1.5e+03
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
"""


def test_a_page_of_metrics_is_read() -> None:
    """The engines of one replica add up; other metrics of similar names do not count."""
    assert reading(PAGE, 7.0) == Reading(7.0, 1500.0, 6.0)
    assert reading(PAGE.replace("1.5e+03", "many"), 7.0) is None
    assert reading(PAGE.replace("generation", "prompt"), 7.0) is None


def test_what_two_readings_tell() -> None:
    one = Reading(10.0, 1000.0, 4.0)
    assert between(one, Reading(12.0, 1500.0, 6.0)) == (5.0, 250.0)
    for other in (
        Reading(12.0, 10.0, 6.0),  # it was started anew
        Reading(12.0, 1500.0, 0.0),
        Reading(60.0, 1500.0, 6.0),
        Reading(10.0, 1000.0, 6.0),
    ):
        assert between(one, other) is None


def test_the_knee_of_a_real_vllm_is_found() -> None:
    """As `benchmarks/cells/knee.py` read it, with 1 to 64 requests at a time, up and down; the most tokens come at 24.

    Going up nothing is known, since nothing was seen beyond. The bound has nine tenths of the most, give or take what a
    minute of looks leaves open, and binds runs that have half a request each at twice as many.
    """
    path = Path(__file__).parent / "vllm_rates.json"
    looks = [Reading(*row) for row in json.loads(path.read_text())]
    rates, top, found = Rates(), 0, []
    for one, other in pairwise(looks):
        seen_now = between(one, other)
        rates = rates if seen_now is None else rates.after(*seen_now)
        top = max(top, int(other.calls))
        found.append((top, rates.knee))
    assert {knee for most, knee in found if most < 48} == {None}
    assert rates.knee is not None and 12 <= rates.knee <= 24
    assert carried(Load(useful_calls=rates.knee, calls_per_run=0.5), 64) == Capacity(2 * rates.knee, Limit.SPEED)
    at = {round(rates.knee): 0.0, 2: 0.0}
    for calls in at:
        near = [level for _, level in rates.levels if calls / 1.3 <= level.calls <= calls * 1.3]
        at[calls] = sum(level.rate * level.looks for level in near) / sum(level.looks for level in near)
    beyond = [level for _, level in rates.levels if level.calls > 1.5 * rates.knee]
    rate = sum(level.rate * level.looks for level in beyond) / sum(level.looks for level in beyond)
    assert at[2] < 0.4 * rate and at[round(rates.knee)] > 0.8 * rate, "it is where growth ends"


class Replica(Pages):
    """Samples up to 100 tokens a second, 25 for each request."""

    calls = 0
    sampled = 0.0

    def page(self, path: str) -> str:
        lines = [
            f"vllm:num_requests_running {self.calls}",
            "vllm:num_requests_waiting 0",
            f"vllm:generation_tokens_total {self.sampled}",
        ]
        return "\n".join(lines)


@pytest.fixture
def replica() -> Iterator[str]:
    with answering(Replica) as url:
        yield url


def test_speed_bounds_what_a_cell_carries(tmp_path: Path, replica: str) -> None:
    """Four requests are as many as pay; two live runs with one request between them are 0.5 each: 8 runs."""
    clock = ManualClock()
    meter = RateMeter(lambda: [replica, "http://127.0.0.1:9"], clock)

    def look(calls: int) -> None:
        Replica.calls = calls
        meter.beat()
        clock.now += 2
        Replica.sampled += 2 * min(100, 25 * calls)
        meter.beat()

    with Journal(tmp_path / "s.db") as journal:
        load = LoadMeter(journal, meter, clock)
        assert load() == Load() and carried(load(), 32) == Capacity(32)
        for run in "ab":
            Talk(journal, run, group="g", member=0).turn([USER], says("one"), tokens=7)
        for calls in (1, 2, 3, 4, 6, 8, 12, 16) * 8:
            look(calls)
        look(1)
        assert meter.calls == 2, "the replica that says nothing is like the others"
        clock.now += 6
        assert load() == Load(useful_calls=meter.rates.knee, calls_per_run=1.0)
        clock.now += 600
        assert load().calls_per_run == 1.0
        look(3)
        clock.now += 60
        assert load().calls_per_run == 1.0, "what was seen a minute ago says nothing of now"
        look(12)
        clock.now += 6
        assert load().calls_per_run == 1.0, "beyond the knee runs have more calls, since each takes longer"
        knee = meter.rates.knee
        assert knee is not None and 3 <= knee <= 4
        found = carried(load(), 32)
        assert found == Capacity(knee, Limit.SPEED)
        assert carried(replace(load(), calls_per_run=0.5), 32).runs == 2 * knee
    meter.stop()
