"""What core and satellites say to each other, and the line that they say it on.

A line is an authenticated TCP connection of `multiprocessing.connection`. Who knows the key is trusted: messages are
pickled, tensors that follow them are not checked for malice. It is for the processes of one training, on a network of
theirs.

A satellite asks and the core answers; beats, and the core's `Leave`, come at any time::

    Hello     -> Welcome
    Join      -> Pull (weights follow on the link) | Wait | Turned
    Take      -> Units | Wait | Stale
    Offer     -> Wait, any number of times, then Ruled (where it says send: the gradient follows, then another Ruled)
    GiveBack, Left, Beat: no answer
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import msgspec

from gyre_sdk.trainer.loss import LossSums, Totals
from gyre_sdk.trainer.mismatch import Mismatch
from gyre_sdk.trainer.sharing.book import Lease, Ruling

Address = tuple[str, int]
_HANDSHAKE_S = 10.0


@dataclass(slots=True)
class Counted:
    """What some units counted and found, beside their gradient. It adds up in any order."""

    totals: Totals = field(default_factory=Totals)
    found: LossSums = field(default_factory=LossSums)
    mismatch: Mismatch = field(default_factory=Mismatch)

    def add(self, other: Counted) -> None:
        """Take in what other units counted and found."""
        more = other.totals
        self.totals.add(runs=more.runs, rows=more.rows, targets=more.targets, calls=more.calls)
        self.found.add(other.found)
        self.mismatch.merge(other.mismatch)


class Message(msgspec.Struct, frozen=True):
    """Base of all messages."""


class Hello(Message, frozen=True):
    """A satellite has dialled in."""

    cell: str
    pid: int = 0
    """Its process, as its machine numbers it."""


class Welcome(Message, frozen=True):
    """It may stay."""

    lease_s: float
    """Silence of more than this is death."""


class Turned(Message, frozen=True):
    """It may not."""

    reason: str


class Join(Message, frozen=True):
    """Asks for the weights of the open batch, if there is one and the cell is admitted."""

    frozen: str
    """Fingerprint of the weights that do not pass."""


class Wait(Message, frozen=True):
    """There is nothing now: ask again."""


class Pull(Message, frozen=True):
    """The weights of the open batch follow on the link."""

    step: int
    version: int | None
    digest: str
    """Fingerprint of the weights."""
    meeting: Any
    """Of a new pair (`link.Meeting`); None goes on with the one there is."""


class Take(Message, frozen=True):
    """Asks for units."""

    step: int
    """Of the batch that it works on."""
    digest: str
    """Fingerprint of the weights that it has."""
    count: int
    """Units at most."""
    least: int
    """Units that it computes at the same time: it gets as many where there are."""
    patient: bool
    """False wants `Wait` at once where there is none: it has something to offer in the meantime."""


class Units(Message, frozen=True):
    """Units to compute."""

    leases: tuple[Lease, ...]
    units: tuple[Any, ...]
    """As sealed; one for each lease."""


class Stale(Message, frozen=True):
    """No lease: other weights, or another batch. Join again."""

    reason: str


class Offer(Message, frozen=True):
    """Units are computed: may their sum come?"""

    contribution: str
    step: int
    leases: tuple[Lease, ...]
    counted: Counted
    """What the units counted and found."""
    names: tuple[str, ...]
    """Parameters that have a gradient, in the order in which they pass."""
    digest: str
    """Fingerprint of the gradient."""
    seconds: float
    """Computing."""


class Ruled(Message, frozen=True):
    """What becomes of an offer."""

    ruling: Ruling


class GiveBack(Message, frozen=True):
    """Units that it does not compute."""

    leases: tuple[Lease, ...]


class Left(Message, frozen=True):
    """It has taken its hands off the batch."""


class Beat(Message, frozen=True):
    """It is alive."""


class Leave(Message, frozen=True):
    """From the core, at any time: end the unit in hand, offer what there is, leave."""


class Line:
    """One end of a connection. Any thread may send; one receives."""

    def __init__(self, sock: socket.socket, patience: float) -> None:
        """Take over a connected socket. `patience`: seconds that a message may be stuck half way."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(True)
        self.here = str(sock.getsockname()[0])
        """Address of this machine on this connection."""
        self._socket = sock.dup()
        self._connection = Connection(sock.detach())
        self._sending = threading.Lock()
        self.patience(patience)

    def patience(self, seconds: float) -> None:
        """Set the seconds that a message may be stuck half way."""
        whole = int(seconds)
        limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            ConnectionError: the line is broken.
        """
        try:
            with self._sending:
                self._connection.send_bytes(pickle.dumps(message))  # whole: torch's own pickler would lend its memory
        except (OSError, ValueError) as error:
            self.hang_up()
            raise ConnectionError(f"the line broke: {error}") from error

    def receive(self, seconds: float) -> Message | None:
        """Return the next message; None when there was none for so long.

        Raises:
            ConnectionError: the line is broken.
        """
        try:
            if not self._connection.poll(seconds):
                return None
            found = pickle.loads(self._connection.recv_bytes())
        except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            self.hang_up()
            raise ConnectionError(f"the line broke: {type(error).__name__}: {error}") from error
        if not isinstance(found, Message):
            raise ConnectionError(f"a {type(found).__name__} came in place of a message")
        return found

    def hang_up(self) -> None:
        """Break the line; whoever waits at either end learns it. Idempotent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up and let go. For the thread that receives."""
        self.hang_up()
        self._connection.close()
        self._socket.close()


def answer(sock: socket.socket, key: bytes, patience: float) -> Line:
    """Make the core's end of a connection, once the other one has shown that it knows the key.

    Raises:
        ConnectionError: it does not, or is gone.
    """
    return _greet(Line(sock, _HANDSHAKE_S), key, patience, first=True)


def dial(address: Address, key: bytes, patience: float) -> Line:
    """Call the core.

    Raises:
        ConnectionError: it is not there, or has another key.
    """
    try:
        sock = socket.create_connection(address, _HANDSHAKE_S)
    except OSError as error:
        raise ConnectionError(f"no core answers at {address[0]}:{address[1]}: {error}") from error
    return _greet(Line(sock, _HANDSHAKE_S), key, patience, first=False)


def _greet(line: Line, key: bytes, patience: float, *, first: bool) -> Line:
    connection = line._connection
    try:
        for challenge in (deliver_challenge, answer_challenge) if first else (answer_challenge, deliver_challenge):
            challenge(connection, key)
    except (OSError, EOFError, AuthenticationError) as error:
        line.close()
        raise ConnectionError(f"no agreement on the key: {type(error).__name__}: {error}") from error
    line.patience(patience)
    return line
