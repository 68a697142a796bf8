"""Holds text back while it may be the start of a stop string.

Engines look for stop strings in the text without special tokens; agents see the text with them. So text comes in
pieces that say whether the engine sees them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class _Match:
    """Looks for one stop string: the longest end of the text so far that the stop string begins with."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._back = _borders(stop)
        self.length = 0
        self.found: int | None = None
        """Where the first occurrence starts."""

    def feed(self, text: str, at: int) -> None:
        """Read on; `at` is the place of the text in all text."""
        if self.found is not None:
            return
        place, stop, length = 0, self._stop, self.length
        while place < len(text):
            if not length:
                place = text.find(stop[0], place)
                if place < 0:
                    break
            while length and stop[length] != text[place]:
                length = self._back[length - 1]
            length += stop[length] == text[place]
            place += 1
            if length == len(stop):
                self.found = at + place - length
                break
        self.length = length

    def safe(self, at: int) -> int:
        """Return where what may be the stop string starts, with all text up to `at` read."""
        return at - self.length if self.found is None else self.found


def _borders(stop: str) -> list[int]:
    back = [0] * len(stop)
    for place in range(1, len(stop)):
        length = back[place - 1]
        while length and stop[length] != stop[place]:
            length = back[length - 1]
        back[place] = length + (stop[length] == stop[place])
    return back


class StopWatch:
    """Passes text on as soon as no stop string can begin in it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._matches = [_Match(stop) for stop in stops if stop]
        self._held: deque[tuple[str, bool, int]] = deque()
        self._start = self._end = 0
        self.settled = 0
        """Tokens that end before anything that may be, or is, a stop string."""

    @property
    def watching(self) -> bool:
        """Whether there is a stop string to look for."""
        return bool(self._matches)

    def feed(self, text: str, tokens: int, *, seen: bool = True) -> str:
        """Return the text that is free to go.

        Args:
            text: the next piece.
            tokens: tokens of the answer up to the end of this piece.
            seen: whether the engine sees this text when it looks for stop strings.
        """
        if not self._matches:
            self.settled = tokens
            return text
        self._held.append((text, seen, tokens))
        if seen:
            for match in self._matches:
                match.feed(text, self._end)
            self._end += len(text)
        return self._pass(min(match.safe(self._end) for match in self._matches))

    def finish(self, stop: str | None) -> str:
        """Return the rest of the text: all of it, or what is before the stop string that ended sampling."""
        place = "".join(text for text, seen, _ in self._held if seen).find(stop) if stop else -1
        settled = self.settled
        rest = self._pass(self._end if place < 0 else self._start + place)
        if place >= 0:
            self.settled = settled
        return rest

    def _pass(self, safe: int) -> str:
        out: list[str] = []
        while self._held:
            text, seen, tokens = self._held[0]
            end = self._start + len(text) if seen else self._start
            if end > safe:
                if self._start < safe:
                    out.append(text[: safe - self._start])
                    self._held[0] = (text[safe - self._start :], seen, tokens)
                    self._start = safe
                break
            out.append(text)
            self._held.popleft()
            self._start, self.settled = end, tokens
        return "".join(out)
