"""OpenAI's older completions: texts or token ids in, their continuation out, with no messages and no tools.

The answer to a prompt is its `content` as it was sampled: thinking and tool calls are not taken apart here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects import AnswerStream, Choice, Dialect, TokenText
from gyre_sdk.harness.proxy.dialects.canonical import Delta, ModelRequest, Part
from gyre_sdk.harness.proxy.dialects.chat import ChatCompletions
from gyre_sdk.harness.proxy.dialects.fields import (
    MAX_CANDIDATES,
    MAX_CHOICES,
    decode_object,
    flag,
    number,
    refuse,
    refuse_given,
    sampling,
    text,
    whole,
)
from gyre_sdk.harness.proxy.sse import encode_data

_encode = msgspec.json.Encoder().encode
_REFUSED = (
    "echo",
    "suffix",
    "use_beam_search",
    "prompt_logprobs",
    "prompt_embeds",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
_TOKENS = 16
"""Tokens of an answer where the request sets no limit, as OpenAI has it."""
_PROMPTS = 64
_ERRORS = ChatCompletions()
Prompt = str | tuple[int, ...]


class Completions(Dialect):
    """`POST /v1/completions`. Choice number `prompt * n + sample` is a sample of that prompt."""

    name = "completions"

    def parse(self, body: bytes) -> ModelRequest:
        """See `Dialect.parse`."""
        fields = decode_object(body)
        refuse_given(fields, _REFUSED)
        prompts = _prompts(fields.pop("prompt", None))
        n = int(number(fields, "n", 1, 1, MAX_CHOICES, integer=True))
        if number(fields, "best_of", n, 1, 1 << 31, integer=True) != n:
            refuse("best_of cannot be honoured by this service: it would hide what is sampled", "best_of")
        stream = flag(fields, "stream")
        options = fields.get("stream_options")
        if options is not None and not isinstance(options, dict):
            refuse("stream_options must be an object", "stream_options")
        structured = fields.get("structured_outputs")
        if structured is not None and not isinstance(structured, dict):
            refuse("structured_outputs must be an object", "structured_outputs")
        candidates = _candidates(fields)
        limit = {"max_tokens": _TOKENS} if fields.get("max_tokens") is None else {}
        return ModelRequest(
            dialect=self.name,
            model=text(fields, "model"),
            messages=(),
            tools=(),
            sampling=sampling({**fields, **limit}, limit="max_tokens"),
            fields=fields,
            raw=prompts,
            stream=stream,
            include_usage=bool(stream and options and options.get("include_usage")),
            logprobs=candidates is not None,
            candidates=candidates or 0,
            names_tokens=flag(fields, "return_tokens_as_token_ids"),
            n=n,
            structured=structured or None,
            prompts=prompts,
        )

    def body(self, request: ModelRequest, name: str, at: float, choices: Sequence[Choice], prompt_tokens: int) -> bytes:
        """See `Dialect.body`."""
        sampled = sum(choice.completion_tokens for choice in choices)
        shown = [
            {
                "index": index,
                "text": choice.answer.content,
                "logprobs": None if choice.tokens is None else _tokens(choice.tokens, 0),
                "finish_reason": _finish(choice),
            }
            for index, choice in enumerate(choices)
        ]
        usage = _usage(prompt_tokens, sampled, [choice.cached_tokens for choice in choices[:: request.n]])
        return _encode({**_head(request, name, at), "choices": shown, "usage": usage})

    def stream(self, request: ModelRequest, name: str, at: float) -> AnswerStream:
        """See `Dialect.stream`."""
        return CompletionStream(request, name, at)

    def error(self, error: ProtocolError) -> bytes:
        """See `Dialect.error`."""
        return _ERRORS.error(error)


class CompletionStream(AnswerStream):
    """Chunks of streamed completions."""

    def __init__(self, request: ModelRequest, name: str, at: float) -> None:
        self._head = _head(request, name, at)
        self._usage = request.include_usage
        self._offsets = [0] * (request.n * len(request.prompts))
        self._choices = request.n
        self._cached: dict[int, int | None] = {}
        """By prompt."""

    def start(self, prompt_tokens: int) -> bytes:
        """See `AnswerStream.start`. The protocol opens with the first text."""
        return b""

    def deltas(self, index: int, deltas: Sequence[Delta], tokens: Sequence[TokenText] = ()) -> bytes:
        """See `AnswerStream.deltas`."""
        said = "".join(delta.text for delta in deltas if delta.part is Part.CONTENT)
        return self._chunk(index, said, None, tokens) if said or tokens else b""

    def finish(self, index: int, choice: Choice, tokens: Sequence[TokenText] = ()) -> bytes:
        """See `AnswerStream.finish`."""
        self._cached.setdefault(index // self._choices, choice.cached_tokens)
        return self._chunk(index, "", _finish(choice), tokens)

    def end(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """See `AnswerStream.end`."""
        usage = _usage(prompt_tokens, completion_tokens, list(self._cached.values()))
        shown = encode_data(_encode({**self._head, "choices": [], "usage": usage})) if self._usage else b""
        return shown + encode_data(b"[DONE]")

    def error(self, error: ProtocolError) -> bytes:
        """See `AnswerStream.error`."""
        return encode_data(_ERRORS.error(error))

    def _chunk(self, index: int, said: str, finish: str | None, tokens: Sequence[TokenText]) -> bytes:
        logprobs = _tokens(tokens, self._offsets[index]) if tokens else None
        self._offsets[index] += sum(len(token.text) for token in tokens)
        choice = {"index": index, "text": said, "logprobs": logprobs, "finish_reason": finish}
        return encode_data(_encode({**self._head, "choices": [choice]}))


def _prompts(given: Any) -> tuple[Prompt, ...]:
    """Return the prompts of a request: one text, one list of ids, or a list of either."""
    several = given if isinstance(given, list) and given and not whole(given[0]) else [given]
    if len(several) > _PROMPTS:
        refuse(f"prompt holds {len(several)} prompts; {_PROMPTS} are the most", "prompt")
    found: list[Prompt] = []
    for item in several:
        if isinstance(item, list) and item and all(whole(one) and 0 <= one < 1 << 31 for one in item):
            found.append(tuple(int(one) for one in item))
        elif isinstance(item, str) and item:
            found.append(item)
        else:
            refuse("prompt must be a text, a list of token ids, or a list of these, none of them empty", "prompt")
    return tuple(found)


def _candidates(fields: dict[str, Any]) -> int | None:
    """Return how many of the likeliest tokens to show at every place; None where no log-probs are asked for."""
    given = fields.get("logprobs")
    if given is None or isinstance(given, bool):
        return 0 if given else None
    return int(number(fields, "logprobs", 0, 0, MAX_CANDIDATES, integer=True))


def _head(request: ModelRequest, name: str, at: float) -> dict[str, Any]:
    return {"id": f"cmpl-{name}", "object": "text_completion", "created": int(at), "model": request.model}


def _finish(choice: Choice) -> str:
    return "length" if choice.finish == "length" else "stop"


def _tokens(tokens: Sequence[TokenText], offset: int) -> dict[str, Any]:
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.label for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_top(token) for token in tokens] if any(token.top for token in tokens) else None,
        "text_offset": offsets,
    }


def _top(token: TokenText) -> dict[str, float | None]:
    """Return the likeliest tokens at a place by what they are called, the sampled one among them.

    Of several tokens with one text the likeliest stays; called by their ids, all do.
    """
    found: dict[str, float | None] = {}
    for other in (*token.top, token):
        found.setdefault(other.label, other.logprob)
    return found


def _usage(prompt_tokens: int, completion_tokens: int, cached: Sequence[int | None]) -> dict[str, Any]:
    known = [tokens for tokens in cached if tokens is not None]
    details = {"prompt_tokens_details": {"cached_tokens": sum(known)}} if known else {}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        **details,
    }


__all__ = ["CompletionStream", "Completions"]
