"""Work begins in order, at most so much of it at a time."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from gyre_sdk.trainer.slots import End, Slots


@given(count=st.integers(1, 4), ends=st.lists(st.integers(0, 3), max_size=30), work=st.integers(0, 12))
def test_in_order_and_never_more_than_there_are_slots(count: int, ends: list[int], work: int) -> None:
    slots = Slots(count)
    begun: list[int] = []
    open_: dict[int, End] = {}

    def begin(number: int, end: End) -> None:
        begun.append(number)
        open_[number] = end
        assert len(open_) <= count

    for number in range(work):
        slots.submit(lambda end, number=number: begin(number, end))  # type: ignore[misc]
    for which in ends:
        if open_:
            end = open_.pop(sorted(open_)[which % len(open_)])
            end()
            end()  # once more changes nothing
    assert begun == list(range(len(begun)))
    assert len(open_) == min(count, work - (len(begun) - len(open_)))


def test_work_that_ends_at_once_needs_no_stack() -> None:
    slots, done = Slots(1), []
    held: list[End] = []
    slots.submit(held.append)
    for number in range(5000):
        slots.submit(lambda end, number=number: (done.append(number), end()))  # type: ignore[misc, func-returns-value]
    held[0]()
    assert done == list(range(5000))


def test_what_is_under_way_already_has_a_slot_of_its_own() -> None:
    slots = Slots(1)
    ends: list[End] = []
    slots.submit(ends.append)
    slots.occupy(ends.append)
    slots.submit(ends.append)
    assert len(ends) == 2
    ends[0]()
    assert len(ends) == 2
    ends[1]()
    assert len(ends) == 3


def test_stopping_forgets_what_waits() -> None:
    slots = Slots(1)
    ends: list[End] = []
    slots.submit(ends.append)
    slots.submit(ends.append)
    assert slots.stop(0.01) is False
    threading.Timer(0.05, ends[0]).start()
    assert slots.stop(20.0) is True
    slots.submit(ends.append)
    assert len(ends) == 1
