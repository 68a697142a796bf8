"""The demo's policy for tests: the real recipe on a small part of the traces, made once per test session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
sys.path.insert(0, str(QUICKSTART))


@pytest.fixture(scope="session")
def demo_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: knows the format of the tasks and makes many mistakes."""
    folder = tmp_path_factory.mktemp("policy")
    program = (
        "import sys; from pathlib import Path; from warmstart import WarmStart, warm_start; folder = Path(sys.argv[1]);"
        "warm_start(folder / 'model', WarmStart(seed=0, traces=300), cache=folder / 'cache')"
    )
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], cwd=QUICKSTART, env=one_thread, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "model"
