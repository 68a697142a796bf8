"""Deltas on their way out, and the answer that they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter

from gyre_sdk.harness.proxy.dialects.canonical import Answer, Delta, Part, ToolCall

_part = attrgetter("part")


class Deltas:
    """Collects deltas; texts of one part that follow each other become one delta."""

    def __init__(self) -> None:
        self._out: list[tuple[Part, list[str], ToolCall | None]] = []
        self._texts: dict[Part, list[str]] = {Part.REASONING: [], Part.CONTENT: []}
        self._calls: list[tuple[ToolCall, list[str]]] = []

    def text(self, part: Part, text: str) -> None:
        """Add text to the reasoning, the content or the last call's arguments."""
        if not text:
            return
        (self._calls[-1][1] if part is Part.ARGUMENTS else self._texts[part]).append(text)
        if not self._out or self._out[-1][0] is not part:
            self._out.append((part, [], None))
        self._out[-1][1].append(text)

    def call(self, call: ToolCall) -> None:
        """Begin a tool call."""
        self._calls.append((call, []))
        self._out.append((Part.CALL, [], call))

    def take(self) -> list[Delta]:
        """Return what was collected since the last time."""
        taken = [Delta(part, "".join(texts), call) for part, texts, call in self._out]
        self._out.clear()
        return taken

    def answer(self) -> Answer:
        """Return what all deltas add up to."""
        calls = tuple(ToolCall(call.id, call.name, "".join(texts)) for call, texts in self._calls)
        return Answer("".join(self._texts[Part.CONTENT]), "".join(self._texts[Part.REASONING]), calls)


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Return what deltas say with few of them: texts of one part that follow each other become one."""
    few: list[Delta] = []
    for part, group in groupby(deltas, _part):
        if part is Part.CALL:
            few += group
        else:
            few.append(Delta(part, "".join([delta.text for delta in group])))
    return few


class Trimmed:
    """One part's text without white space at its ends; stretches with tool calls between are joined by a line feed."""

    def __init__(self, part: Part, out: Deltas) -> None:
        self._part, self._out = part, out
        self._begun = self._continued = False
        self._space: list[str] = []

    def resume(self) -> None:
        """Go on with text that was said before: white space at its start counts."""
        self._begun = True

    def put(self, text: str) -> None:
        """Add text; white space waits until something follows it."""
        if not self._begun:
            text = text.lstrip()
        body = text.rstrip()
        if body:
            if not self._begun and self._continued:
                self._out.text(self._part, "\n")
            self._begun = True
            self._out.text(self._part, "".join((*self._space, body)))
            self._space = []
        if self._begun and len(body) < len(text):
            self._space.append(text[len(body) :])

    def part_here(self) -> None:
        """End a stretch: something that is not of this part comes between."""
        self._continued |= self._begun
        self._begun, self._space = False, []
