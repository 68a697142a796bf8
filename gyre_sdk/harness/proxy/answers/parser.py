"""One call's answer as it is sampled: ids in, deltas out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gyre_sdk.harness.proxy.answers.deltas import Deltas
from gyre_sdk.harness.proxy.answers.detokenize import Detokenizer, Pieces, pieces_of
from gyre_sdk.harness.proxy.answers.formats import BodyKind, Format, Thinking
from gyre_sdk.harness.proxy.answers.harmony import HarmonyScanner
from gyre_sdk.harness.proxy.answers.readers import reader_of
from gyre_sdk.harness.proxy.answers.scanner import Scanner
from gyre_sdk.harness.proxy.answers.stops import StopWatch
from gyre_sdk.harness.proxy.dialects.canonical import Answer, Delta, ToolChoice
from gyre_sdk.harness.proxy.dialects.history import Ids

_TAIL, _LONGEST_TAIL = 4, 8192
"""Tokens of the prompt in which the start of the model's turn is looked for, at first and at most."""


class AnswerParser(ABC):
    """Turns sampled ids, as they come, into deltas; one per call."""

    @abstractmethod
    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """Return what the next ids add and no later id can take back."""

    @abstractmethod
    def finish(self, stop: str | None = None) -> list[Delta]:
        """Return the rest.

        Args:
            stop: the stop string that ended sampling: the text ends before it. None shows everything.
        """

    @property
    @abstractmethod
    def answer(self) -> Answer:
        """What all deltas so far add up to: after `finish`, the answer."""

    @property
    @abstractmethod
    def settled(self) -> int:
        """Tokens fed that end before anything that may be the start of a stop string, or half a character."""


