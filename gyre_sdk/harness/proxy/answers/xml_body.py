"""Tool call blocks written in tags: `<function=NAME><parameter=KEY>value</parameter></function>` and its relatives.

The arguments become the text of a JSON object. A parameter that the tool declares as a string is text, and goes out
as it comes; any other is JSON where it can be read as such, else text. Where the tag itself says which, that counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gyre_sdk.harness.proxy.answers.body import Body, Standing
from gyre_sdk.harness.proxy.answers.formats import BodyKind
from gyre_sdk.harness.proxy.answers.tags import held_from

_LONGEST = 1024
"""Characters of a function's or a parameter's tag."""


@dataclass(frozen=True, slots=True)
class Markup:
    """The tags of one way to write a function."""

    parameter: re.Pattern[str]
    """A parameter's opening tag: its key, and whether its value is text where the tag says so."""
    begun: re.Pattern[str]
    """The end of a text that may become such a tag."""
    first: str
    """What such a tag begins with."""
    last: str
    """Closes a parameter."""
    name: tuple[str, str]
    """What stands before and behind the function's name; behind it stands a parameter where the second is `first`."""
    end: str = ""
    """Closes the function inside its block, where anything does."""
    trimmed: bool = True
    """Whether white space around a value is no part of it."""


def _quoted(tag: str, more: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    opening = re.escape(f'{tag} name="')
    whole = re.compile(rf'{opening}([^"]{{1,{_LONGEST}}})"{more}>')
    return whole, re.compile(rf'{opening}[^"]{{0,{_LONGEST}}}(?:"[^>]{{0,32}})?\Z')


_PARAMETER = re.compile(rf"<parameter=([^>]{{1,{_LONGEST}}})>"), re.compile(rf"<parameter=[^>]{{0,{_LONGEST}}}\Z")
_KEY = (
    re.compile(rf"<arg_key>([^<]{{1,{_LONGEST}}})</arg_key>\s{{0,16}}<arg_value>"),
    re.compile(rf"<arg_key>[^<]{{0,{_LONGEST}}}(?:<[^<>]{{0,8}}(?:>\s{{0,16}}(?:<[^<>]{{0,9}})?)?)?\Z"),
)
_MARKUPS = {
    BodyKind.XML: Markup(*_PARAMETER, "<parameter=", "</parameter>", ("<function=", ">"), "</function>"),
    BodyKind.KEYS: Markup(*_KEY, "<arg_key>", "</arg_value>", ("", "<arg_key>")),
    BodyKind.INVOKE: Markup(*_quoted("<parameter", ""), '<parameter name="', "</parameter>", ("", '">')),
    BodyKind.DSML: Markup(
        *_quoted("<｜DSML｜parameter", ' string="(true|false)"'),
        '<｜DSML｜parameter name="',
        "</｜DSML｜parameter>",
        ("", '">'),
        trimmed=False,
    ),
}
KINDS = frozenset(_MARKUPS)
"""What `XmlBody` reads."""
_NAME = re.compile(r'[^\s<>{}"]+')


class XmlBody(Body):
    """Reads one function with its parameters."""

    def __init__(self, texts: Mapping[str, frozenset[str]], kind: BodyKind = BodyKind.XML) -> None:
        self._texts, self._markup = texts, _MARKUPS[kind]
        self._text = ""
        self._read = self._read_name
        self._begun = self._ended = False
        self._is_text = self._started = False
        self._value: list[str] = []
        self._space: list[str] = []

    def feed(self, text: str) -> str:
        """Return what is new of the arguments' object."""
        out: list[str] = []
        self._text += text
        while self._text and self._read(out):
            pass
        if self.standing is Standing.TEXT:
            self.surplus = self._text
        return "".join(out)

    def finish(self, closed: bool) -> str:
        """Return the end of the object; an object whose parameter was cut off stays open."""
        nameless = self._read == self._read_name and self.standing is Standing.OPEN
        if nameless and closed and self._markup.name[1] == self._markup.first:
            self._named(self._text, "")  # a function without parameters
        if self.standing is not Standing.CALL:
            whole = self.standing is Standing.OPEN and self.name and (closed or self._ended)
            self.standing = Standing.CALL if whole else Standing.TEXT
            return "{}" if whole else ""
        if self._read == self._read_value:
            out: list[str] = []
            self._put(self._text, out)
            return "".join(out) if self._is_text else "".join(self._value)
        return "}" if closed or self._ended else ""

    def _read_name(self, out: list[str]) -> bool:
        before, behind = self._markup.name
        head = self._text.lstrip()
        end = head.find(behind, 0, _LONGEST)
        if head.startswith(before) and end > len(before):
            kept = end if behind == self._markup.first else end + len(behind)
            return self._named(head[len(before) : end], head[kept:])
        if not before.startswith(head[: len(before)]) or end >= 0 or len(head) >= _LONGEST:
            self._reject()
        return False

    def _named(self, name: str, rest: str) -> bool:
        bare = not self._markup.name[0]
        if bare and not _NAME.fullmatch(name.strip()):
            self._reject()
            return False
        self.name, self._text = name.strip() if bare else name, rest
        self._read = self._read_parameters
        return True

    def _reject(self) -> None:
        # Only what cannot be the start of a function was looked at; the rest may hold another block.
        head, before = self._text.lstrip(), self._markup.name[0]
        same = 0
        while same < min(len(head), len(before)) and head[same] == before[same]:
            same += 1
        self._text = head[same:]
        self.standing = Standing.TEXT

    def _read_parameters(self, out: list[str]) -> bool:
        markup = self._markup
        found, end = markup.parameter.search(self._text), self._text.find(markup.end) if markup.end else -1
        if end >= 0 and (found is None or end < found.start()):
            self._ended = True
            self._text = self._text[end + len(markup.end) :]
            return True
        if found is None:
            begun = markup.begun.search(self._text)
            start = held_from(self._text, (markup.first, markup.end) if markup.end else (markup.first,))
            self._text = self._text[min(start, begun.start() if begun else start) :]
            return False
        self._text = self._text[found.end() :]
        self.standing = Standing.CALL
        key, said = found[1].strip() if markup.first == "<arg_key>" else found[1], found.groups()[1:]
        out.append((", " if self._begun else "{") + json.dumps(key, ensure_ascii=False) + ": ")
        self._is_text = said == ("true",) if said else key in self._texts.get(self.name, frozenset())
        self._begun, self._started, self._value, self._space = True, not markup.trimmed, [], []
        if self._is_text:
            out.append('"')
        self._read = self._read_value
        return True

    def _read_value(self, out: list[str]) -> bool:
        last = self._markup.last
        end = self._text.find(last)
        cut = end if end >= 0 else held_from(self._text, (last,))
        self._put(self._text[:cut], out)
        self._text = self._text[cut:]
        if end < 0:
            return False
        self._text = self._text[len(last) :]
        out.append('"' if self._is_text else _value("".join(self._value)))
        self._read = self._read_parameters
        return True

    def _put(self, text: str, out: list[str]) -> None:
        """Add to the value, white space at its ends left out where it is no part of it."""
        if not self._started:
            text = text.lstrip()
        body = text.rstrip() if self._markup.trimmed else text
        if body:
            self._started = True
            shown = "".join((*self._space, body))
            if self._is_text:
                out.append(json.dumps(shown, ensure_ascii=False)[1:-1])
            else:
                self._value.append(shown)
            self._space = []
        if self._started:
            self._space.append(text[len(body) :])


def _value(text: str) -> str:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def text_parameters(tools: Sequence[Mapping[str, Any]]) -> dict[str, frozenset[str]]:
    """Return by tool the names of parameters that are declared as strings."""
    found: dict[str, frozenset[str]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(properties, Mapping) and isinstance(function.get("name"), str):
            found[function["name"]] = frozenset(
                key
                for key, schema in properties.items()
                if isinstance(schema, Mapping) and schema.get("type") in ("string", ["string"])
            )
    return found
