"""Sends a real program through the real proxy, and compares what both ends wrote down."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy_kit import Proxy, running

from clients.programs import Ended, Program
from clients.record import Start
from gyre_sdk.records import AttemptRecord, CallRecord, CallStatus, LaneId, LaneRecord


@dataclass(frozen=True)
class Sent:
    """What an engine wrote down about a request."""

    prompt: list[int]
    sampled: list[int]


@dataclass(frozen=True)
class Toured:
    """A run of a program, as it is on record."""

    ended: list[Ended]
    """One per start."""
    lanes: list[LaneRecord]
    """In order of opening."""
    calls: list[CallRecord]
    """In order of asking."""
    attempts: dict[str, list[AttemptRecord]]
    """By call."""
    refusals: list[str]
    """Counts of requests that the proxy answered with an error."""

    def of(self, lane: LaneId) -> list[CallRecord]:
        """Return the calls of a lane."""
        return [call for call in self.calls if call.lane == lane]


async def tour(
    program: Program,
    starts: Iterable[Start],
    folder: Path,
    model: Path,
    engine: str,
    *,
    limits: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Toured:
    """Start a program once or more in one workspace, all under one key that a classifier sorts into lanes."""
    workspace = folder / "work"
    workspace.mkdir()
    (workspace / "a.txt").write_text("hello\n")
    with running(model, folder / "store.db", engine, **settings) as proxy:
        access = proxy.run(classifier="auto", **({"limits": dict(limits)} if limits else {}))
        ended = [
            await program.run(
                proxy.url,
                access["api_key"],
                workspace,
                start.prompt,
                arguments=start.arguments,
                environment=start.environment,
            )
            for start in starts
        ]
        return _read(proxy, access["run"], ended)


def _read(proxy: Proxy, run: str, ended: list[Ended]) -> Toured:
    page = proxy.http.get("/metrics").text
    with proxy.journal() as journal:
        calls = sorted(journal.calls(run), key=lambda call: call.received_at)
        lanes = sorted(journal.lanes(run), key=lambda lane: lane.created_at)
        attempts = {call.call: journal.attempts(call.call) for call in calls}
    return Toured(ended, lanes, calls, attempts, re.findall(r"^gyre_refusals_total\{.*", page, re.MULTILINE))


def assert_agrees(toured: Toured, log: Mapping[str, Sent]) -> None:
    """Both sides' logs agree on every id of every call, and the engine's has no request that is not on record.

    A call may have had more than one attempt where the machine is busy; the last one sampled what is left of it.
    """
    assert toured.calls
    for call in toured.calls:
        assert call.status is CallStatus.DELIVERED, (call.call, call.status, call.error)
        last = toured.attempts[call.call][-1]
        assert last.end == "finished"
        known = last.tokens_from
        assert log[last.request_id].prompt == call.prompt_ids + call.sampled_ids[:known]
        assert log[last.request_id].sampled == call.sampled_ids[known:]
        assert len(call.logprobs) == len(call.sampled_ids)
    assert {item.request_id for attempts in toured.attempts.values() for item in attempts} >= set(log)


def assert_lanes_extend(toured: Toured, forks: Sequence[tuple[str, str]]) -> None:
    """Within a lane each call continues a recorded path token by token, except at these (lane name, reason)."""
    names = {lane.lane: lane.name for lane in toured.lanes}
    whole = {call.call: call.prompt_ids + call.sampled_ids for call in toured.calls}
    found = []
    for lane in toured.lanes:
        for call in toured.of(lane.lane)[1:]:
            assert call.parent is not None, f"a call of {lane.name} continues nothing"
            shared = whole[call.parent][: call.shared]
            assert call.prompt_ids[: call.shared] == shared
            if call.fork_reason is not None:
                found.append((names[call.lane], call.fork_reason.value))
            else:
                assert len(shared) == len(whole[call.parent])
    assert found == list(forks)
