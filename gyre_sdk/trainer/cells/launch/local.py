"""Cells as processes of this machine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gyre_sdk.harness.ports import Observer
from gyre_sdk.trainer.cells.launch import CellSpec
from gyre_sdk.trainer.processes import Child

__all__ = ["LocalLauncher"]


class LocalLauncher:
    """Starts cells beside this process; they end with it, however it ends. Their replicas keep their address."""

    host = "127.0.0.1"

    def __init__(self, observer: Observer) -> None:
        """`observer` learns of processes that were started again."""
        self._observer = observer
        self._cells: list[_LocalCell] = []

    def launch(self, spec: CellSpec, moved: Callable[[str, str], None] = lambda old, new: None) -> _LocalCell:
        """Begin a cell; do not wait for it."""
        cell = _LocalCell(spec, self._observer)
        self._cells.append(cell)
        return cell

    def close(self) -> None:
        """End all cells, at the same time. Idempotent."""
        _stop([child for cell in self._cells for child in cell.children])


class _LocalCell:
    """A replica, and a worker where there is one, each under supervision."""

    def __init__(self, spec: CellSpec, observer: Observer) -> None:
        specs = [spec.replica] if spec.worker is None else [spec.replica, spec.worker]
        self.children = [Child(one, observer) for one in specs]
        for child in self.children:
            child.begin()

    def wait(self) -> str:
        urls = [child.wait() for child in self.children]
        return urls[0]

    def check(self) -> None:
        for child in self.children:
            child.check()

    def pids(self) -> dict[str, int]:
        return {child.spec.name: child.pid for child in self.children}

    def replace(self, name: str, pid: int, reason: str) -> None:
        for child in self.children:
            if child.spec.name == name:
                child.replace(pid, reason)

    def stop(self) -> None:
        _stop(self.children)


def _stop(children: list[Child]) -> None:
    if children:
        with ThreadPoolExecutor(len(children), thread_name_prefix="stop cells") as pool:
            list(pool.map(Child.stop, children))
