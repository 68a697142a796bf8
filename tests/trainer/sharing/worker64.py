"""The satellite's worker with a policy in float64: `python -m worker64 ARGUMENTS`.

With WORKER64_DIES = "RANK N" that rank is killed in its Nth unit; WORKER64_PIDS is a folder for the names of processes.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from tiny_policy import pure64

from gyre_sdk.trainer import policy
from gyre_sdk.trainer.sharing import cell_policy, worker


def _die_in(rank: int, unit: int) -> None:
    inner, passed = cell_policy.accumulate, 0

    def accumulate(*arguments: Any, **more: Any) -> Any:
        nonlocal passed
        passed += 1
        found = inner(*arguments, **more)
        if passed == unit:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    if rank == (int(sys.argv[sys.argv.index("--rank") + 1].split("/")[0]) if "--rank" in sys.argv else 0):
        cell_policy.accumulate = accumulate


if __name__ == "__main__":
    load = policy.load_policy

    def load64(*arguments: Any) -> Any:
        return load(*arguments).double()

    policy.load_policy = cell_policy.load_policy = load64
    if "WORKER64_PIDS" in os.environ:
        (Path(os.environ["WORKER64_PIDS"]) / f"pid {os.getpid()}").touch()
    if "WORKER64_DIES" in os.environ:
        rank, unit = os.environ["WORKER64_DIES"].split()
        _die_in(int(rank), int(unit))
    with pure64():
        sys.exit(worker.main())
