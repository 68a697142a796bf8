"""Deltas for any renderer: its whole-answer parser, run again on ever longer answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from gyre_sdk.harness.proxy.answers.deltas import Deltas
from gyre_sdk.harness.proxy.answers.detokenize import pieces_of
from gyre_sdk.harness.proxy.answers.parser import AnswerParser, TextFlow
from gyre_sdk.harness.proxy.answers.tags import held_from
from gyre_sdk.harness.proxy.dialects.canonical import Answer, Delta, Part, ToolCall

_GROWTH = 16
_OPEN_TAG = re.compile(r"[<\[][^>\]\s]{0,63}\Z")


class Reparser(AnswerParser):
    """Parses again when the answer has grown by 1/16, so the work stays linear. Tool calls come at the end.

    Text that the parser may still move or trim is held: white space and U+FFFD at the end, a tag that is not closed,
    the start of a stop string. Where a longer answer parses differently all the same, what was given stands.
    """

    def __init__(
        self, parse: Callable[[Sequence[int], bool], Answer], tokenizer: Any, stops: Sequence[str] = ()
    ) -> None:
        """Start an answer.

        Args:
            parse: returns what ids say; its second argument is False for an answer that is still being sampled.
            tokenizer: anything with `decode(ids)`.
            stops: stop strings that the engine looks for.
        """
        self._parse = parse
        self._stops = tuple(stop for stop in stops if stop)
        self._flow = TextFlow(pieces_of(tokenizer), frozenset(), stops)
        self._deltas = Deltas()
        self._ids: list[int] = []
        self._parsed = 0

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        self._ids += ids
        self._flow.feed(ids)
        if len(self._ids) > self._parsed + self._parsed // _GROWTH:
            self._parsed = len(self._ids)
            self._grow(self._parse(self._ids, False))
        return self._deltas.take()

    def finish(self, stop: str | None = None) -> list[Delta]:
        self._flow.finish(stop)
        whole = self._parse(self._ids, True)
        content, reasoning = whole.content, whole.reasoning
        if stop and stop in reasoning and stop not in content:
            reasoning = reasoning[: reasoning.index(stop)]
        elif stop:
            content = content.partition(stop)[0]
        self._add(Part.REASONING, reasoning)
        self._add(Part.CONTENT, content)
        for call in whole.tool_calls:
            self._deltas.call(ToolCall(call.id, call.name))
            self._deltas.text(Part.ARGUMENTS, call.arguments)
        return self._deltas.take()

    @property
    def answer(self) -> Answer:
        return self._deltas.answer()

    @property
    def settled(self) -> int:
        return self._flow.settled

    def _grow(self, part: Answer) -> None:
        self._add(Part.REASONING, self._sure(part.reasoning))
        if not part.content.startswith("{"):  # an answer that is one JSON object may be a tool call
            self._add(Part.CONTENT, self._sure(part.content))

    def _sure(self, text: str) -> str:
        """Return the beginning of a text that no further token changes."""
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        text = text[: min(places)] if places else text
        if self._stops:
            text = text[: held_from(text, self._stops)]
        tag = _OPEN_TAG.search(text)
        return (text[: tag.start()] if tag else text).rstrip("\ufffd \t\r\n\f\v")

    def _add(self, part: Part, text: str) -> None:
        answer = self._deltas.answer()
        given = answer.reasoning if part is Part.REASONING else answer.content
        if text.startswith(given):
            self._deltas.text(part, text[len(given) :])
