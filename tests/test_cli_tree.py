"""`gyre tree` over a real store: the tree of a run in JSON of a fixed shape, and in lines for people."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gyre_sdk.cli import main
from gyre_sdk.journal import CallIntent, Journal, TokenChunk
from gyre_sdk.records import (
    AttemptRecord,
    CallId,
    CallStatus,
    ForkReason,
    LaneId,
    LaneRecord,
    RunId,
    RunRecord,
    RunStatus,
    Sampling,
    VersionSpan,
)

RUN = RunId("r1")


def record(
    journal,
    name,
    prompt,
    sampled,
    *,
    role="main",
    parent=None,
    reason=None,
    shared=0,
    deliver=True,
    version=2,
    top_p=1.0,
):
    call = CallId(name)
    intent = CallIntent(
        call,
        RUN,
        LaneId("lane"),
        role,
        CallId(parent) if parent else None,
        reason,
        shared,
        prompt,
        Sampling(top_p=top_p),
        {},
        [],
        1.0,
    )
    journal.call_received(intent)
    chunk = TokenChunk(0, sampled, [-0.5] * len(sampled), [VersionSpan(version, 0, len(sampled))])
    journal.call_ended(call, CallStatus.COMPLETE, at=2.0, sampled=chunk, finish_reason="stop").result()
    if deliver:
        journal.call_delivered(call).result()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A run that compacts twice over, with an attempt that was rejected, an answer that was lost, and one begun anew."""
    path = tmp_path_factory.mktemp("tree") / "gyre.db"
    with Journal(path) as journal:
        lane = LaneRecord(LaneId("lane"), RUN, "main", "main", None, 0.0)
        journal.open_run(RunRecord(RUN, "fix \x1b[2J", 0.0), lane, "key").result()
        record(journal, "c1", [1, 2, 3], [4, 5])
        record(journal, "c2", [1, 2, 3, 4, 5, 6], [8, 9], parent="c1", shared=5, version=3)
        record(journal, "c3", [1, 2, 3, 4, 5, 6, 8, 9, 10], [41, 42, 43], role="main-summary", parent="c2", shared=8)
        record(journal, "c4", [1, 2, 3, 4, 5, 6, 8, 9, 10], [11, 12, 13], role="main-summary", parent="c2", shared=8)
        record(
            journal, "c5", [1, 2, 20, 11, 12, 21], [22], parent="c4", reason=ForkReason.COMPACTION, shared=2, version=4
        )
        record(
            journal, "c6", [1, 2, 20, 11, 12, 21], [23], parent="c4", reason=ForkReason.RETRY, shared=2, deliver=False
        )
        attempt = AttemptRecord(CallId("c1"), 0, "replica", "c1.0", 0, 0, "open")
        journal.call_dispatched(attempt).result()
        ended = AttemptRecord(CallId("c1"), 0, "replica", "c1.0", 0, 7, "abandoned")
        journal.attempt_ended(ended, TokenChunk(0, [1] * 7, [-1.0] * 7, [])).result()
        journal.end_run(RUN, RunStatus.COMPLETED, at=9.0, reward=0.5).result()
    return path


