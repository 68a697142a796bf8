"""Cells on a Ray cluster: the user's, or one that is started on this machine.

A cell is a placement group with one actor, `Node`, which runs the cell's processes on the node where it lands. All
decisions stay here, in the trainer's process: a dead process is started again where it was, on the same port; when the
actor or its node is gone, the cell takes another place and its processes start there. Places belong to the training's
`Warden`, which outlives this process for a while: a successor takes over what is as it would start it. Processes end with
their actors, and these with the warden.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import secrets
import socket
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from gyre_sdk.errors import SettingsError, TrainerError
from gyre_sdk.harness.ports import Observer
from gyre_sdk.trainer.cells.launch import CellSpec, warden
from gyre_sdk.trainer.cells.launch.calls import Lost, Silent
from gyre_sdk.trainer.cells.launch.cluster import NAME, READY
from gyre_sdk.trainer.cells.launch.connection import Connection, ask_for_token, token_mode
from gyre_sdk.trainer.cells.launch.node import Found, Look, Order
from gyre_sdk.trainer.cells.launch.placement import SILENCE, Place
from gyre_sdk.trainer.cells.launch.tenure import Seat, Tenure
from gyre_sdk.trainer.leashed import STOP_TIMEOUT
from gyre_sdk.trainer.lingering import Linger, Record
from gyre_sdk.trainer.processes import Child, ChildSpec

__all__ = ["RayCell", "RayLauncher"]

_POLL = 0.2
"""Seconds between two looks at a process: each is a call through the cluster."""

_log = logging.getLogger("gyre.trainer")


class RayLauncher:
    """Starts cells on a Ray cluster, or takes them over from a trainer that was killed.

    Args:
        address: `auto`, or `HOST:PORT` of a cluster that runs; None: one on this machine, started here or lingering.
        observer: learns which processes were started again.
        namespace: of the training in the cluster: who has the same takes over; None: a new one.
        linger: how cells, and a cluster that is started here, outlive this process when it is killed; None: not at all.
        cells: those that will be launched, so that others that linger are ended at once; None: all are kept.
        logs: folder of the log of a cluster that is started here.
        room: seconds that a cell waits for room in the cluster, at first and after the loss of its node.
        silence: seconds without a sign of life after which this process counts as gone.
        pin_core: keep the cell without a worker, whose worker is the trainer, on the node where the trainer runs.
        runtime_env: what Ray sets up for the actors on their nodes; None: nothing.

    Raises:
        SettingsError: ray is not installed, or there is no such cluster.
        TrainerError: what an earlier trainer left does not answer, or a cluster does not start.
    """

    host: str
    """Address of this machine in the cluster: where cells elsewhere reach the trainer."""

    def __init__(
        self,
        address: str | None = None,
        *,
        observer: Observer,
        namespace: str | None = None,
        linger: Linger | None = None,
        cells: Collection[str] | None = None,
        logs: Path = Path("logs"),
        room: float = 600.0,
        silence: float = 10.0,
        pin_core: bool = True,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise SettingsError("cells.launcher = 'ray' needs Ray: pip install 'gyre-sdk[ray]'")
        self._observer = observer
        self._room = room
        self._cells: list[RayCell] = []
        namespace = namespace or f"gyre-{secrets.token_hex(6)}"
        with contextlib.ExitStack() as failing:
            self._cluster = None if address or _is_connected() else _cluster(logs, linger, observer)
            if self._cluster is not None:
                failing.callback(self._cluster.stop)
                address = self._cluster.wait()
                ask_for_token()
            self._connection = Connection(address or "auto", namespace, runtime_env)
            failing.callback(self._connection.close)
            self.host, node = self._connection.open()
            self._core_node = node if pin_core else None
            lingers = warden.Linger(linger.seconds if linger is not None else 0.0, silence)
            self._tenure = Tenure(namespace, lingers, node)
            failing.callback(self._tenure.end)
            self._tenure.begin(cells)
            failing.pop_all()

    def launch(self, spec: CellSpec, moved: Callable[[str, str], None] = lambda old, new: None) -> RayCell:
        """Begin a cell; do not wait for it.

        The replica is told where to listen by a last argument `--host ADDRESS`, with its node's address. Everything
        else is as in the spec: paths mean the same on every node.

        Args:
            moved: called with the old and the new URL when a replica comes back elsewhere (another node or port).
        """
        node = self._core_node if spec.worker is None and not spec.standalone else None
        place = Place(spec.name, spec.resources or {"CPU": 1}, node=node, room=self._room, tenure=self._tenure)
        cell = RayCell(spec, place, self._observer, moved, self._cluster)
        self._cells.append(cell)
        cell.begin()
        return cell

    def close(self) -> None:
        """End all cells, the connection, and the cluster if it was started here. Idempotent."""
        cells, self._cells = self._cells, []
        if cells:
            with ThreadPoolExecutor(len(cells)) as pool:
                list(pool.map(RayCell.stop, cells))
        self._tenure.end()
        self._connection.close()
        if self._cluster is not None:
            self._cluster.stop()


def _is_connected() -> bool:
    import ray

    return bool(ray.is_initialized())


def _cluster(logs: Path, linger: Linger | None, observer: Observer) -> Child:
    """Begin a cluster on this machine, or take over the one that lingers."""

    def answers(address: str) -> bool:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
        except OSError:
            return False
        return True

    def died(address: str) -> None:
        raise TrainerError(f"the Ray cluster at {address} ended; see {logs / 'ray.log'}, and start the trainer again")

    spec = ChildSpec(
        NAME,
        lambda port: ["gyre_sdk.trainer.cells.launch.cluster"],
        READY,
        logs / "ray.log",
        environment=token_mode(),
        on_death=died,
        linger=linger,
        fit=answers,
    )
    child = Child(spec, observer)
    child.begin()
    return child


class RayCell:
    """A cell on the cluster: its place, and its processes there, supervised from here."""

    def __init__(
        self,
        spec: CellSpec,
        place: Place,
        observer: Observer,
        moved: Callable[[str, str], None],
        cluster: Child | None = None,
    ) -> None:
        self.name = spec.name
        self._spec = spec
        self._place = place
        self._moved = moved
        self._cluster = cluster
        self._old = ""
        replica = replace(spec.replica, on_death=self._died, on_ready=self._returned)
        self._replica = _child(replica, observer, place, listens=True)
        self._children = [self._replica]
        if spec.worker is not None:
            self._children.append(_child(spec.worker, observer, place, listens=False))

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
            TrainerError: naming it, with the end of its log; or another trainer has taken over, or the cluster ended.
        """
        if self._cluster is not None:
            self._cluster.check()
        self._place.check()
        for child in self._children:
            child.check()

    def pids(self) -> dict[str, int]:
        """Return process ids by name, as their machine numbers them; 0 for one that does not run."""
        return {child.spec.name: child.pid for child in self._children}

    def replace(self, name: str, pid: int, reason: str) -> None:
        """End one of its processes that hangs and start it again, as after a death, if it is still the process `pid`."""
        for child in self._children:
            if child.spec.name == name:
                child.replace(pid, reason)

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


