"""A fixed share of the processors for each cell, so that what an idle cell leaves over goes to nobody."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path("/sys/fs/cgroup/cpu")
"""The processor controller of cgroup v1, which takes single threads: the core's worker is a thread of the trainer."""
_PERIOD_US = 20_000


class Quotas:
    """Context manager over one control group per cell.

    Raises:
        OSError: there is no such controller here, or it may not be written.
    """

    def __init__(self, cells: int, processors: float) -> None:
        self._groups = [ROOT / f"gyre-cells-{cell}" for cell in range(cells)]
        self._quota_us = int(processors * _PERIOD_US)

    def __enter__(self) -> Self:
        for group in self._groups:
            group.mkdir(exist_ok=True)
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(self._quota_us))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for group in self._groups:
            for thread in (group / "tasks").read_text().split():
                with contextlib.suppress(OSError):
                    (ROOT / "tasks").write_text(thread)
            deadline = time.monotonic() + 5.0
            while group.is_dir():
                try:
                    group.rmdir()
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)

    def hold(self, cell: int, pid: int) -> None:
        """Put a process under a cell's quota, with all its threads."""
        (self._groups[cell] / "cgroup.procs").write_text(str(pid))

    def hold_this_thread(self, cell: int) -> None:
        """Put the calling thread under a cell's quota."""
        (self._groups[cell] / "tasks").write_text(str(threading.get_native_id()))
