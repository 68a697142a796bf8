"""Runs read back from the store."""

from __future__ import annotations

from pathlib import Path

from proxy_engine import say
from test_fidelity_cases import scripted

from gyre_sdk.harness.proxy.server.budgets import Prices
from gyre_sdk.harness.proxy.server.stored_runs import load_run


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
