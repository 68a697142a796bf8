"""Limits of a run and of lanes in it: each ends what it is about, the run is scored, nothing outlives its budget."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_engine import Finish, ScriptedEngine, Tokens, Wait
from session_kit import QUESTION, SAMPLED, a_task, ask, stored

import gyre_sdk as gyre
from gyre_sdk.errors import SettingsError
from gyre_sdk.harness.agent.accounts import Accounts, Budget
from gyre_sdk.harness.hooks import Outcome
from gyre_sdk.harness.limits import Limits, classify
from gyre_sdk.harness.proxy.routing import ReplicaSpec
from gyre_sdk.harness.proxy.server.budgets import Prices
from gyre_sdk.harness.scoring import POLICY
from gyre_sdk.harness.service import MeteredCall
from gyre_sdk.harness.session import SystemClock
from gyre_sdk.records import CallStatus, End, RunStatus


@pytest.mark.parametrize("name", ["turns", "tokens", "cost_usd", "wall_s", "working_s"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_impossible_limits_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(SettingsError, match=rf"limits: {name} = .*above 0"):
        Limits(**{name: value})


@pytest.mark.parametrize(
    ("limit", "end"),
    [
        ("turns", End.LIMIT),
        ("tokens", End.LIMIT),
        ("cost_usd", End.LIMIT),
        ("wall_s", End.TIMED_OUT),
        ("working_s", End.TIMED_OUT),
    ],
)
def test_each_limit_ends_a_run_in_its_own_way(limit: str, end: End) -> None:
    ending = classify(gyre.LimitExceeded("spent", limit=limit))
    assert (ending.end, POLICY[ending.end].graded, ending.swallow) == (end, True, True)


# -- of a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "calls", "status"),
    [(Limits(turns=2), 2, RunStatus.LIMIT), (Limits(tokens=40), None, RunStatus.LIMIT)],
)
def test_calls_beyond_a_runs_budget_are_refused_and_the_run_is_scored(
    service: gyre.ServiceClient,
    tmp_path: Path,
    limits: Limits,
    calls: int | None,
    status: RunStatus,
) -> None:
    with gyre.session(a_task(), service=service, workspace="local", limits=limits) as agent:
        agent.workspace.exec("echo yes > answer")
        while True:
            ask(agent.openai())
    assert (agent.result.status, agent.result.reward) == (status, 1.0)
    assert calls is None or len(stored(tmp_path)[2]) == calls


class TurnedClock(SystemClock):
    """The machine's clock, turned forward by hand."""

    ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


def until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not found() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found()


def test_working_time_leaves_out_the_model_and_ends_the_run(model: Path, tmp_path: Path) -> None:
    """A call of 1000 s does not count; what comes after it does."""
    release, clock = threading.Event(), TurnedClock()
    with ScriptedEngine(lambda request, number: [Tokens([40]), Wait(release), Tokens([2]), Finish()]) as slow:
        settings = gyre.ProxySettings(store=tmp_path / "s.db", model=model, replicas=(ReplicaSpec(slow.url, 0),))
        limits = Limits(working_s=60.0)
        with gyre.session(a_task(), proxy=settings, workspace="local", limits=limits, clock=clock) as agent:
            accounts = agent.context.meter._accounts
            thread = threading.Thread(target=ask, args=(agent.openai(),))
            thread.start()
            until(lambda: bool(accounts.in_flight))
            clock.ahead += 1000.0
            until(lambda: accounts.budgets[agent.lane].waiting_s >= 1000.0)
            release.set()
            thread.join()
            agent.workspace.exec("echo yes > answer")
            clock.ahead += 61.0
            agent.workspace.exec("rm answer")
    assert (agent.result.status, agent.result.reward, agent.result.calls) == (RunStatus.TIMED_OUT, 1.0, 1)
    assert "60 s of working time" in (stored(tmp_path)[0].error or "")


PROGRAM = """
import openai, time
client = openai.OpenAI(max_retries=0)
for _ in range(200):
    client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Run ls"}])
    time.sleep(0.05)
"""


def test_working_time_closes_the_key_of_a_program_that_knows_nothing_of_it(
    service: gyre.ServiceClient,
) -> None:
    with gyre.session(a_task(), service=service, workspace="local", limits=Limits(working_s=1.0)) as agent:
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=agent.environment, capture_output=True, text=True)
    assert "revoked" in done.stderr
    assert agent.result.status is RunStatus.TIMED_OUT


# -- of a lane -----------------------------------------------------------------------------------------------------------


