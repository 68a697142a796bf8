"""`gyre timeline`: figures, traces, pictures; and `gyre view` of a store with cells."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent / "view"))

from cell_events import SMALL, check_trace

from gyre_sdk.cli import main
from gyre_sdk.cli.follow import Follower
from gyre_sdk.events import CellMoved, SwitchFailed, SwitchMeasured, UnitsCommitted
from gyre_sdk.journal import Journal
from gyre_sdk.view.cells import STREAM, EventsMissed


def gyre(capsys, *arguments) -> tuple[int, str, str]:
    """Run a command in this process: (exit status, standard output, standard error)."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    return ended.value.code or 0, out.out, out.err


@pytest.fixture
def store(tmp_path):
    with Journal(tmp_path / "gyre.db") as journal:
        for event in SMALL:
            journal.append(STREAM, type(event).__name__, event, at=event.at).result()
    return tmp_path


def test_text(capsys, store):
    status, out, _ = gyre(capsys, "timeline", store)
    assert status == 0
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.split()}
    header = ["cell", "now", "time", "serving", "draining", "switching", "training", "loading", "failed"]
    assert rows["cell"][:9] == header
    assert rows["core"] == [
        "core",
        "serving",
        "34.0",
        "15.0",
        "2.0",
        "3.0",
        "10.0",
        "4.0",
        "2.5",
        "2.0",
        "2",
        "6",
        "600",
        "(75%)",
    ]
    assert rows["s1"] == ["s1", "failed", "24.0", "20.0", "4.0", "0.0", "17.0", "0", "2", "200", "(25%)"]
    assert "seconds; 2 cells over 0:34, 1 step, 1 version\n" in out
    assert rows["training"] == ["training", "1", "5.00", "3", "1", "drain", "2.00,", "sleep", "1.00,", "load", "2.00"]
    assert "2 switches" in out


def test_phases_are_shown_to_the_last(capsys, store):
    phases = {f"phase-{number}": 0.5 for number in range(12)}
    with Journal(store / "gyre.db") as journal:
        switch = SwitchMeasured(1034.0, "core", "elsewhere", phases)
        journal.append(STREAM, "SwitchMeasured", switch, at=1034.0).result()
    _, out, _ = gyre(capsys, "timeline", store)
    said = " ".join(out.split())
    assert all(f"{name} 0.50" in said for name in phases) and "…" not in said


def test_replicas_beside_the_cells_and_failed_switches_are_told(capsys, store):
    with Journal(store / "gyre.db") as journal:
        for event in (
            CellMoved(1001.0, "standalone-0", "serving", "loading", 0.0, standalone=True),
            SwitchFailed(1033.0, "s1", "training", "park", {"drain": 1.0}),
        ):
            journal.append(STREAM, type(event).__name__, event, at=event.at).result()
    _, out, _ = gyre(capsys, "timeline", store)
    assert "2 cells and 1 standalone replica over 0:34, 1 step, 1 version; 1 switch failed" in " ".join(out.split())
    _, out, _ = gyre(capsys, "timeline", store, "--json")
    found = json.loads(out)
    assert [cell["cell"] for cell in found["cells"] if cell["standalone"]] == ["standalone-0"]
    assert found["failed_switches"] == [{"cell": "s1", "to": "training", "phase": "park", "phases": {"drain": 1.0}}]


def test_json(capsys, store):
    status, out, _ = gyre(capsys, "timeline", store, "--json")
    found = json.loads(out)
    core, satellite = found["cells"]
    assert status == 0 and out.count("\n") == 1
    assert (found["start"], found["end"], found["steps"], found["versions"]) == (1000.0, 1034.0, 1, [1])
    assert core["cell"] == "core" and core["states"]["training"] == 10.0 and core["unit_share"] == 0.75
    assert core["idle"] == {"serving": 2.5, "training": 2.0} and sum(core["roles"].values()) == core["span_s"]
    assert satellite["state"] == "failed" and satellite["idle"]["training"] == 17.0
    assert found["switches"]["serving"] == {
        "count": 1,
        "mean_s": 4.0,
        "phases": {"offer": 1.0, "load": 3.0},
        "finished": 0,
        "moved": 0,
    }


