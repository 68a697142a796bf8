"""Who is the trainer of what runs on a cluster: the one with the newest term. An older one is refused, however late it asks."""

from __future__ import annotations

import msgspec

from gyre_sdk.errors import TrainerError

__all__ = ["Fenced", "Term", "Terms"]


class Fenced(TrainerError):
    """Another trainer has taken over."""


class Term(msgspec.Struct, frozen=True):
    """The time of one trainer."""

    warden: str
    """That gave it out. Numbers of different ones are not compared."""
    number: int
    """Each trainer's is higher than that of the one before it."""


class Terms:
    """The newest term that was seen.

    Args:
        warden: whose terms are taken.
    """

    def __init__(self, warden: str) -> None:
        self._newest = Term(warden, 0)

    def begin(self) -> Term:
        """Return the term of a trainer that comes now."""
        self._newest = Term(self._newest.warden, self._newest.number + 1)
        return self._newest

    def check(self, term: Term) -> None:
        """Refuse who is not the trainer any more.

        Raises:
            Fenced: `term` is older than one seen before, or of another warden.
        """
        if term.warden != self._newest.warden or term.number < self._newest.number:
            raise Fenced(
                "another trainer has taken over the cells of this training, which this one cannot steer any more;"
                " only one may use an output.dir"
            )
        self._newest = term
