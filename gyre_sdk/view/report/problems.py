"""What went wrong in a store, grouped: failed runs, calls without an answer, branches, evaluations that were tampered with."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from gyre_sdk.records import CallStatus, RunStatus
from gyre_sdk.view.report.facts import Facts

_FINE = frozenset({RunStatus.RUNNING, RunStatus.COMPLETED})
_LINE = 300
"""Characters of an error that tell it from others."""
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\b[rlgc]-[0-9a-z]{8,}\b|\d+(?:\.\d+)?")
"""What differs between errors of one cause: addresses, ids, numbers."""


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """What failed for one cause."""

    state: str
    """Of the runs or calls."""
    error: str
    """First line of the first one's error; hostile text."""
    count: int
    runs: tuple[str, ...]
    """The first runs that it happened in, three at most."""
    tasks: int
    """Tasks that it happened in; 0 where nobody knows."""


@dataclass(frozen=True, slots=True)
class Problems:
    """What a report says of failures. Each list has the most frequent first."""

    runs: tuple[ErrorRow, ...]
    calls: tuple[ErrorRow, ...]
    """Calls that were aborted or failed."""
    forks: dict[str, int]
    """Calls that do not continue a recorded path token by token, by the reason."""
    calls_in_all: int
    tampered: tuple[tuple[str, tuple[str, ...]], ...]
    """(run, what its evaluation found); hostile text."""


def problems(facts: Facts) -> Problems:
    """Fold a store's failures."""
    tasks = {str(run.run): run.task for run in facts.runs}
    ended = (
        (str(run.status), run.error or "", str(run.run))
        for run in facts.runs
        if run.status not in _FINE or (run.status is RunStatus.COMPLETED and run.error)
    )
    broken = (
        (str(call.status), call.error or "", call.run)
        for call in facts.calls
        if call.status in (CallStatus.ABORTED, CallStatus.FAILED)
    )
    forks = Counter(call.fork for call in facts.calls if call.fork is not None)
    return Problems(
        runs=_grouped(ended, tasks),
        calls=_grouped(broken, tasks),
        forks=dict(forks.most_common()),
        calls_in_all=len(facts.calls),
        tampered=tuple((run, tuple(found)) for run, found in facts.tampered.items()),
    )


def _grouped(failures: Iterable[tuple[str, str, str]], tasks: dict[str, str]) -> tuple[ErrorRow, ...]:
    found: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for state, error, run in failures:
        line = next((one.strip() for one in error.splitlines() if one.strip()), "")[:_LINE]
        _, runs = found.setdefault((state, _VARYING.sub("#", line)), (line, []))
        runs.append(run)
    rows = [
        ErrorRow(
            state=state,
            error=line,
            count=len(runs),
            runs=tuple(dict.fromkeys(runs))[:3],
            tasks=len({tasks[run] for run in runs if run in tasks}),
        )
        for (state, _), (line, runs) in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.count))
