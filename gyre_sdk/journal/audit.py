"""Checks of promises 1 and 2 over what is stored: pure, one function per kind of thing.

Promise 1: a call whose end reached the agent is there, with exact ids. Promise 2: the ids along a call's path are its
prompt and what it sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gyre_sdk.records import AttemptRecord, CallStatus, RunStatus, Sampling, VersionSpan

_ENDED = (CallStatus.COMPLETE, CallStatus.DELIVERED)
_OPEN = (CallStatus.RECEIVED, CallStatus.DISPATCHED, CallStatus.STREAMING)
_RESTORE = "take the store from a backup, or leave its run out of training"
_REPORT = "report it with the proxy's log"


class Level(StrEnum):
    """Whether a finding breaks a promise."""

    ERROR = "error"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check found."""

    level: Level
    subject: str
    """What it is about: a call, run, lane, message, or `store`."""
    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A call as stored, decoded as far as it can be."""

    call: str
    run: str
    lane: str
    status: CallStatus
    parent: str | None
    shared: int
    prompt_len: int
    """As stored."""
    rebuilt_len: int | None
    """Of the prompt put together from its path; None where that failed."""
    prompt_ok: bool
    """Whether the rebuilt prompt has the checksum taken when it was written."""
    sampled: tuple[int, ...]
    logprobs: int
    """Slots of log-probs."""
    sampled_len: int
    """As stored."""
    sampled_ok: bool
    """Whether sampled ids and log-probs have their checksum."""
    versions: tuple[VersionSpan, ...]
    chunks: tuple[tuple[int, int], ...]
    """Start and length of the stretches of an open call."""
    attempts: tuple[AttemptRecord, ...]
    sampling: Sampling | None
    finish: str | None
    ended_at: float | None
    answered: bool
    """Whether there is an answer that says something."""
    hosted: bool
    damage: tuple[str, ...] = ()
    """What could not be decoded."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run's state as stored."""

    run: str
    status: str
    ended_at: float | None


@dataclass(frozen=True, slots=True)
class StoredLane:
    """A lane as stored."""

    lane: str
    run: str
    parent: str | None
    parent_call: str | None


def check_runs(runs: Sequence[StoredRun]) -> Iterator[Finding]:
    """Check that each run is open or has exactly one terminal state."""
    known = set(RunStatus)
    for run in runs:
        if run.status not in known:
            yield _error(run.run, f"unknown state {run.status!r}", "use the gyre that wrote it")
        elif (run.status == RunStatus.RUNNING) != (run.ended_at is None):
            yield _error(
                run.run, f"state {run.status} with {'no' if run.ended_at is None else 'an'} end time", _RESTORE
            )


def check_lanes(lanes: Sequence[StoredLane], runs: set[str], calls: dict[str, str]) -> Iterator[Finding]:
    """Check that lanes refer to what exists. `calls` maps calls to runs."""
    by_lane = {lane.lane: lane for lane in lanes}
    for lane in lanes:
        if lane.run not in runs:
            yield _error(lane.lane, f"its run {lane.run} is not in the store", _RESTORE)
        if lane.parent is not None and (lane.parent not in by_lane or by_lane[lane.parent].run != lane.run):
            yield _error(lane.lane, f"its parent lane {lane.parent} is not in its run", _RESTORE)
        if lane.parent_call is not None and calls.get(lane.parent_call) != lane.run:
            yield _error(lane.lane, f"the call {lane.parent_call} that started it is not in its run", _RESTORE)


def check_call(
    call: StoredCall, runs: set[str], lanes: dict[str, str], calls: dict[str, str], parent: StoredCall | None
) -> Iterator[Finding]:
    """Check one call. `lanes` and `calls` map to runs; `parent` is its parent, where it is there."""
    for problem in call.damage:
        yield _error(call.call, problem, _RESTORE)
    if call.run not in runs:
        yield _error(call.call, f"its run {call.run} is not in the store", _RESTORE)
    if lanes.get(call.lane) != call.run:
        yield _error(call.call, f"its lane {call.lane} is not in its run", _RESTORE)
    if call.status in _OPEN:
        yield Finding(
            Level.INFO,
            call.call,
            f"open ({call.status})",
            "nothing: the agent's retry resumes it, or its run's end ends it",
        )
    yield from _check_prompt(call, calls, parent)
    yield from _check_sampled(call)
    yield from _check_chunks(call)
    if not call.hosted:
        yield from _check_attempts(call)


