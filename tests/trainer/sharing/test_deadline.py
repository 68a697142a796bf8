"""How long units may take: never less than the floor, and never less than ten times what was measured."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gyre_sdk.trainer.sharing.deadline import Deadline

measured = st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e4)), max_size=60)


@given(st.floats(0.1, 1e4), measured, st.integers(0, 10**6))
def test_a_unit_like_those_before_is_never_overdue_in_ten_times_its_time(
    floor: float, seen: list[tuple[int, float]], tokens: int
) -> None:
    deadline = Deadline(floor)
    for each, seconds in seen:
        deadline.measure(each, seconds)
    assert deadline.seconds(tokens) >= floor
    for each, seconds in seen:
        if each and seconds:
            assert deadline.seconds(each) >= 9.99 * seconds
    assert deadline.seconds(2 * tokens) >= deadline.seconds(tokens)


def test_a_deadline_in_numbers() -> None:
    deadline = Deadline(60.0)
    assert deadline.seconds(10**9) == 60.0, "nothing was measured"
    deadline.measure(1000, 20.0)
    assert (deadline.seconds(100), deadline.seconds(1000), deadline.seconds(5000)) == (60.0, 200.0, 1000.0)
    for _ in range(64):
        deadline.measure(1000, 1.0)
    assert deadline.seconds(5000) == 60.0, "what was slow once does not count for ever"
