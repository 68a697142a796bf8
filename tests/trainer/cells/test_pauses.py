"""A replica that cannot be paused goes on, unless it was paused because nobody knows what it would sample from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cells_kit import ToyReplica

from gyre_sdk.trainer.transports import Replica, Unready


@pytest.fixture
def toy() -> Iterator[ToyReplica]:
    found = ToyReplica()
    yield found
    found.close()


def test_a_replica_that_cannot_be_paused_goes_on(toy: ToyReplica) -> None:
    """vLLM says that it is paused then, and refuses to drop its cache: what is on its way there would never arrive."""
    with Replica(toy.url, 1) as replica:
        toy.broken = {"pause"}
        with pytest.raises(Unready), replica.paused():
            pass
        assert toy.asked == ["/resume"]
        toy.paused, toy.asked = True, []
        with pytest.raises(Unready), replica.paused():
            pass
        assert toy.asked == [] and toy.paused
        toy.broken = set()
        with replica.paused():
            assert toy.paused
        assert not toy.paused
