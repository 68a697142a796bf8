"""Tool call blocks written as JSON: `{"name": "bash", "arguments": {...}}`, in any order of keys."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from gyre_sdk.harness.proxy.answers.body import Body, Standing

_SPACE = " \t\r\n"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_LONGEST = 1024
"""Characters of a key or a name with its quotes."""
_MARK = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\s]")
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_ESCAPE = re.compile(r"u[0-9a-fA-F]{4}|[^u]", re.DOTALL)
_LONE = re.compile("[\ud800-\udfff]")


class RawValue:
    """Finds the end of one JSON value and passes its text on as written."""

    def __init__(self, first: str) -> None:
        self._scalar = first not in '{["'
        self._depth = 0
        self._string = self._escaped = False
        self.done = False

    def feed(self, text: str) -> tuple[str, int]:
        """Return the value's text and how much of what was fed it took."""
        if self._scalar:
            found = _SCALAR_END.search(text)
            end = found.start() if found else len(text)
            self.done = found is not None
        else:
            end = self._nested(text)
        return text[:end], end

    def _nested(self, text: str) -> int:
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_STRING_END if self._string else _MARK).search(text, at)
            if found is None:
                break
            at, mark = found.end(), found[0]
            if mark == "\\":
                self._escaped = True
            elif mark == '"':
                self._string = not self._string
            else:
                self._depth += 1 if mark in "{[" else -1
            if not self._string and not self._escaped and self._depth <= 0:
                self.done = True
                return at
        return len(text)

    def finish(self) -> str:
        """Return text that was held; none."""
        return ""


class _Decoded:
    """Decodes one JSON string, piece by piece. Escapes that JSON does not know stay as written."""

    def __init__(self) -> None:
        self._held = ""
        self._high = ""
        self._begun = False
        self.done = False

    def feed(self, text: str) -> tuple[str, int]:
        """Return the decoded text and how much of what was fed was taken."""
        held = len(self._held)
        text = self._held + text
        self._held = ""
        at = 0 if self._begun else 1
        self._begun = True
        out: list[str] = []
        while at < len(text):
            found = _STRING_END.search(text, at)
            end = found.start() if found else len(text)
            self._put(text[at:end], out)
            if found is None:
                at = end
            elif found[0] == '"':
                self.done = True
                return "".join(out) + self.finish(), end + 1 - held
            else:
                escape = _ESCAPE.match(text, end + 1)
                if escape is None and len(text) < end + 6 and re.fullmatch("(u[0-9a-fA-F]*)?", text[end + 1 :]):
                    self._held = text[end:]
                    break
                at = end + 1 if escape is None else escape.end()
                self._put("\\" if escape is None else _unescaped(escape[0]), out)
        return "".join(out), len(text) - held

    def finish(self) -> str:
        """Return what was held for a second half that did not come."""
        rest = ("\ufffd" if self._high else "") + self._held
        self._high = self._held = ""
        return rest

    def _put(self, text: str, out: list[str]) -> None:
        if not text:
            return
        if self._high:
            pair = self._high + text[0]
            self._high = ""
            if "\udc00" <= text[0] <= "\udfff":
                out.append(pair.encode("utf-16", "surrogatepass").decode("utf-16"))
                text = text[1:]
            else:
                out.append("\ufffd")
        if "\ud800" <= text[-1:] <= "\udbff":
            self._high, text = text[-1], text[:-1]
        out.append(_LONE.sub("\ufffd", text))


def _unescaped(escape: str) -> str:
    if escape[0] == "u":
        return chr(int(escape[1:], 16))
    return _ESCAPES.get(escape, "\\" + escape)


