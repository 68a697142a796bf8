"""Which cells' replicas answer: each is asked again and again, in a thread of its own.

One that refuses connections, or says that its engine is dead, is gone at once; one that says nothing may be busy, and is
gone only after a while.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import httpx

from gyre_sdk.harness.ports import Clock
from gyre_sdk.trainer.cells.lookout import Lookout

__all__ = ["Health", "Pulse", "Sign", "look"]

_REFUSALS = 2
"""Refusals in a row after which a replica is gone."""
SILENT_S = 30.0
"""Seconds of silence after which it is: a long prompt keeps an engine from answering."""
_TIMEOUT = 2.0


class Sign(StrEnum):
    """What a replica said when it was asked how it is."""

    ALIVE = "alive"
    REFUSED = "refused"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Pulse:
    """What is known of a replica's life."""

    sign: Sign | None = None
    """The last; None before the first."""
    refusals: int = 0
    """In a row."""
    quiet_since: float | None = None
    """When it was first asked in vain since it last answered; seconds of the clock."""

    def after(self, sign: Sign, now: float) -> Pulse:
        """Return what is known with one more sign."""
        if sign is Sign.ALIVE:
            return Pulse(sign)
        since = now if self.quiet_since is None else self.quiet_since
        return Pulse(sign, self.refusals + 1 if sign is Sign.REFUSED else 0, since)

    def fault(self, now: float) -> str | None:
        """Return in words why it counts as gone; None while it does not."""
        if self.refusals >= _REFUSALS:
            return "its replica refuses connections"
        if self.quiet_since is not None and now - self.quiet_since >= SILENT_S:
            return f"its replica has not answered for {now - self.quiet_since:.0f} s"
        return None


def look(http: httpx.Client, url: str) -> Sign:
    """Ask a replica how it is."""
    try:
        status = http.get(f"{url}/health").status_code
    except httpx.ConnectError:
        return Sign.REFUSED
    except httpx.HTTPError:
        return Sign.SILENT
    return Sign.ALIVE if status == 200 else Sign.REFUSED


class Health(Lookout):
    """Looks at replicas every `period_s` seconds until it is stopped."""

    def __init__(self, clock: Clock, period_s: float) -> None:
        http = httpx.Client(timeout=_TIMEOUT, headers={"connection": "close"}, trust_env=False)
        super().__init__("health of cells", period_s, http)
        self._clock = clock
        self._pulses: dict[str, Pulse] = {}

    def watch(self, urls: list[str]) -> None:
        """Look at these from now on, and at no others."""
        self._pulses = {url: self._pulses.get(url, Pulse()) for url in urls}

    def fault(self, url: str) -> str | None:
        """Return in words why a replica counts as gone; None while it does not."""
        return self._pulses.get(url, Pulse()).fault(self._clock.monotonic())

    def answers(self, url: str) -> bool:
        """Tell whether it answered when it was last asked."""
        return self._pulses.get(url, Pulse()).sign is Sign.ALIVE

    def beat(self) -> None:
        """Look at each replica once."""
        self.each(self._feel, list(self._pulses))

    def _feel(self, url: str) -> None:
        sign = look(self._http, url)
        pulses = self._pulses
        if url in pulses:
            pulses[url] = pulses[url].after(sign, self._clock.monotonic())
