"""Where the processes of a cell run: behind one small protocol, on this machine (`local`) or on a Ray cluster (`ray`).

A launcher starts what a `CellSpec` says and keeps it running; it decides nothing about roles.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gyre_sdk.harness.ports import Observer
from gyre_sdk.trainer.cells.settings import CellsConfig
from gyre_sdk.trainer.lingering import Linger
from gyre_sdk.trainer.processes import ChildSpec

__all__ = ["CellSpec", "Launched", "Launcher", "make_launcher"]


@dataclass(frozen=True, slots=True)
class CellSpec:
    """What a cell is made of."""

    name: str
    """`cell-0` is the core; satellites follow in order."""
    replica: ChildSpec
    """The inference server."""
    worker: ChildSpec | None = None
    """The satellite's training process; None for the core, whose worker is the trainer itself, and for what stands alone."""
    resources: Mapping[str, float] | None = None
    """What a launcher that places cells reserves: `{"CPU": 1}`, `{"GPU": 8}`."""
    standalone: bool = False
    """It has no part in training, and need not be where the trainer is."""


class Launched(Protocol):
    """A started cell. Its processes are started again when they die, until they die too often."""

    def wait(self) -> str:
        """Wait until replica and worker are ready; return the replica's URL.

        Raises:
            TrainerError: one did not get ready; the message holds the end of its log.
        """

    def check(self) -> None:
        """Raise when a process was given up.

        Raises:
            TrainerError: naming it, with the end of its log.
        """

    def pids(self) -> dict[str, int]:
        """Return process ids by name, as their machine numbers them; 0 for one that does not run."""

    def replace(self, name: str, pid: int, reason: str) -> None:
        """End one of its processes that hangs and start it again, as after a death, if it is still the process `pid`."""

    def stop(self) -> None:
        """End everything that was started. Idempotent."""


class Launcher(Protocol):
    """Starts cells."""

    host: str
    """Address of this machine at which cells reach the trainer."""

    def launch(self, spec: CellSpec, moved: Callable[[str, str], None] = lambda old, new: None) -> Launched:
        """Begin a cell; do not wait for it.

        Args:
            moved: called with the old and the new URL when a replica comes back elsewhere (another node or port).
        """

    def close(self) -> None:
        """End all cells and what the launcher itself started. Idempotent."""


def make_launcher(
    settings: CellsConfig, observer: Observer, *, training: str, cells: Collection[str], linger: Linger, logs: Path
) -> Launcher:
    """Return what starts cells under these settings; what lingers on a cluster waits from now on as long as it takes.

    Args:
        training: what tells this training from all others on a cluster.
        cells: that will be launched.
        linger: how long they outlive this process when that is killed.
        logs: folder of logs.

    Raises:
        SettingsError: Ray is wanted and not installed, or its cluster cannot be reached.
        TrainerError: its cluster does not start, or what an earlier trainer left there does not answer.
    """
    if settings.launcher == "ray":
        from gyre_sdk.trainer.cells.launch.ray import RayLauncher

        return RayLauncher(
            settings.ray_address,
            observer=observer,
            namespace=f"gyre-{training}",
            linger=linger,
            cells=cells,
            logs=logs,
        )
    from gyre_sdk.trainer.cells.launch.local import LocalLauncher

    return LocalLauncher(observer)
