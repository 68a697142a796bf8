"""A trainer that has a successor steers the service no more: its requests carry its term, and an older one is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy_engine import ScriptedEngine, say
from proxy_kit import running
from test_replicas import END, replicas

from gyre_sdk.errors import ProtocolError, ServiceError
from gyre_sdk.harness.service import ServiceClient
from gyre_sdk.steering import HEADER, Steering, Term, text


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(lambda request, number: say(65, END)) as scripted:
        yield scripted


def of(number: int, training: str = "one") -> dict[str, str]:
    return {HEADER: text(Term(training, number))}


def test_an_older_trainer_is_refused_and_changes_nothing(model: Path, tmp_path: Path, engine: ScriptedEngine) -> None:
    """Whatever it asks; people and tools without a term, and trainers of something else, are heard."""
    with running(model, tmp_path / "s.db") as proxy:
        control, table = proxy.control, {"replicas": [{"url": engine.url, "version": 7}]}

        def client(number: int) -> ServiceClient:
            return ServiceClient(proxy.url, proxy.service_key, headers=of(number))

        with client(4) as older, client(5) as newer:
            older.set_replicas(table["replicas"])
            newer.set_replicas(table["replicas"])
            for ask in (
                lambda: older.set_replicas([]),
                lambda: older.drain(engine.url, seconds=0.0),
                lambda: older.status(),
                lambda: older.close_run("r", seconds=0.0),
            ):
                with pytest.raises(ServiceError, match=r"stop the older trainer.*old_term"):
                    ask()
            assert replicas(proxy)[engine.url]["state"] == "serving"
            assert control.get("/status").status_code == 200
            assert control.get("/status", headers=of(1, "another")).status_code == 200
            assert control.get("/status", headers={HEADER: "soon"}).status_code == 400
            unknown = httpx.get(f"{proxy.url}/gyre/v1/status", headers=of(99))
            assert unknown.status_code == 401
            newer.status()  # who has no key ends nobody's term


said = st.lists(st.tuples(st.sampled_from(["one", "two"]), st.integers(0, 9)), max_size=20)


@given(said)
def test_of_each_training_only_the_newest_is_heard(requests: list[tuple[str, int]]) -> None:
    steering, newest = Steering(), dict[str, int]()
    for training, number in requests:
        if number < newest.get(training, 0):
            with pytest.raises(ProtocolError) as refused:
                steering.check(text(Term(training, number)))
            assert (refused.value.status, refused.value.code) == (409, "old_term")
        else:
            steering.check(text(Term(training, number)))
            newest[training] = number
    steering.check(None)


@pytest.mark.parametrize("wrong", ["", "5", "five one", "-1 one", "٣ one", "1" * 20 + " one"])
def test_what_is_no_term_is_said(wrong: str) -> None:
    with pytest.raises(ProtocolError, match=r"must be `NUMBER TRAINING`"):
        Steering().check(wrong)


def test_a_training_that_is_heard_again_and_again_is_not_forgotten() -> None:
    """However many others come and go."""
    steering = Steering()
    for number in range(5000):
        steering.check(text(Term("ours", 7)))
        steering.check(text(Term(f"other-{number}", 1)))
    with pytest.raises(ProtocolError, match="of term 6"):
        steering.check(text(Term("ours", 6)))
    steering.check(text(Term("other-0", 0)))  # long ago
