"""A fixed share of the processors for each cell, so that what an idle cell leaves over goes to nobody; and what each used."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path("/sys/fs/cgroup")
"""Of cgroup v1."""
_LIMIT, _COUNT = "cpu", "cpuacct"
_PERIOD_US = 20_000


class Quotas:
    """Context manager over one control group per cell.

    Raises:
        OSError: there are no such controllers here, or they may not be written.
    """

    def __init__(self, cells: int, processors: float) -> None:
        self._names = [f"gyre-cells-{cell}" for cell in range(cells)]
        self._quota_us = int(processors * _PERIOD_US)

    def __enter__(self) -> Self:
        for name in self._names:
            for controller in (_LIMIT, _COUNT):
                (ROOT / controller / name).mkdir(exist_ok=True)
            (ROOT / _LIMIT / name / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (ROOT / _LIMIT / name / "cpu.cfs_quota_us").write_text(str(self._quota_us))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self._names:
            for controller in (_LIMIT, _COUNT):
                _remove(ROOT / controller, name)

    def hold(self, cell: int, pid: int) -> None:
        """Put a process under a cell's quota, with all its threads."""
        for controller in (_LIMIT, _COUNT):
            (ROOT / controller / self._names[cell] / "cgroup.procs").write_text(str(pid))

    def used(self) -> list[float]:
        """Return the seconds of a processor that each cell has used so far."""
        return [int((ROOT / _COUNT / name / "cpuacct.usage").read_text()) / 1e9 for name in self._names]


def _remove(controller: Path, name: str) -> None:
    group = controller / name
    for thread in (group / "tasks").read_text().split():
        with contextlib.suppress(OSError):
            (controller / "tasks").write_text(thread)
    deadline = time.monotonic() + 5.0
    while group.is_dir():
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
