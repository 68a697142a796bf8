"""gyre's workspaces: `ours.py IMAGE launcher|shell`; `fork TIMES` besides what `timing` answers."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import timing

from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import DockerWorkspace, engine
from gyre_sdk.harness.workspace.launcher import launcher

_CHANGED_MB = 100


class ShellOnly(DockerWorkspace):
    """As where no C compiler is."""

    with_launcher = False


class Gyre:
    """Workspaces of the image, as hardened as always, with all of the machine's cores."""

    def __init__(self, image: str, kind: str) -> None:
        if kind == "launcher" and launcher() is None:
            raise SystemExit("no C compiler: the launcher cannot be made")
        self._kind = DockerWorkspace if kind == "launcher" else ShellOnly
        self._client = engine.shared_client()
        self._task = Task(
            instruction="x", image=image, user="1000:1000", memory_mb=1024, cpus=float(os.cpu_count() or 1)
        )

    def open(self) -> DockerWorkspace:
        """Start one."""
        return self._kind(self._task, self._client)

    def run(self, workspace: DockerWorkspace, command: str) -> str:
        """Run a command."""
        return workspace.exec(command, check=True, timeout=60).stdout

    def close(self, workspace: DockerWorkspace) -> None:
        """Remove one."""
        workspace.close()

    def forks(self, times: int) -> list[float]:
        """Return the milliseconds of forking a workspace in which 100 MB are changed."""
        took = []
        with self.open() as workspace:
            workspace.exec(f"head -c {_CHANGED_MB}000000 /dev/urandom >changed", check=True, timeout=120)
            digest = workspace.exec("sha256sum changed", check=True, timeout=120).stdout
            for _ in range(times):
                began = time.perf_counter()
                forked = workspace.fork()
                took.append(1e3 * (time.perf_counter() - began))
                with forked:
                    assert forked.exec("sha256sum changed", check=True, timeout=120).stdout == digest
        return took


def _answer(system: Any, held: Any, verb: str, rest: list[str]) -> Any:
    return system.forks(int(rest[0])) if verb == "fork" else _plain(system, held, verb, rest)


if __name__ == "__main__":
    _plain, timing._answer = timing._answer, _answer
    timing.serve(Gyre(sys.argv[1], sys.argv[2]))