def test_what_cannot_be_read_or_was_missed_is_said(capsys, store):
    with Journal(store / "gyre.db") as journal:
        journal.append(STREAM, "CellFlew", {"event": "CellFlew", "at": 1035.0, "cell": "core"}, at=1035.0).result()
        journal.append(STREAM, "CellMoved", msgspec.Raw(b"\x86\xa5event"), at=1036.0).result()
        journal.append(STREAM, "EventsMissed", EventsMissed(1037.0, 12), at=1037.0).result()
    status, out, _ = gyre(capsys, "timeline", store)
    assert status == 0
    assert "not recorded: 12 events; left out: 2 entries of a newer gyre" in " ".join(out.split())


def test_trace_and_pictures(capsys, store, tmp_path):
    trace, page, image = tmp_path / "trace.json", tmp_path / "t.html", tmp_path / "t.png"
    status, out, _ = gyre(capsys, "timeline", store, "--out", trace, "--picture", page)
    assert status == 0 and "2 cells" in out
    events = check_trace(trace.read_bytes())
    assert {event["name"] for event in events} >= {"training", "failed", "runs", "step 1", "version 1"}
    drawn = page.read_text()
    assert drawn.count("<svg") == 1 and drawn.count("<rect") == 8 and ">core</text>" in drawn
    assert ": 0:34, 37% of the cells&#x27; time idle</h2>" in drawn and "2 cells over 0:34, 1 step, 1 version" in drawn
    status, _, _ = gyre(capsys, "timeline", store, "--picture", image)
    assert status == 0 and image.read_bytes().startswith(b"\x89PNG")


def test_errors_are_one_line(capsys, store, tmp_path):
    empty = tmp_path / "empty.db"
    Journal(empty).close()
    newer = tmp_path / "newer.db"
    with Journal(newer) as journal:
        journal.append(STREAM, "CellFlew", {"event": "CellFlew", "at": 1.0}, at=1.0).result()
    for arguments, said in [
        ((empty,), "holds nothing of cells: a training records them when its settings have a section [cells]"),
        ((newer,), "1 entry of a newer gyre"),
        ((tmp_path / "none.db",), "none.db"),
        ((store, "--picture", "t.gif"), "--picture t.gif: a timeline is .html or .png"),
        ((store, "--out", tmp_path / "no" / "t.json"), "name another file"),
        ((store, "--picture", tmp_path / "no" / "t.png"), "--picture"),
    ]:
        status, out, err = gyre(capsys, "timeline", *arguments)
        assert (status, out, err.count("\n")) == (2, "", 1) and said in err


def test_following_tells_what_cells_did_once_and_leaves_steps_to_the_ledger(store):
    with Journal(store / "gyre.db") as journal:
        follower = Follower(journal)
        told = follower.poll()
        assert [type(event) for event in told if isinstance(event, SwitchMeasured)] == [SwitchMeasured] * 2
        assert len(told) == 13 and follower.poll() == []
        assert sum(isinstance(event, CellMoved | UnitsCommitted) for event in told) == 8
        journal.append(STREAM, "CellMoved", SMALL[2], at=1.0).result()
        assert follower.poll() == [SMALL[2]]


def test_view_of_a_store_with_cells(capsys, store):
    status, out, _ = gyre(capsys, "view", store, "--once", "--plain")
    assert status == 0
    assert (
        "cell core went over to training in 5.00 s (drain 2.00, sleep 1.00, load 2.00), 3 requests ended, 1 moved"
        in out
    )
    assert "cell s1 failed after 0:20 training: no sign of life for 6 s" in out


def test_nothing_heavy_is_loaded(store):
    code = (
        "import sys; from gyre_sdk.cli import main\n"
        f"try: main(['timeline', {str(store)!r}, '--picture', {str(store / 'p.png')!r}])\n"
        "except SystemExit as ended: assert not ended.code\n"
        "heavy = {'torch', 'transformers', 'trl', 'vllm', 'ray'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
