"""What the manager of cells asks of training: the gate of the core, satellites that join and go, and how far a batch is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

__all__ = ["Hung", "Progress", "TrainingSide"]


class Progress(Protocol):
    """How far the open batch is. Tokens are targets."""

    @property
    def step(self) -> int:
        """The step whose batch is open."""

    @property
    def ready_units(self) -> int:
        """Units that are sealed and that nobody holds."""

    @property
    def ready_tokens(self) -> int:
        """Their tokens."""

    @property
    def leased_tokens(self) -> int:
        """Tokens of the units that somebody computes."""

    @property
    def done_tokens(self) -> int:
        """Tokens of the units whose gradient is in the batch."""

    @property
    def sealed_all(self) -> bool:
        """Whether no further unit will be sealed in this batch."""

    @property
    def tokens_per_second(self) -> Mapping[str, float]:
        """Measured speed of each cell that has trained, by name."""

    @property
    def pull_s(self) -> float:
        """Mean seconds of a satellite's pull of weights, if it is alone; each batch needs one. 0 before the first."""

    @property
    def push_s(self) -> float:
        """Mean seconds of a satellite's push of gradients, if it is alone; 0 before the first."""


class Hung(Protocol):
    """A worker that nothing is to be expected of any more."""

    @property
    def pid(self) -> int:
        """Its process, as its machine numbers it."""

    @property
    def reason(self) -> str:
        """What is wrong, in words."""


class TrainingSide(Protocol):
    """The sharing of a batch's units, seen from the cells. Every wait is bounded by its caller."""

    def open_gate(self) -> None:
        """Let the core compute."""

    def close_gate(self, seconds: float) -> bool:
        """Let the core compute no more; False: it has a unit in hand that did not end within `seconds`. The gate stays closed."""

    def admit(self, cell: str) -> None:
        """Let a satellite's worker join."""

    def join_wait(self, cell: str, seconds: float) -> bool:
        """Wait until it holds the weights of the open batch and takes units, if one is open; False: not within `seconds`."""

    def dismiss(self, cell: str, seconds: float) -> bool:
        """Let it offer what it has, give back the rest and free its devices; True at once for one that has not joined.

        False when it did not within `seconds`, or was lost; its units are free all the same.
        """

    def waiting(self) -> set[str]:
        """Return the cells whose workers are connected, admitted or not."""

    def hung(self, cell: str) -> Hung | None:
        """Return the worker of a cell that had units in hand for too long, or is lost and has not come back for as long."""

    def progress(self) -> Progress:
        """Return how far the open batch is."""