def _child(spec: ChildSpec, observer: Observer, place: Place, *, listens: bool) -> Child:
    site = _Site(spec, place, listens)
    return Child(spec, observer, site.start, _POLL, site)


class _Site:
    """Where one child of a cell runs, wherever the cell is then: starts it there, and finds it there."""

    def __init__(self, spec: ChildSpec, place: Place, listens: bool) -> None:
        self._spec = spec
        self._place = place
        self._listens = listens
        self._last: Seat | None = None

    @property
    def specification(self) -> str:
        """Digest of what is started."""
        return hashlib.blake2b(f"{self._spec.specification()} {self._listens}".encode(), digest_size=16).hexdigest()

    def board(self) -> tuple[Record, _There] | None:
        """Take over what an earlier trainer started here; None when nothing does that was ready.

        Raises:
            TrainerError: there is no place for the cell.
        """
        seat = self._place.seat()
        try:
            found: Found | None = seat.ask("found", self._spec.name)
        except (Lost, Silent):
            return None  # who starts another looks what is there
        if found is None:
            return None
        self._last = seat
        return found.record, _There(self._place, seat, self._spec, found.pid, found.record.port, found.said)

    def ready(self, url: str, port: int) -> None:
        """Note that the child is ready: only such a one is taken over."""
        if self._spec.lingers and self._last is not None:
            with contextlib.suppress(Lost, Silent):  # then another is started, here or under the next trainer
                self._last.ask("note", self._spec.name, Record(self.specification, "", url, port))

    def clear(self) -> None:
        """Leave nothing: what is known of a child ends with it."""

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

    def __init__(self, place: Place, seat: Seat, spec: ChildSpec, pid: int, port: int, said: int = 0) -> None:
        self.pid = pid
        self.port = port
        self.address = seat.address
        self._place = place
        self._seat = seat
        self._name = spec.name
        self._log = spec.log
        self._said = said
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
