"""The numbered examples run, one after the other, on what the demo recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_sdk.journal import Journal

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def replica(demo_policy: Path) -> Iterator[str]:
    """An engine with the demo's policy; gives its address."""
    engine = subprocess.Popen(
        [sys.executable, "-m", "gyre_sdk.trainer.engines.embedded", "--model", str(demo_policy), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert engine.stdout is not None
        yield next(word for word in engine.stdout.readline().split() if word.startswith("http"))
    finally:
        engine.terminate()
        engine.wait(30)


def test_record_a_call(tmp_path: Path, demo_policy: Path, replica: str) -> None:
    store = str(tmp_path / "s.db")
    out = run("01_record_a_call.py", "--model", str(demo_policy), "--replica", replica, "--store", store)
    assert "the run ended: completed reward 1.0" in out
    assert "main sent [" in out and "by version 0" in out


PROGRAM = """
import openai

client = openai.OpenAI()

def said(role, content):
    return {"role": role, "content": content}

def ask(*messages):
    answer = client.chat.completions.create(model="any", messages=messages, max_tokens=80)
    return answer.choices[0].message

begin = [said("system", "You look around."), said("user", "Look around")]
first = ask(*begin)
review = ask(said("system", "You review."), said("user", "Review what was seen"))
ask(*begin, first, said("user", "They say: " + (review.content or "nothing")))
"""
"""The policy may answer with a call of the tool that it was trained to use, and no text."""


def test_black_box_agent(tmp_path: Path, demo_policy: Path, replica: str) -> None:
    """A program with one key for its own loop and for a helper: two lanes."""
    store = str(tmp_path / "s.db")
    shared = ["--model", str(demo_policy), "--replica", replica, "--store", store]
    out = run("05_black_box_agent.py", *shared, "--", sys.executable, "-c", PROGRAM)
    assert "the run ended: completed" in out
    lanes = [line.split()[:4] for line in out.splitlines() if "started by" in line]
    assert lanes == [["main", "main", "calls:", "2,"], ["subagent", "subagent", "calls:", "1,"]]


@pytest.mark.timeout(600)
def test_tree_selection_and_gradient(finished_demo: tuple[object, dict[str, object]], demo_policy: Path) -> None:
    store = str(finished_demo[1]["store"])
    tree = run("02_tree_of_a_run.py", store)
    assert "subagent" in tree and "different ones" in tree
    weighed = run("03_select_and_weigh.py", store)
    assert "main-summary" in weighed and "advantage" in weighed
    gradient = run("04_one_gradient.py", store, str(demo_policy))
    assert float(gradient.rsplit("gradient norm ", 1)[1]) > 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("trainer", ["grpo", "async"])
def test_trls_trainers(tmp_path: Path, demo_policy: Path, trainer: str) -> None:
    """A step or two of TRL's own trainers on the demo's tasks, in local workspaces."""
    small = ["rollout.groups_per_step=2", "rollout.runs_per_group=4", "rollout.concurrency=8"]
    given = ["--policy", str(demo_policy), "--dir", str(tmp_path), "--steps", "1" if trainer == "grpo" else "2"]
    given += ["--tasks", "2", "--budget", "512", *(part for pair in small for part in ("--set", pair))]
    found = json.loads(run("07_trl_trainers.py", "--trainer", trainer, *given).splitlines()[-1])
    assert found["trainer"] == trainer and 0 <= found["before"] <= 1 and 0 <= found["after"] <= 1
    with Journal(tmp_path / "store.db", "r") as journal:
        trained = [record for record in journal.runs() if record.group is not None]
        versions = {span.version for call in journal.calls() for span in call.versions}
    assert len(trained) >= 8 and all((record.group or "").startswith("trl-") for record in trained)
    assert {record.metadata["split"] for record in trained} == {"train"}
    assert max(versions) >= 2, "the evaluation after it was served by trained weights"
