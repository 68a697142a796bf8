"""What a satellite computes with: a policy on one process, or on the ranks of a cell, which rank 0 leads.

Rank 0 speaks with the core and gives orders; each order is carried out by all ranks at the same time. It pulls weights and
passes them on, deals out the units that it has leased, and puts together what the ranks found before it offers that.
Whether a rank holds all weights or a shard of them is known here and nowhere else.

A rank that fails ends its process, and with it the whole worker: there is no work with fewer ranks than were started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, NoReturn

import torch
from torch import Tensor

from gyre_sdk.trainer.ranks import Ranks
from gyre_sdk.trainer.sharded import fill, is_sharded, put_together
from gyre_sdk.trainer.sharing.tensors import fingerprint, frozen, gradients, trainable, weights
from gyre_sdk.trainer.sharing.wire import Counted
from gyre_sdk.trainer.units import Unit

__all__ = ["Part", "Receive"]

Receive = Callable[[Mapping[str, Tensor]], None]
"""Fills tensors with the core's weights, in their order."""


class Order(StrEnum):
    """What rank 0 tells the others to do with it."""

    ENTER = "enter"
    LOAD = "load"
    WORK = "work"
    GATHER = "gather"
    DROP = "drop"
    LEAVE = "leave"


class Part:
    """One rank's part. On rank 0 a satellite calls its methods; the other ranks `follow`.

    Args:
        model: the policy, whose weights are overwritten and whose gradients are read; whole, and the same on every rank.
        ranks: the processes of the cell's worker; None for this one alone.
    """

    def __init__(self, model: Any, ranks: Ranks | None = None) -> None:
        self.model = model
        self.ranks = Ranks() if ranks is None else ranks
        self.counted = Counted()
        """Of the units that this rank has computed since it dropped its gradient."""
        self.base = fingerprint(frozen(model)) if self.ranks.leads else ""
        """Fingerprint of the weights that are not trained; on rank 0."""

    # -- for each kind of policy ---------------------------------------------------------------------------------------

    def occupy(self) -> None:
        """Get what computing needs: the devices are the worker's now. Every rank has to call this."""
        raise NotImplementedError

    def free(self) -> None:
        """Free the devices."""
        raise NotImplementedError

    def compute(self, unit: Unit | None, version: int | None, counted: Counted) -> None:
        """Add a unit's un-normalised gradient into the parameters' `.grad`, and count it.

        Args:
            unit: None where other ranks have one and this one has none; only where weights are sharded.
            version: number of the weights in training, if they have one.
        """
        raise NotImplementedError

    # -- on rank 0 -----------------------------------------------------------------------------------------------------

    @property
    def at_once(self) -> int:
        """Units that are computed at the same time."""
        return self.ranks.size

    def enter(self) -> None:
        """Let every rank get what computing needs."""
        self._carry_out(Order.ENTER)

    def pull(self, receive: Receive, digest: str) -> bool:
        """Take the core's weights, and pass them on to all ranks.

        Args:
            receive: what it raises is raised here; other ranks have heard nothing then.
            digest: fingerprint that the weights must have.

        Returns:
            False when they came with another one; nobody may compute with what is there then.
        """
        found = weights(self.model)
        if is_sharded(self.model):
            found = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in found.items()}
        receive(found)
        if fingerprint(found) != digest:
            return False
        self._carry_out(Order.LOAD, found)
        return True

    def work(self, units: Iterable[Unit], version: int | None) -> None:
        """Add up the gradients of units, dealt out to the ranks in rounds.

        Args:
            units: taken when they are computed; it must not raise.
        """
        self._carry_out(Order.WORK, (units, version))

    def gather(self) -> tuple[Counted, dict[str, Tensor]]:
        """Return what all ranks counted, and the sum of their gradients, by name. To be dropped when they have passed."""
        found: tuple[Counted, dict[str, Tensor]] = self._carry_out(Order.GATHER)
        return found

    def drop(self) -> None:
        """Forget what is computed, on every rank."""
        self._carry_out(Order.DROP)

    def leave(self) -> None:
        """Free the devices of every rank."""
        self._carry_out(Order.LEAVE)

    def _carry_out(self, order: Order, given: Any = None) -> Any:
        self.ranks.share(order)
        return self._do(order, given)

    # -- on the others -------------------------------------------------------------------------------------------------

    def follow(self) -> NoReturn:
        """Carry out rank 0's orders for as long as it gives some."""
        while True:
            self._do(self.ranks.share(), None)

    # -- on every rank -------------------------------------------------------------------------------------------------

    def _do(self, order: Order, given: Any) -> Any:
        """Carry out an order. `given`: what rank 0 has for it."""
        match order:
            case Order.ENTER:
                self.occupy()
            case Order.LOAD:
                self._load(given)
            case Order.WORK:
                units, version = given or ((), None)
                self._work(units, self.ranks.share(version))
            case Order.GATHER:
                return self._gather()
            case Order.DROP:
                self._drop()
            case Order.LEAVE:
                self.free()

    def _load(self, whole: Mapping[str, Tensor] | None) -> None:
        """Take rank 0's weights. Where they are whole, it has received them into place."""
        if self.ranks.size > 1:
            fill(weights(self.model), whole)

    def _work(self, units: Iterable[Unit], version: int | None) -> None:
        sharded = is_sharded(self.model)
        for hand in self.ranks.deal(units):
            if hand.mine is not None or sharded:
                self.compute(hand.mine, version, self.counted)

    def _gather(self) -> tuple[Counted, dict[str, Tensor]]:
        counted = Counted()
        for one in self.ranks.all(self.counted):
            counted.add(one)
        if is_sharded(self.model):
            own = {name: one.grad for name, one in trainable(self.model).items() if one.grad is not None}
            return counted, put_together(own, keep=self.ranks.leads)
        self.ranks.add_gradients(self.model.parameters())
        return counted, gradients(self.model)

    def _drop(self) -> None:
        self.counted = Counted()
        for parameter in trainable(self.model).values():
            parameter.grad = None
