"""Tokens to text as they come: the pieces add up to what decoding all tokens at once gives.

A token's text is looked up once and kept, unless it depends on its neighbours (bytes of a character that is split over
tokens); such tokens wait until their character is whole. Exact for byte-level vocabularies. A vocabulary with byte
fallback decodes a run of byte tokens as a whole, so invalid bytes there may show differently.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

_BROKEN = "\ufffd"
_HALF = 3
"""Bytes, so at most tokens, of a character that is not whole."""

_FALLBACK = re.compile("<0x([0-9A-F]{2})>")
_SHOWN = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_HIDDEN = (byte for byte in range(0x100) if byte not in _SHOWN)
_BYTES = {chr(byte): byte for byte in _SHOWN} | {chr(0x100 + place): byte for place, byte in enumerate(_HIDDEN)}
"""Bytes by the characters that byte-level vocabularies write for them."""


class Pieces:
    """The texts of a vocabulary's tokens, remembered."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.known: dict[int, tuple[str | None, bool]] = {}
        """What was looked up so far."""
        self._single: dict[str, int | None] = {}

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        text: str = self._tokenizer.decode(list(ids))
        return text

    def single(self, text: str) -> int | None:
        """Return the one token that stands for a text, where there is one and the tokenizer tells it."""
        if text not in self._single:
            tell = getattr(self._tokenizer, "convert_tokens_to_ids", None)
            token = tell(text) if tell is not None else None
            whole = isinstance(token, int) and self.decode([token]) == text
            self._single[text] = token if whole else None
        return self._single[text]

    def look_up(self, token: int) -> tuple[str | None, bool]:
        """Return a token's text, None where it depends on the tokens beside it; and whether it is special."""
        found = self.known.get(token)
        if found is None:
            text: str | None = self.decode([token])
            special = bool(text) and self._skipped(token)
            if text is None or _BROKEN in text or self.decode([token, token]) != text + text:
                text = None
            found = self.known[token] = (text, special)
        return found

    def raw(self, token: int) -> bytes:
        """Return a token's bytes, also where they are no whole characters."""
        text = self.decode([token])
        written = getattr(self._tokenizer, "id_to_token", None)
        form = written(token) if _BROKEN in text and written is not None else None
        if form is None:
            return text.encode()
        fallback = _FALLBACK.fullmatch(form)
        if fallback:
            return bytes.fromhex(fallback[1])
        return bytes(_BYTES[char] for char in form) if all(char in _BYTES for char in form) else text.encode()

    def _skipped(self, token: int) -> bool:
        try:
            return not self._tokenizer.decode([token], skip_special_tokens=True)
        except TypeError:  # a tokenizer that knows no special tokens
            return False


_PIECES: WeakKeyDictionary[Any, Pieces] = WeakKeyDictionary()


def pieces_of(tokenizer: Any) -> Pieces:
    """Return the pieces of a tokenizer, the same for every call with it."""
    found = _PIECES.get(tokenizer)
    if found is None:
        found = _PIECES[tokenizer] = Pieces(tokenizer)
    return found


class Detokenizer:
    """Turns one answer's tokens into text, in constant time per token."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._pending: list[int] = []
        self._before: list[int] = []

    @property
    def waiting(self) -> int:
        """Tokens whose text is not known yet."""
        return len(self._pending)

    def plain(self, ids: Sequence[int], stop_ids: frozenset[int]) -> tuple[str, int]:
        """Return the text of the leading tokens that need no care, and how many they are: most of an answer."""
        if self._pending:
            return "", 0
        texts: list[str] = []
        known = self._pieces.known
        for token in ids:
            text, special = known.get(token) or (None, True)
            if text is None or special or token in stop_ids:
                break
            texts.append(text)
        if texts:
            self._before = [ids[len(texts) - 1]]
        return "".join(texts), len(texts)

    def feed(self, token: int) -> str:
        """Return the text that the token completes."""
        if not self._pending:
            text, _ = self._pieces.look_up(token)
            if text is not None:
                self._before = [token]
                return text
        self._pending.append(token)
        text = self._text(self._pending)
        if not text.endswith(_BROKEN):
            return self._release(len(self._pending), text)
        place = len(self._pending) - _HALF
        if place > 0:
            head = self._text(self._pending[:place])
            if head + self._pieces.decode(self._pending[place:]) == text:
                return self._release(place, head)
        return ""

    def finish(self) -> str:
        """Return the text of tokens that still wait, with U+FFFD for bytes that make no character."""
        return self._release(len(self._pending), self._text(self._pending)) if self._pending else ""

    def _release(self, count: int, text: str) -> str:
        self._before = self._pending[:count]
        del self._pending[:count]
        return text

    def _text(self, ids: list[int]) -> str:
        # Some vocabularies write a token differently at the start of a text, and runs of byte tokens as a whole,
        # so show the tokens before as well.
        if not self._before:
            return self._pieces.decode(ids)
        return self._pieces.decode([*self._before, *ids])[len(self._pieces.decode(self._before)) :]
