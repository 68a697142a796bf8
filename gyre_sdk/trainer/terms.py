"""The term of a trainer: which of all trainers of one `output.dir` it is, and whether it is the newest still.

The number lies in the folder and is one higher with each trainer. Whoever holds the newest steers; requests of an older one
are refused by the processes that gyre wrote (`gyre_sdk.steering`), and not sent to those that it did not write.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from gyre_sdk.errors import TrainerError
from gyre_sdk.steering import HEADER, Term, text

__all__ = ["Fenced", "Mandate"]

_NAME = "term.json"


class Fenced(TrainerError):
    """Another trainer has taken over."""


class _Kept(msgspec.Struct, frozen=True):
    number: int
    holder: str
    """Tells two trainers with one number apart: they took it at the same moment, where no lock keeps them apart."""


class Mandate:
    """This trainer's term. `take` it once, under the lock of the folder.

    Args:
        folder: where the number is kept.
        training: what tells this training from others.
    """

    def __init__(self, folder: Path, training: str, kept: _Kept) -> None:
        self.term = Term(training, kept.number)
        self._path = folder / _NAME
        self._kept = kept

    @classmethod
    def take(cls, folder: Path, training: str) -> Mandate:
        """Begin a term; whoever had one before is refused from now on."""
        before = _read(folder / _NAME)
        kept = _Kept(before.number + 1 if before is not None else 1, secrets.token_hex(6))
        fresh = folder / f"{_NAME}.{kept.holder}"
        with fresh.open("wb") as file:
            file.write(msgspec.json.encode(kept))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(folder / _NAME)
        return cls(folder, training, kept)

    @property
    def headers(self) -> dict[str, str]:
        """What its requests carry."""
        return {HEADER: text(self.term)}

    def check(self) -> None:
        """Raise when another trainer has begun a term since.

        Raises:
            Fenced: naming both.
        """
        now = _read(self._path)
        if now is not None and now != self._kept:
            raise Fenced(
                f"another trainer uses {self._path.parent}: it has term {now.number}, this one had {self.term.number} and steers"
                " nothing any more; stop it: only one may use an output.dir"
            )


def _read(path: Path) -> _Kept | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError):
        return None
