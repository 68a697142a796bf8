"""What a call says: its sampled tokens as deltas for connections, and as the answer that is recorded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gyre_sdk.errors import RenderError
from gyre_sdk.harness.proxy.answers import (
    AnswerParser,
    PlainParser,
    Reparser,
    TextFlow,
    make_parser,
    pieces_of,
    thinking_tokens,
)
from gyre_sdk.harness.proxy.dialects import Answer, Delta, ModelRequest, Part, TokenText
from gyre_sdk.harness.proxy.dialects.canonical import ToolCall
from gyre_sdk.harness.proxy.dialects.history import Ids
from gyre_sdk.harness.proxy.generate import Candidates
from gyre_sdk.harness.proxy.render import Template

log = logging.getLogger(__name__)
PROMPT_TAIL = 8192
"""Tokens at the end of the prompt that tell whether thinking was opened there."""
_NOTHING: Ids = np.empty(0, dtype=np.int32)


class Speech:
    """Turns one call's tokens into deltas; connections read `deltas` at their own pace.

    Args:
        template: how the model writes.
        request: what was asked.
        prompt: ids of the prompt.
        name: makes the ids of tool calls.
    """

    def __init__(self, template: Template, request: ModelRequest, prompt: Sequence[int] | Ids, name: str) -> None:
        self.deltas: list[Delta] = []
        """What may be seen so far, in order."""
        self.heard = 0
        """Sampled tokens behind `deltas`."""
        self._template = template
        self._request = request
        self._tail: Ids = np.asarray(prompt[-PROMPT_TAIL:], dtype=np.int32)
        self._name = name
        self._parser: AnswerParser | None = None
        self._flow: TextFlow | None = None
        self._flowed = 0
        self._rest: list[Delta] | None = None
        """What the end of the answer adds, while it is not durable."""

    def hear(self, ids: list[int], upto: int) -> None:
        """Take tokens up to `upto`, as far as no stop string can begin in them."""
        if self._request.sampling.stop:
            upto = min(upto, self.settled(ids))
        if upto > self.heard and self._rest is None:
            fresh, self.heard = ids[self.heard : upto], upto
            self.deltas += self._speaking().feed(fresh)

    def end(self, ids: list[int], stop: str | None) -> Answer:
        """Take the rest; return the answer, which ends before the stop string that ended sampling.

        What the rest adds is not seen before `release`: it is not durable yet.
        """
        parser = self._speaking()
        rest = parser.feed(ids[self.heard :])
        keep = self._request.sampling.extra.get("include_stop_str_in_output")
        self._rest = rest + parser.finish(None if keep else stop)
        self._parser = self._flow = None
        self._tail = _NOTHING
        return parser.answer

    def release(self, tokens: int) -> None:
        """Show all of an answer of that many tokens, which is durable now."""
        self.deltas += self._rest or ()
        self.heard, self._rest = tokens, None

    def recall(self, deltas: Sequence[Delta], tokens: int) -> None:
        """Take a recorded answer instead."""
        self.deltas, self.heard = list(deltas), tokens

    def settled(self, ids: list[int]) -> int:
        """Return how many tokens end before anything that may be the start of a stop string."""
        if not self._request.sampling.stop:
            return len(ids)
        if self._flow is None or self._flowed > len(ids):  # tokens were given up with a broken attempt
            pieces = pieces_of(self._template.tokenizer)
            self._flow = TextFlow(pieces, frozenset(self._template.stop_ids), self._request.sampling.stop)
            self._flowed = 0
        self._flow.feed(ids[self._flowed :])
        self._flowed = len(ids)
        return self._flow.settled

    def tokens(
        self, ids: Sequence[int], logprobs: Sequence[float | None], candidates: Sequence[Candidates] = ()
    ) -> tuple[TokenText, ...]:
        """Return tokens as agents may ask to see them, with the likeliest ones at each place where they are known."""
        shown = [self._token(token, logprob) for token, logprob in zip(ids, logprobs, strict=True)]
        if not any(candidates):
            return tuple(shown)
        return tuple(
            replace(token, top=tuple(self._token(*other) for other in top[: self._request.candidates]))
            for token, top in zip(shown, candidates, strict=True)
        )

    def thought(self, ids: Sequence[int], answer: Answer) -> int:
        """Return how many of an answer's tokens are thinking, as far as it is known how the model writes that."""
        form = self._template.format
        if not answer.reasoning or form is None or self._request.prompts:
            return 0
        return thinking_tokens(self._template.tokenizer, form, ids)

    def _token(self, token: int, logprob: float | None) -> TokenText:
        name = f"token_id:{token}" if self._request.names_tokens else ""
        raw = pieces_of(self._template.tokenizer).raw(token)
        return TokenText(self._template.text([token]), raw, logprob, name=name)

    def _speaking(self) -> AnswerParser:
        if self._parser is None:
            self._parser = self._make_parser()
        return self._parser

    def _make_parser(self) -> AnswerParser:
        request, template = self._request, self._template
        stop_ids = frozenset(template.stop_ids)
        if request.prompts:
            return PlainParser(template.tokenizer, stop_ids, request.sampling.stop)
        if template.format is None:
            return Reparser(self._whole, template.tokenizer, request.sampling.stop)
        return make_parser(
            template.tokenizer,
            format=template.format,
            prompt_tail=self._tail,
            tools=request.tools,
            name=self._name,
            stops=request.sampling.stop,
            choice=request.tool_choice,
            parallel=request.parallel_tool_calls,
            begun=bool(request.prefill),
        )

    def _whole(self, ids: Sequence[int], final: bool) -> Answer:
        request = self._request
        try:
            answer = self._template.parse(
                ids,
                self._tail,
                tools=request.tools,
                name=self._name,
                final=final,
                choice=request.tool_choice,
                parallel=request.parallel_tool_calls,
            )
            return self._resumed(ids, answer) if request.prefill else answer
        except RenderError as error:
            log.warning("call c-%s: %s; the agent gets the plain text", self._name, error)
            return Answer(self._template.text(ids) if final else "")

    def _resumed(self, ids: Sequence[int], answer: Answer) -> Answer:
        """Return an answer that continues text, with the white space that it begins with."""
        text = self._template.text(ids)
        content = answer.content.lstrip()
        return replace(answer, content=text[: len(text) - len(text.lstrip())] + content if content else "")


def whole_answer(answer: Answer) -> list[Delta]:
    """Return a finished answer as deltas."""
    deltas = [Delta(Part.REASONING, answer.reasoning), Delta(Part.CONTENT, answer.content)]
    for call in answer.tool_calls:
        deltas += [Delta(Part.CALL, call=ToolCall(call.id, call.name)), Delta(Part.ARGUMENTS, call.arguments)]
    return [delta for delta in deltas if delta.text or delta.call]
