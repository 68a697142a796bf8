"""How one cell goes over, to training and back, phase by phase. Each phase is timed, and one that fails is named.

To training: out of routing (`drain`: what does not end within the bound goes on on other cells, from what it has sampled;
here it may still be taken back: the replica is as it was)
-> the replica makes room (`park`) -> the training side takes over (`join`).

Back: the training side lets go (`leave`) -> the replica takes its room again (`wake`) -> the newest weights, checked ->
into routing. So a cell's devices have one user at any time, and a replica that requests can reach computes with weights
that were compared with what was published.

A call that is carried to another cell has its context filled in there again: the keys and values of this cell are lost.
Where that is dear, vLLM's replicas share them (`engines/kv.py`): the other cell then finds what the same version computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import httpx

from gyre_sdk.errors import ServiceError, TrainerError
from gyre_sdk.harness.service import Drained
from gyre_sdk.trainer.cells.launch import Launched
from gyre_sdk.trainer.cells.state import CellEvent
from gyre_sdk.trainer.cells.training_side import TrainingSide
from gyre_sdk.trainer.publish import Publisher
from gyre_sdk.trainer.transports import Replica, Unready

__all__ = [
    "Cell",
    "Parking",
    "Pausing",
    "PhaseFailed",
    "Sleeping",
    "Switched",
    "parking_of",
    "to_serving",
    "to_training",
]


class Parking(Protocol):
    """How a replica makes room for its cell's training worker. It runs nothing of ours when it is parked."""

    def park(self, replica: Replica) -> None:
        """Hold no request and compute nothing, checked."""

    def wake(self, replica: Replica) -> None:
        """Take room for weights; called before they are brought."""

    def ready(self, replica: Replica) -> None:
        """Compute again, checked; called when the weights are there, before requests are sent."""

    def is_parked(self, replica: Replica) -> bool:
        """Tell whether it is parked: one that was started anew is not."""


@dataclass(frozen=True, slots=True)
class Pausing:
    """Paused, with its memory: where devices are not short of it, and on CPUs, where vLLM's sleep frees nothing.

    It aborts what it still has: a request that it keeps would wait in it without a word.
    """

    def park(self, replica: Replica) -> None:
        """Pause."""
        replica.post("/pause?mode=abort&clear_cache=true", {})
        if not replica.is_paused():
            raise Unready("it was paused, and says that it is not")

    def wake(self, replica: Replica) -> None:
        """Do nothing: it has its memory."""

    def ready(self, replica: Replica) -> None:
        """Resume."""
        if replica.is_paused():
            replica.resume()
        if replica.is_paused():
            raise Unready("it was resumed, and says that it is paused")

    def is_parked(self, replica: Replica) -> bool:
        """Tell whether it is paused."""
        return replica.is_paused()


@dataclass(frozen=True, slots=True)
class Sleeping:
    """Asleep, without memory: vLLM on GPUs, started with `--enable-sleep-mode`.

    Weights are woken first, alone: old weights, new ones and a cache do not fit together.
    """

    level: int = 2
    """2 drops the weights, for transports that send all of them. 1 keeps them in main memory: with adapters, whose base
    nobody sends."""

    def park(self, replica: Replica) -> None:
        """Sleep."""
        replica.sleep(self.level)
        if not replica.is_sleeping():
            raise Unready("it was sent to sleep, and says that it does not")

    def wake(self, replica: Replica) -> None:
        """Take memory for weights."""
        replica.wake("weights")

    def ready(self, replica: Replica) -> None:
        """Take memory for the cache, and resume."""
        replica.wake("kv_cache")
        if replica.is_paused():
            replica.resume()
        if replica.is_sleeping():
            raise Unready("it was woken, and says that it sleeps")

    def is_parked(self, replica: Replica) -> bool:
        """Tell whether it sleeps."""
        return replica.is_sleeping()


