"""Tool call blocks that name the tool, then hold its arguments as JSON: `bash[ARGS]{"cmd": "ls"}` and the like."""

from __future__ import annotations

import re
from collections.abc import Callable

from gyre_sdk.harness.proxy.answers.body import Body, Standing
from gyre_sdk.harness.proxy.answers.json_body import RawValue

_LONGEST = 1024
"""Characters of a name with what surrounds it."""
_NAME = re.compile(r'[^\s<>{}"]+')
NUMBERED_SEPARATOR = "<|tool_call_argument_begin|>"
_FENCE, _TICKS = "```json", "```"


class NamedBody(Body):
    """Reads a name up to a separator, then arguments, which go out as they are written.

    Args:
        separator: ends the name.
        tidy: makes the name from the text before the separator.
        alone: whether the block ends with the JSON value, as no tag closes it.
    """

    def __init__(self, separator: str, tidy: Callable[[str], str] = str.strip, *, alone: bool = False) -> None:
        self._separator, self._tidy, self._alone = separator, tidy, alone
        self._text = ""
        self._raw: RawValue | None = None
        self._led = self._fenced = self._begun = False
        self._held: list[str] = []

    def feed(self, text: str) -> str:
        """Return what is new of the arguments."""
        self._text += text
        if self.standing is Standing.OPEN and self._read_name():
            self.standing = Standing.CALL
        if self.standing is Standing.TEXT:
            self.surplus = self._text
        if self.standing is not Standing.CALL or not (self._led or self._lead()):
            return ""
        text, self._text = self._text, ""
        return self._pass(text)

    def finish(self, closed: bool) -> str:
        """Return the end of the arguments, without the fence around them."""
        if self.standing is not Standing.CALL:
            self.standing = Standing.TEXT
            return ""
        rest = ("".join(self._held) if self._led else self._text).strip()
        return "" if self._fenced and rest in _TICKS else rest

    def _read_name(self) -> bool:
        """Take the name and its separator off the text; False when more text is needed, or there is no name."""
        head, found, rest = self._text.partition(self._separator)
        if found:
            return self._named(self._tidy(head), rest, len(head))
        if len(head) > _LONGEST + len(self._separator):
            self.standing = Standing.TEXT
        return False

    def _named(self, name: str, rest: str, size: int) -> bool:
        if size > _LONGEST or not _NAME.fullmatch(name):
            self.standing = Standing.TEXT
            return False
        self.name, self._text = name, rest
        return True

    def _lead(self) -> bool:
        """Take white space and a fence off the text; False when more text is needed."""
        self._text = self._text.lstrip()
        if _FENCE.startswith(self._text):
            return False
        if self._text.startswith(_TICKS):
            self._fenced = True
            self._text = self._text.removeprefix(_FENCE).removeprefix(_TICKS)
        self._led = True
        return True

    def _pass(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
            if self._alone and text[:1] in ("{", "["):
                self._raw = RawValue(text[0])
        if self._raw is not None:
            value, taken = self._raw.feed(text)
            self.over, self.surplus = self._raw.done, text[taken:]
            return value
        core = text.rstrip()
        if self._fenced:
            core = core.rstrip("`").rstrip()
        if not core:
            self._held.append(text)
            return ""
        out, self._held = "".join((*self._held, core)), [text[len(core) :]]
        return out


class TypedBody(NamedBody):
    """Reads `function<｜tool▁sep｜>NAME`, a line feed and arguments; or `NAME<｜tool▁sep｜>{...}`."""

    def __init__(self) -> None:
        super().__init__("<｜tool▁sep｜>")
        self._typed = False

    def finish(self, closed: bool) -> str:
        """See `NamedBody.finish`. A call without arguments may end with its name."""
        if self.standing is Standing.OPEN and self._typed and closed:
            self._text += "\n"
            if self._read_name():
                self.standing = Standing.CALL
        return super().finish(closed)

    def _read_name(self) -> bool:
        if not self._typed:
            head, _, rest = self._text.partition(self._separator)
            if head.strip() != "function":
                return super()._read_name()
            if not rest.strip():
                return False
            if rest.lstrip().startswith("{"):
                return super()._read_name()
            self._typed, self._text = True, rest.lstrip()
        name, found, rest = self._text.partition("\n")
        if found:
            return self._named(name.strip(), rest, len(name))
        if len(name) > _LONGEST:
            self.standing = Standing.TEXT
        return False


def numbered(text: str) -> str:
    """Return the tool's name from `functions.NAME:0`."""
    name = text.strip().partition(":")[0]
    return name.partition(".")[2] or name


def without_id(text: str) -> str:
    """Return the tool's name from `NAME[CALL_ID]id`."""
    return text.partition("[CALL_ID]")[0].strip()
