"""Tool calls as JSON objects that no tag closes: one after another, or in a list."""

from __future__ import annotations

from collections.abc import Sequence

from gyre_sdk.harness.proxy.answers.body import Body, Standing
from gyre_sdk.harness.proxy.answers.json_body import JsonBody, RawValue
from gyre_sdk.harness.proxy.answers.named_body import NamedBody, without_id

_BETWEEN = " \t\r\n,;"


class ObjectsBody(Body):
    """Reads one object, up to its last brace; `follow` reads the next one.

    Args:
        argument_keys: as for `JsonBody`.
        listed: whether the object is an item of a list.
        later: whether a call came before it.
    """

    def __init__(self, argument_keys: Sequence[str], *, listed: bool = False, later: bool = False) -> None:
        self._argument_keys = argument_keys
        self._listed, self._later = listed, later
        self._inner = JsonBody(argument_keys)
        self._raw: RawValue | None = None

    def feed(self, text: str) -> str:
        """Return what is new of the arguments' value."""
        if self._raw is None:
            text = text.lstrip(_BETWEEN if self._later else None)
            if not text:
                return ""
            if text[0] != "{":
                ends = self._listed and text[0] == "]"
                self.standing = Standing.NOTHING if ends else Standing.TEXT
                self.over, self.surplus = ends, text[ends:]
                return ""
            self._raw = RawValue("{")
        value, taken = self._raw.feed(text)
        out = self._inner.feed(value)
        self.over, self.surplus = self._raw.done, text[taken:]
        self._know()
        if self.standing is Standing.TEXT:
            self.over, self.surplus = False, self._inner.surplus + self.surplus
        return out

    def finish(self, closed: bool) -> str:
        """Return the rest of the arguments; text that spoils the object is shown with them."""
        if self._raw is None:
            if self.standing is Standing.OPEN:
                self.standing = Standing.NOTHING if self._later else Standing.TEXT
            return ""
        rest = self._inner.finish(closed and self.over)
        self._know()
        return rest

    def follow(self) -> Body | None:
        """See `Body.follow`."""
        if self._raw is None:
            return None
        return ObjectsBody(self._argument_keys, listed=self._listed, later=True)

    def _know(self) -> None:
        self.standing, self.name = self._inner.standing, self._inner.name


class ListedBody(Body):
    """Reads a list of objects, or a name with arguments: which one the first character tells."""

    def __init__(self, argument_keys: Sequence[str]) -> None:
        self._argument_keys = argument_keys
        self._inner: Body | None = None

    def feed(self, text: str) -> str:
        """Return what is new of the arguments."""
        if self._inner is None:
            text = text.lstrip()
            if not text:
                return ""
            if text[0] in "[{":
                self._inner = ObjectsBody(self._argument_keys, listed=text[0] == "[")
                text = text.removeprefix("[")
            else:
                self._inner = NamedBody("[ARGS]", without_id, alone=True)
        out = self._inner.feed(text)
        self._know()
        return out

    def finish(self, closed: bool) -> str:
        """Return the rest of the arguments."""
        rest = self._inner.finish(closed) if self._inner is not None else ""
        self._know()
        if self._inner is None:
            self.standing = Standing.TEXT
        return rest

    def follow(self) -> Body | None:
        """See `Body.follow`."""
        return self._inner.follow() if self._inner is not None else None

    def _know(self) -> None:
        inner = self._inner
        if inner is not None:
            self.standing, self.name, self.over, self.surplus = inner.standing, inner.name, inner.over, inner.surplus


__all__ = ["ListedBody", "ObjectsBody"]
