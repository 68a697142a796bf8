"""Nothing is left behind: what this process opened is closed at its end, what dead processes left is swept."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

import docker
from docker.errors import APIError, DockerException, NotFound

from gyre_sdk.harness.workspace.owner import NAME, RUN, is_stale, me

_open: dict[int, Callable[[], None]] = {}
_lock = threading.RLock()
_installed_in: int | None = None


def watch(key: int, close: Callable[[], None]) -> None:
    """Call `close` when the process ends, by `atexit`, SIGTERM or SIGHUP, unless `unwatch` comes first."""
    global _installed_in
    with _lock:
        if _installed_in != os.getpid():
            _open.clear()  # a forked child owns nothing of its parent's
            _installed_in = os.getpid()
            atexit.register(_close_all)
            _install_signals()
        _open[key] = close


def unwatch(key: int) -> None:
    """Forget what `watch` was told."""
    with _lock:
        _open.pop(key, None)


def _close_all() -> None:
    if _installed_in != os.getpid():
        return
    while True:
        with _lock:
            if not _open:
                return
            _, close = _open.popitem()
        try:
            close()
        except Exception:  # boundary: at exit every other workspace still has to go
            pass


def _install_signals() -> None:
    """Turn the default end by SIGTERM or SIGHUP into an orderly one; handlers that somebody set are left alone."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _ended)


def _ended(number: int, frame: FrameType | None) -> None:
    _close_all()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def remove(client: docker.DockerClient, container: str) -> None:
    """Remove a container; one that is gone, or being removed, is fine."""
    try:
        client.api.remove_container(container, force=True, v=True)
    except NotFound:
        pass
    except APIError as error:
        if error.status_code != 409:
            raise


def sweep(client: docker.DockerClient) -> list[str]:
    """Remove gyre's containers whose owner is dead or whose deadline has passed; return their ids.

    Containers without gyre's labels, and those of living owners, are never touched.
    """
    removed = []
    for found in client.api.containers(all=True, filters={"label": RUN}):
        labels = found.get("Labels") or {}
        if f"/{labels.get(NAME)}" in (found.get("Names") or []) and is_stale(labels):
            remove(client, found["Id"])
            removed.append(found["Id"])
    return removed


def owned(client: docker.DockerClient) -> list[str]:
    """Return the ids of the containers that this process opened and that still exist, running or not."""
    label = f"gyre.owner={me().pid}:{me().start}"
    try:
        return [found["Id"] for found in client.api.containers(all=True, filters={"label": label})]
    except DockerException:
        return []
