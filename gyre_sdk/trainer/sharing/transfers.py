"""What a transfer between the core and a satellite takes, where several share the core's line. Pure."""

from __future__ import annotations

__all__ = ["Transfers"]


class Transfers:
    """Transfers of one kind, measured: those that go on at the same time have equal shares of the time.

    Times are seconds of the caller's clock.
    """

    def __init__(self) -> None:
        self.count = 0
        """That came to their end."""
        self._shares = 0.0
        self._under_way = 0
        self._share = 0.0
        """Seconds that one would have had that went on all the time."""
        self._since = 0.0

    @property
    def mean_s(self) -> float:
        """Seconds that one takes alone; 0 before the first."""
        return self._shares / self.count if self.count else 0.0

    def begin(self, now: float) -> float:
        """Begin one; return what `end` takes."""
        self._pass(now)
        self._under_way += 1
        return self._share

    def end(self, began: float, now: float, *, whole: bool) -> None:
        """End one. `whole`: it came to its end; others count for nothing."""
        self._pass(now)
        self._under_way -= 1
        if whole:
            self.count += 1
            self._shares += self._share - began

    def _pass(self, now: float) -> None:
        if self._under_way:
            self._share += (now - self._since) / self._under_way
        self._since = now
