"""The demo for tests: its policy, and small runs of `demo.py` itself. A pytest plugin."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
DEMO = [sys.executable, str(ROOT / "examples" / "quickstart" / "demo.py"), "--plain"]
SMALL = ["train.steps=3", "rollout.groups_per_step=3", "rollout.runs_per_group=6", "rollout.concurrency=12"]
QUICKSTART = ROOT / "examples" / "quickstart"
sys.path.insert(0, str(QUICKSTART))


class Demo:
    """A demo in a folder of its own."""

    def __init__(self, folder: Path, policy: Path) -> None:
        self.folder = folder
        self.engine_log = folder / "engine.jsonl"
        self.store = folder / "store.db"
        shutil.copytree(policy, folder / "policy")

    def start(self, tasks: int = 10) -> subprocess.Popen[str]:
        """Start it, with this many tasks per evaluation."""
        settings = [*SMALL, f"engine.request_log={self.engine_log}"]
        command = [*DEMO, "--dir", str(self.folder), "--tasks", str(tasks)]
        for pair in settings:
            command += ["--set", pair]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def finish(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        output, _ = process.communicate(timeout=420)
        assert process.returncode == 0, output[-4000:]
        return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="session")
def demo_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy that `make demo` starts from, seed 0; made in about a minute, and cached like the demo's."""
    folder = tmp_path_factory.mktemp("policy") / "model"
    done = subprocess.run(
        [sys.executable, str(QUICKSTART / "warmstart.py"), "--out", str(folder), "--seed", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="session")
def finished_demo(
    tmp_path_factory: pytest.TempPathFactory, demo_policy: Path, base_image: str
) -> tuple[Demo, dict[str, Any]]:
    """A small demo that ran to its end, and its result."""
    demo = Demo(tmp_path_factory.mktemp("demo"), demo_policy)
    return demo, demo.finish(demo.start())
