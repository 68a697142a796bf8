"""The public surface, and the light install: importing gyre loads none of the heavy packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gyre_sdk

GOLDEN = Path(__file__).parent / "golden" / "public_names.txt"
HEAVY = ("torch", "transformers", "trl", "peft", "vllm", "ray", "litellm", "accelerate")


def test_public_names_are_the_golden_ones() -> None:
    assert sorted(gyre_sdk.__all__) == GOLDEN.read_text().split()
    for name in gyre_sdk.__all__:
        assert getattr(gyre_sdk, name).__doc__, name


def loaded_heavy(statement: str) -> list[str]:
    program = f"{statement}\nimport sys\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_import_loads_nothing_heavy() -> None:
    assert loaded_heavy("import gyre_sdk") == []


def test_whole_facade_loads_nothing_heavy() -> None:
    assert loaded_heavy("import gyre_sdk\n[getattr(gyre_sdk, n) for n in gyre_sdk.__all__]") == []


def test_command_line_and_rollouts_load_nothing_heavy() -> None:
    assert loaded_heavy("import gyre_sdk.cli.commands, gyre_sdk.trainer.rollouts") == []


def test_the_check_itself_would_notice() -> None:
    assert loaded_heavy("import torch") == ["torch"]


def test_import_time_is_far_below_half_a_second_of_cpu() -> None:
    """Counted in modules, not seconds: what costs time at import is the number of modules loaded."""
    program = "import sys\nbefore = len(sys.modules)\nimport gyre_sdk\nprint(len(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 60
