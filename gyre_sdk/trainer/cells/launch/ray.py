"""Cells on a Ray cluster: the user's, or one that is started on this machine.

A cell is a placement group with one actor, `Node`, which runs the cell's processes on the node where it lands. All
decisions stay here, in the trainer's process: a dead process is started again where it was, on the same port; when the
actor or its node is gone, the cell takes another place and its processes start there. The actors end with this
process, however it ends, and the processes end with the actors.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from gyre_sdk.errors import SettingsError, TrainerError
from gyre_sdk.harness.ports import Observer
from gyre_sdk.trainer.cells.launch import CellSpec
from gyre_sdk.trainer.cells.launch.node import Look, Order
from gyre_sdk.trainer.cells.launch.placement import SILENCE, Lost, Place, Seat, Silent
from gyre_sdk.trainer.leashed import STOP_TIMEOUT
from gyre_sdk.trainer.processes import Child, ChildSpec

__all__ = ["RayCell", "RayLauncher"]

_POLL = 0.2
"""Seconds between two looks at a process: each is a call through the cluster."""
_CONNECT = 120.0
"""Seconds that connecting, or starting a cluster, may take."""
_LOCAL_CPUS = 64
"""What a cluster on this machine says it has at least: cells there share the cores, as they do without Ray."""
_LOCAL_STORE = 80 << 20
"""Bytes of the object store of a cluster on this machine: nothing is passed through it."""

_log = logging.getLogger("gyre.trainer")


class RayLauncher:
    """Starts cells on a Ray cluster.

    Args:
        address: `auto`, or `HOST:PORT` of a cluster that runs; None starts one on this machine.
        observer: learns which processes were started again.
        namespace: of the actors in the cluster.
        room: seconds that a cell waits for room in the cluster, at first and after the loss of its node.
        pin_core: keep the cell without a worker, whose worker is the trainer, on the node where the trainer runs.
        runtime_env: what Ray sets up for the actors on their nodes; None: nothing.

    Raises:
        SettingsError: ray is not installed, or there is no such cluster.
    """

    host: str
    """Address of this machine in the cluster: where cells elsewhere reach the trainer."""

    def __init__(
        self,
        address: str | None = None,
        *,
        observer: Observer,
        namespace: str = "gyre",
        room: float = 600.0,
        pin_core: bool = True,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise SettingsError("cells.launcher = 'ray' needs Ray: pip install 'gyre-sdk[ray]'")
        self._observer = observer
        self._room = room
        self._cells: list[RayCell] = []
        self._connection = _Connection(address, namespace, runtime_env)
        self.host, node = self._connection.open()
        self._core_node = node if pin_core else None

    def launch(self, spec: CellSpec, moved: Callable[[str, str], None] = lambda old, new: None) -> RayCell:
        """Begin a cell; do not wait for it.

        The replica is told where to listen by a last argument `--host ADDRESS`, with its node's address. Everything
        else is as in the spec: paths mean the same on every node.

        Args:
            moved: called with the old and the new URL when a replica comes back elsewhere (another node or port).
        """
        node = self._core_node if spec.worker is None else None
        place = Place(spec.name, spec.resources or {"CPU": 1}, node=node, room=self._room)
        cell = RayCell(spec, place, self._observer, moved)
        self._cells.append(cell)
        cell.begin()
        return cell

    def close(self) -> None:
        """End all cells, the connection, and the cluster if it was started here. Idempotent."""
        cells, self._cells = self._cells, []
        if cells:
            with ThreadPoolExecutor(len(cells)) as pool:
                list(pool.map(RayCell.stop, cells))
        self._connection.close()


class RayCell:
    """A cell on the cluster: its place, and its processes there, supervised from here."""

    def __init__(self, spec: CellSpec, place: Place, observer: Observer, moved: Callable[[str, str], None]) -> None:
        self.name = spec.name
        self._spec = spec
        self._place = place
        self._moved = moved
        self._old = ""
        replica = replace(spec.replica, on_death=self._died, on_ready=self._returned)
        self._replica = Child(replica, observer, _Starter(place, listens=True).start, _POLL)
        self._children = [self._replica]
        if spec.worker is not None:
            self._children.append(Child(spec.worker, observer, _Starter(place).start, _POLL))

    def begin(self) -> None:
        """Start looking for a place, and the processes in it."""
        for child in self._children:
            child.begin()

    def wait(self) -> str:
        """Wait until replica and worker are ready; return the replica's URL.

        Raises:
            TrainerError: one did not get ready; the message holds the end of its log.
        """
        for child in self._children:
            child.wait()
        return self._replica.url

    def check(self) -> None:
        """Raise when a process was given up.

        Raises:
            TrainerError: naming it, with the end of its log.
        """
        for child in self._children:
            child.check()

    def pids(self) -> dict[str, int]:
        """Return process ids by name, as their machine numbers them; 0 for one that does not run."""
        return {child.spec.name: child.pid for child in self._children}

    def stop(self) -> None:
        """End everything that was started. Idempotent."""
        self._place.refuse()
        for child in self._children:
            child.stop()
        self._place.close()

    def _died(self, url: str) -> None:
        self._old = url
        self._spec.replica.on_death(url)

    def _returned(self, url: str) -> None:
        if url != self._old:
            self._moved(self._old, url)
        self._spec.replica.on_ready(url)


class _Starter:
    """Starts one child of a cell, where the cell is then."""

    def __init__(self, place: Place, *, listens: bool = False) -> None:
        self._place = place
        self._listens = listens
        self._last: Seat | None = None

    def start(self, spec: ChildSpec, port: int) -> _There:
        """Start the process.

        Raises:
            TrainerError: there is no place for it, or its node could not start it.
        """
        silent_since: float | None = None
        while True:
            seat = self._place.seat()
            try:
                return self._start(spec, port if seat is self._last else spec.port, seat)
            except Silent:
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > SILENCE:
                    self._place.lost(seat)
                    silent_since = None
            except Lost as error:
                _log.warning("%s: %s", self._place.name, error)
                self._place.lost(seat)

    def _start(self, spec: ChildSpec, port: int, seat: Seat) -> _There:
        if not port and spec.ready.startswith("/"):
            port = int(seat.ask("free_port", seat.address))
        arguments = spec.command(port) + (["--host", seat.address] if self._listens else [])
        python = None if spec.python is None else str(spec.python)
        order = Order(spec.name, arguments, python, dict(spec.environment), str(Path.cwd()))
        pid = int(seat.ask("start", order))
        self._last = seat
        return _There(self._place, seat, spec, pid, port)


class _There:
    """A process on a node. Its output is added to the log here, whenever it is looked at."""

    def __init__(self, place: Place, seat: Seat, spec: ChildSpec, pid: int, port: int) -> None:
        self.pid = pid
        self.port = port
        self.address = seat.address
        self._place = place
        self._seat = seat
        self._name = spec.name
        self._log = spec.log
        self._said = 0
        self._heard = time.monotonic()
        self._end: str | None = None
        self._over = False
        """Nothing is left of it."""

    def ended(self) -> str | None:
        """Return what it ended with, or None while it runs."""
        if self._end is None:
            try:
                self._end = self._look()
            except Silent:
                if time.monotonic() - self._heard > SILENCE:
                    self._lose(f"the silence of its actor on {self.address}")
            except Lost:
                self._lose(f"the loss of its actor on {self.address}")
        if self._end is not None:
            self.pid = 0
        return self._end

    def end(self) -> None:
        """End it, and what it started: SIGTERM, and SIGKILL for what is left after a while. Idempotent."""
        if self._over:
            return
        with contextlib.suppress(TrainerError):  # it ends with its actor
            self._seat.ask("terminate", self._name)
            give_up = time.monotonic() + STOP_TIMEOUT
            while self._look() is None and time.monotonic() < give_up:
                time.sleep(0.05)
            self._seat.ask("kill", self._name)
        self._over = True
        self.pid = 0

    def _lose(self, reason: str) -> None:
        self._end = reason
        self._over = True
        self._place.lost(self._seat)

    def _look(self) -> str | None:
        look: Look = self._seat.ask("look", self._name, self._said)
        self._heard = time.monotonic()
        dropped = look.start - self._said
        if look.output:
            with self._log.open("ab") as log:
                log.write(b"[%d bytes were dropped]\n" % dropped if dropped > 0 else b"")
                log.write(look.output)
        self._said = look.start + len(look.output)
        return look.ended


class _Connection:
    """The process's connection to Ray, held by a thread of its own.

    What Ray starts ends with the thread that started it, and what connects from the main thread loses its handler of
    SIGTERM to Ray. A connection that this process had before is used, and left as it is.
    """

    def __init__(self, address: str | None, namespace: str, runtime_env: Mapping[str, Any] | None) -> None:
        self._address = address
        self._namespace = namespace
        self._runtime_env = runtime_env
        self._opened = threading.Event()
        self._closing = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._hold, name="connection to Ray", daemon=True)

    def open(self) -> tuple[str, str]:
        """Connect; return this machine's address in the cluster and the id of its node.

        Raises:
            SettingsError: there is no such cluster.
        """
        import ray

        if not ray.is_initialized() and self._found():
            self._thread.start()
            if not self._opened.wait(_CONNECT):
                self._failure = TimeoutError(f"no answer in {_CONNECT:.0f} s")
                self._closing.set()
        if self._failure is not None:
            where = "on this machine" if self._address is None else f"at cells.ray_address = {self._address!r}"
            raise SettingsError(
                f"no Ray cluster {where}: {self._failure}; start one with `ray start --head`, or leave the address out"
            ) from self._failure
        node = str(ray.get_runtime_context().get_node_id())
        return str(ray.util.get_node_ip_address()), node

    def close(self) -> None:
        """Disconnect, and end the cluster if it was started here. Idempotent."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _found(self) -> bool:
        """Ask for the head at once: Ray asks for minutes where nobody is."""
        if self._address is None or self._address == "auto":
            return True
        host, _, port = self._address.rpartition(":")
        if "/" in self._address or not host or not port.isdecimal():
            raise SettingsError(
                f"cells.ray_address = {self._address!r} must be 'auto' or HOST:PORT of the head: the trainer runs on a"
                " node of the cluster, not as a client from outside"
            )
        try:
            socket.create_connection((host, int(port)), timeout=10.0).close()
        except OSError as error:
            self._failure = error
        return self._failure is None

    def _hold(self) -> None:
        import ray

        logger = logging.getLogger("ray")
        level = logger.level
        logger.setLevel(logging.ERROR)  # a warning for each thing that is as it is meant to be
        try:
            ray.init(
                self._address or "local",
                namespace=self._namespace,
                runtime_env=None if self._runtime_env is None else dict(self._runtime_env),
                log_to_driver=False,
                configure_logging=False,
                **({} if self._address else _local()),
            )
        except Exception as error:  # boundary: top of the connecting thread; Ray raises errors of many kinds
            self._failure = error
            return
        finally:
            logger.setLevel(level)
            self._opened.set()
        with _silence():
            self._closing.wait()
            ray.shutdown()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Log what nodes report instead of printing it. Ray has no setting for that, and stdout is for the trainer's report."""
    from ray._private import worker

    def note(data: Mapping[str, Any], *_: Any, **__: Any) -> None:
        for line in data["lines"]:
            _log.info("Ray: %s", line.partition("\n")[0])

    printing = worker.print_to_stdstream
    worker.print_to_stdstream = note
    try:
        yield
    finally:
        worker.print_to_stdstream = printing


def _local() -> dict[str, Any]:
    """Return how a cluster on this machine is started: with nothing that cells do not need."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # a cell that reserves no GPU sees all, as without Ray
    return {
        "num_cpus": max(_LOCAL_CPUS, os.cpu_count() or 1),
        "include_dashboard": False,
        "object_store_memory": _LOCAL_STORE,
        "_system_config": {
            "enable_worker_prestart": False,
            "prestart_worker_first_driver": False,
            "worker_niceness": 0,  # 15 otherwise, also for what the actors start
        },
    }
