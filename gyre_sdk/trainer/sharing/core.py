"""`Core`: the trainer's side of a batch that several cells compute.

The trainer deals itself units of the open batch, while satellites pull its weights, compute other units, and push sums of
gradients back (arXiv:2609.33848). Who computed what changes nothing: sums are not normalised, each unit is committed
exactly once, and only the trainer divides, clips and steps.

A core that dies takes the batch with it: it is computed anew from its first unit, with the weights of the checkpoint.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Any, Self

import torch

from gyre_sdk.errors import TrainerError
from gyre_sdk.harness.ports import Observer
from gyre_sdk.trainer.loss import LossSums, Totals
from gyre_sdk.trainer.mismatch import Mismatch
from gyre_sdk.trainer.sharing.batch import Batch, Whole
from gyre_sdk.trainer.sharing.overdue import look_after
from gyre_sdk.trainer.sharing.seat import Passed, Seat
from gyre_sdk.trainer.sharing.tensors import Sums
from gyre_sdk.trainer.sharing.wire import Hello, Leave, Welcome, answer
from gyre_sdk.trainer.units import Unit

__all__ = ["Collected", "Core", "Hung", "Progress"]

_POLL = 0.2
_HELLO_S = 10.0

_log = logging.getLogger("gyre.trainer")


@dataclass(frozen=True, slots=True)
class Collected:
    """What satellites added to a batch."""

    totals: Totals = field(default_factory=Totals)
    found: LossSums = field(default_factory=LossSums)
    mismatch: Mismatch = field(default_factory=Mismatch)
    names: list[str] = field(default_factory=list)
    """Ids of all units of the batch in the order in which they were sealed, whoever computed them."""
    sums: Sums = field(default_factory=Sums)
    """Of their gradients."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the open batch is. Tokens are targets."""

    step: int
    """0 when no batch is open; all else is 0 and false then, but what was measured."""
    ready_units: int
    """Sealed, and nobody has them."""
    ready_tokens: int
    leased_tokens: int
    """Being computed, or computed and not committed."""
    done_tokens: int
    """Committed."""
    sealed_all: bool
    """True when no further unit comes in this batch."""
    tokens_per_second: Mapping[str, float]
    """Measured speed of computing, by cell."""
    pull_s: float
    """Mean seconds of a satellite's pull of weights, alone; 0 before the first."""
    push_s: float
    """Mean seconds of a push of gradients, alone; 0 before the first."""


@dataclass(frozen=True, slots=True)
class Hung:
    """A worker that nothing is to be expected of any more."""

    pid: int
    """Its process, as its machine numbers it."""
    reason: str


