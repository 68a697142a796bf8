"""Limits on captured output: the head and the tail are kept, with a visible mark between."""

from __future__ import annotations

OUTPUT_LIMIT = 1 << 20
"""Default bytes kept per output of a command."""


def clip(kept: bytes, lost: int | None, limit: int) -> tuple[bytes, bool]:
    """Return (at most `limit` bytes, whether something was dropped).

    Args:
        kept: the captured head and tail; where bytes were lost between, both are longer than half the limit.
        lost: bytes that were not captured, or None when some were and nobody counted.
        limit: bytes of the result, mark included.
    """
    if lost == 0 and len(kept) <= limit:
        return kept, False
    mark = b""
    for _ in range(2):  # the mark takes room too, and its own length depends on the number in it
        dropped = (lost or 0) + max(0, len(kept) - (limit - len(mark)))
        mark = b"\n[... %s bytes dropped ...]\n" % (b"some" if lost is None else b"%d" % dropped)
    head = (limit - len(mark)) // 2
    tail = limit - len(mark) - head
    if len(kept) <= limit - len(mark):
        return kept + mark, True
    return kept[:head] + mark + kept[len(kept) - tail :], True


class Capture:
    """Bytes of one stream as they come: what does not fit into `limit` is lost from the middle, and counted."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2 + 1
        self._head = bytearray()
        self._tail = bytearray()
        self.lost = 0
        """Bytes dropped since the last `take`."""

    def __len__(self) -> int:
        return len(self._head) + len(self._tail)

    def add(self, data: bytes) -> None:
        """Take what came next."""
        if not self._tail:
            room = self._half - len(self._head)
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > self._half + 65536:  # trimmed rarely, so that small pieces cost little
            self._trim()

    def take(self) -> tuple[bytes, int]:
        """Return (what is kept, bytes lost in its middle), and forget it."""
        self._trim()
        kept, lost = bytes(self._head + self._tail), self.lost
        self._head, self._tail, self.lost = bytearray(), bytearray(), 0
        return kept, lost

    def _trim(self) -> None:
        over = len(self._tail) - self._half
        if over > 0:
            self.lost += over
            del self._tail[:over]
