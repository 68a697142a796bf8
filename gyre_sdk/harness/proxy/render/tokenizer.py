"""Text to ids and back, with every way closed by which text of a message could become a control token."""

from __future__ import annotations

import json
import re
import secrets
import threading
import unicodedata
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from gyre_sdk.errors import RenderError

_REMEMBERED = 2_000_000
"""Characters of text whose ids are remembered."""
_PER_TEXT = 64
"""Characters that remembering a text costs besides its own."""
_LOOKS_LIKE_CONTROL = re.compile(r"<[|｜].+[|｜]>")

Span = tuple[int, int]
"""Start and end of a stretch of text, in characters."""


class Remembered:
    """Ids of texts encoded lately: templates repeat the same few, and the runs of a group begin with the same prompt.

    Args:
        encode: gives the ids of a text.
    """

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._known: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text, in a list of the caller's own."""
        with self._lock:
            found = self._known.get(text)
            if found is not None:
                self._known.move_to_end(text)
                return list(found)
        ids = self._encode(text)
        cost = len(text) + _PER_TEXT
        if cost <= _REMEMBERED // 8:
            with self._lock:
                if text not in self._known:
                    self._known[text] = tuple(ids)
                    self._size += cost
                while self._size > _REMEMBERED:
                    self._size -= len(self._known.popitem(last=False)[0]) + _PER_TEXT
        return ids


