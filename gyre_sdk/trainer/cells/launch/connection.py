"""This process's connection to a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from gyre_sdk.errors import SettingsError

__all__ = ["Connection", "ask_for_token", "token_mode"]

_MODE = "RAY_AUTH_MODE"
_CONNECT = 120.0
"""Seconds that connecting may take."""

_log = logging.getLogger("gyre.trainer")


class Connection:
    """The process's connection to Ray, held by a thread of its own.

    What Ray starts ends with the thread that started it, and what connects from the main thread loses its handler of
    SIGTERM to Ray. A connection that this process had before is used, and left as it is.
    """

    def __init__(self, address: str, namespace: str, runtime_env: Mapping[str, Any] | None) -> None:
        self._address = address
        self._namespace = namespace
        self._runtime_env = runtime_env
        self._opened = threading.Event()
        self._closing = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._hold, name="connection to Ray", daemon=True)

    def open(self) -> tuple[str, str]:
        """Connect; return this machine's address in the cluster and the id of its node.

        Raises:
            SettingsError: there is no such cluster.
        """
        import ray

        if not ray.is_initialized() and self._found():
            self._thread.start()
            if not self._opened.wait(_CONNECT):
                self._failure = TimeoutError(f"no answer in {_CONNECT:.0f} s")
                self._closing.set()
        if self._failure is not None:
            raise SettingsError(
                f"no Ray cluster at cells.ray_address = {self._address!r}: {self._failure}; start one with `ray start --head`, or leave the address out"
            ) from self._failure
        _keep_sigterm()
        node = str(ray.get_runtime_context().get_node_id())
        return str(ray.util.get_node_ip_address()), node

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _found(self) -> bool:
        """Ask for the head at once: Ray asks for minutes where nobody is."""
        if self._address == "auto":
            return True
        host, _, port = self._address.rpartition(":")
        if "/" in self._address or not host or not port.isdecimal():
            raise SettingsError(
                f"cells.ray_address = {self._address!r} must be 'auto' or HOST:PORT of the head: the trainer runs on a"
                " node of the cluster, not as a client from outside"
            )
        try:
            socket.create_connection((host, int(port)), timeout=10.0).close()
        except OSError as error:
            self._failure = error
        return self._failure is None

    def _hold(self) -> None:
        import ray

        logger = logging.getLogger("ray")
        level = logger.level
        logger.setLevel(logging.ERROR)  # a warning for each thing that is as it is meant to be
        try:
            ray.init(
                self._address,
                namespace=self._namespace,
                runtime_env=None if self._runtime_env is None else dict(self._runtime_env),
                log_to_driver=False,
                configure_logging=False,
            )
        except Exception as error:  # boundary: top of the connecting thread; Ray raises errors of many kinds
            self._failure = error
            return
        finally:
            logger.setLevel(level)
            self._opened.set()
        with _silence():
            self._closing.wait()
            ray.shutdown()


def token_mode() -> dict[str, str]:
    """Return the variables under which a cluster on this machine asks whoever connects for this user's token."""
    return {_MODE: os.environ.get(_MODE, "token")}


def ask_for_token() -> None:
    """Let this process show the token when it connects. Ray does so by itself only to a cluster that it started here."""
    from ray._raylet import Config  # type: ignore[attr-defined]  # compiled

    os.environ.update(token_mode())
    Config.initialize("")  # it was read from the environment when Ray was imported


def _keep_sigterm() -> None:
    """Put this process's handler of SIGTERM back: Ray's aborts the process three seconds after the signal."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Log what nodes report instead of printing it. Ray has no setting for that, and stdout is for the trainer's report."""
    from ray._private import worker

    def note(data: Mapping[str, Any], *_: Any, **__: Any) -> None:
        for line in data["lines"]:
            _log.info("Ray: %s", line.partition("\n")[0])

    printing = worker.print_to_stdstream
    worker.print_to_stdstream = note
    try:
        yield
    finally:
        worker.print_to_stdstream = printing
