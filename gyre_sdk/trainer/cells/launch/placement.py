"""A cell's place in a Ray cluster: a placement group with one actor in it, taken anew when it is lost.

Ray is imported inside functions: whoever imports this module has not chosen it yet.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.cells.launch.node import Node

__all__ = ["Lost", "Place", "Seat", "Silent"]

CALL = 5.0
"""Seconds that an actor may take to answer one call."""
SILENCE = 60.0
"""Seconds without an answer after which an actor counts as lost."""
_ATTEMPTS = 3
"""Actors that may end while they start, before the place is given up."""
_SAID_AFTER = 5.0
"""Seconds of waiting for room after which it is logged."""

_log = logging.getLogger("gyre.trainer")


class Lost(TrainerError):
    """The actor of a seat, or its node, is gone."""


class Silent(TrainerError):
    """The actor of a seat did not answer in time. It may have done what it was asked."""


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """What a place holds now."""

    group: Any
    """The placement group."""
    actor: Any
    """Handle of the `Node` actor in it."""
    address: str = ""
    """Of the node."""

    def ask(self, method: str, *arguments: Any, timeout: float = CALL) -> Any:
        """Call the actor and return its answer.

        Raises:
            Lost: the actor is gone.
            Silent: no answer came in `timeout` seconds.
            TrainerError: what the call raised there, or the connection was closed.
        """
        ray = _connected()
        from ray import exceptions

        try:
            return ray.get(getattr(self.actor, method).remote(*arguments), timeout=timeout)
        except (exceptions.GetTimeoutError, exceptions.ActorUnavailableError) as error:
            raise Silent(f"the actor on {self.address} does not answer") from error
        except exceptions.RayTaskError as error:
            cause = error.cause
            raise TrainerError(f"on the node {self.address}: {type(cause).__name__}: {cause}") from error
        except exceptions.RayError as error:
            raise Lost(f"the actor on {self.address or 'a new node'} is gone: {error}") from error


class Place:
    """Gives a cell its seat. Threads may share it; nobody gets a seat after `close`.

    Args:
        name: of the cell.
        resources: what is reserved.
        node: id of the node that it must be on; None: any.
        room: seconds to wait until the cluster has room.
    """

    def __init__(self, name: str, resources: Mapping[str, float], *, node: str | None, room: float) -> None:
        self.name = name
        self._resources = dict(resources)
        self._node = node
        self._room = room
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
                _release(seat)

    def refuse(self) -> None:
        """Give no seats from now on, and end the wait for one."""
        self._closed.set()

    def close(self) -> None:
        """Give the seat back to the cluster; what still runs in it ends. Idempotent."""
        self.refuse()
        with self._lock:
            seat, self._seat = self._seat, None
        if seat is not None:
            _release(seat)

    # -- taking one --------------------------------------------------------------------------------------------------

    def _take(self) -> Seat:
        give_up = time.monotonic() + self._room
        for attempt in range(1, _ATTEMPTS + 1):
            seat = self._begin()
            try:
                self._wait_room(seat, give_up)
                return Seat(seat.group, seat.actor, self._wait_actor(seat, give_up))
            except Lost as error:
                _release(seat)
                if attempt == _ATTEMPTS:
                    raise TrainerError(
                        f"the actor of {self.name} ended {_ATTEMPTS} times while it started; are gyre-sdk and the Python"
                        f" of this trainer on every node of the cluster?\n{error}"
                    ) from error
                _log.warning("%s: %s; trying again", self.name, error)
            except BaseException:
                _release(seat)
                raise
        raise AssertionError("unreachable")

    def _begin(self) -> Seat:
        ray = _connected()
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group(
            [self._resources],
            strategy="STRICT_PACK",
            name=f"gyre-{self.name}-{secrets.token_hex(4)}",
            bundle_label_selector=[{"ray.io/node-id": self._node}] if self._node else None,
        )
        others = {name: amount for name, amount in self._resources.items() if name not in ("CPU", "GPU", "memory")}
        actor = (
            ray.remote(Node)
            .options(
                name=f"{self.name}-{secrets.token_hex(4)}",
                num_cpus=self._resources.get("CPU", 0),
                num_gpus=self._resources.get("GPU", 0),
                memory=self._resources.get("memory"),
                resources=others,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            )
            .remote()
        )
        return Seat(group, actor)

    def _wait_room(self, seat: Seat, give_up: float) -> None:
        said = time.monotonic() + _SAID_AFTER
        while not seat.group.wait(1):
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

    def _check(self) -> None:
        if self._closed.is_set():
            raise TrainerError(f"{self.name} was stopped while it looked for a place")

    def _needs(self) -> str:
        import ray

        where = " on the node of the trainer" if self._node else ""
        free = {name: ray.available_resources().get(name, 0.0) for name in self._resources}
        return f"it needs {self._resources}{where}, and of these the cluster has {free} free"


def _connected() -> Any:
    """Return the module; where it is not connected, its calls would start a cluster of their own."""
    import ray

    if not ray.is_initialized():
        raise TrainerError("the trainer's connection to the Ray cluster was closed; start the trainer again")
    return ray


def _release(seat: Seat) -> None:
    import ray
    from ray.exceptions import RayError
    from ray.util.placement_group import remove_placement_group

    if not ray.is_initialized():
        return  # the actors ended with the connection
    try:
        ray.kill(seat.actor, no_restart=True)
        remove_placement_group(seat.group)
    except RayError as error:
        _log.warning("a place of the cluster could not be given back: %s", error)
