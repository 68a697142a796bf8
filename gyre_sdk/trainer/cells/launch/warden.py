"""What stands for a training on a Ray cluster: one actor, to whom the places of all its cells belong.

Ray ends what an actor made together with the actor: other actors, placement groups, those that wait for room too. So this
is all that has to end in time when a trainer was killed, and however it ends, nothing is left.

Ray is imported inside functions: whoever imports this module has not chosen it yet.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Collection
from typing import Any

import msgspec

from gyre_sdk.trainer.cells.launch.node import Node
from gyre_sdk.trainer.cells.launch.terms import Term, Terms

__all__ = ["Claim", "Linger", "Warden"]

_LOOK = 0.5
"""Seconds between looks at the clock."""
_GIVE_BACK = 10.0
"""Seconds that giving all places back may take when nobody has come."""


class Claim(msgspec.Struct, frozen=True):
    """What a cell needs of the cluster."""

    cell: str
    resources: dict[str, float]
    """Reserved on one node."""
    node: str | None
    """Id of the node that it must be on; None: any."""


class Linger(msgspec.Struct, frozen=True):
    """How long all of it lives without a trainer."""

    seconds: float
    """After the trainer counts as gone. 0: it ends with the trainer's connection to the cluster."""
    silence: float
    """Seconds without a beat after which it counts as gone."""


class Warden:
    """The actor. Its calls are short and come one after the other.

    Args:
        linger: when it ends by itself.
    """

    def __init__(self, linger: Linger) -> None:
        self._linger = linger
        self._name = secrets.token_hex(8)
        self._terms = Terms(self._name)
        self._held: dict[str, tuple[Claim, Any, Any]] = {}
        self._heard = time.monotonic()
        if linger.seconds:
            threading.Thread(target=self._wait, name="trainer's silence", daemon=True).start()

    def take(self) -> tuple[Term, Linger]:
        """Begin the term of a trainer; whoever was it before is refused from now on."""
        self._heard = time.monotonic()
        return self._terms.begin(), self._linger

    def beat(self, term: Term) -> None:
        """Note that the trainer lives.

        Raises:
            Fenced: it is not the trainer any more; so do all others here.
        """
        self._terms.check(term)
        self._heard = time.monotonic()

    def place(self, term: Term, claim: Claim) -> tuple[Any, Any]:
        """Return a cell's placement group and the `Node` actor in it: those that it has, if they are what it claims."""
        self._terms.check(term)
        held = self._held.get(claim.cell)
        if held is None or held[0] != claim:
            self.vacate(term, claim.cell)
            held = self._held[claim.cell] = (claim, *_reserve(claim, self._name))
        return held[1], held[2]

    def vacate(self, term: Term, cell: str) -> None:
        """Give a cell's place back; what runs there ends. Idempotent."""
        self._terms.check(term)
        self._vacate(cell)

    def retain(self, term: Term, cells: Collection[str]) -> None:
        """Give back the places of all other cells."""
        self._terms.check(term)
        for cell in set(self._held) - set(cells):
            self.vacate(term, cell)

    def end(self, term: Term) -> None:
        """Give everything back, and end. There is no answer: the actor is gone."""
        import ray

        self.retain(term, ())
        ray.actor.exit_actor()

    def _vacate(self, cell: str) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        held = self._held.pop(cell, None)
        if held is not None:
            _, group, actor = held
            ray.kill(actor, no_restart=True)
            remove_placement_group(group)

    def _wait(self) -> None:
        while time.monotonic() - self._heard < self._linger.silence + self._linger.seconds:
            time.sleep(_LOOK)
        # groups outlive their maker as long as the job that made that one, and the trainer may be there, stopped for ever
        giving = threading.Thread(target=self._give_back, name="give all back", daemon=True)
        giving.start()
        giving.join(_GIVE_BACK)
        os._exit(0)

    def _give_back(self) -> None:
        for cell in list(self._held):
            self._vacate(cell)


def _reserve(claim: Claim, warden: str) -> tuple[Any, Any]:
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group(
        [claim.resources],
        strategy="STRICT_PACK",
        name=f"gyre-{claim.cell}-{secrets.token_hex(4)}",
        bundle_label_selector=[{"ray.io/node-id": claim.node}] if claim.node else None,
    )
    others = {name: amount for name, amount in claim.resources.items() if name not in ("CPU", "GPU", "memory")}
    actor = (
        ray.remote(Node)
        .options(
            name=f"{claim.cell}-{secrets.token_hex(4)}",
            num_cpus=claim.resources.get("CPU", 0),
            num_gpus=claim.resources.get("GPU", 0),
            memory=claim.resources.get("memory"),
            resources=others,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        )
        .remote(warden)
    )
    return group, actor
