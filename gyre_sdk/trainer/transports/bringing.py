"""A replica is brought to a version as soon as it can take it: it may be starting, or busy."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx

from gyre_sdk.errors import PublishError, TrainerError
from gyre_sdk.trainer.transports.replica import Replica, Unready

if TYPE_CHECKING:
    from gyre_sdk.trainer.terms import Mandate
    from gyre_sdk.trainer.transports import Transport
    from gyre_sdk.trainer.weights import PolicyFiles

__all__ = ["PAUSE", "Behind", "at_once", "bring_patiently", "still_serves"]

PAUSE = 0.5
"""Seconds before a replica is asked again."""

_log = logging.getLogger("gyre.trainer")


class Behind(PublishError):
    """A replica could not be reached for longer than its publisher waits."""


def bring_patiently(
    transport: Transport,
    url: str,
    files: PolicyFiles,
    *,
    lock: threading.Lock,
    mandate: Mandate | None,
    patience: float,
    refused: Callable[[], None],
    check: Callable[[], None],
    wanted: Callable[[], bool] = lambda: True,
    brought: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Make a replica serve these weights, checked; return seconds by phase.

    Args:
        mandate: of this trainer.
        lock: held while it is brought: one thread at a time does that.
        patience: seconds that it may be unable to take them.
        refused: called when it refuses connections.
        check: raises when it was given up by who supervises it.
        wanted: whether it is still to be brought; nothing is done else.
        brought: called when it serves them, with the lock held.

    Raises:
        Behind: it could not take them for `patience` seconds.
        PublishError: it refused for good.
    """
    give_up = time.monotonic() + patience
    while True:
        try:
            with lock, Replica(url, files.version, mandate) as replica:
                if not wanted():
                    return {}
                phases = transport.bring(replica, files)
                brought()
            return phases
        except (httpx.TransportError, Unready) as error:
            if isinstance(error, httpx.ConnectError):
                refused()
            check()
            if time.monotonic() > give_up:
                raise Behind(
                    f"version {files.version} did not reach replica {url} in {patience:.0f} s:"
                    f" {type(error).__name__}: {error}; look at the engine's log, then run the same command again:"
                    " it resumes"
                ) from error
            _log.warning("replica %s did not take version %d (%s); trying again", url, files.version, error)
            time.sleep(PAUSE)


def at_once(
    bring: Callable[[str], dict[str, float]], urls: Sequence[str]
) -> tuple[dict[str, float], dict[str, Behind]]:
    """Bring replicas at the same time; return the phases of the slowest, and who could not take it in time.

    Raises:
        PublishError: one refused for good; all others have ended by then.
    """
    with ThreadPoolExecutor(len(urls) or 1, thread_name_prefix="publish") as pool:
        running = {url: pool.submit(bring, url) for url in urls}
    behind: dict[str, Behind] = {}
    phases: dict[str, float] = {}
    for url, future in running.items():
        try:
            found = future.result()
        except Behind as error:
            behind[url] = error
        else:
            phases = found if sum(found.values()) > sum(phases.values()) else phases
    return phases, behind


def still_serves(replica: Replica, version: int) -> bool:
    """Tell whether a replica answers, and with the label of a version or one that is no number: one started anew does not."""
    try:
        with replica:
            label = replica.version()
    except (httpx.TransportError, Unready, TrainerError):
        return False
    return label is not None and label != "default" and (not label.isdigit() or int(label) == version)
