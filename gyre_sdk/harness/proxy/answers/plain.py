"""Answers of protocols without messages: all of it is content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gyre_sdk.harness.proxy.answers.deltas import Deltas
from gyre_sdk.harness.proxy.answers.detokenize import pieces_of
from gyre_sdk.harness.proxy.answers.parser import AnswerParser, TextFlow
from gyre_sdk.harness.proxy.dialects.canonical import Answer, Delta, Part


class PlainParser(AnswerParser):
    """Reads an answer as text, tags and white space included."""

    def __init__(self, tokenizer: Any, stop_ids: frozenset[int], stops: Sequence[str] = ()) -> None:
        """Start an answer.

        Args:
            tokenizer: anything with `decode(ids)`.
            stop_ids: the answer ends before the first of these tokens.
            stops: stop strings that the engine looks for.
        """
        self._flow = TextFlow(pieces_of(tokenizer), stop_ids, stops)
        self._deltas = Deltas()

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """See `AnswerParser.feed`."""
        self._deltas.text(Part.CONTENT, self._flow.feed(ids))
        return self._deltas.take()

    def finish(self, stop: str | None = None) -> list[Delta]:
        """See `AnswerParser.finish`."""
        self._deltas.text(Part.CONTENT, self._flow.finish(stop))
        return self._deltas.take()

    @property
    def answer(self) -> Answer:
        """See `AnswerParser.answer`."""
        return self._deltas.answer()

    @property
    def settled(self) -> int:
        """See `AnswerParser.settled`."""
        return self._flow.settled
