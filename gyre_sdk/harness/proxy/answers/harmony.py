"""Answers in channels, as gpt-oss writes them: `<|channel|>analysis<|message|>...<|end|><|start|>assistant...`.

A message's header says what it is: thinking, text for the user, or a tool's arguments (`to=functions.NAME`).
"""

from __future__ import annotations

import re

from gyre_sdk.harness.proxy.answers.deltas import Deltas, Trimmed
from gyre_sdk.harness.proxy.answers.tags import held_from
from gyre_sdk.harness.proxy.dialects.canonical import Part, ToolCall

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", _START)
_HEADS = (_START, _CHANNEL, _MESSAGE, "to=")
"""What a header begins with, white space aside; the first one comes without `_START`, which the prompt holds."""
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


class HarmonyScanner:
    """Reads the text of one answer.

    Args:
        out: where the deltas go.
        calls: whether messages to tools are calls; else they are text.
        name: of the answer, for the ids of tool calls.
        parallel: whether tool calls after the first are kept.
        begun: whether the prompt holds the start of a message to the user.
    """

    def __init__(self, out: Deltas, *, calls: bool, name: str, parallel: bool, begun: bool = False) -> None:
        self._out, self._named, self._name, self._parallel = out, calls, name, parallel
        self._reasoning, self._content = Trimmed(Part.REASONING, out), Trimmed(Part.CONTENT, out)
        self._text = ""
        self._header = self._first = not begun
        self._part = Part.CONTENT
        self._calls = 0
        if begun:
            self._content.resume()

    def feed(self, text: str) -> None:
        """Read on."""
        self._text += text
        while self._text and (self._read_header() if self._header else self._read_body()):
            pass

    def finish(self) -> None:
        """Settle what is open: a header without a message is text."""
        self._put(self._text) if not self._header else self._content.put(self._text)
        self._text = ""

    def _read_header(self) -> bool:
        head = self._text.lstrip()
        if self._first and head and not any(head.startswith(tag) or tag.startswith(head) for tag in _HEADS):
            self._header = self._first = False  # no channels at all
            return True
        place = self._text.find(_MESSAGE)
        if place < 0:
            return False
        header, self._text = self._text[:place], self._text[place + len(_MESSAGE) :]
        self._header = self._first = False
        recipient = _RECIPIENT.search(header)
        if recipient and self._named:
            self._part = Part.CALL
            if self._parallel or not self._calls:
                self._part = Part.ARGUMENTS
                self._out.call(ToolCall(f"call_{self._name}{self._calls}", recipient[1]))
            self._calls += 1
        else:
            thinks = header.partition(_CHANNEL)[2].split()[:1] == ["analysis"]
            self._part = Part.REASONING if thinks else Part.CONTENT
        return True

    def _read_body(self) -> bool:
        found = min(((place, tag) for tag in _ENDS if (place := self._text.find(tag)) >= 0), default=None)
        end = found[0] if found else held_from(self._text, _ENDS)
        said, self._text = self._text[:end], self._text[end:]
        self._put(said)
        if found is None:
            return False
        self._text = self._text.removeprefix(found[1]) if found[1] != _START else self._text
        self._header = True
        return True

    def _put(self, text: str) -> None:
        if self._part is Part.REASONING:
            self._reasoning.put(text)
        elif self._part is Part.CONTENT:
            self._content.put(text)
        elif self._part is Part.ARGUMENTS:
            self._out.text(Part.ARGUMENTS, text)


__all__ = ["HarmonyScanner"]
