"""Show hostile text: task names, commands and errors come from agents and models and may hold anything."""

from __future__ import annotations

import unicodedata

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode categories that move cursors, hide or reorder text, or cannot be encoded."""
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\x1b": "\\e"}


def visible(text: str, limit: int) -> str:
    """Return text on one line with everything invisible escaped, cut to `limit` characters with an ellipsis."""
    found: list[str] = []
    size = marks = 0
    for character in text[: 4 * limit]:
        category = unicodedata.category(character)
        # A few combining marks make an accent; more of them climb over the lines above.
        marks = marks + 1 if category in ("Mn", "Me") else 0
        hide = category in _HIDDEN or marks > 2
        piece = _SHORT.get(character, f"\\u{ord(character):04x}") if hide else " " if category == "Zs" else character
        size += len(piece)
        if size > limit:
            break
        found.append(piece)
    else:
        if len(text) <= 4 * limit:
            return "".join(found)
    while found and sum(map(len, found)) >= limit:
        found.pop()
    return "".join(found) + "…"


def duration(seconds: float) -> str:
    """Return a duration as `m:ss` or `h:mm:ss`."""
    whole = max(0, int(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def count(number: int) -> str:
    """Return a count in at most five characters: 950, 12.3k, 4.56M."""
    for factor, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= factor:
            scaled = number / factor
            return f"{scaled:.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f}{unit}"
    return str(number)


def counted(number: int, noun: str, nouns: str = "") -> str:
    """Return a number with what it counts: 1 run, 1,200 runs; `nouns` where an s does not make the plural."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def shortly(number: int, noun: str) -> str:
    """Return a count in at most five characters with what it counts: 1 token, 12.3k tokens."""
    return f"{count(number)} {noun if number == 1 else noun + 's'}"


def reward(value: float | None, *, placeholder: bool = False) -> str:
    """Return a reward; an unknown one is `unscored`, and that of a run that never started `placeholder`, never 0."""
    if placeholder:
        return "placeholder"
    return "unscored" if value is None else f"{value:.2f}"
