"""Tool call blocks written in tags: `<function=NAME><parameter=KEY>value</parameter></function>`.

The arguments become the text of a JSON object. A parameter that the tool declares as a string is text, and goes out
as it comes; any other is JSON where it can be read as such, else text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gyre_sdk.harness.proxy.answers.body import Body, Standing
from gyre_sdk.harness.proxy.answers.tags import held_from

_FUNCTION, _PARAMETER, _PARAMETER_END, _FUNCTION_END = "<function=", "<parameter=", "</parameter>", "</function>"
_LONGEST = 1024
"""Characters of a function's or a parameter's tag."""
_NEXT = re.compile(rf"<parameter=([^>]{{1,{_LONGEST}}})>|</function>")


class XmlBody(Body):
    """Reads one function with its parameters."""

    def __init__(self, texts: Mapping[str, frozenset[str]]) -> None:
        self._texts = texts
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
        head = self._text.lstrip()
        end = head.find(">", 0, _LONGEST)
        if head.startswith(_FUNCTION) and end > len(_FUNCTION):
            self.name = head[len(_FUNCTION) : end]
            self._text = head[end + 1 :]
            self._read = self._read_parameters
            return True
        if not _FUNCTION.startswith(head[: len(_FUNCTION)]) or end >= 0 or len(head) >= _LONGEST:
            self._reject()
        return False

    def _reject(self) -> None:
        # Only what cannot be the start of a function was looked at; the rest may hold another block.
        head = self._text.lstrip()
        same = 0
        while same < min(len(head), len(_FUNCTION)) and head[same] == _FUNCTION[same]:
            same += 1
        self._text = head[same:]
        self.standing = Standing.TEXT

    def _read_parameters(self, out: list[str]) -> bool:
        found = _NEXT.search(self._text)
        if found is None:
            start = self._text.rfind("<")
            tail = self._text[start:] if start >= 0 else ""
            whole = tail.startswith(_PARAMETER) and len(tail) <= len(_PARAMETER) + _LONGEST
            kept = len(tail) if whole else len(self._text) - held_from(self._text, (_PARAMETER, _FUNCTION_END))
            self._text = self._text[len(self._text) - kept :]
            return False
        self._text = self._text[found.end() :]
        if found[1] is None:
            self._ended = True
            return True
        self.standing = Standing.CALL
        out.append((", " if self._begun else "{") + json.dumps(found[1], ensure_ascii=False) + ": ")
        self._is_text = found[1] in self._texts.get(self.name, frozenset())
        self._begun, self._started, self._value, self._space = True, False, [], []
        if self._is_text:
            out.append('"')
        self._read = self._read_value
        return True

    def _read_value(self, out: list[str]) -> bool:
        end = self._text.find(_PARAMETER_END)
        cut = end if end >= 0 else held_from(self._text, (_PARAMETER_END,))
        self._put(self._text[:cut], out)
        self._text = self._text[cut:]
        if end < 0:
            return False
        self._text = self._text[len(_PARAMETER_END) :]
        out.append('"' if self._is_text else _value("".join(self._value)))
        self._read = self._read_parameters
        return True

    def _put(self, text: str, out: list[str]) -> None:
        """Add to the value, white space at its ends left out."""
        if not self._started:
            text = text.lstrip()
        body = text.rstrip()
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
