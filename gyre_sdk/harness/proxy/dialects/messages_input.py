"""Tool arguments as the object that Anthropic's protocol demands, also while they are being sampled.

OpenAI's protocol carries arguments as text, whatever the model wrote. Anthropic's carries a JSON object, and its
SDKs fail on a stream of anything else. So arguments pass as long as they are the beginning of an object, letter for
letter; what is not an object in the end is sent as text under the key `INVALID_JSON`, and turned back into that text
when the agent sends it back.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

INVALID = "INVALID_JSON"
"""Key of the arguments' text where they are no JSON object: the name that Anthropic's own guide gives it."""

_DEPTH = 64
_LONGEST = 100
"""Characters of a number."""
_SPACE = re.compile(r"[ \t\n\r]+")
_CHARS = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]+')
_HEX = "[0-9a-fA-F]"
_ESCAPE = re.compile(
    rf'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F]){_HEX}{{4}}|u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}})'
)
_ESCAPE_BEGUN = re.compile(rf"\\(?:u{_HEX}{{0,4}}(?:\\(?:u{_HEX}{{0,4}})?)?)?\Z")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]{0,39})(?:\.[0-9]{1,30})?(?:[eE][+-]?[0-9]{1,2})?")
_SCALAR_CHARS = re.compile(r"[-+.a-zA-Z0-9]+")
_CLOSING = {"{": "}", "[": "]"}


class ObjectText:
    """Passes the text of one JSON object on as it comes, as far as it is one.

    The brace that ends the object is kept until `close`, so that there is room for `INVALID_JSON` if more follows.
    """

    def __init__(self) -> None:
        self._whole: list[str] = []
        self._rest = ""
        self._open: list[str] = []
        self._members = False
        self._bad = False
        self._state = "start"
        """What may come next: `start` of the object; `key` or its end, `name` after a comma, `colon`, `value`, `item`
        of an array or its end, `next` after a value; the rest of a `string` or of a key, `naming`; `done`."""

    @property
    def sound(self) -> bool:
        """Whether the text so far is one whole object."""
        return self._state == "done" and not self._bad and not self._rest

    def feed(self, text: str) -> str:
        """Take text; return what can be passed on."""
        self._whole.append(text)
        if self._bad:
            return ""
        self._rest += text
        out: list[str] = []
        at = 0
        while at < len(self._rest):
            size = self._string(at) if self._state in ("string", "naming") else self._token(at)
            if not size:
                break
            if self._state not in ("start", "done"):
                out.append(self._rest[at : at + size])
            at += size
        self._rest = self._rest[at:]
        return "".join(out)

    def close(self) -> str:
        """Return what makes the text passed so far a whole object."""
        whole = "".join(self._whole)
        if not whole.strip():
            return "{}"
        return "}" if self.sound else f"{self._to_member()}{_member(whole)}}}"

    def _to_member(self) -> str:
        """Return what leads from the text passed so far to a further member of the outermost object."""
        if self._state == "start":
            return "{"
        if self._state == "name" and len(self._open) == 1:
            return ""
        ends = {"string": '"', "naming": '":null', "colon": ":null", "value": "null", "name": _member("")}
        inner = "".join(_CLOSING[kind] for kind in reversed(self._open[1:]))
        return ends.get(self._state, "") + inner + ("," if self._members else "")

    def _string(self, at: int) -> int:
        text = self._rest
        if text[at] == '"':
            self._state = "colon" if self._state == "naming" else "next"
            return 1
        found = _CHARS.match(text, at) or _ESCAPE.match(text, at)
        if found:
            return found.end() - at
        self._bad = not _ESCAPE_BEGUN.match(text, at)
        return 0

    def _token(self, at: int) -> int:
        text, state = self._rest, self._state
        found = _SPACE.match(text, at)
        if found:
            return found.end() - at
        mark = text[at]
        after = self._after(mark)
        if after:
            self._state = after
            return 1
        if state in ("value", "item"):
            found = _SCALAR_CHARS.match(text, at)
            if found and found.end() == len(text) and len(found[0]) < _LONGEST:
                return 0
            if found and _SCALAR.fullmatch(found[0]):
                self._state = "next"
                return len(found[0])
        self._bad = True
        return 0

    def _after(self, mark: str) -> str:
        """Return the state after a mark of punctuation, or nothing where it may not stand."""
        state = self._state
        if mark == '"' and state in ("key", "name"):
            self._members = True
            return "naming"
        if mark == '"' and state in ("value", "item"):
            return "string"
        if mark == ":" and state == "colon":
            return "value"
        if mark == "," and state == "next":
            return "name" if self._open[-1] == "{" else "value"
        if mark == "{" and state in ("start", "value", "item") and len(self._open) < _DEPTH:
            self._open.append(mark)
            return "key"
        if mark == "[" and state in ("value", "item") and len(self._open) < _DEPTH:
            self._open.append(mark)
            return "item"
        ends = (mark == "}" and state in ("key", "next")) or (mark == "]" and state in ("item", "next"))
        if ends and _CLOSING[self._open[-1]] == mark:
            self._open.pop()
            return "next" if self._open else "done"
        return ""


def input_of(arguments: str) -> msgspec.Raw:
    """Return arguments as a JSON object: as they are, or as text under `INVALID_JSON`."""
    check = ObjectText()
    passed = check.feed(arguments) + check.close()
    if not check.sound and arguments.strip():
        return msgspec.Raw(f"{{{_member(arguments)}}}".encode())
    return msgspec.Raw(passed.encode())


def arguments_of(value: dict[str, Any]) -> str:
    """Return the arguments that an agent's `input` stands for."""
    given = value.get(INVALID)
    if isinstance(given, str) and given.strip():
        check = ObjectText()
        check.feed(given)
        if not check.sound:
            return given
    return msgspec.json.encode(value).decode()


def _member(text: str) -> str:
    shown = text.encode("utf-8", "replace").decode()
    return f'"{INVALID}":{msgspec.json.encode(shown).decode()}'
