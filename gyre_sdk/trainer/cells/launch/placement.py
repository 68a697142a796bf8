"""A cell's place in a Ray cluster: a placement group with one actor in it, taken anew when it is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.cells.launch.calls import Lost, Silent, connected
from gyre_sdk.trainer.cells.launch.tenure import Seat, Tenure
from gyre_sdk.trainer.cells.launch.warden import Claim

__all__ = ["SILENCE", "Place"]

SILENCE = 60.0
"""Seconds without an answer after which an actor counts as lost."""
_ATTEMPTS = 3
"""Actors that may end while they start, before the place is given up."""
_SAID_AFTER = 5.0
"""Seconds of waiting for room after which it is logged."""

_log = logging.getLogger("gyre.trainer")


class Place:
    """Gives a cell its seat. Threads may share it; nobody gets a seat after `close`.

    Args:
        name: of the cell.
        resources: what is reserved.
        node: id of the node that it must be on; None: any.
        room: seconds to wait until the cluster has room.
        tenure: where the cell may have a place already.
    """

    def __init__(
        self, name: str, resources: Mapping[str, float], *, node: str | None, room: float, tenure: Tenure
    ) -> None:
        self.name = name
        self._claim = Claim(name, dict(resources), node)
        self._room = room
        self._tenure = tenure
        self._lock = threading.Lock()
        self._seat: Seat | None = None
        self._closed = threading.Event()

    def seat(self) -> Seat:
        """Return the seat; take one when there is none.

        Raises:
            TrainerError: there was no room, actors do not start, or the place is closed.
        """
        with self._lock:
            if self._seat is None:
                self._seat = self._take()
            return self._seat

    def lost(self, seat: Seat) -> None:
        """Give up a seat, so that the next one to ask gets another. Nothing happens when that was done before."""
        with self._lock:
            if self._seat is seat:
                self._seat = None
                self._tenure.vacate(self.name, seat)

    def refuse(self) -> None:
        """Give no seats from now on, and end the wait for one."""
        self._closed.set()

    def close(self) -> None:
        """Give the seat back to the cluster; what still runs in it ends. Idempotent."""
        self.refuse()
        with self._lock:
            seat, self._seat = self._seat, None
        if seat is not None:
            self._tenure.vacate(self.name, seat)

    # -- taking one --------------------------------------------------------------------------------------------------

    def _take(self) -> Seat:
        give_up = time.monotonic() + self._room
        for attempt in range(1, _ATTEMPTS + 1):
            seat = self._tenure.place(self._claim)
            try:
                self._wait_room(seat, give_up)
                return replace(seat, address=self._wait_actor(seat, give_up))
            except Lost as error:
                self._tenure.vacate(self.name, seat)
                if attempt == _ATTEMPTS:
                    raise TrainerError(
                        f"the actor of {self.name} ended {_ATTEMPTS} times while it started; are gyre-sdk and the Python"
                        f" of this trainer on every node of the cluster?\n{error}"
                    ) from error
                _log.warning("%s: %s; trying again", self.name, error)
            except BaseException:
                self._tenure.vacate(self.name, seat)
                raise
        raise AssertionError("unreachable")

    def _wait_room(self, seat: Seat, give_up: float) -> None:
        said = time.monotonic() + _SAID_AFTER
        while not _reserved(seat.group):
            self._check()
            if time.monotonic() > give_up:
                raise TrainerError(
                    f"no room for {self.name} in {self._room:.0f} s: {self._needs()}; add nodes, or ask for less in"
                    " cells.resources"
                )
            if time.monotonic() > said:
                _log.warning("%s waits for room in the cluster: %s", self.name, self._needs())
                said = float("inf")

    def _wait_actor(self, seat: Seat, give_up: float) -> str:
        while True:
            self._check()
            try:
                return str(seat.ask("address", timeout=1.0))
            except Silent:
                if time.monotonic() > give_up:
                    raise TrainerError(f"the actor of {self.name} did not start in {self._room:.0f} s") from None

    def check(self) -> None:
        """Raise when another trainer has taken over.

        Raises:
            Fenced: it has.
        """
        self._tenure.check()

    def _check(self) -> None:
        self.check()
        if self._closed.is_set():
            raise TrainerError(f"{self.name} was stopped while it looked for a place")

    def _needs(self) -> str:
        available = connected().available_resources()
        where = " on the node of the trainer" if self._claim.node else ""
        free = {name: available.get(name, 0.0) for name in self._claim.resources}
        return f"it needs {self._claim.resources}{where}, and of these the cluster has {free} free"


def _reserved(group: Any) -> bool:
    """Wait a second for a placement group; tell whether it is there."""
    try:
        return bool(group.wait(1))
    except (
        Exception
    ) as error:  # boundary: to Ray, which raises nothing better when the group was removed with its warden
        raise Lost(f"the placement group is gone: {error}") from error