class TokenizerAdapter:
    """The part of a Hugging Face tokenizer that `renderers` calls, over `tokenizers.Tokenizer`."""

    unk_token_id: int | None = None

    def __init__(self, tokenizer: Tokenizer, name_or_path: str, eos_token_id: int | None) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True
        self._remembered = Remembered(lambda text: self._tokenizer.encode(text, add_special_tokens=False).ids)
        self.name_or_path = name_or_path
        self.eos_token_id = eos_token_id

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Return the ids of plain text."""
        if add_special_tokens:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=True).ids
            return ids
        return self._remembered.ids(text)

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: Any) -> str:
        """Return the text of ids."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def id_to_token(self, token: int) -> str | None:
        """Return a token as the vocabulary writes it."""
        form: str | None = self._tokenizer.id_to_token(token)
        return form

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Return the id of a token, or of each; None for one that the vocabulary does not have."""
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]


class Codec:
    """Encodes rendered conversations: control tokens where the template wrote them, plain text everywhere else.

    The text is cut at the control tokens that the template wrote; each stretch between them is encoded as a whole,
    as the model's own tokenizer does, so the ids are those of the plain tokenizer wherever no message holds the text
    of a control token.

    Args:
        data: content of `tokenizer.json`.
        sources: the chat template's text; added tokens that it names, other than plain words, are control tokens.
        named: texts of the tokenizer's named tokens (beginning and end of text, padding).
    """

    def __init__(self, data: str, sources: Iterable[str], named: Iterable[str] = ()) -> None:
        source = "\n".join(sources)
        value = json.loads(data)
        self.control: dict[str, int] = {}
        """Text to id."""
        flags: dict[str, dict[str, Any]] = {}
        for token in value.get("added_tokens") or ():
            text = token["content"]
            if not text.strip():
                continue
            written = text in source and not text.replace(" ", "").isalpha()  # plain words occur in any template
            if token["special"] or text in named or written or _LOOKS_LIKE_CONTROL.fullmatch(text):
                self.control[text], flags[text] = token["id"], token
                token["special"] = True
        self._plain = Tokenizer.from_str(json.dumps(value))
        self._plain.encode_special_tokens = True
        self._ids = frozenset(self.control.values())
        flagged = {text: pattern for text, token in flags.items() if (pattern := _flagged(token))}
        bare = _any_of([text for text in flags if text not in flagged])
        self._cut = re.compile("|".join([*sorted(flagged.values(), key=len, reverse=True), bare]))
        self._names = re.compile(_any_of(list(flags)))
        self._guard = self._find_guard()
        self._remembered = Remembered(lambda text: self._plain.encode(text, add_special_tokens=False).ids)

    def control_in(self, text: str) -> list[Span]:
        """Return where a text holds the text of control tokens."""
        return [found.span() for found in self._names.finditer(text)]

    def encode(self, text: str, blocked: Sequence[Span] = (), *, first: bool = True) -> list[int]:
        """Return the ids of a rendered text.

        Args:
            text: as the template wrote it.
            blocked: stretches that came from messages and must stay plain; ascending.
            first: False for text that continues a conversation.

        Raises:
            RenderError: a blocked stretch cannot be written as plain text, or the text is not valid Unicode.
        """
        ids: list[int] = []
        at, waiting = 0, list(blocked)[::-1]
        for found in self._cut.finditer(text):
            while waiting and waiting[-1][1] <= found.start():
                waiting.pop()
            if waiting and waiting[-1][0] < found.end():
                continue
            ids += self._run(text[at : found.start()], first=first and not at)
            ids.append(self.control[found[0].strip() if found[0] not in self.control else found[0]])
            at = found.end()
        return ids + self._run(text[at:], first=first and not at)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens included."""
        text: str = self._plain.decode(list(ids), skip_special_tokens=False)
        return text

    def same(self, text: str, ids: Sequence[int]) -> bool:
        """Return whether ids say this text, up to the normalisation that the tokenizer applies."""
        said = self.decode(ids)
        if said == text:
            return True
        for form in ("NFC", "NFKC"):
            if unicodedata.normalize(form, said).strip(" ") == unicodedata.normalize(form, text).strip(" "):  # type: ignore[arg-type]
                return True
        return False

    def _run(self, text: str, *, first: bool) -> list[int]:
        if not text:
            return []
        guarded = self._guard is not None and not first
        try:
            ids = self._remembered.ids(f"{self._guard}{text}" if guarded else text)
        except UnicodeEncodeError as error:
            raise RenderError(f"a message is not valid Unicode: {error}") from error
        ids = ids[1:] if guarded else ids
        if self._names.search(text) and not self._ids.isdisjoint(ids):
            raise RenderError("a message holds the text of a control token, and this tokenizer cannot write it plainly")
        return ids

    def _find_guard(self) -> str | None:
        """Return a token to put before text that does not begin a conversation, where that makes a difference."""
        alone = self._plain.encode("a", add_special_tokens=False).ids
        guard = f"<guard-{secrets.token_hex(8)}>"
        other = Tokenizer.from_str(self._plain.to_str())
        other.encode_special_tokens = True
        other.add_tokens([AddedToken(guard, special=False, normalized=False)])
        if other.encode(f"{guard}a", add_special_tokens=False).ids[1:] == alone:
            return None
        self._plain = other
        return guard


def _flagged(token: dict[str, Any]) -> str | None:
    """Return the pattern of a token that takes spaces with it or must stand alone."""
    if not any(token.get(flag) for flag in ("lstrip", "rstrip", "single_word")):
        return None
    core: str = re.escape(token["content"])
    if token.get("single_word"):
        core = rf"(?<!\w){core}(?!\w)"
    return (r"\s*" if token.get("lstrip") else "") + core + (r"\s*" if token.get("rstrip") else "")


def _any_of(words: Sequence[str]) -> str:
    """Return a pattern for the longest of many words; each letter is looked at once, however many there are."""
    if not words:
        return "(?!)"
    groups: dict[str, list[str]] = {}
    for word in words:
        if word:
            groups.setdefault(word[0], []).append(word[1:])
    if not groups:
        return ""
    parts = []
    for first, rests in groups.items():
        while len(rests) == 1 and len(rests[0]) > 1:
            first, rests = first + rests[0], [""]
        parts.append(re.escape(first) + _any_of(rests))
    return f"(?:{'|'.join(parts)})" + ("?" if "" in words else "")


__all__ = ["Codec", "Span", "TokenizerAdapter"]
