"""Ends of texts that may be the start of a tag."""

from __future__ import annotations

from collections.abc import Sequence


def held_from(text: str, tags: Sequence[str]) -> int:
    """Return where the longest end of a text starts that one of the tags begins with; the text's length if none."""
    start = max(0, len(text) - max(map(len, tags)) + 1)
    firsts = {tag[0] for tag in tags}
    for place in range(start, len(text)):
        if text[place] in firsts and any(tag.startswith(text[place:]) for tag in tags):
            return place
    return len(text)