def test_a_subagents_turns_end_it_and_the_run_goes_on(service: gyre.ServiceClient, tmp_path: Path) -> None:
    stops: list[gyre.SubagentStop] = []
    hooks = gyre.Hooks(SubagentStop=stops.append)
    with gyre.session(a_task(), service=service, workspace="local", hooks=hooks) as agent:
        with pytest.raises(gyre.LimitExceeded, match="lane 'helper' has spent its budget of 2 turns") as caught:
            with agent.subagent("helper", limits=Limits(turns=2)) as helper:
                ask(helper.openai())
                ask(helper.openai(max_retries=0))
                helper.workspace.exec("echo yes > answer")  # tools may follow the last call
                ask(helper.openai())
        assert (caught.value.limit, caught.value.lane) == ("turns", helper.lane)
        assert isinstance(caught.value.__cause__, openai.PermissionDeniedError)
        ask(agent.openai())
    assert (agent.result.status, agent.result.reward) == (RunStatus.COMPLETED, 1.0)
    assert [call.role for call in stored(tmp_path)[2]] == ["subagent", "subagent", "main"]
    assert [stop.outcome for stop in stops] == [Outcome.LIMIT]


def test_uncaught_it_ends_the_run_scored(service: gyre.ServiceClient) -> None:
    with gyre.session(a_task(), service=service, workspace="local") as agent:
        agent.workspace.exec("echo yes > answer")
        with agent.subagent("helper", limits=Limits(tokens=1)) as helper:
            for _ in range(3):
                ask(helper.openai())
    assert (agent.result.status, agent.result.reward) == (RunStatus.LIMIT, 1.0)


def test_what_a_subagent_opens_counts_against_it_and_the_inner_limit_may_be_smaller(
    service: gyre.ServiceClient,
    tmp_path: Path,
) -> None:
    with gyre.session(a_task(), service=service, workspace="local", limits=Limits(turns=20)) as agent:
        with agent.subagent("outer", limits=Limits(turns=4)) as outer:
            with pytest.raises(gyre.LimitExceeded, match=r"lane 'inner' .* 1 turn$"):
                with outer.subagent("inner", limits=Limits(turns=1)) as inner:
                    ask(inner.openai())
                    ask(inner.openai())
            with outer.compaction() as summary:
                ask(summary.openai())
            with outer.subagent("second") as second:
                ask(second.openai())
                ask(second.openai())
                with pytest.raises(openai.PermissionDeniedError, match=r"lane 'outer' .* 4 turns"):
                    ask(second.openai())
            with pytest.raises(openai.PermissionDeniedError, match=r"lane 'outer' .* 4 turns"):
                ask(outer.openai())
        ask(agent.openai())
    assert agent.result.status is RunStatus.COMPLETED
    assert len(stored(tmp_path)[2]) == 5


def test_every_kind_of_client_asks_before_it_calls(service: gyre.ServiceClient, tmp_path: Path) -> None:
    async def async_clients(lane: Any) -> None:
        async with lane.async_openai() as client:
            with pytest.raises(openai.PermissionDeniedError, match=r"1 turn\b"):
                await client.responses.create(model="policy", input="Run ls")
        async with lane.async_anthropic() as other:
            with pytest.raises(anthropic.PermissionDeniedError, match=r"1 turn\b"):
                await other.messages.create(model="policy", max_tokens=8, messages=QUESTION)

    with gyre.session(a_task(), service=service, workspace="local") as agent:
        with agent.subagent(limits=Limits(turns=1)) as lane:
            with lane.anthropic() as client:
                client.messages.create(model="policy", max_tokens=8, messages=QUESTION)  # type: ignore[arg-type]
                with pytest.raises(anthropic.PermissionDeniedError, match=r"1 turn\b"):
                    client.messages.create(model="policy", max_tokens=8, messages=QUESTION)  # type: ignore[arg-type]
            asyncio.run(async_clients(lane))
    assert len(stored(tmp_path)[2]) == 1


def test_threads_that_ask_at_once_get_no_more_than_there_is(service: gyre.ServiceClient, tmp_path: Path) -> None:
    with gyre.session(a_task(), service=service, workspace="local") as agent:
        with agent.subagent(limits=Limits(turns=3)) as lane, ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(ask, lane.openai()) for _ in range(8)]
            refused = [answer for answer in answers if answer.exception() is not None]
    assert len(refused) == 5 and len(stored(tmp_path)[2]) == 3