def _check_prompt(call: StoredCall, calls: dict[str, str], parent: StoredCall | None) -> Iterator[Finding]:
    if call.parent is not None and calls.get(call.parent) != call.run:
        yield _error(call.call, f"its parent {call.parent} is not in its run", _RESTORE)
        return
    if call.parent is None and call.shared:
        yield _error(call.call, f"a root that shares {call.shared} tokens", _RESTORE)
        return
    if parent is not None:
        prompt = parent.prompt_len if parent.rebuilt_len is None else parent.rebuilt_len
        length = prompt + max(parent.sampled_len, sum(part[1] for part in parent.chunks))
        if call.shared > length:
            yield _error(call.call, f"shares {call.shared} tokens of its parent's {length}", _RESTORE)
            return
    if call.rebuilt_len is None:
        return
    if call.rebuilt_len != call.prompt_len:
        yield _error(call.call, f"its prompt has {call.rebuilt_len} tokens, {call.prompt_len} were sent", _RESTORE)
    elif not call.prompt_ok:
        yield _error(call.call, "its prompt does not continue its parent's path with the ids that were sent", _RESTORE)
    if call.status in _ENDED and not call.hosted and not call.prompt_len:
        yield _error(call.call, f"{call.status} without prompt ids", _REPORT)


def _check_sampled(call: StoredCall) -> Iterator[Finding]:
    count = len(call.sampled)
    if count != call.sampled_len:
        yield _error(call.call, f"{count} sampled ids are stored, {call.sampled_len} were sampled", _RESTORE)
    if call.logprobs != count:
        yield _error(call.call, f"{call.logprobs} log-probs for {count} sampled ids", _RESTORE)
    elif not call.sampled_ok:
        yield _error(call.call, "sampled ids or log-probs are not those that were written", _RESTORE)
    if call.status not in _ENDED:
        return
    if call.ended_at is None or call.finish is None:
        yield _error(call.call, f"{call.status} without a terminal record", _REPORT)
    if call.answered and not count and not call.hosted:
        yield _error(call.call, "an answer without sampled ids", _REPORT)
    at = 0
    for span in call.versions:
        if span.start != at or span.end <= span.start:
            break
        at = span.end
    if at != count or (call.versions and call.versions[-1].end != count):
        yield _error(call.call, f"versions cover {at} of {count} sampled ids", _REPORT)


def _check_chunks(call: StoredCall) -> Iterator[Finding]:
    if call.chunks and call.status not in _OPEN:
        yield _error(call.call, f"{call.status} with {len(call.chunks)} chunks left over", _REPORT)
    at = 0
    for start, length in call.chunks:
        if start != at:
            yield _error(call.call, f"its chunks jump from token {at} to {start}", _RESTORE)
            return
        at += length


def _check_attempts(call: StoredCall) -> Iterator[Finding]:
    before: AttemptRecord | None = None
    for number, attempt in enumerate(call.attempts):
        name = f"attempt {attempt.number}"
        if attempt.number != number:
            yield _error(call.call, f"attempt {number} is missing", _REPORT)
            return
        if attempt.tokens_to < attempt.tokens_from:
            yield _error(call.call, f"{name} goes from token {attempt.tokens_from} to {attempt.tokens_to}", _REPORT)
        if before is not None:
            given_up = before.end == "abandoned"
            if attempt.tokens_from > before.tokens_to or (attempt.tokens_from < before.tokens_to and not given_up):
                yield _error(
                    call.call,
                    f"{name} starts at token {attempt.tokens_from}, the one before ended at {before.tokens_to}",
                    _REPORT,
                )
        before = attempt
    if call.status in _ENDED:
        yield from _check_last_attempt(call, before)


def _check_last_attempt(call: StoredCall, last: AttemptRecord | None) -> Iterator[Finding]:
    if last is None:
        yield _error(call.call, f"{call.status} without an attempt", _REPORT)
        return
    stops = call.sampling.stop_token_ids if call.sampling else ()
    limit = call.sampling.max_tokens if call.sampling else 0
    full = len(call.sampled) >= limit or (bool(call.sampled) and call.sampled[-1] in stops)
    if last.end != "finished" and not (full and last.end in ("broken", "aborted")):
        yield _error(call.call, f"{call.status}, but its last attempt is {last.end}", _REPORT)
    elif last.tokens_to != len(call.sampled):
        yield _error(call.call, f"its last attempt ended at token {last.tokens_to} of {len(call.sampled)}", _REPORT)


def _error(subject: str, what: str, remedy: str) -> Finding:
    return Finding(Level.ERROR, subject, what, remedy)
