"""The numbered examples run, one after the other, on what the demo recorded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_record_a_call(tmp_path: Path, demo_policy: Path) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-m", "gyre_sdk.trainer.engines.embedded", "--model", str(demo_policy), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert engine.stdout is not None
        ready = engine.stdout.readline()
        url = next(word for word in ready.split() if word.startswith("http"))
        out = run(
            "01_record_a_call.py", "--model", str(demo_policy), "--replica", url, "--store", str(tmp_path / "s.db")
        )
    finally:
        engine.terminate()
        engine.wait(30)
    assert "the run ended: completed reward 1.0" in out
    assert "main sent [" in out and "by version 0" in out


@pytest.mark.timeout(600)
def test_tree_selection_and_gradient(finished_demo: tuple[object, dict[str, object]], demo_policy: Path) -> None:
    store = str(finished_demo[1]["store"])
    tree = run("02_tree_of_a_run.py", store)
    assert "subagent" in tree and "different ones" in tree
    weighed = run("03_select_and_weigh.py", store)
    assert "main-summary" in weighed and "advantage" in weighed
    gradient = run("04_one_gradient.py", store, str(demo_policy))
    assert float(gradient.rsplit("gradient norm ", 1)[1]) > 0
