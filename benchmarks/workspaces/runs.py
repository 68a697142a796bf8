"""Whole runs: commands and a score in recycled workspaces, eight at a time."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from gyre_sdk.harness.scoring import score
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import WorkspacePool, engine
from gyre_sdk.harness.workspace.sandboxes import build_sandbox

_AT_ONCE = 8
_TASK = Task(
    instruction="x",
    memory_mb=256,
    verifier_mode="shared",
    files={"app.txt": "broken"},
    tests={
        "test.sh": "grep -q fixed app.txt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
    },
)


def measure(quick: bool) -> dict[str, float]:
    """Return runs of four commands and a score per second."""
    build_sandbox(engine.shared_client(), "base")
    count = _AT_ONCE if quick else 25 * _AT_ONCE
    with WorkspacePool(recycle=True) as pool, ThreadPoolExecutor(_AT_ONCE) as threads:

        def run(_: int) -> None:
            with pool.take(_TASK) as workspace:
                for _ in range(4):
                    workspace.exec("echo fixed > app.txt; ls", check=True)
                assert score(_TASK, workspace).reward == 1.0

        list(threads.map(run, range(2 * _AT_ONCE)))
        began = time.perf_counter()
        list(threads.map(run, range(count)))
        return {"runs of 4 commands and a score per second": round(count / (time.perf_counter() - began), 1)}