class JsonBody(Body):
    """Reads a JSON object, strictly up to the arguments' value; that value goes out as it is written."""

    def __init__(self, argument_keys: Sequence[str] = ("arguments",)) -> None:
        self._argument_keys = argument_keys
        self._expect = "open"
        self._text = ""
        self._key = ""
        self._value: RawValue | _Decoded | None = None
        self._named = self._argued = self._first = False
        self._early: list[str] = []
        self._tail: list[str] = []

    def feed(self, text: str) -> str:
        """Return what is new of the arguments' value."""
        out: list[str] = []
        self._text += text
        while self.standing is not Standing.TEXT and self._text and self._step(out):
            pass
        if self.standing is Standing.TEXT:
            self.surplus = self._text
        return "".join(out)

    def finish(self, closed: bool) -> str:
        """Return the rest of the arguments; text that spoils the object is shown with them."""
        if self.standing is Standing.OPEN:
            whole = closed and self._expect == "end" and self._named
            self.standing = Standing.CALL if whole else Standing.TEXT
            return ""
        if self.standing is Standing.TEXT:
            return ""
        if self._expect == "value" and self._value is not None:
            return self._value.finish()
        tail = "".join(self._tail)
        return tail if closed and not _continues(tail) else ""

    def _step(self, out: list[str]) -> bool:
        """Take one thing off the text; False when more text is needed."""
        if self.standing is Standing.CALL and self._argued and self._expect != "value":
            self._tail.append(self._text)
            self._text = ""
            return False
        if self._value is not None:
            return self._take_value(out)
        self._text = self._text.lstrip(_SPACE)
        if not self._text:
            return False
        head = self._text[0]
        match self._expect:
            case "open" if head == "{":
                self._advance("key", 1)
                self._first = True
            case "key" if head == '"':
                return self._take_key()
            case "colon" if head == ":":
                self._advance("value", 1)
            case "value":
                return self._begin_value(head, out)
            case "next" if head == ",":
                self._advance("key", 1)
            case "next" | "key" if head == "}" and (self._expect == "next" or self._first) and self._named:
                self._advance("end", 1)
            case _:
                self.standing = Standing.TEXT
        return True

    def _advance(self, expect: str, count: int) -> None:
        self._expect, self._text, self._first = expect, self._text[count:], False

    def _take_string(self) -> str | None:
        """Take a whole string off the text; None when it is not whole yet, or none."""
        found = _STRING.match(self._text, 0, _LONGEST)
        if found is None:
            if len(self._text) >= _LONGEST:
                self.standing = Standing.TEXT
            return None
        try:
            value = json.loads(found[0], strict=False)
        except ValueError:
            self.standing = Standing.TEXT
            return None
        self._text = self._text[found.end() :]
        return _LONE.sub("\ufffd", value)

    def _take_key(self) -> bool:
        key = self._take_string()
        if key is None:
            return self.standing is Standing.TEXT
        self._key = key
        self._advance("colon", 0)
        return True

    def _begin_value(self, head: str, out: list[str]) -> bool:
        if self._key == "name" and not self._named:
            return self._take_name(head, out)
        argues = self._key in self._argument_keys and not self._argued
        self._value = _Decoded() if argues and head == '"' else RawValue(head)
        if argues:
            self._argued = True
            if self._named:
                self.standing = Standing.CALL
        else:
            self._key = ""
        return True

    def _take_name(self, head: str, out: list[str]) -> bool:
        name = self._take_string() if head == '"' else ""
        if name is None:
            return self.standing is Standing.TEXT
        if not name:
            self.standing = Standing.TEXT
            return True
        self.name, self._named = name, True
        self._advance("next", 0)
        if self._argued:
            self.standing = Standing.CALL
            out.extend(self._early)
        return True

    def _take_value(self, out: list[str]) -> bool:
        assert self._value is not None
        text, taken = self._value.feed(self._text)
        self._text = self._text[taken:]
        if self._key in self._argument_keys and text:
            (out if self.standing is Standing.CALL else self._early).append(text)
        if self._value.done:
            self._value = None
            self._expect = "next"
        return bool(self._text)


def _continues(tail: str) -> bool:
    """Tell whether a text may follow the arguments: the rest of the object, or closing braces of which some lack."""
    if not tail.strip(_SPACE + "}"):
        return True
    try:
        json.loads('{"":0' + tail)
    except (ValueError, RecursionError):
        return False
    return True