def parking_of(options: Sequence[str], transport: str) -> Parking:
    """Return how replicas with these command-line options make room.

    Args:
        transport: how weights reach them: `file`, `lora` or `nccl`.
    """
    if "--enable-sleep-mode" not in options:
        return Pausing()
    return Sleeping(1 if transport == "lora" else 2)


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell as its manager is given it: it serves."""

    name: str
    """`cell-0` is the core."""
    url: str
    """Of its replica."""
    parking: Parking = Pausing()
    launched: Launched | None = None
    """What keeps its processes running; None: somebody else looks after them."""
    worker: str = ""
    """Its training process among `launched.pids()`; empty: `NAME-worker`. The core has none there."""
    standalone: bool = False
    """It is no cell but a replica beside them, which serves all the time."""

    @property
    def worker_name(self) -> str:
        """What its training process is called there."""
        return self.worker or f"{self.name}-worker"

    def worker_pid(self) -> int | None:
        """Return the process id of its training worker; None where it is not known."""
        return None if self.launched is None else self.launched.pids().get(self.worker_name)


class PhaseFailed(TrainerError):
    """A phase of a switch failed.

    Attributes:
        phase: which.
        phases: seconds by phase, in order, of those that began.
    """

    def __init__(self, phase: str, message: str) -> None:
        super().__init__(f"{phase}: {message}")
        self.phase = phase
        self.phases: dict[str, float] = {}


@dataclass(slots=True)
class Switched:
    """What a switch took."""

    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, in order."""
    starts: dict[str, float] = field(default_factory=dict)
    """Seconds from when it began until each phase began."""
    drained: Drained = field(default_factory=Drained)
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Return the whole."""
        return sum(self.phases.values())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase, and name it when it fails."""
        began = time.monotonic()
        self.starts[name] = began - self._began
        try:
            yield
        except PhaseFailed as error:
            error.phases = self.phases
            raise
        except (TrainerError, ServiceError, Unready, httpx.HTTPError) as error:
            failed = PhaseFailed(name, f"{type(error).__name__}: {error}")
            failed.phases = self.phases
            raise failed from error
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - began

    def split(self, name: str, parts: Mapping[str, float]) -> None:
        """Tell a phase from those that it ended with, seconds in order; it keeps what was before them."""
        self.phases[name] = max(0.0, self.phases[name] - sum(parts.values()))
        begin = self.starts[name] + self.phases[name]
        for part, seconds in parts.items():
            self.phases[part], self.starts[part] = seconds, begin
            begin += seconds


@dataclass(frozen=True, slots=True)
class Patience:
    """Bounds of the phases, seconds."""

    drain_s: float
    """Requests may take so long to end on a cell that leaves."""
    join_s: float = 60.0
    """A satellite may take so long to join."""
    leave_s: float = 60.0
    """A satellite may take so long to offer what it has and let go, and the core to end the unit that it has in hand."""
    restore_s: float = 60.0
    """A replica may be unable to take weights for so long."""


Enter = Callable[[CellEvent], None]
"""Called at the moment of each event of a cell."""


def to_training(
    cell: Cell,
    core: bool,
    publisher: Publisher,
    training: TrainingSide,
    patience: Patience,
    enter: Enter,
    stays: Callable[[], bool] = lambda: False,
) -> Switched:
    """Make a serving cell train.

    Args:
        core: whether it is the core, which has a gate where satellites join.
        stays: asked when it has drained; whether it serves on after all.

    Raises:
        PhaseFailed: naming the phase. The cell takes no requests then, whichever it was.
    """
    switched = Switched()
    enter(CellEvent.LEAVE)
    with switched.phase("drain"):
        switched.drained = publisher.withdraw(cell.url, patience.drain_s)
    if stays():
        with switched.phase("return"):
            switched.phases |= publisher.restore(cell.url, patience=patience.restore_s)
        enter(CellEvent.STAY)
        return switched
    enter(CellEvent.DRAINED)
    with switched.phase("park"), publisher.replica(cell.url) as replica:
        cell.parking.park(replica)
    with switched.phase("join"):
        if core:
            training.open_gate()
        else:
            training.admit(cell.name)
            if not training.join_wait(cell.name, patience.join_s):
                raise PhaseFailed("join", f"its worker did not join within {patience.join_s:g} s; see its log")
    enter(CellEvent.READY)
    return switched


def to_serving(
    cell: Cell,
    core: bool,
    publisher: Publisher,
    training: TrainingSide,
    patience: Patience,
    enter: Enter,
    *,
    event: CellEvent = CellEvent.RETURN,
) -> Switched:
    """Make a cell serve that trains, or that takes no requests for whatever reason; idempotent where it failed before.

    Args:
        event: what begins its way back.

    Raises:
        PhaseFailed: naming the phase. The cell takes no requests then.
    """
    switched = Switched()
    with switched.phase("leave"):
        if core:
            if not training.close_gate(patience.leave_s):
                raise PhaseFailed("leave", _busy(patience.leave_s))
        elif not training.dismiss(cell.name, patience.leave_s):
            raise PhaseFailed("leave", f"its worker did not let go within {patience.leave_s:g} s; see its log")
    enter(event)
    with switched.phase("wake"), publisher.replica(cell.url) as replica:
        cell.parking.wake(replica)

    def awake() -> None:
        with publisher.replica(cell.url) as replica:
            cell.parking.ready(replica)

    with switched.phase("weights"):
        phases = publisher.restore(cell.url, awake=awake, patience=patience.restore_s)
    switched.split("weights", phases)
    enter(CellEvent.LOADED)
    return switched


def _busy(seconds: float) -> str:
    return (
        f"the core still computes a unit after {seconds:g} s, and nobody can take that over; its cell serves again once the"
        " unit has ended. If units take that long, raise cells.lease_s; if it hangs, the training begins anew from its"
        " checkpoint when that has lasted for cells.stuck_s"
    )
