"""The tree's benchmark runs, checks every system's tree, and reports its aims. Its figures are not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "tree.py"


def run(*options: str) -> tuple[dict[str, Any], str]:
    """Run the benchmark; give its result and its tables."""
    command = [sys.executable, str(SCRIPT), "--quick", "--shapes", "branches", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def measured() -> tuple[dict[str, Any], str]:
    return run()


def test_every_system_found_the_same_tree(measured):
    result = measured[0]
    assert result["problems"] == {}
    beside = result["beside"]["branches"]
    assert set(beside["systems"]) == {"gyre", "numpy", "rows", "TreeRow"}
    found = {name: told["unique"] for name, told in beside["systems"].items()}
    assert found["gyre"] == found["numpy"] == beside["unique_tokens"]
    assert found["rows"] == beside["raw_tokens"] > 5 * beside["unique_tokens"]
    assert 0 < found["TreeRow"] - found["gyre"] < beside["calls"], "TreeRow parts one token before each fork"
    assert beside["systems"]["gyre"]["rows"] == 5 and beside["pack_seconds"] > 0


def test_aims_are_told_with_their_limits(measured):
    result, text = measured
    assert [(aim["aim"], aim["limit"]) for aim in result["aims"]] == [
        ("branches: seconds to build and select", 0.6),
        ("branches: share of 8 bytes per unique token + 8 per sampled", 1.0),
    ]
    for aim in result["aims"]:
        assert aim["aim"] in text


def test_a_tree_keeps_its_promise_of_memory(measured):
    """Bytes are counted, not timed: at most 8 per unique token and 8 per sampled one, at the peak of building it."""
    grown = measured[0]["growth"]["branches"]
    assert 0 < grown["memory"]["held"] <= grown["memory"]["peak"]
    assert grown["memory"]["peak"] <= 8 * grown["unique_tokens"] + 8 * grown["sampled_tokens"]


def test_a_section_that_does_not_exist_is_refused_by_name():
    done = subprocess.run([sys.executable, str(SCRIPT), "--only", "speed"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no section speed; choose from growth, beside" in done.stderr
