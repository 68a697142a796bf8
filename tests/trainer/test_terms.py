"""A trainer that was taken for dead, and was only slow, steers no replica any more."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest
from test_publish import Served, expected, mortal
from tiny_policy import tiny_model

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.publish import Publisher
from gyre_sdk.trainer.terms import Fenced, Mandate
from gyre_sdk.trainer.weights import full_weights

__all__ = ["mortal"]


def steered(served: Served, mandate: Mandate) -> Publisher:
    """A publisher of a trainer with this term."""
    publisher = served.make()
    publisher._mandate = mandate
    publisher.connect([served.url], None)
    return publisher


def test_each_trainer_of_a_folder_has_a_higher_term(tmp_path: Path) -> None:
    first = Mandate.take(tmp_path, "one")
    first.check()
    second = Mandate.take(tmp_path, "one")
    assert (first.term, second.term) == (("one", 1), ("one", 2))
    second.check()
    with pytest.raises(Fenced, match="it has term 2, this one had 1 and steers nothing any more; stop it"):
        first.check()


def test_of_two_that_take_one_number_one_is_fenced(tmp_path: Path) -> None:
    """Where no lock keeps them apart: both read, then both write."""
    meet, found = threading.Barrier(2), list[Mandate]()

    def take() -> None:
        meet.wait(30)
        found.append(Mandate.take(tmp_path, "one"))

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fenced = 0
    for mandate in found:
        try:
            mandate.check()
        except Fenced:
            fenced += 1
    assert fenced == 1


def test_an_engine_of_gyre_refuses_who_has_a_successor(mortal: Served, tmp_path: Path) -> None:
    """Also one that does not see the folder of its successor, as over a network."""
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    old = steered(mortal, Mandate.take(tmp_path / "elsewhere", "one"))
    other = tiny_model(1)
    assert old.publish(full_weights(other), step=1) == 1
    Mandate.take(tmp_path / "here", "one")
    new = steered(mortal, Mandate.take(tmp_path / "here", "one"))
    _sends_nothing(mortal, tmp_path)
    with new.replica(mortal.url) as replica:
        assert replica.version() == "1"  # what it asks first tells the engine of its term
    with old.replica(mortal.url) as replica:
        for change in (
            lambda: replica.post("/pause?mode=abort", {}),
            lambda: replica.start(),
            lambda: replica.rename("9"),
            lambda: replica.release(),
        ):
            with pytest.raises(Fenced, match=r"a trainer with term 2 of training 'one' steers here.* term 1"):
                change()
    with pytest.raises(TrainerError):
        old.publish(full_weights(tiny_model(2)), step=2)
    with new.replica(mortal.url) as replica:
        assert not replica.is_paused() and replica.version() == "1"
    assert mortal.greedy() == (expected(other), "1")
    assert httpx.post(f"{mortal.url}/pause?mode=keep", json={}).status_code == 200, "people have no term"
    assert httpx.post(f"{mortal.url}/resume", json={}).status_code == 200
    assert new.publish(full_weights(tiny_model(2)), step=2) == 3


def _sends_nothing(served: Served, tmp_path: Path) -> None:
    """What changes a replica is not sent by who finds a successor in its folder: vLLM, too, would do what it is told."""
    (tmp_path / "seen").mkdir()
    old = steered(served, Mandate.take(tmp_path / "seen", "of another training"))
    Mandate.take(tmp_path / "seen", "of another training")
    with old.replica(served.url) as replica:
        with pytest.raises(Fenced, match="another trainer uses"):
            replica.post("/pause?mode=abort", {})
        assert not replica.is_paused()
