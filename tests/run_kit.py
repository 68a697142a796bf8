"""`gyre run` as a process, on a task folder and a scripted engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gyre_sdk.journal import Journal
from gyre_sdk.records import RunRecord

REWARD = """#!/bin/sh
mkdir -p /logs/verifier
[ "$(cat answer 2>/dev/null)" = yes ] && echo 1 > /logs/verifier/reward.txt || echo 0.25 > /logs/verifier/reward.txt
"""


def task_folder(folder: Path, *, image: str = "gyre/base", test: str = REWARD, timeout: float = 300.0) -> Path:
    """Write a Harbor task whose reward is 1 once the file `answer` says yes, else 0.25."""
    (folder / "tests").mkdir(parents=True)
    (folder / "instruction.md").write_text("Write yes into the file answer.\n")
    (folder / "task.toml").write_text(
        'schema_version = "1.4"\n[task]\nname = "test/answer"\n'
        f'[environment]\ndocker_image = "{image}"\nworkdir = "/workspace"\nnetwork_mode = "no-network"\n'
        f"[agent]\ntimeout_sec = {timeout}\n"
    )
    (folder / "tests" / "test.sh").write_text(test)
    return folder


class Service:
    """How `gyre run` reaches a service that runs."""

    def __init__(self, url: str, key: str, store: Path) -> None:
        self.url, self.key, self.store = url, key, store

    def start(self, task: Path, *arguments: str) -> subprocess.Popen[str]:
        """Start `gyre run`."""
        return start(task, "--service", self.url, *arguments, key=self.key)

    def run(self, task: Path, *arguments: str) -> str:
        """Run `gyre run` to its end; return what it wrote, both outputs."""
        out, err = self.start(task, *arguments).communicate(timeout=240)
        return out + err

    def runs(self) -> list[RunRecord]:
        """Return what is on record."""
        with Journal(self.store, "r") as journal:
            return journal.runs()


def start(task: Path, *arguments: str, key: str = "") -> subprocess.Popen[str]:
    """Start `gyre run` in a session of its own, as a terminal would."""
    return subprocess.Popen(
        [sys.executable, "-m", "gyre_sdk.cli", "run", str(task), *arguments],
        env={**os.environ, "GYRE_SERVICE_KEY": key, "NO_COLOR": "1", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def lines_of(output: str) -> list[dict[str, Any]]:
    """Return the objects that `--json` wrote."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def python(code: str) -> Sequence[str]:
    """Return the command that runs Python code on this machine."""
    return ["--", sys.executable, "-c", code]
