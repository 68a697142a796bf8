"""Nothing is left behind: what this process opened is closed at its end, what dead processes left is swept."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import docker
from docker.errors import DockerException, NotFound

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.workspace.owner import NAME, OWNER, RUN, is_stale, me

_AT_ONCE = 8
"""Containers that are removed at a time."""
_PATIENCE = 10.0
"""Seconds that a signal's clean-up, or somebody else's removal, may take; what is left then ends by its deadline or the next
sweep."""

_open: dict[int, Callable[[], object]] = {}
_engines: set[str] = set()
_lock = threading.RLock()
_installed_in: int | None = None
_ending = False


def watch(key: int, close: Callable[[], object]) -> None:
    """Call `close` when the process ends, by `atexit`, SIGTERM or SIGHUP, unless `unwatch` comes first."""
    global _installed_in
    with _lock:
        if _installed_in != os.getpid():
            _open.clear()  # a forked child owns nothing of its parent's
            _installed_in = os.getpid()
            atexit.register(_at_exit)
            _install_signals()
        _open[key] = close


def unwatch(key: int) -> None:
    """Forget what `watch` was told."""
    with _lock:
        _open.pop(key, None)


def refuse_when_ending() -> None:
    """Keep threads from starting what nobody would remove any more.

    Raises:
        WorkspaceError: this process is ending.
    """
    if _ending:
        raise WorkspaceError("this process is ending: no workspace can be opened any more")


def remember(url: str) -> None:
    """Note an engine that this process may have containers on."""
    _engines.add(url)


def _at_exit() -> None:
    """Close what is open, and remove what other threads were about to start."""
    global _ending
    if _installed_in != os.getpid():
        return
    _ending = True
    _close_all()
    try:
        _remove_mine_everywhere(at_once=1)  # no thread can be started any more
    except KeyboardInterrupt:  # told twice to end: what is left ends by its deadline or the next sweep
        pass


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
        except (Exception, KeyboardInterrupt):  # boundary: at exit every other workspace still has to go
            pass


def _install_signals() -> None:
    """Turn the default end by SIGTERM or SIGHUP into an orderly one; handlers that somebody set are left alone."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _ended)


def _ended(number: int, frame: FrameType | None) -> None:
    """Clean up and end.

    The interrupted thread may hold any lock, also one of a client's connection pool: all is done in another thread, and what
    is on engines by clients of its own.
    """
    global _ending
    _ending = True
    cleaning = threading.Thread(target=_remove_mine_everywhere, daemon=True)
    cleaning.start()
    cleaning.join(_PATIENCE)
    closing = threading.Thread(target=_close_all, daemon=True)
    closing.start()
    closing.join(_PATIENCE)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _remove_mine_everywhere(at_once: int = _AT_ONCE) -> None:
    for url in list(_engines):
        try:
            client = docker.DockerClient(base_url=url, max_pool_size=_AT_ONCE, timeout=_PATIENCE)
            remove_mine(client, at_once=at_once)
            client.close()
        except (DockerException, OSError):  # an engine that does not answer keeps them until their deadline
            pass


def remove_mine(client: docker.DockerClient, *, at_once: int = _AT_ONCE) -> int:
    """Remove every container of this process, also those whose start is under way; return how many."""
    count = 0
    quiet = 0
    deadline = time.monotonic() + _PATIENCE
    while quiet < 2 and time.monotonic() < deadline:
        found = owned(client)
        if at_once > 1:
            with ThreadPoolExecutor(at_once) as removing:
                list(removing.map(lambda container: remove(client, container), found))
        else:
            for container in found:
                remove(client, container)
        count += len(found)
        quiet = 0 if found else quiet + 1
        if starting.busy and quiet:
            quiet = 1
            time.sleep(0.05)
    return count


class _Starting:
    """Counts the containers that are being started by this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    @property
    def busy(self) -> bool:
        """Whether there are any."""
        return self._count > 0

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._count -= 1


starting = _Starting()
"""Entered around the creation of a container: a signal's clean-up waits for those under way."""


def remove(client: docker.DockerClient, container: str) -> bool:
    """Remove a container, by id or name, and tell whether it is gone. One that cannot be removed now ends by its deadline, and is the
    next sweep's."""
    try:
        client.api.remove_container(container, force=True, v=True)
    except NotFound:
        pass
    except (DockerException, OSError):
        return False
    return True


def sweep_containers(client: docker.DockerClient) -> list[str]:
    """Remove gyre's containers whose owner is dead or whose deadline has passed; return their ids.

    Containers without gyre's labels, and those of living owners, are never touched.
    """
    removed = []
    for found in client.api.containers(all=True, filters={"label": RUN}):
        labels = found.get("Labels") or {}
        mine = f"/{labels.get(NAME)}" in (found.get("Names") or [])
        if mine and is_stale(labels) and remove(client, found["Id"]):
            removed.append(found["Id"])
    return removed


def own_label() -> str:
    """Return the label that this process's containers have, as a filter."""
    return f"{OWNER}={me().pid}:{me().start}"


def owned(client: docker.DockerClient) -> list[str]:
    """Return the ids of the containers that this process opened and that still exist, running or not."""
    try:
        return [found["Id"] for found in client.api.containers(all=True, filters={"label": own_label()})]
    except DockerException:
        return []
