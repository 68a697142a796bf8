"""`gyre report` over real stores: its figures, its page, what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "view"))

from cell_events import SMALL

from gyre_sdk.cli import main
from gyre_sdk.harness.scoring.record import EVALUATED, Evaluated
from gyre_sdk.harness.scoring.record import STREAM as SCORING
from gyre_sdk.journal import CallIntent, Journal, TokenChunk
from gyre_sdk.records import (
    CallId,
    CallStatus,
    ForkReason,
    GroupId,
    LaneId,
    LaneRecord,
    RunId,
    RunRecord,
    RunStatus,
    Sampling,
    Score,
    VersionSpan,
)
from gyre_sdk.trainer import ledger
from gyre_sdk.view.cells import STREAM as CELLS

HOSTILE = "<script>alert(1)</script>"


def gyre(capsys, *arguments) -> tuple[int, str, str]:
    """Run a command in this process: (exit status, standard output, standard error)."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    return ended.value.code or 0, out.out, out.err


def open_run(journal: Journal, name: str, task: str = "task", *, at: float = 100.0, **more) -> None:
    run = RunRecord(RunId(name), task, at, **more)
    journal.open_run(run, LaneRecord(LaneId(name), RunId(name), "main", "main", None, at), f"key-{name}").result()


def end_run(journal: Journal, name: str, reward: float | None, *, at: float = 110.0, **more) -> None:
    status = more.pop("status", RunStatus.COMPLETED)
    journal.end_run(RunId(name), status, at=at, reward=reward, **more).result()


def record(journal: Journal, run: str, name: str, sampled: list[int], **more) -> None:
    """Record a call that is complete, with what a provider said where a hosted model answered."""
    call, fork, answer = CallId(name), more.get("fork"), more.get("answer")
    intent = CallIntent(call, RunId(run), LaneId(run), "main", None, fork, 0, [1], Sampling(), {}, [], 101.0)
    journal.call_received(intent).result()
    spans = [VersionSpan(2, 0, len(sampled))] if sampled else []
    chunk = TokenChunk(0, sampled, [-0.5] * len(sampled), spans)
    status = more.get("status", CallStatus.COMPLETE)
    journal.call_ended(call, status, at=102.0, sampled=chunk, answer=answer, error=more.get("error")).result()


@pytest.fixture
def store(tmp_path):
    """Runs of an agent without a training: scored, hostile, hosted, still going."""
    with Journal(tmp_path / "gyre.db") as journal:
        for name in ("r1", "r2"):
            open_run(journal, name, f"task {HOSTILE}", group=GroupId("g"))
        open_run(journal, "r3", "other")
        open_run(journal, "r4", "other")
        record(journal, "r1", "a", [2, 3])
        record(journal, "r1", "b", [4], fork=ForkReason.COMPACTION)
        record(journal, "r2", "c", [], status=CallStatus.FAILED, error=f"broken {HOSTILE}")
        said = {"usage": {"prompt_tokens": 9, "completion_tokens": 40}, "cost": 0.125}
        record(journal, "r3", "d", [], answer={"role": "assistant", "content": "x", "extra": {"provider": said}})
        end_run(journal, "r1", 1.0, at=160.0)
        end_run(journal, "r2", 0.5)
        end_run(journal, "r3", None, status=RunStatus.AGENT_ERROR, error=f"<b>bold</b> {HOSTILE}\nsecond line")
        score = Score(1.0, tampered=(f"conftest.py {HOSTILE}",))
        journal.append(SCORING, EVALUATED, Evaluated("r1", "task", score), at=161.0).result()
    return tmp_path


@pytest.fixture
def trained(tmp_path):
    """Two committed steps, the second made again after a restart, and cells."""
    with Journal(tmp_path / "gyre.db") as journal:
        for number, reward in enumerate((0.0, 1.0, 0.5, 0.5)):
            open_run(journal, f"r{number}", group=GroupId(f"g{number // 2}"))
            record(journal, f"r{number}", f"c{number}", [5, 6, 7])
            end_run(journal, f"r{number}", reward)
        open_run(journal, "e", "held-out", metadata={"split": "after"}, dispatch_version=1)
        end_run(journal, "e", 1.0)
        found = ledger.Ledger(journal)
        for group in range(2):
            found.add(ledger.GroupPlanned(f"g{group}", group, "task", 2), at=200.0)
        found.add(ledger.StepStarted(1, ["g0"]), at=201.0)
        found.add(ledger.GroupClosed("g0", ["r0", "r1"], [0.0, 1.0], 0), at=202.0)
        found.add(ledger.UnitSealed("u0", "g0", 2, 6), at=203.0)
        metrics = {"loss": 0.25, "grad_norm": 2.0, "seconds": 5.0, "seconds_waiting": 4.0}
        found.add(ledger.StepCommitted(1, ["u0"], metrics), at=204.0)
        found.add(ledger.VersionAllocated(1, 1), at=205.0)
        found.add(ledger.VersionPublished(1, "digest"), at=205.5)
        found.add(ledger.StepStarted(2, ["g1"]), at=206.0)
        found.add(ledger.GroupClosed("g1", ["r2", "r3"], [0.5, 0.5], 1), at=207.0)
        found.add(ledger.StepCommitted(2, [], {"untrained/group_flat": 1.0}), at=208.0)
        found.add(ledger.Resumed(1), at=209.0)
        found.add(ledger.StepStarted(2, ["g1"]), at=210.0)
        found.add(ledger.StepCommitted(2, [], {"untrained/group_flat": 1.0}), at=211.0)
        found.add(ledger.StepStarted(3, []), at=212.0)
        for event in SMALL:
            journal.append(CELLS, type(event).__name__, event, at=event.at).result()
    return tmp_path


