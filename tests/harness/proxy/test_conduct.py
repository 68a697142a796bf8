"""Calls that are ended at their very first step, or before; what is kept of those that have ended."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy_toy import toy_template

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.answers.deltas import joined
from gyre_sdk.harness.proxy.dialects.canonical import Delta, Part, ToolCall
from gyre_sdk.harness.proxy.routing import ReplicaSpec
from gyre_sdk.harness.proxy.server import ProxySettings
from gyre_sdk.harness.proxy.server.budgets import Limits
from gyre_sdk.harness.proxy.server.conduct import LARGE, Services
from gyre_sdk.harness.proxy.server.conversations import Conversations
from gyre_sdk.harness.proxy.server.fleet import Fleet
from gyre_sdk.harness.proxy.server.intake import Asked, Intake
from gyre_sdk.harness.proxy.server.prepare import OFF_LOOP
from gyre_sdk.harness.proxy.server.protocols import DIALECTS
from gyre_sdk.harness.proxy.server.registry import Registry
from gyre_sdk.harness.proxy.server.state import Lane, RunState
from gyre_sdk.harness.proxy.server.templates import Templates
from gyre_sdk.harness.proxy.upstream import Upstream
from gyre_sdk.journal import Journal
from gyre_sdk.records import MAIN, CallStatus, LaneId, LaneRecord, RunId, RunRecord


async def served(
    folder: Path, use: Callable[[Services, Registry], Awaitable[None]], context: int | None = None
) -> None:
    """Give what serves calls, without HTTP in front; its replica refuses connections."""
    settings = ProxySettings(store=folder / "s.db", model=folder, replicas=(ReplicaSpec("http://127.0.0.1:9"),))
    upstream = Upstream(versions={})
    await upstream.open()
    with Journal(settings.store) as journal:
        fleet = Fleet(upstream, settings.replicas)
        services = Services(
            settings, journal, Templates(settings, replace(toy_template(), context=context)), fleet, asyncio.create_task
        )
        try:
            await use(services, Registry(journal, settings))
        finally:
            await fleet.close()
            await upstream.close()


def opened(services: Services, registry: Registry) -> Lane:
    """Open a run; give its main lane."""
    run, main = RunId("r"), LaneRecord(LaneId("l"), RunId("r"), MAIN, MAIN, None, time.time())
    services.journal.open_run(RunRecord(run=run, task="t", created_at=time.time()), main, "digest").result(30)
    state = RunState(run, time.time(), Limits())
    registry.open_run(state)
    return registry.open_lane(state, main, "digest")


def asked(lane: Lane, prompt: int, **more: str) -> Asked:
    """Return a chat of so many characters."""
    body = json.dumps({"messages": [{"role": "user", "content": "x" * prompt}], **more}).encode()
    return Asked(lane, DIALECTS["/v1/chat/completions"], body, None)


@pytest.mark.parametrize("prompt", [10, LARGE + 10])
def test_a_call_that_is_cancelled_before_its_first_step(tmp_path: Path, prompt: int) -> None:
    """The agent is told why, and the end is on record behind the intent, which a thread writes where it is large."""

    async def use(services: Services, registry: Registry) -> None:
        turn = await Intake(services, Conversations(services.journal)).turn(asked(opened(services, registry), prompt))
        [call] = turn.calls
        call.cancel("the run was closed")
        await call.stopped()
        assert call.error is not None and (call.error.status, call.error.code) == (403, "run_closed")

    asyncio.run(served(tmp_path, use))
    with Journal(tmp_path / "s.db", "r") as journal:
        [call] = journal.calls()
    assert call.status is CallStatus.ABORTED and call.error == "the run was closed" and len(call.prompt_ids) > prompt


def test_a_run_that_is_closed_while_a_request_is_prepared(tmp_path: Path) -> None:
    """Its calls are not begun: nobody would end them."""

    async def use(services: Services, registry: Registry) -> None:
        lane = opened(services, registry)
        asking = asyncio.create_task(
            Intake(services, Conversations(services.journal)).turn(asked(lane, 10, user="x" * OFF_LOOP))
        )
        async with asyncio.timeout(60):
            while not any(lane.run.turns.values()):  # noqa: ASYNC110  nothing tells of it
                await asyncio.sleep(0)
        lane.run.closed = True
        turn = await asking
        assert turn.problem is not None and turn.problem.code == "run_closed"
        assert not lane.run.live and not lane.run.turns

    asyncio.run(served(tmp_path, use))
    with Journal(tmp_path / "s.db", "r") as journal:
        assert list(journal.calls()) == []


def test_requests_that_come_to_nothing_leave_nothing(tmp_path: Path) -> None:
    """An agent may send any number of requests that are too long, or come after the end."""

    async def use(services: Services, registry: Registry) -> None:
        lane = opened(services, registry)
        intake = Intake(services, Conversations(services.journal))
        for number in range(3):
            long = msgspec.structs.replace(asked(lane, 100 + number), key="again")
            turn = await intake.turn(long)
            assert turn.problem is not None and turn.problem.code == "context_length_exceeded"
        lane.run.closed = True
        with pytest.raises(ProtocolError, match="closed"):
            await intake.turn(asked(lane, 1))
        assert not lane.run.turns and not lane.run.keyed and not lane.run.named

    asyncio.run(served(tmp_path, use, context=50))


WORDS = st.lists(st.tuples(st.sampled_from([Part.REASONING, Part.CONTENT, Part.ARGUMENTS]), st.text(min_size=1)))


@given(WORDS, st.lists(st.integers(0, 9), max_size=3))
def test_deltas_that_nobody_reads_any_more_say_the_same(words: list[tuple[Part, str]], calls: list[int]) -> None:
    """In the same order, and never two of one part behind each other."""
    deltas = [Delta(Part.CALL, call=ToolCall("first", "name"))] + [Delta(part, text) for part, text in words]
    for number, place in enumerate(calls):
        deltas.insert(1 + min(place, len(words)), Delta(Part.CALL, call=ToolCall(f"c{number}", "name")))
    few = joined(deltas)
    assert said(few) == said(deltas)
    assert all(a.part is not b.part or a.call for a, b in itertools.pairwise(few))


def said(deltas: list[Delta]) -> list[tuple[Part, str, ToolCall | None]]:
    """Return the letters of deltas, each with its part."""
    return [(item.part, letter, item.call) for item in deltas for letter in item.text or [""]]
