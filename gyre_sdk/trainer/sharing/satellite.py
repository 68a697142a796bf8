"""A satellite: joins an open batch late, computes some of its units, pushes their summed gradient, leaves when told to.

It has no optimizer and no version of its own: for each batch it pulls the weights that the core has frozen. What it
computes and has not committed is lost with it, and computed by others; nothing else is.

Sums go up when a chunk of units is computed and the time for it outweighs a push, when there is nothing to compute now,
and when it leaves.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from uuid import uuid4

from gyre_sdk.errors import SettingsError
from gyre_sdk.trainer.sharing.book import Lease, Ruling, Verdict
from gyre_sdk.trainer.sharing.link import Link, LinkLost, come
from gyre_sdk.trainer.sharing.part import Part
from gyre_sdk.trainer.sharing.tensors import fingerprint
from gyre_sdk.trainer.sharing.wire import (
    Address,
    Beat,
    GiveBack,
    Hello,
    Join,
    Leave,
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
    Welcome,
    dial,
)
from gyre_sdk.trainer.units import Unit

CHUNK = 4
"""Units for each rank that are leased at a time, at most."""
_OUTWEIGHS = 10.0
"""Times that computing a contribution takes as long as its push, before it is pushed without need."""
_BACKOFF_S = (0.05, 2.0)
"""First and longest pause before the core is called again."""
_PATIENCE = 4.0
"""Leases that the core may take to answer."""
_TRIES = 3
"""Pulls in a row that may come out wrong: one does when the batch ends under it."""

_log = logging.getLogger("gyre.trainer")


class Satellite:
    """One satellite. `run` serves core after core until it is stopped."""

    def __init__(
        self,
        address: Address,
        key: bytes,
        cell: str,
        part: Part,
        *,
        ready: Callable[[], None] = lambda: None,
        chunk: int = CHUNK,
    ) -> None:
        """Prepare a satellite.

        Args:
            address: where the core listens.
            key: that the core has too.
            cell: name of the cell that it trains on.
            part: what it computes with; that of rank 0.
            ready: called when the core has let it in for the first time.
            chunk: units for each rank that it leases at a time, at most.
        """
        self._address = address
        self._key = key
        self._cell = cell
        self._part = part
        self._ready: Callable[[], None] | None = ready
        self._chunk = chunk
        self._stopping = threading.Event()
        self._push_s = 0.0
        self._forget_core()

    def run(self) -> None:
        """Serve until `stop`.

        Raises:
            SettingsError: the core turned it away: the two cannot compute the same.
        """
        pause, longest = _BACKOFF_S
        while not self._stopping.is_set():
            try:
                line = dial(self._address, self._key, longest)
            except ConnectionError as error:
                _log.debug("%s; the next call in %.2f s", error, pause)
                self._stopping.wait(pause)
                pause = min(2 * pause, longest)
                continue
            pause = _BACKOFF_S[0]
            try:
                self._serve(line)
            except (ConnectionError, LinkLost) as error:
                if not self._stopping.is_set():
                    _log.info("the core is lost: %s", error)
            finally:
                line.close()
                if self._link is not None:
                    self._link.close()
                if self._inside:
                    self._part.leave()
                self._forget_core()

    def stop(self) -> None:
        """End `run`, from another thread: at once, whatever is in hand."""
        self._stopping.set()
        line = self._line
        if line is not None:
            line.hang_up()

    # -- one core ------------------------------------------------------------------------------------------------------

    def _forget_core(self) -> None:
        self._line: Line | None = None
        self._link: Link | None = None
        self._inside = self._leaving = False
        self._lease_s = 0.0
        self._drop()

    def _drop(self) -> None:
        """Forget what is computed and not committed."""
        self._leases: list[Lease] = []
        self._seconds = 0.0
        self._part.drop()

    def _serve(self, line: Line) -> None:
        self._line = line
        line.send(Hello(self._cell, os.getpid()))
        welcome = line.receive(_BACKOFF_S[1] * 5)
        if not isinstance(welcome, Welcome):
            raise ConnectionError("the core did not welcome it")
        self._lease_s = welcome.lease_s
        line.patience(max(welcome.lease_s, 1.0))
        if self._ready is not None:
            self._ready()
            self._ready = None
        quiet = threading.Event()
        beats = threading.Thread(target=self._beat, args=(line, quiet), name="beats of the satellite", daemon=True)
        beats.start()
        try:
            while not self._stopping.is_set():
                self._join()
        finally:
            quiet.set()

    def _beat(self, line: Line, quiet: threading.Event) -> None:
        """Show that this process lives, whatever it computes."""
        try:
            while not quiet.wait(self._lease_s / 4):
                line.send(Beat())
        except ConnectionError:
            pass  # the other thread learns it too

    def _ask(self, question: Message | None) -> Message:
        """Say something, if it is not None, and return the answer."""
        line = self._line
        assert line is not None
        if question is not None:
            line.send(question)
        while True:
            answer = line.receive(max(_PATIENCE * self._lease_s, 10.0))
            if answer is None:
                raise ConnectionError("the core does not answer")
            if not isinstance(answer, Leave):
                return answer
            self._leaving = True

    def _told_to_leave(self) -> bool:
        """Look whether the core said so since the last question."""
        assert self._line is not None
        while (said := self._line.receive(0)) is not None:
            if not isinstance(said, Leave):
                raise ConnectionError(f"the core said {type(said).__name__}, unasked")
            self._leaving = True
        return self._leaving

    # -- one batch -----------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Wait to be let into a batch, and work on it; or leave."""
        if self._leaving:
            self._leave()
        answer = self._ask(Join(self._part.base))
        tries = 1
        while isinstance(answer, Pull):
            if self._pull(answer):
                self._work(answer)
                return
            if tries == _TRIES:
                raise LinkLost(f"{tries} pulls in a row brought other weights than the core's")
            tries += 1
            answer = self._ask(Join(self._part.base))
        if isinstance(answer, Turned):
            raise SettingsError(f"the core turned the worker on {self._cell} away: {answer.reason}")
        if not isinstance(answer, Wait):
            raise ConnectionError(f"the core answered {type(answer).__name__} to who wants to join")

    def _leave(self) -> None:
        """Take the hands off the batch."""
        assert self._line is not None
        self._drop()
        if self._inside:
            self._part.leave()
        self._inside = self._leaving = False
        if self._link is not None:
            self._link.close()
            self._link = None
        self._line.send(Left())

    def _pull(self, pull: Pull) -> bool:
        """Fetch the weights of the batch; tell whether they came whole."""
        assert self._line is not None
        if not self._inside:
            self._part.enter()
            self._inside = True
        if pull.meeting is not None:
            self._link = come(pull.meeting, self._line.here)
        assert self._link is not None
        self._drop()
        return self._part.pull(self._link.receive, pull.digest)

    def _work(self, pull: Pull) -> None:
        """Compute units of the batch until it is over, or the core wants this cell back."""
        while not self._stopping.is_set():
            answer = self._ask(
                Take(pull.step, pull.digest, self._chunk * self._part.at_once, self._part.at_once, not self._leases)
            )
            match answer:
                case Units():
                    self._compute(answer, pull.version)
                case Wait():
                    pass
                case Stale():
                    self._drop()
                    return
                case _:
                    raise ConnectionError(f"the core answered {type(answer).__name__} to who wants units")
            idle = isinstance(answer, Wait) or self._told_to_leave()
            if self._leases and (idle or self._seconds >= _OUTWEIGHS * self._push_s):
                self._offer(pull.step)
            if self._leaving:
                return

    def _compute(self, found: Units, version: int | None) -> None:
        """Compute what was leased; give back what is left when it is time to leave."""
        own = list(zip(found.leases, found.units, strict=True))
        if self._part.at_once > 1:
            own.sort(key=lambda pair: -pair[0].tokens)  # who has the same round has about the same work
        broken: list[ConnectionError] = []

        def taken() -> Iterator[Unit]:
            for place, (lease, unit) in enumerate(own):
                try:
                    if place and self._told_to_leave():
                        assert self._line is not None
                        self._line.send(GiveBack(tuple(lease for lease, _ in own[place:])))
                        return
                except ConnectionError as error:
                    broken.append(error)
                    return
                self._leases.append(lease)
                yield unit

        began = time.monotonic()
        self._part.work(taken(), version)
        self._seconds += time.monotonic() - began
        if broken:
            raise broken[0]

    def _offer(self, step: int) -> None:
        """Offer what is computed, push it if it may come, and begin anew."""
        counted, found = self._part.gather()
        offer = Offer(
            contribution=f"{self._cell}-{uuid4().hex}",
            step=step,
            leases=tuple(self._leases),
            counted=counted,
            names=tuple(found),
            digest=fingerprint(found),
            seconds=self._seconds,
        )
        if self._ruling(offer).verdict is Verdict.SEND:
            began = time.monotonic()
            assert self._link is not None
            self._link.send(found)
            ruling = self._ruling(None)
            self._push_s = time.monotonic() - began
            if ruling.verdict is not Verdict.COMMITTED:
                _log.info("a contribution of %d units was refused: %s", len(self._leases), ruling.refusal)
        self._drop()

    def _ruling(self, offer: Offer | None) -> Ruling:
        answer = self._ask(offer)
        while isinstance(answer, Wait):
            answer = self._ask(None)
        if not isinstance(answer, Ruled):
            raise ConnectionError(f"the core answered {type(answer).__name__} to an offer")
        return answer.ruling
