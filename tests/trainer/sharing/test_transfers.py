"""What a transfer takes by itself, seen from transfers that share a line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_sdk.trainer.sharing.transfers import Transfers


@given(st.lists(st.floats(0.5, 10), min_size=1, max_size=6), st.floats(0, 5))
def test_those_that_share_the_line_take_as_long_as_one_after_the_other(alone: list[float], pause: float) -> None:
    """Each has its share of the line until it is over; so however they overlap, the mean is that of each alone."""
    apart, together, now = Transfers(), Transfers(), 0.0
    for seconds in alone:
        apart.end(apart.begin(now), now + seconds, whole=True)
        now += seconds + pause
    now, done = 100.0, 0.0
    begun = {place: together.begin(now) for place in range(len(alone))}
    for place in sorted(begun, key=alone.__getitem__):
        now += (alone[place] - done) * len(begun)
        done = alone[place]
        together.end(begun.pop(place), now, whole=True)
    assert apart.count == together.count == len(alone)
    assert apart.mean_s == pytest.approx(sum(alone) / len(alone)) == pytest.approx(together.mean_s)


def test_one_that_comes_to_nothing_does_not_count() -> None:
    found = Transfers()
    assert found.mean_s == 0.0
    lost, whole = found.begin(0.0), found.begin(0.0)
    found.end(whole, 4.0, whole=True)
    assert (found.count, found.mean_s) == (1, 2.0)
    found.end(lost, 1000.0, whole=False)
    assert (found.count, found.mean_s) == (1, 2.0)
