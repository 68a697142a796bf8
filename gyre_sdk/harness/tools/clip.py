"""Outputs as a model is shown them: no longer than a bound, with what was left out counted. Pure."""

from __future__ import annotations


def clip(text: str, most: int) -> str:
    """Return a text of at most about `most` characters: its begin and its end, and how much is missing between.

    Args:
        text: what to show.
        most: characters kept; the note comes on top.
    """
    if len(text) <= most:
        return text
    head = most // 3
    tail = most - head
    left = len(text) - head - tail
    return f"{text[:head]}\n[... {left:,} of {len(text):,} characters left out ...]\n{text[len(text) - tail :]}"
