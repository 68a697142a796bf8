"""Everything that a store knows of one call."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from gyre_sdk.errors import JournalError
from gyre_sdk.journal import Journal, RecordedExchange
from gyre_sdk.records import AttemptRecord, CallRecord, LaneRecord
from gyre_sdk.view.escape import counted, visible

_WIDTH = 160
"""Characters of a message to show."""


def look_up(journal: Journal, call: str) -> tuple[CallRecord, RecordedExchange, list[AttemptRecord], LaneRecord | None]:
    """Return a call, its messages, its attempts and its lane.

    Raises:
        JournalError: it is not in the store.
    """
    record, exchange = journal.call(call), journal.exchange(call)
    if record is None or exchange is None:
        raise JournalError(f"call {call!r} is not in {journal.path}; `gyre calls {journal.path}` lists what is")
    lane = next((lane for lane in journal.lanes(record.run) if lane.lane == record.lane), None)
    return record, exchange, journal.attempts(call), lane


def as_object(journal: Journal, call: str) -> dict[str, Any]:
    """Return everything about a call as one JSON object."""
    record, exchange, attempts, lane = look_up(journal, call)
    return {
        **msgspec.to_builtins(record),
        "dialect": exchange.request.get("dialect"),
        "history": exchange.request.get("history"),
        "hosted": exchange.hosted,
        "lane_record": msgspec.to_builtins(lane),
        "attempts": msgspec.to_builtins(attempts),
        "request": exchange.request,
        "messages": exchange.messages,
        "raw": exchange.raw,
        "answer": exchange.answer,
    }


def show(journal: Journal, call: str) -> None:
    """Print a call for people."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    for name, value in _facts(*look_up(journal, call)):
        console.print(Text(f"{name:<10} {visible(value, _WIDTH)}"), soft_wrap=True)


def _facts(
    record: CallRecord, exchange: RecordedExchange, attempts: list[AttemptRecord], lane: LaneRecord | None
) -> Iterator[tuple[str, str]]:
    yield "call", f"{record.call} of run {record.run}: {record.status}"
    yield "lane", _lane(record, lane)
    request = exchange.request
    yield "request", f"{request.get('dialect') or 'unknown dialect'}, history {request.get('history') or 'unknown'}"
    yield "prompt", _prompt(record, exchange.hosted)
    yield "sampled", _sampled(record, exchange.hosted)
    sampling = msgspec.to_builtins(record.sampling)
    yield "sampling", ", ".join(f"{key} {value}" for key, value in sampling.items() if value not in (None, (), [], {}))
    yield "time", _timing(record)
    for attempt in attempts:
        span = f"tokens {attempt.tokens_from} to {attempt.tokens_to}"
        yield f"attempt {attempt.number}", f"{attempt.replica} ({attempt.request_id}): {span}, {attempt.end}"
    for message in exchange.messages:
        yield from _message(message)
    if exchange.raw:
        yield "raw", f"{counted(len(exchange.raw), 'item')} as sent (--json shows them)"
    if exchange.answer is not None:
        yield "answer", "" if record.finish_reason is None else f"finished: {record.finish_reason}"
        yield from _message(exchange.answer)
    if record.error:
        yield "error", record.error


def _lane(record: CallRecord, lane: LaneRecord | None) -> str:
    if lane is None:
        return f"{record.lane} (unknown), role {record.role}"
    parent = f", child of lane {lane.parent}" if lane.parent else ""
    started = f", started by call {lane.parent_call}" if lane.parent_call else ""
    return f"{lane.name} ({lane.lane}), role {record.role}{parent}{started}"


def _prompt(record: CallRecord, hosted: bool) -> str:
    if hosted:
        return "no ids: a hosted model answered"
    if record.parent is None:
        return f"{counted(len(record.prompt_ids), 'token')}, a root"
    how = f"forks from (reason {record.fork_reason})" if record.fork_reason else "continues"
    return f"{counted(len(record.prompt_ids), 'token')}, {how} {record.parent}, {record.shared} shared"


def _sampled(record: CallRecord, hosted: bool) -> str:
    if hosted:
        return "no ids: a hosted model answered"
    versions = ", ".join(f"{span.version} for {span.start}-{span.end}" for span in record.versions)
    return counted(len(record.sampled_ids), "token") + (f", versions {versions}" if versions else "")


def _timing(record: CallRecord) -> str:
    received = f"received {_moment(record.received_at)}"
    if record.ended_at is None:
        return f"{received}, not ended"
    return f"{received}, {record.ended_at - record.received_at:.3f} s"


def _moment(at: float) -> str:
    """Return a time as this machine's date and time of day, with its offset from UTC."""
    try:
        return datetime.fromtimestamp(at, UTC).astimezone().isoformat(" ", "milliseconds")
    except (OverflowError, ValueError, OSError):
        return f"at {at:g}"


def _message(message: dict[str, Any]) -> Iterator[tuple[str, str]]:
    role = f"  {message.get('role', '?')}"
    if message.get("reasoning"):
        yield role, f"(reasoning) {message['reasoning']}"
    content = message.get("content") or ""
    calls = message.get("tool_calls") or []
    if content or not calls:
        yield role, content if isinstance(content, str) else msgspec.json.encode(content).decode()
    for call in calls:
        yield role, f"(calls {call.get('name', '?')}) {call.get('arguments', '')}"