class TextFlow:
    """Ids to text in which no stop string can begin any more."""

    def __init__(self, pieces: Pieces, stop_ids: frozenset[int], stops: Sequence[str]) -> None:
        self._pieces, self._stop_ids = pieces, stop_ids
        self._detokenizer = Detokenizer(pieces)
        self._watch = StopWatch(stops)
        self._fed = 0
        self._ended = False

    @property
    def settled(self) -> int:
        """As `AnswerParser.settled`."""
        return self._watch.settled

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that is settled. Ids from the first stop token on are no text."""
        out: list[str] = []
        if not self._watch.watching and not self._ended:
            plain = self._detokenizer.plain(ids, self._stop_ids)
            out.append(plain[0])
            self._fed += plain[1]
            self._watch.feed("", self._fed)
            ids = ids[plain[1] :]
        for token in ids:
            if self._ended or token in self._stop_ids:
                out.append(self._flush())
                self._ended = True
                self._fed += 1
                out.append(self._watch.feed("", self._fed, seen=False))
                continue
            special = self._pieces.look_up(token)[1]
            if special:
                out.append(self._flush())
            self._fed += 1
            text = self._detokenizer.feed(token)
            out.append(self._watch.feed(text, self._fed - self._detokenizer.waiting, seen=not special))
        return "".join(out)

    def finish(self, stop: str | None) -> str:
        """Return the rest, up to the stop string that ended sampling."""
        return self._flush() + self._watch.finish(stop)

    def _flush(self) -> str:
        if not self._detokenizer.waiting:
            return ""
        return self._watch.feed(self._detokenizer.finish(), self._fed)


class _StreamParser(AnswerParser):
    """Reads an answer of a known format in time linear in its tokens."""

    def __init__(self, flow: TextFlow, scanner: Scanner | HarmonyScanner, deltas: Deltas) -> None:
        self._flow, self._scanner, self._deltas = flow, scanner, deltas

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        self._scanner.feed(self._flow.feed(ids))
        return self._deltas.take()

    def finish(self, stop: str | None = None) -> list[Delta]:
        self._scanner.feed(self._flow.finish(stop))
        self._scanner.finish()
        return self._deltas.take()

    @property
    def answer(self) -> Answer:
        return self._deltas.answer()

    @property
    def settled(self) -> int:
        return self._flow.settled


def make_parser(
    tokenizer: Any,
    *,
    format: Format,
    prompt_tail: Sequence[int] | Ids,
    tools: Sequence[Mapping[str, Any]],
    name: str,
    stops: Sequence[str],
    choice: ToolChoice,
    parallel: bool,
    begun: bool = False,
) -> AnswerParser:
    """Return a parser for one answer.

    Args:
        tokenizer: anything with `decode(ids)`; its token texts are remembered between calls.
        format: how the model writes.
        prompt_tail: ids of the prompt or of its end; tells whether thinking was opened there.
        tools: as in the request; the types of parameters are read from them.
        name: makes the ids of tool calls, `call_{name}{place}`.
        stops: stop strings that the engine looks for.
        choice: with `NONE`, tool calls stay text.
        parallel: False keeps the first tool call only.
        begun: whether the prompt holds the start of the answer's text.
    """
    pieces = pieces_of(tokenizer)
    deltas = Deltas()
    scanner: Scanner | HarmonyScanner
    if format.body is BodyKind.CHANNELS:
        scanner = HarmonyScanner(deltas, calls=choice is not ToolChoice.NONE, name=name, parallel=parallel, begun=begun)
    else:
        scanner = Scanner(
            deltas,
            format.think,
            None if choice is ToolChoice.NONE else format.call,
            reader_of(format, tools),
            wrap=format.wrap,
            bare=format.bare and bool(tools),
            thinking=not begun and thinking_after(tokenizer, format, prompt_tail) is Thinking.OPEN,
            begun=begun,
            name=name,
            parallel=parallel,
        )
    return _StreamParser(TextFlow(pieces, format.stop_ids, stops), scanner, deltas)


def thinking_tokens(tokenizer: Any, format: Format, ids: Sequence[int]) -> int:
    """Return how many of an answer's tokens come up to the end of its thinking, the closing tag included.

    Args:
        tokenizer: as in `make_parser`.
        format: how the model writes.
        ids: an answer that holds thinking. Where no tag closes it, a tool call does, or the end.
    """
    if format.think is None:
        return 0
    pieces, closing = pieces_of(tokenizer), format.think[1]
    token = pieces.single(closing)
    if token is not None and token in ids:
        return list(ids).index(token) + 1
    text = pieces.decode(ids)
    places = [place for tag in (format.call[0], *format.wrap) if (place := text.find(tag)) >= 0]
    place = text.find(closing)
    end = place + len(closing) if place >= 0 else min(places, default=len(text))
    return bisect_left(range(len(ids)), end, key=lambda count: len(pieces.decode(ids[:count])))


def read_text(format: Format, text: str, tools: Sequence[Mapping[str, Any]]) -> Answer:
    """Return what a whole text says, without thinking.

    Args:
        format: how the model writes.
        text: an answer, up to the token that ended it.
        tools: as in the request.
    """
    deltas = Deltas()
    scanner = Scanner(
        deltas,
        None,
        format.call,
        reader_of(format, tools),
        wrap=format.wrap,
        bare=format.bare and bool(tools),
        thinking=False,
        name="",
        parallel=True,
    )
    scanner.feed(text)
    scanner.finish()
    return deltas.answer()


def thinking_after(tokenizer: Any, format: Format, prompt: Sequence[int] | Ids) -> Thinking:
    """Tell where the answer to a prompt begins, as far as the prompt holds the model's turn.

    Args:
        tokenizer: as in `make_parser`.
        format: how the model writes.
        prompt: ids of the prompt or of its end.
    """
    if format.think is None:
        return Thinking.OVER
    pieces = pieces_of(tokenizer)
    opening, closing = format.think
    count = _TAIL
    while True:
        shown = pieces.decode(np.asarray(prompt[-count:]).tolist())
        _, turn, text = shown.rpartition(format.turn)
        if turn:
            text = (text.rpartition(format.resumed)[2] if format.resumed else text).strip()
            if not text.startswith(opening):
                return Thinking.OVER if text == closing else Thinking.FREE
            return Thinking.OVER if closing in text else Thinking.OPEN
        if count >= min(len(prompt), _LONGEST_TAIL):
            return Thinking.OPEN if shown.rfind(opening) > shown.rfind(closing) else Thinking.FREE
        count *= 4
