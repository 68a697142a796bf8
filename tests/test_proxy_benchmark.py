"""The proxy's benchmark runs and reports what it promises. Its figures are not looked at: nothing is timed in tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "proxy.py"


def run(*options: str) -> tuple[dict[str, Any], str]:
    """Run the benchmark; give its result and its table."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", *options], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def measured() -> tuple[dict[str, Any], str]:
    return run()


def test_every_call_that_was_answered_before_a_kill_is_counted_on_disk(measured):
    kept = measured[0]["kill"]
    assert kept["gyre"]["answered"] == kept["gyre"]["on_disk"] == 64
    assert kept["passthrough"] == {"answered": 64, "on_disk": 0, "errors": []}


def test_no_call_of_any_section_fails(measured):
    result = measured[0]
    assert result["problems"] == {}
    assert result["throughput"]["errors"] == [] and result["latency"]["errors"] == []
    assert result["agents"]["errors"] == 0
    assert result["agents"]["answered"] == result["agents"]["on_disk"] == 200


def test_streams_go_on_elsewhere_when_a_replica_is_killed_and_when_it_hangs(measured):
    seen = measured[0]["death"]
    assert seen["errors"] == 0, seen["first_errors"]
    assert (seen["calls"], seen["moved"]) == (16, 8)
    assert set(seen["noticed_s"]) == set(seen["next_token_s"]) == {"kill", "hang"}


def test_the_growing_run_reaches_the_size_asked_for(measured):
    grown = measured[0]["growth"]
    assert grown["tokens"] > 8 * 250
    assert grown["stored_bytes"] > 0


def test_each_aim_is_reported_with_its_limit_and_in_the_table(measured):
    result, table = measured
    assert {aim["limit"] for aim in result["aims"]} >= {0.3, 0, 1.0, 2.0, 3.0, 1024, 6.0, 150.0}
    for aim in result["aims"]:
        assert aim["aim"] in table


def test_a_section_that_does_not_exist_is_refused_by_name():
    done = subprocess.run([sys.executable, str(SCRIPT), "--only", "speed"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no section speed; choose from throughput, latency, kill, death, agents, growth" in done.stderr
