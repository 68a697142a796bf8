"""Sockets made inside a container's network namespace. They work from outside: a socket stays in the namespace it was made in.

A thread made for it joins the namespace, makes the socket and ends. Linux gives every thread a namespace of its own to be
in, so the rest of the process never notices; no process has to be started, which takes a hundred times as long.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_BACKLOG = 256
T = TypeVar("T")


class CannotEnter(Exception):
    """This process cannot join the container's network namespace. Internal: another way is taken."""


def listen_inside(container_pid: int, port: int, *, container: str = "") -> socket.socket:
    """Return a socket that listens on 127.0.0.1:`port` inside; it is accepted on from here.

    Args:
        container_pid: the container's first process, as this machine counts.
        container: its full id; when given, the process must be one of that container.

    Raises:
        CannotEnter: no permission, the container is not on this machine, or it is gone.
        OSError: the port is taken inside.
    """

    def make() -> socket.socket:
        made = socket.socket()
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(("127.0.0.1", port))
            made.listen(_BACKLOG)
            made.setblocking(False)
        except BaseException:
            made.close()
            raise
        return made

    return inside(container_pid, make, container=container)


def connect_inside(container_pid: int, port: int, *, container: str = "", timeout: float = 10.0) -> socket.socket:
    """Return a connection to 127.0.0.1:`port` inside.

    Raises:
        CannotEnter: see `listen_inside`.
        OSError: nothing listens there, or it does not answer within `timeout` seconds.
    """
    return inside(container_pid, lambda: socket.create_connection(("127.0.0.1", port), timeout), container=container)


def inside(container_pid: int, make: Callable[[], T], *, container: str = "") -> T:
    """Return what `make` returns in a thread that has joined a container's network namespace.

    Raises:
        CannotEnter: see `listen_inside`.
    """
    given: list[T] = []
    problems: list[BaseException] = []

    def work() -> None:
        try:
            _join(container_pid, container)
            given.append(make())
        except BaseException as error:  # boundary: the thread's caller gets it
            problems.append(error)

    thread = threading.Thread(target=work, name="gyre-inside", daemon=True)
    thread.start()
    thread.join()
    if problems:
        raise problems[0]
    return given[0]


def process_handle(container_pid: int, *, container: str = "") -> int:
    """Return a descriptor that becomes readable when the container's first process ends.

    Raises:
        CannotEnter: see `listen_inside`.
    """
    try:
        with _process(container_pid, container):
            return os.pidfd_open(container_pid)
    except OSError as error:
        raise CannotEnter(f"process {container_pid} cannot be watched: {error}") from error


def _join(pid: int, container: str) -> None:
    try:
        with _process(pid, container) as folder:
            namespace = os.open("ns/net", os.O_RDONLY, dir_fd=folder)
        try:
            _set_namespace(namespace)
        finally:
            os.close(namespace)
    except OSError as error:
        raise CannotEnter(f"the network of process {pid} cannot be joined: {error}") from error


@contextmanager
def _process(pid: int, container: str) -> Iterator[int]:
    """Give a process' folder in /proc, known to be one of the container; it stays this process', whoever gets its number."""
    folder = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with os.fdopen(os.open("cgroup", os.O_RDONLY, dir_fd=folder)) as found:
            if container not in found.read():
                raise CannotEnter(f"process {pid} is not one of container {container[:12]}: its engine runs elsewhere")
        yield folder
        os.stat("cgroup", dir_fd=folder)  # it is still alive: what happened meanwhile happened to it
    finally:
        os.close(folder)


def _set_namespace(descriptor: int) -> None:
    if hasattr(os, "setns"):  # Python 3.12
        os.setns(descriptor, _NEW_NETWORK)
        return
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NEW_NETWORK) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
