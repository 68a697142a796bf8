"""Runs read back from the store."""

from __future__ import annotations

from pathlib import Path

from proxy_engine import say
from proxy_kit import Proxy
from test_fidelity_cases import scripted
from test_retries import wait_for

from gyre_sdk.harness.proxy.server.budgets import Limits, Prices, out_of_time
from gyre_sdk.harness.proxy.server.lane_states import LaneOpened
from gyre_sdk.harness.proxy.server.state import Lane, RunState
from gyre_sdk.harness.proxy.server.stored_runs import load_run
from gyre_sdk.records import MAIN, LaneId, LaneRecord, RunId


def test_calls_that_have_ended_are_kept_without_their_prompts(model: Path, tmp_path: Path) -> None:
    """The prompts of T tokens in all of a run's calls make up T² of them; the history holds each token once."""
    messages = [{"role": "user", "content": "x" * 200}]
    with scripted(model, tmp_path, {"ok": 301}, say(301, 260)) as (proxy, _):
        access = proxy.run()
        for _ in range(8):
            proxy.chat(access, {"messages": messages, "max_tokens": 4}).raise_for_status()
            messages += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "x" * 200}]
        calls = proxy.calls()
        with proxy.journal() as journal:
            state = load_run(journal, Prices(), access["run"])
    assert state is not None and len(state.history) == 8
    kept = [orphan for orphans in state.orphans.values() for orphan in orphans]
    assert [orphan.prompt_tokens for orphan in kept] == [len(call.prompt_ids) for call in calls]
    assert [orphan.record.sampled_ids for orphan in kept] == [[301, 260]] * 8
    assert [orphan.record.logprobs for orphan in kept] == [call.logprobs for call in calls]
    assert not any(orphan.record.prompt_ids or orphan.messages for orphan in kept)
    last = state.history.get(calls[-1].call)
    assert last is not None and last.whole.tolist() == calls[-1].prompt_ids + calls[-1].sampled_ids


def in_memory(proxy: Proxy) -> int:
    found: int = proxy.control.get("/status").json()["runs_open"]
    return found


def test_a_run_that_nobody_asks_for_leaves_the_memory_and_its_agent_sees_nothing_of_it(
    model: Path, tmp_path: Path
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    more = {**body, "messages": [*body["messages"], {"role": "assistant", "content": "ok"}, *body["messages"]]}
    with scripted(model, tmp_path, {"ok": 301}, say(301, 260), idle=0.1) as (proxy, _):
        access, timed = proxy.run(), proxy.run(limits={"seconds": 3600})
        first = proxy.chat(access, body).json()["id"]
        wait_for(lambda: in_memory(proxy) == 1)
        retry = {"x-stainless-retry-count": "1"}
        assert proxy.chat(access, body, **retry).json()["id"] == first
        wait_for(lambda: in_memory(proxy) == 1)
        assert proxy.chat(access, body).json()["id"] != first, "not a retry: its answer had arrived"
        wait_for(lambda: in_memory(proxy) == 1)
        proxy.chat(access, more).raise_for_status()
        assert proxy.chat(timed, body).status_code == 200
        calls = proxy.calls(access["run"])
    assert [call.fork_reason for call in calls[1:]] == ["retry", None] and calls[2].parent == calls[1].call


def test_a_closed_run_stays_closed_when_it_is_read_back(model: Path, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    with scripted(model, tmp_path, {"ok": 301}, say(301, 260), idle=0.1) as (proxy, _):
        access = proxy.run()
        assert proxy.chat(access, body).status_code == 200
        for _ in range(2):
            assert proxy.control.post(f"/runs/{access['run']}/close", json={}).json()["calls"] == 1
            wait_for(lambda: not in_memory(proxy))
            refused = proxy.chat(access, body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "run_closed")


def test_a_run_rests_when_nothing_goes_on_and_no_clock_runs() -> None:
    run = RunState(RunId("r"), 0.0, Limits(seconds=5.0))
    assert not run.at_rest
    run.spend(out_of_time(run.limits))
    assert run.at_rest
    with run.asked_for():
        assert not run.at_rest
    run.lanes["l"] = Lane(LaneRecord(LaneId("l"), run.run, MAIN, MAIN, None, 0.0), run)
    run.budgets.take(LaneOpened(LaneId("l"), Limits(seconds=5.0)))
    assert not run.at_rest
    run.budgets.spend(LaneId("l"), out_of_time(run.limits))
    assert run.at_rest
