"""OpenAI responses: `POST /v1/responses`, what its GET and cancel show, and conversations kept by the server."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects import AnswerStream, Choice, Dialect
from gyre_sdk.harness.proxy.dialects.canonical import ModelRequest
from gyre_sdk.harness.proxy.dialects.responses.answer import (
    error_object,
    item_status,
    output_items,
    response_id,
    response_object,
    usage_of,
)
from gyre_sdk.harness.proxy.dialects.responses.chain import Earlier, complete, needs
from gyre_sdk.harness.proxy.dialects.responses.request import NAME, from_fields, parse_responses
from gyre_sdk.harness.proxy.dialects.responses.stream import ResponseStream

_encode = msgspec.json.Encoder().encode


class Responses(Dialect):
    """`POST /v1/responses`."""

    name = NAME

    def parse(self, body: bytes) -> ModelRequest:
        """See `Dialect.parse`. The server must `complete` a request that `needs` earlier answers."""
        return parse_responses(body)

    def body(self, request: ModelRequest, name: str, at: float, choices: Sequence[Choice], prompt_tokens: int) -> bytes:
        """See `Dialect.body`."""
        return self.snapshot(request, name, at, item_status(choices[0]), choices, None, prompt_tokens)

    def snapshot(
        self,
        request: ModelRequest,
        name: str,
        at: float,
        status: str,
        choices: Sequence[Choice] | None,
        error: ProtocolError | None,
        prompt_tokens: int,
    ) -> bytes:
        """Return the response as it is now: the answer of GET and of cancel.

        Args:
            request: as parsed, or rebuilt by `from_fields`.
            name: of the answer.
            at: seconds since the epoch when the request was received.
            status: `queued`, `in_progress`, `completed`, `incomplete`, `failed` or `cancelled`.
            choices: the finished answer, or None.
            error: why it failed, or None.
            prompt_tokens: of the prompt; not shown before there is an answer.
        """
        if not choices:
            return _encode(response_object(request, name, at, status, error=error))
        [choice] = choices
        usage = usage_of(prompt_tokens, choice.completion_tokens, choice.reasoning_tokens, choice.cached_tokens)
        items = output_items(request, name, choice)
        return _encode(response_object(request, name, at, status, items, usage, error))

    def stream(self, request: ModelRequest, name: str, at: float) -> AnswerStream:
        """See `Dialect.stream`."""
        return ResponseStream(request, name, at)

    def error(self, error: ProtocolError) -> bytes:
        """See `Dialect.error`."""
        return _encode({"error": error_object(error)})


__all__ = ["Choice", "Earlier", "Responses", "complete", "from_fields", "needs", "response_id"]
