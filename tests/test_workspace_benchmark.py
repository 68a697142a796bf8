"""How the benchmark of workspaces compares starts: in pairs, by the median of their ratios."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_FILE = Path(__file__).parent.parent / "benchmarks" / "workspaces" / "pairing.py"
_spec = importlib.util.spec_from_file_location("workspace_pairing", _FILE)
assert _spec is not None and _spec.loader is not None
pairing = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pairing)
NAMES = ["gyre", "shell", "docker-py", "cli", "other"]
PAIR = ("gyre", "docker-py")


def test_a_pair_is_measured_side_by_side_and_each_goes_first_as_often():
    rounds = [pairing.order(NAMES, PAIR, turn) for turn in range(12)]
    assert all(sorted(one) == sorted(NAMES) for one in rounds)
    assert all(abs(one.index("gyre") - one.index("docker-py")) == 1 for one in rounds)
    assert sum(one.index("gyre") < one.index("docker-py") for one in rounds) == 6
    assert {one[2] for one in rounds} == {"shell", "cli", "other"}
    assert pairing.order(NAMES, PAIR, 1, only=True) == ["docker-py", "gyre"]
    assert pairing.order(["gyre"], PAIR, 3) == ["gyre"]


def test_a_slow_spell_of_the_machine_that_meets_both_says_nothing():
    """Nor does a hiccup that meets one of ten."""
    calm, slow = [(90.0, 100.0)] * 5, [(900.0, 1000.0)] * 5
    found = pairing.summary([*calm, *slow])
    assert (found.count, found.ratio, found.low, found.high) == (10, 0.9, 0.9, 0.9)
    assert pairing.summary([*calm, *slow[:4], (3000.0, 1000.0)]).ratio == 0.9
    assert pairing.summary([(120.0, 100.0)]).ratio == pytest.approx(1.2)


def test_the_spread_is_what_all_but_a_tenth_at_each_end_show():
    found = pairing.summary([(float(ours), 100.0) for ours in range(51, 71)])
    assert (found.low, found.ratio, found.high) == (0.53, 0.605, 0.68)
    assert found.difference_ms == pytest.approx(-39.5)
    assert str(found) == "ratio 0.60 (80 % of 20 pairs from 0.53 to 0.68), -40 ms"
