"""The core's end of one satellite: answers what it asks, sends it weights, stages its gradients.

A seat is held from a satellite's dial-in until its line breaks, it falls silent, or a transfer fails. Then whatever it
leased is free again; a satellite that lives dials in anew, and gets another seat.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gyre_sdk.errors import SettingsError
from gyre_sdk.trainer.sharing.batch import Batch, Open
from gyre_sdk.trainer.sharing.book import Refusal, Verdict
from gyre_sdk.trainer.sharing.link import Link, LinkLost, choose, invite
from gyre_sdk.trainer.sharing.tensors import fingerprint, summed, trainable
from gyre_sdk.trainer.sharing.transfers import Transfers
from gyre_sdk.trainer.sharing.wire import (
    Beat,
    GiveBack,
    Join,
    Left,
    Line,
    Message,
    Offer,
    Pull,
    Ruled,
    Stale,
    Take,
    Turned,
    Units,
    Wait,
)

_ANSWER_S = 1.0
"""A question is answered within this, if only by `Wait`."""

_log = logging.getLogger("gyre.trainer")


@dataclass(frozen=True, slots=True)
class Passed:
    """What passed between core and satellites. Guarded by the batch's lock."""

    pulls: Transfers = field(default_factory=Transfers)
    pushes: Transfers = field(default_factory=Transfers)


