"""Limits on captured output: the head and the tail are kept, with a visible mark between."""

from __future__ import annotations

OUTPUT_LIMIT = 1 << 20
"""Default bytes kept per output of a command."""


def clip(kept: bytes, lost: int | None, limit: int) -> tuple[str, bool]:
    """Return (text of at most `limit` bytes, whether something was dropped).

    Args:
        kept: the captured head and tail; where bytes were lost between, both are longer than half the limit.
        lost: bytes that were not captured, or None when some were and nobody counted.
        limit: bytes of the result, mark included.
    """
    if lost == 0 and len(kept) <= limit:
        return kept.decode(errors="replace"), False
    mark = b""
    for _ in range(2):  # the mark takes room too, and its own length depends on the number in it
        dropped = (lost or 0) + max(0, len(kept) - (limit - len(mark)))
        mark = b"\n[... %s bytes dropped ...]\n" % (b"some" if lost is None else b"%d" % dropped)
    head = (limit - len(mark)) // 2
    tail = limit - len(mark) - head
    if len(kept) <= limit - len(mark):
        return (kept + mark).decode(errors="replace"), True
    return (kept[:head] + mark + kept[len(kept) - tail :]).decode(errors="replace"), True
