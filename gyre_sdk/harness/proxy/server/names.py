"""Names of calls, runs and lanes: nobody guesses one, and later ones sort after earlier ones."""

from __future__ import annotations

import os
import time

_DIGITS, _BATCH = 10, 256
_random: list[str] = []


def fresh_name() -> str:
    """Return 21 hexadecimal digits: the time in milliseconds, then 40 random bits. Safe to use from several threads.

    Names that sort by time are appended to the store's indexes; scattered ones would make each commit write a page of
    its own per call. Random bits are drawn from the system in batches: a call of the system for each costs as much as
    parsing a request.
    """
    try:
        bits = _random.pop()
    except IndexError:
        drawn = os.urandom(_DIGITS * _BATCH // 2).hex()
        fresh = [drawn[at : at + _DIGITS] for at in range(0, len(drawn), _DIGITS)]
        bits = fresh.pop()
        _random.extend(fresh)
    return f"{time.time_ns() // 1_000_000:011x}{bits}"


os.register_at_fork(after_in_child=_random.clear)
