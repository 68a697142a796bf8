"""Costs of a workspace on this machine: `python benchmarks/workspace.py`. Prints median and minimum, in milliseconds."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gyre_sdk.harness.scoring import score
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import DockerWorkspace, WorkspacePool, engine
from gyre_sdk.harness.workspace.sandboxes import build_sandbox

TASK = Task(
    instruction="x",
    memory_mb=256,
    files={"app.txt": "broken"},
    tests={
        "test.sh": "grep -q fixed app.txt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
    },
)


def show(name: str, act: Callable[[], object], times: int) -> None:
    took = []
    for _ in range(times):
        began = time.perf_counter()
        act()
        took.append(1e3 * (time.perf_counter() - began))
    print(f"{name:42} {statistics.median(took):8.1f} {min(took):8.1f}")


def measure() -> None:
    client = engine.shared_client()
    build_sandbox(client, "base")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n{'':42} {'median':>8} {'min':>8}  ms")
    show("start, first exec, remove", lambda: _once(client), 8)
    with DockerWorkspace(TASK, client) as workspace:
        show("exec true", lambda: workspace.exec("true"), 200)
        show("exec echo", lambda: workspace.exec("echo hi"), 200)
        show("exec with 1 MB of output", lambda: workspace.exec("head -c 1000000 /dev/zero | tr '\\0' x"), 20)
        show("write 1 KB", lambda: workspace.write("a", b"x" * 1000), 50)
        show("read 1 KB", lambda: workspace.read("a"), 50)
        show("kill_all", workspace.kill_all, 50)
        show("score", lambda: score(TASK, workspace), 30)
    with WorkspacePool(recycle=True) as pool:
        held = [pool.take(TASK)]

        def turn() -> None:
            held.pop().close()
            held.append(pool.take(TASK))

        show("give back, clean, take again", turn, 50)

        def run(_: int) -> None:
            with pool.take(TASK) as workspace:
                for _ in range(4):
                    workspace.exec("echo fixed > app.txt; ls")
                assert score(TASK, workspace).reward == 1.0

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(run, range(16)))
            began = time.perf_counter()
            list(threads.map(run, range(200)))
            print(f"{'runs of 4 commands and a score, 8 at once':42} {200 / (time.perf_counter() - began):8.1f} runs/s")


def _once(client: object) -> None:
    with DockerWorkspace(TASK, client) as workspace:  # type: ignore[arg-type]
        workspace.exec("true")


def main() -> None:
    """Measure on the engine that answers, else on a private one."""
    if engine.answers():
        measure()
        return
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        private = engine.start_private_engine(folder)
        os.environ["DOCKER_HOST"] = private.url
        try:
            measure()
        finally:
            private.stop()


if __name__ == "__main__":
    main()
