"""The reference loop of the examples, whole: tools in a workspace, a refusal, a helper, a compaction of each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from clients.plays import Prompt, play
from clients.scripted_provider import Reply
from proxy_engine import ScriptedEngine

from gyre_sdk.journal import Journal
from gyre_sdk.records import RunStatus

EXAMPLE = Path(__file__).parents[2] / "examples" / "06_reference_loop.py"


def walk(prompt: Prompt) -> Reply:
    """Look, delegate, submit: each conversation goes by what its summary says, as each turn is compacted."""
    begun = prompt.users[0]
    if prompt.tail.startswith("Summarise"):
        return Reply("Summary: delegated." if "I delegate." in prompt.said else "Summary: looked.")
    if begun.startswith("HELP"):
        if "Summary:" in prompt.tail:
            return Reply("I hand in.", (("submit", {"answer": "it says hi"}),))
        return Reply("I look.", (("bash", {"command": "cat a.txt"}),))
    if "Summary: delegated." in prompt.tail:
        return Reply("I hand in.", (("submit", {"answer": "all done"}),))
    if "Summary: looked." in prompt.tail:
        return Reply("I delegate.", (("delegate", {"task": "HELP: what does a.txt say?"}),))
    return Reply("I look.", (("bash", {"command": "rm -rf /"}), ("bash", {"command": "echo hi > a.txt"})))


def test_the_reference_loop_runs(model: Path, tmp_path: Path) -> None:
    store = tmp_path / "s.db"
    with ScriptedEngine(play(walk, model)) as engine:
        given = ["--model", str(model), "--replica", engine.url, "--store", str(store), "--workspace", "local"]
        command = [sys.executable, str(EXAMPLE), *given, "--compact-at", "1", "TASK: work"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "PostToolUse: bash denied",
        "PostToolUse: bash completed",
        "PreCompact: main",
        "PostCompact: main completed",
        "  SubagentStart: helper",
        "  PostToolUse: bash completed",
        "  PreCompact: helper",
        "  PostCompact: helper completed",
        "  PostToolUse: submit completed",
        "  SubagentStop: helper completed",
        "PostToolUse: delegate completed",
        "PreCompact: main",
        "PostCompact: main completed",
        "PostToolUse: submit completed",
        "RunEnd: main",
        "the run ended: completed after 8 calls: all done",
    ]
    with Journal(store, "r") as journal:
        (run,) = journal.runs()
        roles = [call.role for call in journal.calls(run.run)]
    assert run.status is RunStatus.COMPLETED
    assert roles == (
        ["main", "main-summary", "main", "subagent", "subagent-summary", "subagent", "main-summary", "main"]
    )


def test_it_is_a_page() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 120
