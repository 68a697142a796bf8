"""Which runs of a group are still to be made, from what is on record."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable

from gyre_sdk.harness.scoring import stands
from gyre_sdk.records import RunRecord, RunStatus


def members_left(runs: Iterable[RunRecord], count: int) -> list[int]:
    """Return the members of a group of `count` runs that have no end that stands. Pure.

    Args:
        runs: of the group, also open ones: those are being made.
    """
    made = {run.member for run in runs if run.status is RunStatus.RUNNING or stands(run.status)}
    return [member for member in range(count) if member not in made]


def orphans(runs: Iterable[RunRecord], alive: Callable[[str], bool]) -> list[RunRecord]:
    """Return the open runs whose owner is gone. Pure."""
    return [run for run in runs if run.status is RunStatus.RUNNING and not alive(run.owner)]


def owner_alive(owner: str) -> bool:
    """Tell whether the process that opened a run may still be there; one of another machine may."""
    host, _, rest = owner.partition(":")
    number = rest.partition(":")[0]
    if host != socket.gethostname() or not number.isdigit():
        return True
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
