"""Who may steer a process that several trainers can reach: of each training the one with the newest term. Pure.

A trainer that was taken for dead, and was only slow, must not pause a replica or change a routing table that its successor
steers now. Its requests carry its term, and are refused once a newer one was heard. Requests without a term are
from people and tools, and pass.
"""

from __future__ import annotations

from typing import NamedTuple

from gyre_sdk.errors import ProtocolError

__all__ = ["HEADER", "REFUSED", "Steering", "Term", "text"]

HEADER = "X-Gyre-Term"
"""Of a request: `NUMBER TRAINING`."""
REFUSED = "refused: "
"""How messages begin that say that trying again does not help."""
_TRAININGS = 1000
"""Trainings whose newest term is remembered: those heard last."""


class Term(NamedTuple):
    """The time of one trainer."""

    training: str
    """Terms of different ones are not compared."""
    number: int
    """Each trainer's is higher than that of the one before it."""


def text(term: Term) -> str:
    """Return a term as the header says it."""
    return f"{term.number} {term.training}"


class Steering:
    """The newest term of each training that a process has heard of."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}

    def check(self, said: str | None) -> None:
        """Note the term that a request carries, if it carries one.

        Args:
            said: value of the header.

        Raises:
            ProtocolError: 409 for a term older than one heard before, 400 for what is none.
        """
        if said is None:
            return
        number, _, training = said.partition(" ")
        if not (number.isdecimal() and number.isascii() and len(number) < 16 and training):
            raise ProtocolError(f"{HEADER} is {said[:100]!r}; it must be `NUMBER TRAINING`", param=HEADER)
        newest, own = self._newest.get(training, 0), int(number)
        if own < newest:
            raise ProtocolError(
                f"{REFUSED}a trainer with term {newest} of training {training!r} steers here, and this request is of term {own};"
                " stop the older trainer: only one may use an output.dir",
                status=409,
                code="old_term",
                param=HEADER,
            )
        self._newest.pop(training, None)  # who was heard last is forgotten last
        if len(self._newest) >= _TRAININGS:
            self._newest.pop(next(iter(self._newest)))
        self._newest[training] = own
