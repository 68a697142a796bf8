"""A trainer's hold on what its training has on a Ray cluster: it finds the `Warden` there, or makes it, and beats.

Ray is imported inside functions: whoever imports this module has not chosen it yet.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.cells.launch.calls import CALL, Lost, Silent, ask, connected
from gyre_sdk.trainer.cells.launch.terms import Fenced, Term
from gyre_sdk.trainer.cells.launch.warden import Claim, Linger, Warden

__all__ = ["WARDEN", "Seat", "Tenure"]

WARDEN = "warden"
"""Name of the actor, in the namespace of the training."""
_ANSWER = 120.0
"""Seconds that a warden may take to start, or to answer who takes it over."""
_ATTEMPTS = 3
"""Wardens that may end while they start."""
_PAUSE = 0.1
"""Seconds before one that is ending is looked for again."""
_BEATS = 4
"""Beats in the time after which a silent trainer counts as gone."""
_WHERE = "the trainer's node"

_log = logging.getLogger("gyre.trainer")


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """What a cell has on the cluster."""

    group: Any
    """The placement group."""
    actor: Any
    """Handle of the `Node` actor in it."""
    term: Term
    """In which this trainer asks it."""
    address: str = ""
    """Of the node."""

    def ask(self, method: str, *arguments: Any, timeout: float = CALL) -> Any:
        """Call the actor and return its answer.

        Raises:
            Lost: the actor is gone.
            Silent: no answer came in `timeout` seconds.
            Fenced: another trainer has taken over.
            TrainerError: what the call raised there, or the connection was closed.
        """
        where = f"the node {self.address}" if self.address else "a new node"
        return ask(self.actor, where, method, self.term, *arguments, timeout=timeout)


class Tenure:
    """From `begin` to `end` this process is the trainer, until another one takes over. Threads may share it.

    Args:
        namespace: of the training in the cluster.
        linger: how long everything outlives this process when that is killed.
        node: id of this process's node.
    """

    def __init__(self, namespace: str, linger: Linger, node: str) -> None:
        self._namespace = namespace
        self._linger = linger
        self._node = node
        self._lock = threading.Lock()
        self._held: tuple[Any, Term] = (None, Term("", 0))
        """The warden, and the term that it gave."""
        self._fenced: Fenced | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="beats to the cluster", daemon=True)

    def begin(self, cells: Collection[str] | None = None) -> None:
        """Take over what an earlier trainer left, or begin with nothing.

        Args:
            cells: those that are wanted; others are ended. None: all are kept.

        Raises:
            TrainerError: a warden does not start, or does not answer.
        """
        with self._lock:
            self._find()
        self._thread.start()
        if cells is not None:
            warden, term = self._held
            ask(warden, _WHERE, "retain", term, sorted(cells), timeout=_ANSWER)

    def check(self) -> None:
        """Raise when another trainer has taken over.

        Raises:
            Fenced: it has.
        """
        if self._fenced is not None:
            raise Fenced(str(self._fenced))

    def place(self, claim: Claim) -> Seat:
        """Return what a cell has, or begin to reserve it.

        Raises:
            Fenced: another trainer has taken over.
            TrainerError: the warden does not start or answer, or the connection was closed.
        """
        give_up = time.monotonic() + _ANSWER
        while True:
            self.check()
            held = self._held
            warden, term = held
            try:
                group, actor = ask(warden, _WHERE, "place", term, claim)
                return Seat(group, actor, term)
            except Lost:
                with self._lock:
                    if self._held is held:
                        _log.warning("what held the places of cells on the cluster is gone; they take new ones")
                        self._find()
            except Silent:
                if time.monotonic() > give_up:
                    raise

    def vacate(self, cell: str, seat: Seat) -> None:
        """Give a cell's place back; what still runs in it ends. It is left to the trainer that has taken over."""
        from ray.util.placement_group import remove_placement_group

        warden, term = self._held
        try:
            if seat.term == term:
                with contextlib.suppress(Lost):
                    ask(warden, _WHERE, "vacate", term, cell)
                    return
            connected()
            remove_placement_group(seat.group)  # its warden is gone, and the actors; a group stays as long as the job
        except TrainerError as error:
            _log.warning("the place of %s in the cluster was not given back: %s", cell, error)

    def end(self) -> None:
        """End all that the training has on the cluster, unless another trainer has taken over. Idempotent."""
        if self._ending.is_set():
            return
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()
        warden, term = self._held
        if warden is not None:
            try:
                with contextlib.suppress(Lost):  # that is its answer
                    ask(warden, _WHERE, "end", term)
            except TrainerError as error:
                _log.warning("what the training has on the cluster was not ended: %s", error)

    # -- the warden ----------------------------------------------------------------------------------------------------

    def _find(self) -> None:
        """Take over this training's warden, or make one. One that is there when ours was lost is another trainer's."""
        made: Any = None
        lost: Lost | None = None
        attempts, give_up = 0, time.monotonic() + _ANSWER
        while time.monotonic() < give_up and attempts < _ATTEMPTS:
            warden = made or self._there()
            if warden is None:
                made = self._make()
                continue
            try:
                if made is None and self._held[0] is not None:
                    ask(warden, _WHERE, "beat", self._held[1])
                    return
                term, linger = ask(warden, _WHERE, "take")
                if linger == self._linger:
                    self._held = (warden, term)
                    return
                _log.info("the cells of an earlier start linger in another way, and are ended")
                ask(warden, _WHERE, "end", term)
            except Fenced as error:
                self._fenced = error
                raise
            except Lost as error:  # where it was not made here it is ending, and its name is free soon
                attempts, lost, made = attempts + (made is not None), error, None
                time.sleep(_PAUSE)
            except Silent:
                continue
        raise TrainerError(
            f"the actor {WARDEN!r} of this training (namespace {self._namespace!r}) on the Ray cluster"
            + (
                f" ended {attempts} times while it started: {lost}"
                if attempts
                else " does not answer; run the same command again once it has ended, output.linger_s after the last trainer"
            )
        )

    def _there(self) -> Any:
        try:
            return connected().get_actor(WARDEN, namespace=self._namespace)
        except ValueError:
            return None

    def _make(self) -> Any:
        """Return a new one, on the node of this process; None when somebody was faster."""
        ray = connected()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        try:
            return (
                ray.remote(Warden)
                .options(
                    name=WARDEN,
                    namespace=self._namespace,
                    lifetime="detached" if self._linger.seconds else None,
                    num_cpus=0,
                    max_restarts=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(self._node, soft=False),
                )
                .remote(self._linger)
            )
        except ValueError:
            return None

    def _beat(self) -> None:
        while not self._ending.wait(self._linger.silence / _BEATS):
            warden, term = self._held
            try:
                ask(warden, _WHERE, "beat", term)
            except Fenced as error:
                self._fenced = error
                return
            except (Silent, Lost):
                continue  # who asks for a place makes another
            except TrainerError:
                return  # the connection was closed
