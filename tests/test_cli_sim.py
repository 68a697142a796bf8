"""`gyre sim`: exact JSON, a readable verdict, pictures, stores, one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gyre_sdk.cli import main
from gyre_sdk.cli.sim import verdict
from gyre_sdk.trainer.simulate.compare import Comparison, Figure, PolicyResult

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
    assert "mine, 1 seed: elastic is" in out
    assert "time (min)" in out and "GPU-min serving" in out


def test_short_trainings_are_told_in_their_own_unit(capsys, tmp_path):
    path = tmp_path / "short.toml"
    path.write_text(SCENARIO.replace("median_s = 300", "median_s = 3").replace("batch_s = 100", "batch_s = 1"))
    _, out, _ = gyre(capsys, str(path), "--seeds", "1")
    assert "time (s)" in out and "GPU-s serving" in out
    times = [float(line.split()[1]) for line in out.splitlines() if line.split()[:1] in (["elastic"], ["colocate"])]
    assert len(times) == 2 and min(times) > 10


def figure(mean):
    return Figure(mean, 0.0)


def comparison(**ratios):
    """Return what was compared, of which the verdict needs only this."""
    one = PolicyResult(*[figure(2.0)] * 8, knobs="")
    found = {name: figure(ratio) for name, ratio in ratios.items()}
    least = min(ratios, key=lambda name: ratios[name])
    return Comparison("mine", 2, {"elastic": one, **dict.fromkeys(ratios, one)}, found, least, 1.0)


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ({"a": 1.3, "b": 1.1}, "elastic is 1.10x faster than the best baseline, b; no policy"),
        ({"a": 1.3, "b": 1.001}, "elastic takes as long as the best baseline, b; no policy"),
        ({"a": 0.999, "b": 1.2}, "elastic takes as long as the best baseline, a; no policy"),
        ({"a": 0.97, "b": 0.9}, "elastic loses to b, which takes 0.90 of its time; it loses to a as well; no policy"),
    ],
)
def test_where_elastic_loses_is_said(ratios, said):
    assert f"mine, 2 seeds: {said} can be more than 2.00x faster than elastic" == verdict(comparison(**ratios))


def test_list(capsys):
    status, out, _ = gyre(capsys)
    assert status == 0
    assert "nl2repo-122b" in out
    assert "6 scenarios" in out


def test_timeline(capsys, scenario, tmp_path):
    status, out, _ = gyre(capsys, scenario, "--seeds", "1", "--timeline", str(tmp_path / "t.html"))
    assert status == 0
    drawn, said = (tmp_path / "t.html").read_text(), " ".join(out.split())
    assert drawn.count("<svg") == 3 and drawn.count("of the cells&#x27; time idle</h2>") == 3
    verdict = drawn.partition("<p>Drawn is the first seed. ")[2].partition(".</p>")[0]
    assert verdict.startswith("mine, 1 seed: elastic ") and verdict in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "'nothing' is neither a file nor a scenario"),
        (["nl2repo-122b", "--timeline", "t.gif"], "a timeline is .html or .png"),
        (["nl2repo-122b", "--timeline", "no/such/folder/t.png"], "there is no folder no/such/folder"),
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
        "except SystemExit as ended: assert not ended.code\n"
        "heavy = {'torch', 'transformers', 'trl', 'vllm', 'ray'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