def test_the_figures_of_a_store_without_a_training(capsys, store):
    status, out, _ = gyre(capsys, "report", store, "--json")
    found = json.loads(out)
    head = found["head"]
    assert status == 0 and not (store / "report.html").exists()
    assert head["statuses"] == {"completed": 2, "agent_error": 1, "running": 1}
    assert (head["calls"], head["sampled"], head["versions"]) == (4, 43, [2, 2])
    assert (head["hosted"], head["dollars"], head["unpriced"]) == (1, 0.125, 0)
    assert (head["began"], head["ended"]) == (100.0, 160.0)
    rows = {row["task"]: row for row in found["tasks"]}
    task, other = rows[f"task {HOSTILE}"], rows["other"]
    assert (task["mean"], task["best"], task["solved"], task["scored"]) == (0.75, 1.0, 1, 2)
    assert (other["mean"], other["going"], other["unscored"]) == (None, 1, 1)
    assert [(one["name"], one["p50"], one["most"]) for one in found["lengths"]] == [
        ("seconds", 10.0, 60.0),
        ("calls", 1.0, 2.0),
        ("sampled tokens", 3.0, 40.0),
    ]
    assert found["problems"]["forks"] == {"compaction": 1}
    assert [row["runs"] for row in found["problems"]["calls"]] == [["r2"]]
    assert (found["training"], found["cells"], found["groups"], found["without_contrast"]) == (None, None, 1, [])


def test_the_page_of_a_store(capsys, store):
    out = store / "page.html"
    status, said, _ = gyre(capsys, "report", store, "--out", out)
    assert (status, said) == (0, f"{out}: 4 runs, 4 calls\n")
    page = out.read_text(encoding="utf-8")
    assert "<script" not in page and "<b>bold" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 4, (
        "task, errors of run and call, what was tampered with"
    )
    assert "second line" not in page and "1 run still going" in page and "$0.12" in page
    assert re.findall(r'<h2 id="(\w+)"', page) == ["tasks", "lengths", "groups", "problems"]


def test_it_writes_report_html_where_one_is(capsys, store, monkeypatch):
    monkeypatch.chdir(store)
    status, said, _ = gyre(capsys, "report", ".")
    assert status == 0 and said.startswith("report.html: ") and (store / "report.html").stat().st_size > 5000


def test_a_training(capsys, trained):
    out = trained / "page.html"
    status, said, _ = gyre(capsys, "report", trained, "--out", out, "--json")
    found = json.loads(said)
    assert status == 0
    first, second = found["training"]["steps"]
    assert (first["step"], first["reward"], first["std"], first["loss"], first["tokens"]) == (1, 0.5, 0.5, 0.25, 6)
    assert (first["waiting_s"], first["training_s"], first["publishing_s"]) == (4.0, 1.0, 0.5)
    assert second["skipped"] and second["at"] == 211.0, "the step that was made again"
    assert (second["loss"], second["reward"]) == (None, 0.5)
    assert found["untrained"] == {"group_flat": 1}
    assert [(one["group"], one["reason"]) for one in found["without_contrast"]] == [("g1", "flat")]
    assert [(one["name"], one["step"], one["reward"]) for one in found["evaluations"]] == [("after", 1, 1.0)]
    assert {cell["cell"] for cell in found["cells"]["cells"]} == {"core", "s1"}
    page = out.read_text(encoding="utf-8")
    ids = ["training", "tasks", "lengths", "groups", "cells", "problems"]
    assert re.findall(r'<h2 id="(\w+)"', page) == ids and "2 steps, 6 tokens trained; 1 step skipped" in page


def test_an_empty_store(capsys, tmp_path):
    Journal(tmp_path / "gyre.db").close()
    out = tmp_path / "page.html"
    status, said, _ = gyre(capsys, "report", tmp_path, "--out", out)
    assert (status, said) == (0, f"{out}: 0 runs, 0 calls\n") and "no runs yet" in out.read_text(encoding="utf-8")


def test_a_store_that_is_written_to(capsys, store):
    with Journal(store / "gyre.db") as journal:
        record(journal, "r4", "open", [8, 9])
        status, out, _ = gyre(capsys, "report", store, "--json")
        assert status == 0 and json.loads(out)["head"]["calls"] == 5
        end_run(journal, "r4", 1.0)
    assert json.loads(gyre(capsys, "report", store, "--json")[1])["head"]["statuses"]["completed"] == 3


def test_what_cannot_be(capsys, store, tmp_path):
    status, _, said = gyre(capsys, "report", store, "--out", tmp_path / "none" / "page.html")
    assert status == 2 and "--out" in said and "name another file" in said
    status, _, said = gyre(capsys, "report", tmp_path / "missing.db")
    assert status == 2 and "missing.db" in said


def test_it_loads_nothing_heavy(store):
    code = (
        "import sys; sys.argv = ['gyre', 'report', sys.argv[1], '--json']\n"
        "from gyre_sdk.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = ('torch', 'transformers', 'trl', 'vllm', 'ray', 'litellm')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(store)], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]" and json.loads(done.stdout)["name"] == str(store.resolve() / "gyre.db")
