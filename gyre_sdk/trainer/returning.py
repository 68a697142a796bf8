"""A trainer comes back, and finds processes of the one before it: what it does to know the state that they are in.

Nothing that they say is trusted. Which version a replica serves is compared with what is published, as always; here it is
brought to where that can be done, whatever it was in the middle of.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from gyre_sdk.errors import PublishError, TrainerError
from gyre_sdk.trainer.cells.switch import Parking
from gyre_sdk.trainer.publish import Publisher
from gyre_sdk.trainer.transports import Unready

if TYPE_CHECKING:
    from gyre_sdk.trainer.sharing.core import Core

__all__ = ["listen_again", "rouse", "tell_again"]

_TELLINGS, _TELL_EVERY = 60, 1.0
"""Times that a proxy is told, and seconds between two of them."""

_log = logging.getLogger("gyre.trainer")


def rouse(publisher: Publisher, urls: Sequence[str], parking: Parking) -> None:
    """Bring replicas that are parked back to serving, with the current weights: their cells trained.

    One that cannot be brought is left to the publication that follows, which says why.
    """
    for url in urls:
        try:
            with publisher.replica(url) as replica:
                if not parking.is_parked(replica):
                    continue
                _log.info("replica %s was parked, and serves again", url)
                parking.wake(replica)
            publisher.restore(url, awake=lambda url=url: _ready(publisher, parking, url))  # type: ignore[misc]
        except (httpx.HTTPError, Unready, PublishError) as error:
            _log.warning("replica %s was parked, and is not awake: %s", url, error)
            publisher.returned(url, known=False)


def _ready(publisher: Publisher, parking: Parking, url: str) -> None:
    with publisher.replica(url) as replica:
        parking.ready(replica)


def listen_again(make: Callable[[int], Core], kept: Path, cleanup: ExitStack) -> Core:
    """Return a core that listens where the one before it did, if that can be had: its satellites dial there.

    Args:
        make: port -> core.
        kept: file with the port.
        cleanup: leaves the core.

    Raises:
        TrainerError: it cannot listen at all.
    """
    text = kept.read_text() if kept.is_file() else ""
    port = int(text) if text.isdigit() else 0
    try:
        core = cleanup.enter_context(make(port))
    except TrainerError:
        if not port:
            raise
        core = cleanup.enter_context(make(0))
    kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept.write_text(str(core.address[1]))
    return core


def tell_again(publisher: Publisher) -> None:
    """Tell a proxy that came back who serves: now, or for a minute in a thread of its own, when it does not hear it.

    One that dies again before is told when it is back again.
    """
    if not _told(publisher):
        threading.Thread(target=_tell, args=(publisher,), name="tell the proxy", daemon=True).start()


def _tell(publisher: Publisher) -> None:
    for _ in range(_TELLINGS):
        time.sleep(_TELL_EVERY)
        if _told(publisher):
            return


def _told(publisher: Publisher) -> bool:
    try:
        publisher.route()
    except PublishError as error:
        _log.warning("the proxy that came back was not told who serves: %s", error)
        return False
    return True