class Seat:
    """One satellite at the core. `serve` runs in a thread of its own; what is public is guarded by the batch's lock."""

    def __init__(
        self,
        line: Line,
        cell: str,
        holder: str,
        batch: Batch,
        *,
        pid: int = 0,
        admitted: Callable[[], bool],
        passed: Passed,
        link: str,
        folder: Path | None,
    ) -> None:
        """Seat a satellite that has said hello.

        Args:
            holder: its name in the book, never used before.
            pid: its process.
            admitted: whether its cell may join, asked under the lock.
            passed: takes the measurements.
            link: kind of link, or `auto`.
            folder: of a link of files.
        """
        self.line = line
        self.cell = cell
        self.holder = holder
        self.inside = False
        """True from its first pull until it has left."""
        self.step: int | None = None
        """Of the batch that it has asked for units of."""
        self.gone = False
        self.pid = pid
        self.tokens = 0
        """Targets that it took last."""
        self.worked = time.monotonic()
        """When it last said anything but that it lives."""
        self._batch = batch
        self._admitted = admitted
        self._passed = passed
        self._kind = link
        self._folder = folder
        self._link: Link | None = None
        self._open: Open | None = None

    def serve(self) -> None:
        """Answer until the satellite is gone."""
        batch = self._batch
        try:
            while True:
                message = self.line.receive(batch.lease_s)
                if message is None:
                    raise ConnectionError(f"nothing was heard of it for {batch.lease_s:.0f} s")
                if isinstance(message, Beat) and (stuck := self.stuck()):
                    raise ConnectionError(stuck)
                batch.renew(self.holder)
                self._answer(message)
                if not isinstance(message, Beat):
                    self.worked = time.monotonic()
        except (ConnectionError, LinkLost) as error:
            units = batch.release(self.holder)
            if self.inside:
                _log.info("the satellite on %s is lost, its %d units are free again: %s", self.cell, units, error)
        except SettingsError as error:
            _log.warning("the satellite on %s is turned away: %s", self.cell, error)
        except Exception:  # boundary: top of a satellite's thread; the batch goes on without it
            _log.exception("the satellite on %s is given up", self.cell)
        finally:
            batch.release(self.holder)
            with batch.changed:
                self.gone, self.inside = True, False
                batch.changed.notify_all()
            self._unlink()
            self.line.close()

    def stuck(self) -> str | None:
        """Return in words that it has had its units for too long to compute them still; None while it has not."""
        bound, silent = self._batch.deadline.seconds(self.tokens), time.monotonic() - self.worked
        if silent <= bound:
            return None
        return f"{self.tokens} targets in hand for {silent:.0f} s, longer than the {bound:.0f} s that they may take"

    def _answer(self, message: Message) -> None:
        match message:
            case Beat():
                pass
            case Join():
                self._join(message)
            case Take():
                self._take(message)
            case Offer():
                self._offer(message)
            case GiveBack():
                self._batch.give_back(self.holder, message.leases)
            case Left():
                self._batch.release(self.holder)
                self._unlink()
                with self._batch.changed:
                    self.inside, self.step = False, None
                    self._batch.changed.notify_all()
            case _:
                raise ConnectionError(f"it said {type(message).__name__}, which is not its to say")

    def _join(self, message: Join) -> None:
        """Send the weights of the open batch."""
        try:
            found = self._batch.join(message.frozen, self._patience(), self._enter, self._dismissed)
        except SettingsError as error:
            self.line.send(Turned(str(error)))
            raise
        if found is None:
            self.line.send(Wait())
            return
        with self._measured(self._passed.pulls):
            meeting, build = None, None
            if self._link is None:
                kind = choose(self._kind, found.model)
                meeting, build = invite(kind, self.line.here, self._batch.lease_s, self._folder)
            self.line.send(Pull(found.step, found.version, found.digest, meeting))
            if build is not None:
                self._link = build()
            assert self._link is not None
            self._link.send(found.weights)
        self._open = found

    def _enter(self) -> bool:
        self.inside = self.inside or self._admitted()
        return self._admitted()

    def _dismissed(self) -> bool:
        return self.inside and not self._admitted()

    def _take(self, message: Take) -> None:
        seconds = self._patience() if message.patient else 0.0
        found = self._batch.take(
            self.holder,
            message.step,
            message.digest,
            message.count,
            seconds,
            lambda: not self._admitted(),
            least=message.least,
        )
        if isinstance(found, Refusal):
            self.line.send(Stale(found))
            return
        with self._batch.changed:
            self.step = message.step
            self._batch.changed.notify_all()
        leases, units = found
        self.tokens = sum(lease.tokens for lease in leases)
        self.line.send(Units(tuple(leases), tuple(units)) if leases else Wait())

    def _offer(self, message: Offer) -> None:
        """Rule on an offer; stage and commit what may come."""
        batch = self._batch
        while not batch.staging.acquire(timeout=self._patience()):
            batch.renew(self.holder)
            self.line.send(Wait())
        try:
            ruling = batch.offer(message.contribution, self.holder, message.step, message.leases)
            self.line.send(Ruled(ruling))
            if ruling.verdict is not Verdict.SEND:
                return
            staged = self._stage(message)
            if fingerprint(staged, self._renew) != message.digest:
                raise LinkLost("its gradient came damaged")
            ruling = batch.commit(
                message.contribution, self.holder, self.cell, message.leases, message.counted, staged, message.seconds
            )
        except LinkLost:
            batch.abandon(message.contribution)
            raise
        finally:
            batch.staging.release()
        self.line.send(Ruled(ruling))

    def _stage(self, message: Offer) -> dict[str, torch.Tensor]:
        """Receive a gradient into memory of its own."""
        if self._link is None or self._open is None:
            raise LinkLost("it offered before it had weights")
        own = trainable(self._open.model)
        unknown = set(message.names) - set(own)
        if unknown:
            raise LinkLost(f"it has gradients of other parameters: {', '.join(sorted(unknown)[:3])}")
        device = self._link.device
        staged = {
            name: torch.empty(own[name].shape, dtype=summed(own[name].dtype), device=device) for name in message.names
        }
        with self._measured(self._passed.pushes):
            self._link.receive(staged, self._renew)
        return staged

    @contextmanager
    def _measured(self, transfers: Transfers) -> Iterator[None]:
        with self._batch.changed:
            began = transfers.begin(time.monotonic())
        whole = False
        try:
            yield
            whole = True
        finally:
            with self._batch.changed:
                transfers.end(began, time.monotonic(), whole=whole)

    def _renew(self) -> None:
        self._batch.renew(self.holder)

    def _patience(self) -> float:
        return min(_ANSWER_S, self._batch.lease_s / 4)

    def _unlink(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
