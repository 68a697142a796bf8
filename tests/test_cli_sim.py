"""`gyre sim`: exact JSON, a readable verdict, pictures, stores, one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gyre_sdk.cli import main

SCENARIO = """
name = "mine"
[fleet]
cells = 3
slots = 6
[batch]
groups = 3
runs = 4
steps = 6
mu = 2
[runs]
median_s = 300
sigma = 0.8
[training]
batch_s = 100
tokens_per_cell_s = 2
"""


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(SCENARIO)
    return str(path)


def gyre(capsys, *arguments):
    """Run a command in this process: (exit status, standard output, standard error)."""
    with pytest.raises(SystemExit) as ended:
        main(["sim", *arguments])
    out = capsys.readouterr()
    return ended.value.code or 0, out.out, out.err


def test_json(capsys, scenario):
    status, out, _ = gyre(capsys, scenario, "--seeds", "2", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["scenario"] == "mine"
    assert found["seeds"] == 2
    assert {"colocate", "async", "elastic"} <= set(found["policies"])
    elastic = found["policies"]["elastic"]
    assert found["ratios"]["colocate"] == pytest.approx(
        found["policies"]["colocate"]["makespan_h"] / elastic["makespan_h"], rel=0.1
    )
    assert elastic["makespan_h"] > found["bound_h"] > 0


def test_text(capsys, scenario):
    status, out, _ = gyre(capsys, scenario, "--seeds", "1")
    assert status == 0
    assert "async_tuned_streaming" in out
    assert "elastic is" in out or "elastic loses to" in out


def test_where_elastic_loses_is_said(capsys, tmp_path):
    """Nothing to gain: one group at a time, no training to speak of, and a plan that is held to move at great cost."""
    path = tmp_path / "lost.toml"
    path.write_text(
        SCENARIO.replace("batch_s = 100", "batch_s = 0.1") + "[costs]\ndrain_s = 400\nswitch_s = 400\nload_s = 400\n"
    )
    _, out, _ = gyre(capsys, str(path), "--seeds", "1")
    assert "elastic loses to" in out or "elastic is 1.0" in out


def test_list(capsys):
    status, out, _ = gyre(capsys)
    assert status == 0
    assert "nl2repo-122b" in out
    assert "6 scenarios" in out


def test_timeline(capsys, scenario, tmp_path):
    status, _, _ = gyre(capsys, scenario, "--seeds", "1", "--timeline", str(tmp_path / "t.html"))
    assert status == 0
    assert "<svg" in (tmp_path / "t.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "'nothing' is neither a file nor a scenario"),
        (["nl2repo-122b", "--timeline", "t.gif"], "a timeline is .html or .png"),
        (["nl2repo-122b", "--store", "no.db"], "no.db"),
    ],
)
def test_errors_are_one_line(capsys, arguments, message):
    status, out, err = gyre(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_nothing_heavy_is_loaded():
    code = (
        "import sys; from gyre_sdk.cli import main\n"
        "try: main(['sim'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'trl', 'vllm', 'ray'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
