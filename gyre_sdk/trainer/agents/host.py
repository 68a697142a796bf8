"""The agents' process.

    python -m gyre_sdk.trainer.agents.host --folder DIR [--port PORT]

Agents run in its threads, so that neither the trainer's end nor its torch touches them, and nothing that they do touches
the trainer. It listens on the loopback for whoever knows the key in `DIR/agents.key`, one trainer at a time. When a trainer
goes away runs go on; the next one learns which are under way, and what came of those that ended meanwhile.
No torch. What agents print goes to its log. Exit status: 0 told to end, 2 the folder has no key.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from gyre_sdk.errors import GyreError, SettingsError
from gyre_sdk.events import AnyEvent, Event
from gyre_sdk.harness.session import owner
from gyre_sdk.trainer.agents.sessions import Sessions
from gyre_sdk.trainer.agents.settings import AgentSettings
from gyre_sdk.trainer.agents.wire import (
    HOST,
    KEY_FILE,
    READY,
    Begin,
    Ended,
    Hello,
    Know,
    Line,
    Message,
    Refused,
    Running,
    Seen,
    Serve,
    Stop,
    Stopped,
    Told,
    Welcome,
    answer,
    listen,
)
from gyre_sdk.trainer.keys import read_key

_A_LINE_PER_REQUEST = ("httpx", "httpcore", "httpx2", "httpcore2", "openai", "anthropic", "urllib3", "docker")
"""Loggers of clients that would fill the log, call by call."""
_EVENTS = 20_000
"""Events that may wait for a trainer; the oldest are forgotten."""

_log = logging.getLogger("gyre.agents")


class Outbox:
    """What goes to the trainer, in order; what cannot go now waits for the next one."""

    def __init__(self, events: int = _EVENTS) -> None:
        self._events = events
        self._changed = threading.Condition()
        self._queue: deque[Message] = deque()
        self._unseen: dict[str, Ended] = {}
        """Outcomes that no trainer has acknowledged."""
        self._line: Line | None = None
        threading.Thread(target=self._send, name="outbox", daemon=True).start()

    def attach(self, line: Line) -> None:
        """Send on a line from now on: what has waited, then the outcomes that nobody has seen."""
        with self._changed:
            self._queue = deque(message for message in self._queue if isinstance(message, Told))
            self._queue.extend(self._unseen.values())
            self._line = line
            self._changed.notify_all()

    def detach(self) -> None:
        """Keep what there is to send."""
        with self._changed:
            self._line = None

    def put(self, message: Message) -> None:
        """Send a message when its turn comes."""
        with self._changed:
            self._queue.append(message)
            if isinstance(message, Ended):
                self._unseen[message.id] = message
            elif len(self._queue) > self._events:
                self._forget()
            self._changed.notify_all()

    def seen(self, id: str) -> None:
        """Forget an outcome."""
        with self._changed:
            self._unseen.pop(id, None)

    def has(self, id: str) -> bool:
        """Tell whether an outcome waits to be seen."""
        with self._changed:
            return id in self._unseen

    def _forget(self) -> None:
        oldest = next((place for place, message in enumerate(self._queue) if isinstance(message, Told)), None)
        if oldest is not None:
            del self._queue[oldest]

    def _send(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._line is not None and self._queue)
                line, message = self._line, self._queue.popleft()
            assert line is not None
            try:
                line.send(message)
            except ConnectionError:
                with self._changed:
                    if self._line is line:
                        self._line = None
                    if isinstance(message, Told):
                        self._queue.appendleft(message)


class Host:
    """Serves one trainer after the other."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._outbox = Outbox()
        self._sessions: Sessions | None = None
        self._lock = threading.Lock()
        self._under_way: dict[str, tuple[Begin, float]] = {}
        """Request -> what was asked for, and when it began."""
        self._stopped = False

    def serve(self, listener: socket.socket) -> None:
        """Attend to whoever calls, until one says stop. A line is read to its end before the next one is answered: what a
        trainer asked for with its last breath is under way when its successor asks.
        """
        while True:
            try:
                line = answer(listener, self._key)
            except ConnectionError as error:
                _log.warning("%s", error)
                continue
            try:
                if self._attend(line):
                    return
            except ConnectionError as error:
                _log.info("the trainer is gone: %s", error)
            finally:
                self._outbox.detach()
                line.close()

    def stop(self) -> None:
        """End what is under way. Idempotent."""
        if self._sessions is not None and not self._stopped:
            self._sessions.stop()

    def _attend(self, line: Line) -> bool:
        """Do what a trainer says, until it is gone; True when it said stop."""
        hello = line.receive()
        if not isinstance(hello, Hello):
            raise ConnectionError(f"a {type(hello).__name__} came in place of a greeting")
        try:
            sessions = self._sessions or self._made(hello)
        except GyreError as error:
            line.send(Refused(type(error).__name__, str(error)))
            return False
        except Exception as error:  # boundary: the user's module, on import
            _log.exception("the agent cannot be loaded")
            line.send(Refused("SettingsError", f"agent.function cannot be loaded: {type(error).__name__}: {error}"))
            return False
        with self._lock:
            now = time.monotonic()
            running = [Running(id, begun.order, now - at) for id, (begun, at) in self._under_way.items()]
        line.send(Welcome(owner(), running))
        self._outbox.attach(line)
        while True:
            try:
                message = line.receive()
            except ConnectionError:
                if self._stopped:
                    return True
                raise
            if isinstance(message, Stop):
                self.stop()
                self._stopped = True
                self._outbox.put(Stopped())
            else:
                self._take(message, sessions)

    def _made(self, hello: Hello) -> Sessions:
        settings = pickle.loads(hello.settings)
        assert isinstance(settings, AgentSettings)
        self._sessions = Sessions(settings, self._observe)
        return self._sessions

    def _observe(self, event: Event) -> None:
        if isinstance(event, AnyEvent):
            self._outbox.put(Told(event))

    def _take(self, message: Message, sessions: Sessions) -> None:
        match message:
            case Serve(url, key):
                sessions.serve(url, key)
            case Know(key, task):
                sessions.know(key, task)
            case Begin():
                self._begin(message, sessions)
            case Seen(id):
                self._outbox.seen(id)
            case _:
                raise ConnectionError(f"a {type(message).__name__} came from a trainer")

    def _begin(self, asked: Begin, sessions: Sessions) -> None:
        with self._lock:
            if asked.id in self._under_way or self._outbox.has(asked.id):
                return
            self._under_way[asked.id] = (asked, time.monotonic())

        def run() -> None:
            outcome = sessions.run(asked.order, asked.key)
            with self._lock:
                del self._under_way[asked.id]
                self._outbox.put(Ended(asked.id, outcome))

        order = asked.order
        name = f"{order.group or order.split} {order.member if order.group else order.task}"
        threading.Thread(target=run, name=name, daemon=True).start()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to end; return the exit status."""
    parser = argparse.ArgumentParser(prog="gyre-agents", description="Run the agents of a training.")
    parser.add_argument("--folder", type=Path, required=True, help="output folder of the training")
    parser.add_argument("--port", type=int, default=0, help="0, the default, takes a free one")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for name in _A_LINE_PER_REQUEST:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        key = read_key(options.folder / KEY_FILE)
    except SettingsError as error:
        sys.stderr.write(f"gyre-agents: {error}\n")
        return 2
    host = Host(key)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with listen(options.port) as listener:
            sys.stdout.write(f"{READY} {HOST}:{listener.getsockname()[1]}\n")
            sys.stdout.flush()
            host.serve(listener)
        while True:
            signal.pause()  # it was stopped; whoever started it ends it
    except KeyboardInterrupt:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        host.stop()
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _end(status: int) -> NoReturn:
    """End this process now, tidily: Python would wait first for what agents have left in pools of threads, however long it
    takes."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _end(main())
