"""The demo itself, small: what it prints and records, and that it resumes after each of its processes is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from demo_kit import Demo

from gyre_sdk.journal import Journal
from gyre_sdk.records import CallStatus, RunStatus

KEYS = [
    *("success_before", "success_after", "greedy_before", "greedy_after", "reward_before", "reward_after"),
    *("runs", "calls", "sampled_tokens", "trained_tokens", "versions", "minutes", "store"),
]
pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]


@pytest.fixture
def demo(tmp_path: Path, demo_policy: Path, base_image: str) -> Demo:
    return Demo(tmp_path, demo_policy)


def gyre(*arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "gyre_sdk.cli", *arguments], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_last_line_is_the_result(finished_demo: tuple[Demo, dict[str, Any]]) -> None:
    demo, result = finished_demo
    assert list(result) == KEYS
    assert result["store"] == str(demo.store)
    assert result["versions"] == 3
    assert result["runs"] == 40 + 3 * 3 * 6 + _runs_ahead(demo)
    assert 0 < result["trained_tokens"] < result["sampled_tokens"]


def _runs_ahead(demo: Demo) -> int:
    """Runs that were made for steps beyond the last one."""
    with Journal(demo.store, "r") as journal:
        train = [run for run in journal.runs() if run.metadata["split"] == "train"]
        return sum(run.status not in (RunStatus.RUNNING, RunStatus.CANCELLED) for run in train) - 54


def test_recorded_ids_equal_what_the_engine_saw(finished_demo: tuple[Demo, dict[str, Any]]) -> None:
    """Both sides' logs agree on every id, log-prob and version of every call."""
    demo, result = finished_demo
    engine = {line["request_id"]: line for line in map(json.loads, demo.engine_log.read_text().splitlines())}
    compared = 0
    with Journal(demo.store, "r") as journal:
        for call in journal.calls():
            if call.status is not CallStatus.DELIVERED:
                continue
            (attempt,) = journal.attempts(call.call)
            seen = engine[f"generate-tokens-{attempt.request_id}"]
            assert call.prompt_ids == seen["prompt_ids"]
            assert call.sampled_ids == seen["sampled_ids"]
            assert call.logprobs == pytest.approx(seen["logprobs"], abs=1e-6)
            spans = [(span.version, span.start, span.end) for span in call.versions]
            assert spans == [(int(span["version"]), span["start"], span["end"]) for span in seen["versions"]]
            compared += 1
    assert compared == result["calls"]


def test_calls_and_samples_of_the_store(finished_demo: tuple[Demo, dict[str, Any]]) -> None:
    demo, _ = finished_demo
    calls = gyre("calls", str(demo.store), "--json")
    assert list(calls[0])[:9] == (
        ["run", "lane", "role", "call", "status", "prompt_ids", "sampled_ids", "logprobs", "versions"]
    )
    roles = Counter(call["role"] for call in calls)
    assert set(roles) == {"main", "main-summary", "subagent", "subagent-summary"}
    samples = gyre("samples", str(demo.store), "--j-max", "5", "--json")
    weights: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    for sample in samples:
        assert len(sample["path_ids"]) == len(sample["owned"]) == len(sample["weights"])
        assert all(
            (weight > 0) == bool(owned) for weight, owned in zip(sample["weights"], sample["owned"], strict=True)
        )
        weights[sample["run"]] += sum(sample["weights"])
        rows[sample["run"]] += 1
    assert all(total == pytest.approx(1.0) for total in weights.values())
    assert max(rows.values()) <= 5 and max(rows.values()) > 1
    assert {sample["role"] for sample in samples} == set(roles)


def test_nothing_is_left_running(finished_demo: tuple[Demo, dict[str, Any]], docker_client: Any) -> None:
    demo, _ = finished_demo
    with Journal(demo.store, "r") as journal:
        assert not journal.runs(status=RunStatus.RUNNING)
        assert {lane.run for lane in journal.lanes()} == {run.run for run in journal.runs()}
    listed = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    assert str(demo.folder) not in listed


def test_killed_in_the_middle_it_goes_on(demo: Demo) -> None:
    """kill -9 of proxy, agents and engine: it goes on by itself. Of the trainer: it finishes when it is run again."""
    process = demo.start(tasks=2)
    output: list[str] = []
    reader = threading.Thread(target=lambda: output.extend(process.stdout or []))
    reader.start()
    for restarts, (step, victim) in enumerate(((1, "proxy"), (1, "agents"), (2, "engine")), 1):
        _wait(lambda step=step: any(f"step {step}/3" in line for line in output), process, output)
        _kill(process, victim)
        _wait(lambda count=restarts: sum("restarted" in line for line in output) >= count, process, output)
    _kill(process, "trainer")
    process.wait(420)
    reader.join(30)
    assert process.returncode == -signal.SIGKILL
    result = demo.finish(demo.start(tasks=2))
    assert list(result) == KEYS
    _wait(lambda: not _children_of(demo.folder), None, output)
    with Journal(demo.store, "r") as journal:
        runs = journal.runs()
        assert not [run for run in runs if run.status is RunStatus.RUNNING]
        assert _consistent(journal) >= result["calls"]
    published = _published(demo.store)
    assert len(published) == len(set(published)) >= 3, f"a version was reused: {published}"


def _kill(process: subprocess.Popen[str], victim: str) -> None:
    if victim == "trainer":
        os.kill(process.pid, signal.SIGKILL)
        return
    marker = {"proxy": "gyre_sdk.cli serve", "agents": "agents.host", "engine": "engines.embedded"}[victim]
    pids = [pid for pid, args in _processes(process.pid) if marker in args]
    assert pids, f"no {victim} among {_processes(process.pid)}"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _processes(parent: int) -> list[tuple[int, str]]:
    listed = subprocess.run(["ps", "-eww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [(int(pid), int(above), args) for pid, above, args in (line.split(None, 2) for line in listed.splitlines())]
    family = {parent}
    while grown := {pid for pid, above, _ in rows if above in family} - family:
        family |= grown
    return [(pid, args) for pid, _, args in rows if pid in family - {parent}]


def _children_of(folder: Path) -> list[str]:
    listed = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if str(folder) in line]


def _wait(condition: Callable[[], Any], process: subprocess.Popen[str] | None, output: list[str]) -> None:
    for _ in range(2400):
        if condition():
            return
        assert process is None or process.poll() is None, "".join(output)[-4000:]
        time.sleep(0.1)
    pytest.fail("".join(output)[-4000:])


def _consistent(journal: Journal) -> int:
    """Check every answered call: ids with log-probs, versions that cover them."""
    count = 0
    for call in journal.calls():
        if call.status in (CallStatus.COMPLETE, CallStatus.DELIVERED):
            assert len(call.logprobs) == len(call.sampled_ids) > 0
            assert call.versions[0].start == 0 and call.versions[-1].end == len(call.sampled_ids)
            count += 1
    return count


def _published(store: Path) -> list[int]:
    from gyre_sdk.trainer.ledger import Ledger

    with Journal(store, "r") as journal:
        return sorted(Ledger(journal).state.versions)