class Core:
    """Context manager that listens for satellites.

    Args:
        lease_s: seconds of silence after which a satellite is taken for dead; also what a bucket of tensors may take.
        stuck_s: seconds that units may be in hand before who computes them is taken for hung; more where they are slow.
        host: address to listen on.
        port: 0 takes a free one.
        key: who has it is trusted.
        link: `auto`, `gloo`, `nccl` or `files`.
        folder: shared with the satellites; for `files`.
        observer: learns of commits.
        clock: seconds, of the leases.
    """

    def __init__(
        self,
        *,
        key: bytes,
        lease_s: float = 60.0,
        stuck_s: float = 600.0,
        host: str = "127.0.0.1",
        port: int = 0,
        link: str = "auto",
        folder: Path | None = None,
        observer: Observer = lambda event: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.check: Callable[[], None] = lambda: None
        """Asked while the trainer's thread waits; raises when nothing can come of it."""
        self.on_hung: Callable[[str], None] = lambda reason: _log.error("%s; see cells.stuck_s", reason)
        """Called, from a thread, when the core's own units do not end. The thread that computes may never come back."""
        self._key = key
        self._lease_s = lease_s
        self._at = (host, port)
        self._link = link
        self._folder = folder
        self._clock = clock
        self._batch = Batch(lease_s, observer, clock, stuck_s)
        self._ended = Event()
        self._admitted: set[str] = set()
        self._seats: dict[str, Seat] = {}
        self._passed = Passed()
        self._serial = count(1)
        self._server: socket.socket | None = None
        self._threads: list[Thread] = []

    def __enter__(self) -> Self:
        try:
            self._server = socket.create_server(self._at)
        except OSError as error:
            raise TrainerError(f"the core cannot listen on {self._at[0]}:{self._at[1]}: {error}") from error
        self._server.settimeout(_POLL)
        self._start(self._accept, self._server)
        self._start(self._look_after)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        server, self._server = self._server, None
        if server is not None:
            server.close()
        self._batch.end()
        with self._batch.changed:
            self._batch.closing = True
            self._batch.changed.notify_all()
            seats = list(self._seats.values())
        for seat in seats:
            seat.line.hang_up()
        for thread in self._threads:
            thread.join(_POLL)  # one in a transfer ends with it

    @property
    def address(self) -> tuple[str, int]:
        """Where satellites dial in."""
        if self._server is None:
            raise TrainerError("the core does not listen: enter it as a context manager first")
        host, port = self._server.getsockname()[:2]
        return str(host), int(port)

    # -- the trainer's thread ------------------------------------------------------------------------------------------

    def deal(
        self,
        step: int,
        version: int | None,
        model: Any,
        units: Iterable[Unit],
        *,
        size: int = 1,
        whole: Whole | None = None,
    ) -> Generator[Sequence[Unit], None, None]:
        """Open a batch; yield rounds of units that the core computes itself; return when every unit is committed.

        A round counts as computed when the next one is asked for. One without units asks the core to free what computing
        took: its gate was closed. The weights must not change before the end.

        Args:
            version: number of the weights in training, if they have one.
            units: taken in a thread of its own, as they are sealed.
            size: units of a round at most: ranks of the core.
            whole: what satellites get, where the model is in shards.

        Raises:
            BaseException: what `units` or `check` raised.
        """
        batch = self._batch
        batch.begin(step, version, model, units, whole)
        try:
            while (found := batch.take_own(self.check, size)) is not None:
                began = self._clock()
                yield [unit for _, unit in found]
                if found:
                    batch.commit_own([lease for lease, _ in found], self._clock() - began)
        finally:
            batch.end()
            batch.report_own(step)

    def collect(self) -> Collected:
        """Return what satellites computed of the batch that has ended."""
        counted, sums, names = self._batch.collect()
        return Collected(counted.totals, counted.found, counted.mismatch, names, sums)

    # -- the manager's thread ------------------------------------------------------------------------------------------

    def open_gate(self) -> None:
        """Let the core compute. It does from the start."""
        with self._batch.changed:
            self._batch.gate = True
            self._batch.changed.notify_all()

    def close_gate(self, seconds: float | None = None) -> bool:
        """Let the core take no further unit; return when it has none in hand, and GPUs have the memory that those took.

        Args:
            seconds: to wait for that at most; None: for ever.

        Returns:
            False when it still has a unit in hand. The gate is closed all the same. Nobody can take that unit over: what is
            computed of it is in the core's own sums, where nothing can be taken out.
        """
        with self._batch.changed:
            self._batch.gate = False
            if not self._batch.changed.wait_for(lambda: not self._batch.computing, seconds):
                return False
        torch.cuda.empty_cache()  # weights, gradients and the optimizer's state stay; nothing happens without a GPU
        return True

    def admit(self, cell: str) -> None:
        """Let a cell's worker join this batch and those that follow, now or when it dials in."""
        with self._batch.changed:
            self._admitted.add(cell)
            self._batch.changed.notify_all()

    def dismiss(self, cell: str, seconds: float) -> bool:
        """Let a satellite end its unit, offer what it has, and leave.

        Returns:
            True when it has left, or had not joined. False when it did not in time, or was lost: its leases are free.
        """
        changed = self._batch.changed
        with changed:
            self._admitted.discard(cell)
            changed.notify_all()
            seat = self._seats.get(cell)
            if seat is None or not seat.inside:
                return True
        with suppress(ConnectionError):
            seat.line.send(Leave())
        with changed:
            changed.wait_for(lambda: not seat.inside, seconds)
            left = not seat.inside and not seat.gone
        if not left:
            seat.line.hang_up()
            self._batch.release(seat.holder)
        return left

    def joined(self, cell: str) -> bool:
        """Tell whether a cell's satellite holds the weights of the open batch and takes units."""
        with self._batch.changed:
            return self._has_joined(cell)

    def join_wait(self, cell: str, seconds: float) -> bool:
        """Wait until an admitted satellite has joined the open batch.

        Returns:
            False when it has not in time, or was lost. True also when no batch is open: it joins the next one by itself.
        """
        batch = self._batch

        def lost() -> bool:
            seat = self._seats.get(cell)
            return seat is not None and seat.gone

        with batch.changed:
            batch.changed.wait_for(lambda: not batch.is_open or self._has_joined(cell) or lost(), seconds)
            return not batch.is_open or self._has_joined(cell)

    def waiting(self) -> set[str]:
        """Return the cells whose workers are dialled in, admitted or not."""
        with self._batch.changed:
            return {cell for cell, seat in self._seats.items() if not seat.gone}

    def hung(self, cell: str) -> Hung | None:
        """Return the worker of a cell that had units in hand for too long, or is lost and has not come back for as long."""
        with self._batch.changed:
            seat = self._seats.get(cell)
            reason = seat.stuck() if seat is not None and seat.gone else None
        return None if seat is None or reason is None else Hung(seat.pid, reason)

    def progress(self) -> Progress:
        """Return how far the open batch is."""
        step, counts, speeds = self._batch.counts()
        with self._batch.changed:
            pull_s, push_s = self._passed.pulls.mean_s, self._passed.pushes.mean_s
        return Progress(
            step=step,
            ready_units=counts.ready_units,
            ready_tokens=counts.ready_tokens,
            leased_tokens=counts.leased_tokens,
            done_tokens=counts.done_tokens,
            sealed_all=counts.closed,
            tokens_per_second=speeds,
            pull_s=pull_s,
            push_s=push_s,
        )

    def _has_joined(self, cell: str) -> bool:
        seat = self._seats.get(cell)
        return seat is not None and seat.inside and seat.step is not None and seat.step == self._batch.book.step

    # -- satellites ----------------------------------------------------------------------------------------------------

    def _look_after(self) -> None:
        look_after(self._batch, self._ended, lambda reason: self.on_hung(reason))

    def _start(self, function: Callable[..., None], *arguments: Any) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = Thread(target=function, args=arguments, name=f"core {function.__name__}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, server: socket.socket) -> None:
        while self._server is server:
            try:
                sock, _ = server.accept()
            except TimeoutError:
                continue
            except OSError:
                return  # closed
            self._start(self._seat, sock)

    def _seat(self, sock: socket.socket) -> None:
        """Hear who dials in, and serve it until it is gone."""
        try:
            line = answer(sock, self._key, self._lease_s)
        except ConnectionError as error:
            _log.warning("somebody who dialled in was not let in: %s", error)
            return
        try:
            hello = line.receive(_HELLO_S)
            if not isinstance(hello, Hello):
                raise ConnectionError("it did not say hello")
            line.send(Welcome(self._lease_s))
        except ConnectionError as error:
            _log.warning("somebody who dialled in was turned away: %s", error)
            line.close()
            return
        cell = hello.cell
        seat = Seat(
            line,
            cell,
            f"{cell}/{next(self._serial)}",
            self._batch,
            admitted=lambda: cell in self._admitted,
            pid=hello.pid,
            passed=self._passed,
            link=self._link,
            folder=self._folder,
        )
        with self._batch.changed:
            before, self._seats[cell] = self._seats.get(cell), seat
            self._batch.changed.notify_all()
        if before is not None:
            before.line.hang_up()
        if self._server is not None:
            seat.serve()
        line.close()