def run_program(lane: Any, calls: int) -> str:
    """Let a program that knows nothing of limits call with a lane's key; return what its SDK raised."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("200", str(calls)).replace("0.05", "0")],
        env=lane.environment,
        capture_output=True,
        text=True,
    )
    return done.stderr


@pytest.mark.parametrize(
    ("limits", "calls", "said"), [(Limits(turns=2), 2, "2 turns"), (Limits(tokens=40), None, "40 tokens")]
)
def test_whoever_has_a_lanes_key_is_held_to_its_limits(
    service: gyre.ServiceClient, tmp_path: Path, limits: Limits, calls: int | None, said: str
) -> None:
    """Exactly, and by name at the end of the block; the key of a lane below, too."""
    with gyre.session(a_task(), service=service, workspace="local") as agent:
        with pytest.raises(gyre.LimitExceeded, match=f"lane 'helper' has spent its budget of {said}") as caught:
            with agent.subagent("helper", limits=limits) as helper:
                with helper.subagent("below") as below:
                    assert f"lane 'helper' has spent its budget of {said}" in run_program(below, 1000)
                ask(openai.OpenAI(base_url=helper.base_url, api_key=helper.api_key, max_retries=0))
        assert (caught.value.limit, caught.value.lane) == (said.split()[1], helper.lane)
        ask(agent.openai())
    made = [call for call in stored(tmp_path)[2] if call.role == "subagent"]
    assert len(made) == calls or calls is None
    assert limits.tokens is None or sum(len(call.prompt_ids) + len(call.sampled_ids) for call in made) <= limits.tokens


def test_an_async_block_ends_with_the_lanes_own_limit(service: gyre.ServiceClient) -> None:
    stops: list[gyre.SubagentStop] = []

    async def work(agent: Any) -> None:
        async with agent.subagent("helper", limits=Limits(turns=1)) as helper, helper.async_openai() as client:
            for _ in range(2):
                await client.responses.create(model="policy", input="Run ls")

    hooks = gyre.Hooks(SubagentStop=stops.append)
    with gyre.session(a_task(), service=service, workspace="local", hooks=hooks) as agent:
        with pytest.raises(gyre.LimitExceeded, match=r"1 turn\b"):
            asyncio.run(work(agent))
    assert [stop.outcome for stop in stops] == [Outcome.LIMIT]


def test_a_lanes_working_time_closes_its_key(model: Path, tmp_path: Path, engine: ScriptedEngine) -> None:
    """What the service does not know of is looked after here, for clients of the lane and for others."""
    clock = TurnedClock()
    settings = gyre.ProxySettings(store=tmp_path / "s.db", model=model, replicas=(ReplicaSpec(engine.url, 0),))
    with gyre.session(a_task(), proxy=settings, workspace="local", clock=clock) as agent:
        with pytest.raises(gyre.LimitExceeded, match="60 s of working time") as caught:
            with agent.subagent("helper", limits=Limits(working_s=60.0)) as helper:
                client = openai.OpenAI(base_url=helper.base_url, api_key=helper.api_key, max_retries=0)
                ask(client)
                clock.ahead += 61.0
                with pytest.raises(openai.PermissionDeniedError, match="60 s of working time"):
                    ask(helper.openai(max_retries=0))
                deadline = time.monotonic() + 60
                while time.monotonic() < deadline:
                    ask(client)
        assert caught.value.limit == "working_s" and isinstance(caught.value.__cause__, openai.AuthenticationError)
        ask(agent.openai())


def test_a_lane_that_was_opened_elsewhere_ends_with_the_runs_working_time(service: gyre.ServiceClient) -> None:
    clock, limits = TurnedClock(), Limits(working_s=60.0)
    with gyre.session(a_task(), service=service, workspace="local", clock=clock, limits=limits) as agent:
        opened = service.open_lane(agent.run, role="subagent", name="elsewhere", parent=agent.lane)
        client = openai.OpenAI(base_url=opened.base_url, api_key=opened.api_key, max_retries=0)
        ask(client)
        deadline = time.monotonic() + 60
        while not agent.context.meter.metered(opened.lane):
            assert time.monotonic() < deadline, "its call is on record, and nobody looked"
            time.sleep(0.02)
        clock.ahead += 61.0
        with pytest.raises(openai.AuthenticationError):
            while time.monotonic() < deadline:
                ask(client)
    assert agent.result.status is RunStatus.TIMED_OUT


def test_a_lanes_wall_time_ends_its_tools_and_its_calls(service: gyre.ServiceClient) -> None:
    with gyre.session(a_task(), service=service, workspace="local") as agent:
        with pytest.raises(gyre.LimitExceeded, match=r"0\.5 s of wall time") as caught:
            with agent.subagent("slow", limits=Limits(wall_s=0.5)) as slow:
                slow.tools.run({"type": "tool_use", "id": "t", "name": "bash", "input": {"command": "sleep 30"}})
        assert caught.value.limit == "wall_s"
        client = openai.OpenAI(base_url=slow.base_url, api_key=slow.api_key, max_retries=0)
        with pytest.raises(openai.PermissionDeniedError, match=r"0\.5 s of wall time"):
            ask(client)
        ask(agent.openai())
    assert agent.result.status is RunStatus.COMPLETED


def test_a_lanes_budget_of_cost(model: Path, tmp_path: Path) -> None:
    """The lane and those below it end at their dollars, the run goes on."""
    with ScriptedEngine(lambda request, number: [Tokens([40]), Finish()]) as engine:
        replicas = (ReplicaSpec(engine.url, 0),)
        priced = gyre.ProxySettings(store=tmp_path / "s.db", model=model, replicas=replicas, prices=Prices(sampled=1e6))
        with gyre.session(a_task(), proxy=priced, workspace="local") as agent:
            with pytest.raises(gyre.LimitExceeded, match="has spent its budget of 3 US dollars") as caught:
                with agent.subagent("helper", limits=Limits(cost_usd=3.0)) as helper:
                    with helper.subagent("below", limits=Limits(cost_usd=100.0)) as below:
                        for _ in range(9):
                            ask(below.openai(max_retries=0))
            assert (caught.value.limit, caught.value.lane) == ("cost_usd", helper.lane)
            ask(agent.openai())
    assert agent.result.status is RunStatus.COMPLETED


# -- the accounts --------------------------------------------------------------------------------------------------------

OPEN, ENDED = CallStatus.STREAMING, CallStatus.DELIVERED


def accounts() -> tuple[Accounts, Budget, Budget]:
    """Return accounts with a lane `a`, and `b` that it opened, both with budgets; `c` is opened by `b`."""
    found = Accounts(parents={"main": None, "a": "main", "b": "a", "c": "b", "d": "main"})
    for lane in ("a", "b"):
        found.budgets[lane] = Budget(lane, f"lane {lane!r}", True, Limits(turns=100, working_s=100.0), 0.0)
    return found, found.budgets["a"], found.budgets["b"]


@settings(deadline=None)
@given(st.lists(st.sampled_from("abcd"), max_size=12), st.randoms())
def test_however_the_record_is_read_it_is_known_what_is_in_flight(calls: list[str], random: Any) -> None:
    """Calls begin in order and end in any; the record is read again and again in between, never more than is needed."""
    found, _, _ = accounts()
    events = [(seq, False) for seq in range(len(calls))]
    for seq in range(len(calls)):
        events.insert(random.randint(events.index((seq, False)) + 1, len(events)), (seq, True))
    begun: dict[int, bool] = {}
    for seq, ended in events:
        begun[seq] = ended
        record = [
            MeteredCall(at + 1, f"c-{at}", calls[at], ENDED if done else OPEN, 5, 1)
            for at, done in sorted(begun.items())
            if at + 1 > found.cursor
        ]
        if random.random() < 0.7:
            found.read(record)
            found.read([call for call in record if call.seq > found.cursor])
            assert found.in_flight == {f"c-{at}": calls[at] for at, done in begun.items() if not done}
            assert all(begun[at] for at in range(found.cursor))
    found.read(
        [MeteredCall(at + 1, f"c-{at}", lane, ENDED, 5, 1) for at, lane in enumerate(calls) if at >= found.cursor]
    )
    assert (found.in_flight, found.cursor) == ({}, len(calls))


def test_time_in_which_calls_are_in_flight_is_waiting() -> None:
    found, a, b = accounts()
    found.look(0.0)
    found.read([MeteredCall(1, "c-1", "c", OPEN, 5, 0), MeteredCall(2, "c-2", "a", OPEN, 5, 0)])
    found.look(2.0)
    found.read([MeteredCall(1, "c-1", "c", ENDED, 5, 1), MeteredCall(2, "c-2", "a", OPEN, 5, 0)])
    found.look(3.0)
    found.read([MeteredCall(2, "c-2", "a", ENDED, 5, 1)])
    found.look(10.0)
    assert (a.waiting_s, b.waiting_s) == (3.0, 2.0)
    assert (a.left_s(10.0), b.left_s(10.0)) == (93.0, 92.0)
    assert found.below("a") == ["a", "b", "c"]


def test_the_answer_of_a_scripted_engine_has_the_length_that_these_tests_count_on(
    service: gyre.ServiceClient,
) -> None:
    with gyre.session(a_task(), service=service, workspace="local") as agent:
        ask(agent.openai())
    assert agent.result.sampled_tokens == SAMPLED