def test_the_json_has_the_documented_shape(store, capfdbinary):
    main_of("tree", store, RUN, "--json", "--tokens")
    found = json.loads(capfdbinary.readouterr().out)
    assert list(found) == [
        "run", "task", "group", "member", "status", "reward", "placeholder", "raw_tokens", "unique_tokens",
        "sampled_tokens", "trained_tokens", "untrained", "trajectories", "nodes", "calls",
    ]  # fmt: skip
    assert (found["run"], found["status"], found["reward"]) == ("r1", "completed", 0.5)
    assert found["untrained"] == {"orphan": 1, "rejected": 1}
    calls = {entry["call"]: entry for entry in found["calls"]}
    assert list(calls["c1"]) == [
        "call", "lane", "role", "status", "node", "parent", "fork", "prompt_tokens", "sampled_tokens", "versions",
        "trained_in", "untrained", "given_up",
    ]  # fmt: skip
    assert calls["c1"]["given_up"] == [7] and calls["c2"]["given_up"] == []
    assert calls["c2"]["versions"] == [{"version": 3, "start": 0, "end": 2}]
    assert calls["c5"]["fork"] == {"reason": "compaction", "origin": "c4", "shared": 2}
    assert {name: entry["trained_in"] for name, entry in calls.items()} == {
        "c1": "c4", "c2": "c4", "c3": None, "c4": "c4", "c5": "c5", "c6": None,
    }  # fmt: skip
    assert calls["c3"]["untrained"] == "rejected" and calls["c3"]["status"] == "delivered"
    assert calls["c6"]["untrained"] == "orphan" and calls["c6"]["status"] == "complete"
    assert list(found["nodes"][0]) == ["node", "above", "start", "stop", "calls", "ids"]
    assert found["nodes"][0] == {"node": 0, "above": None, "start": 0, "stop": 2, "calls": [], "ids": [1, 2]}
    chosen = {entry["leaf"]: entry for entry in found["trajectories"]}
    assert chosen["c4"]["owned"] == 7 and chosen["c4"]["tokens"] == 12
    assert chosen["c4"]["stretches"][0] == {"call": "c1", "start": 3, "stop": 5, "owned": True}


def main_of(*arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert not ended.value.code


def test_without_tokens_the_json_has_no_ids(store, capfdbinary):
    main_of("tree", store, RUN, "--json", "--j-max", "1")
    found = json.loads(capfdbinary.readouterr().out)
    assert all(node["ids"] is None for node in found["nodes"])
    assert len(found["trajectories"]) == 1
    assert found["untrained"]["not_selected"] >= 1


def test_the_lines_tell_roles_versions_fates_and_forks(store, capfd):
    main_of("tree", store.parent, RUN, "--tokens")
    text = capfd.readouterr().out
    assert "run r1, task fix \\e[2J: completed, reward 0.50" in text
    assert "calls not trained: 1 orphan, 1 rejected" in text
    assert "shared by 6 calls" in text
    expected = [
        ("main x2  4 sampled  versions 2-3  trained in", "gave up 7 tokens of 1 engine attempt  c1 .. c2"),
        ("main-summary  3 sampled  version 2  rejected", "c3"),
        ("main  1 sampled  version 4  trained in", "forks: compaction x1  c5"),
        ("orphan", "forks: retry x1  c6"),
    ]
    for parts in expected:
        assert any(all(part in line for part in parts) for line in text.splitlines()), parts
    assert "3 [4 5] 6 [8 9]" in text


def test_a_run_that_is_not_there_is_an_error_of_one_line(store):
    done = subprocess.run(
        [sys.executable, "-m", "gyre_sdk.cli", "tree", str(store), "nowhere"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("gyre: run 'nowhere' is not in ") and len(done.stderr.splitlines()) == 1


def test_a_call_that_the_trainer_cannot_compute_again_is_told_so(tmp_path, capfdbinary):
    with Journal(tmp_path / "gyre.db") as journal:
        lane = LaneRecord(LaneId("lane"), RUN, "main", "main", None, 0.0)
        journal.open_run(RunRecord(RUN, "task", 0.0), lane, "key").result()
        record(journal, "a", [1], [2], top_p=0.5)
        record(journal, "b", [1, 2, 3], [4], parent="a", shared=2)
    main_of("tree", tmp_path, RUN, "--json")
    found = json.loads(capfdbinary.readouterr().out)
    assert found["untrained"] == {"sampling": 1} and found["trained_tokens"] == 1


def test_an_empty_run_has_an_empty_tree(tmp_path, capfd):
    with Journal(tmp_path / "gyre.db") as journal:
        lane = LaneRecord(LaneId("lane"), RUN, "main", "main", None, 0.0)
        journal.open_run(RunRecord(RUN, "task", 0.0), lane, "key").result()
    main_of("tree", tmp_path, RUN)
    assert "0 calls, 0 tokens sent and sampled, 0 different" in capfd.readouterr().out
