"""Looks whether the core's own units end: from a thread, since the one that computes them may never come back."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event

from gyre_sdk.trainer.sharing.batch import Batch

__all__ = ["look_after"]

_LOOK_S = 0.5
"""Seconds between two looks."""


def look_after(batch: Batch, ended: Event, hung: Callable[[str], None]) -> None:
    """Call `hung`, once, when the units that the core has in hand do not end in time.

    Time in which this process stood still does not count: what it computes stood still too.

    Args:
        ended: ends the watch.
        hung: given what is wrong, in words.
    """
    hand, lasted, before = batch.in_hand, 0.0, time.monotonic()
    while not ended.wait(_LOOK_S):
        now = time.monotonic()
        passed, before = min(now - before, 4 * _LOOK_S), now
        if hand is None or hand != batch.in_hand:
            hand, lasted = batch.in_hand, 0.0
            continue
        lasted += passed
        bound = batch.deadline.seconds(hand[1])
        if lasted > bound:
            hung(
                f"the core has {hand[1]} targets in hand for {lasted:.0f} s, longer than the {bound:.0f} s that they may take"
            )
            return
