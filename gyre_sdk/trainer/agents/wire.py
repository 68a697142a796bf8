"""What trainer and agents' process say to each other, and the line that they say it on.

A line is a connection over the loopback whose two ends have shown each other that they know the key. Messages are
msgpack; a task, the settings and an agent's options are Python objects, pickled: who knows the key is trusted.

The trainer greets, the process answers; then both send as they like::

    Hello -> Welcome | Refused
    Serve, Know, Begin, Seen, Stop: no answer, but
    Begin -> Told, any number of times, then Ended, which is sent again on a new line until it was Seen
    Stop  -> Stopped
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import msgspec

from gyre_sdk.events import AnyEvent
from gyre_sdk.trainer.agents.outcome import Outcome

HOST = "127.0.0.1"
KEY_FILE = "agents.key"
"""In the output folder."""
READY = "gyre-agents ready on"
"""Start of the line that the process prints once it listens; the address follows."""
_HANDSHAKE_S = 10.0


class Order(msgspec.Struct, frozen=True):
    """Which run is asked for."""

    task: str
    """Name of the task."""
    group: str | None = None
    member: int = 0
    split: str = "train"
    options: bytes = b""
    """Added to `agent.options`: a pickled dict; empty for none."""


class Running(msgspec.Struct, frozen=True):
    """A run that is under way."""

    id: str
    """Of the request; no two have the same."""
    order: Order
    seconds: float
    """That it has taken so far."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A trainer is there."""

    settings: bytes
    """`settings.AgentSettings`, pickled. The process works with those of the first trainer that greets it."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The process is ready for runs."""

    owner: str
    """What its runs have as `RunRecord.owner`."""
    under_way: list[Running]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The settings are wrong: the process has no agent, or no workspaces."""

    name: str
    """Class of the error."""
    error: str


class Serve(msgspec.Struct, frozen=True, tag=True):
    """Where the recording service is, for runs that begin from now on."""

    url: str
    key: str


class Know(msgspec.Struct, frozen=True, tag=True):
    """A task that runs will name."""

    key: str
    task: bytes
    """Pickled `Task`."""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Make a run. One whose id is known already is not made again."""

    id: str
    order: Order
    key: str
    """Of the task; empty: the one of that name in `[tasks]`, as the process loads it."""


class Seen(msgspec.Struct, frozen=True, tag=True):
    """An outcome arrived."""

    id: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Begin nothing more, record runs under way as cancelled, remove their workspaces; whoever started it ends it then."""


class Told(msgspec.Struct, frozen=True, tag=True):
    """Something happened in a run."""

    event: AnyEvent


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A run came to its end."""

    id: str
    outcome: Outcome


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """All is stopped."""


Message = Hello | Welcome | Refused | Serve | Know | Begin | Seen | Stop | Told | Ended | Stopped

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode  # type: ignore[var-annotated]


class Line:
    """One end of a connection. Any thread may send; one receives."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over a connected socket."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(True)
        self._socket = sock.dup()
        self._connection = Connection(sock.detach())
        self._sending = threading.Lock()

    def greet(self, key: bytes, *, first: bool) -> None:
        """Agree on the key.

        Args:
            first: true at the end that was called.

        Raises:
            ConnectionError: the other end has another key, says nothing, or is gone.
        """
        challenges = (deliver_challenge, answer_challenge) if first else (answer_challenge, deliver_challenge)
        try:
            self._patience(_HANDSHAKE_S)
            for challenge in challenges:
                challenge(self._connection, key)
            self._patience(0.0)
        except (OSError, EOFError, AuthenticationError) as error:
            self.close()
            raise ConnectionError(f"no agreement on the key: {type(error).__name__}: {error}") from error

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            ConnectionError: the line is broken.
        """
        body = _encode(message)
        try:
            with self._sending:
                self._connection.send_bytes(body)
        except (OSError, ValueError) as error:
            self.hang_up()
            raise ConnectionError(f"the line broke: {error}") from error

    def receive(self) -> Message:
        """Wait for the next message, and return it.

        Raises:
            ConnectionError: the line is broken, or what came is no message.
        """
        try:
            return _decode(self._connection.recv_bytes())
        except (OSError, EOFError, ValueError, msgspec.MsgspecError) as error:
            self.hang_up()
            raise ConnectionError(f"the line broke: {type(error).__name__}: {error}") from error

    def hang_up(self) -> None:
        """Break the line; whoever waits at either end learns it. Idempotent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up and let go. For the thread that receives."""
        self.hang_up()
        with self._sending:
            self._connection.close()
            self._socket.close()

    def _patience(self, seconds: float) -> None:
        """Set the seconds that the other end may be silent; 0 for ever."""
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))


def listen(port: int) -> socket.socket:
    """Return a socket that listens on the loopback; port 0 takes a free one."""
    return socket.create_server((HOST, port), reuse_port=False)


def answer(listener: socket.socket, key: bytes) -> Line:
    """Wait for a trainer that knows the key; return the line to it.

    Raises:
        ConnectionError: one that does not, or went away.
    """
    line = Line(listener.accept()[0])
    line.greet(key, first=True)
    return line


def dial(address: str, key: bytes) -> Line:
    """Call the agents' process at `host:port`.

    Raises:
        ConnectionError: it is not there, or has another key.
    """
    host, _, port = address.rpartition(":")
    try:
        line = Line(socket.create_connection((host, int(port)), _HANDSHAKE_S))
    except OSError as error:
        raise ConnectionError(f"no agents' process answers at {address}: {error}") from error
    line.greet(key, first=False)
    return line
