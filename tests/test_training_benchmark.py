"""The benchmark of training on trees runs and reports what it promises. Its figures are not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
SCRIPT = Path(__file__).parent.parent / "benchmarks" / "tree_training.py"


def test_every_system_is_exact_and_each_aim_is_reported() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--only", "comb"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["problems"] == {}
    assert set(result["times"]["comb, hidden 64"]) == {"separate", "flat", "gather", "dfs", "auto", "TRL"}
    assert result["trees"]["comb"] == {
        "rows": 4, "raw": 1148, "unique": 380, "raw_per_unique": 3.02, "raw_pairs_per_pair": 2.48,
    }  # fmt: skip
    assert {aim["limit"] for aim in result["aims"]} == {0.75, 1.0}
    for aim in result["aims"]:
        assert aim["aim"] in done.stderr
