"""Anthropic messages: answers, streams, errors and token counts."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects import AnswerStream, Choice, Dialect, TokenText
from gyre_sdk.harness.proxy.dialects.canonical import Delta, ModelRequest, Part
from gyre_sdk.harness.proxy.dialects.messages_input import ObjectText, input_of
from gyre_sdk.harness.proxy.dialects.messages_request import parse_count, parse_messages
from gyre_sdk.harness.proxy.sse import SseEvent, encode_event

_encode = msgspec.json.Encoder().encode
_STOP = {"length": "max_tokens", "tool_calls": "tool_use"}
_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class AnthropicMessages(Dialect):
    """`POST /v1/messages`."""

    name = "messages"

    def parse(self, body: bytes) -> ModelRequest:
        """See `Dialect.parse`."""
        return parse_messages(body)

    def body(self, request: ModelRequest, name: str, at: float, choices: Sequence[Choice], prompt_tokens: int) -> bytes:
        """See `Dialect.body`. The protocol has one choice."""
        (choice,) = choices
        usage = _usage(prompt_tokens, choice.completion_tokens, choice.cached_tokens)
        return _encode({**_head(request, name), "content": _content(choice), **_stop(choice), "usage": usage})

    def stream(self, request: ModelRequest, name: str, at: float) -> AnswerStream:
        """See `Dialect.stream`."""
        return MessageStream(request, name)

    def error(self, error: ProtocolError) -> bytes:
        """See `Dialect.error`."""
        return _encode(_error(error))

    def status(self, error: ProtocolError) -> int:
        """See `Dialect.status`. 503 is 529, overloaded, here."""
        return 529 if error.status == 503 else error.status


class MessageStream(AnswerStream):
    """Events of a streamed message. A block begins with the first delta of its kind and ends with the next of another."""

    def __init__(self, request: ModelRequest, name: str) -> None:
        self._message = _head(request, name)
        self._prompt_tokens = 0
        self._index = -1
        self._part: Part | None = None
        """What the open block holds: reasoning, content or a call; None while no block is open."""
        self._thought: list[str] = []
        self._input = ObjectText()

    def start(self, prompt_tokens: int) -> bytes:
        """See `AnswerStream.start`."""
        self._prompt_tokens = prompt_tokens
        usage = _usage(prompt_tokens, 0)
        message = {**self._message, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=message)

    def deltas(self, index: int, deltas: Sequence[Delta], tokens: Sequence[TokenText] = ()) -> bytes:
        """See `AnswerStream.deltas`. The protocol has no log-probs."""
        return b"".join(self._delta(delta) for delta in deltas)

    def finish(self, index: int, choice: Choice, tokens: Sequence[TokenText] = ()) -> bytes:
        """See `AnswerStream.finish`."""
        usage = _usage(self._prompt_tokens, choice.completion_tokens, choice.cached_tokens)
        return self._close() + _event("message_delta", delta=_stop(choice), usage=usage)

    def end(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """See `AnswerStream.end`."""
        return _event("message_stop")

    def error(self, error: ProtocolError) -> bytes:
        """See `AnswerStream.error`."""
        return encode_event(SseEvent(_encode(_error(error)), "error"))

    def heartbeat(self) -> bytes:
        """See `AnswerStream.heartbeat`."""
        return _event("ping")

    def _delta(self, delta: Delta) -> bytes:
        if delta.part is Part.CALL and delta.call is not None:
            block = {"type": "tool_use", "id": delta.call.id, "name": delta.call.name, "input": {}}
            opened = self._open(Part.CALL, block)
            self._input = ObjectText()
            return opened + self._arguments(delta.call.arguments)
        if not delta.text:
            return b""
        if delta.part is Part.ARGUMENTS:
            return self._arguments(delta.text)
        if delta.part is Part.REASONING:
            opened = self._open_for(Part.REASONING, {"type": "thinking", "thinking": "", "signature": ""})
            self._thought.append(delta.text)
            return opened + self._piece({"type": "thinking_delta", "thinking": delta.text})
        opened = self._open_for(Part.CONTENT, {"type": "text", "text": ""})
        return opened + self._piece({"type": "text_delta", "text": delta.text})

    def _open_for(self, part: Part, block: dict[str, Any]) -> bytes:
        return b"" if self._part is part else self._open(part, block)

    def _open(self, part: Part, block: dict[str, Any]) -> bytes:
        closed = self._close()
        self._part, self._index = part, self._index + 1
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        last = b""
        if self._part is None:
            return last
        if self._part is Part.REASONING:
            last = self._piece({"type": "signature_delta", "signature": signature("".join(self._thought))})
            self._thought = []
        elif self._part is Part.CALL:
            last = self._piece({"type": "input_json_delta", "partial_json": self._input.close()})
        self._part = None
        return last + _event("content_block_stop", index=self._index)

    def _arguments(self, text: str) -> bytes:
        shown = self._input.feed(text)
        return self._piece({"type": "input_json_delta", "partial_json": shown}) if shown else b""

    def _piece(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def count_body(tokens: int) -> bytes:
    """Return the answer to a request to count tokens."""
    return _encode({"input_tokens": tokens})


def signature(thinking: str) -> str:
    """Return the signature of a thinking block: opaque to agents, the same for the same text, never checked."""
    digest = hashlib.blake2b(thinking.encode("utf-8", "surrogatepass"), digest_size=48, person=b"gyre thinking")
    return base64.b64encode(digest.digest()).decode()


def _head(request: ModelRequest, name: str) -> dict[str, Any]:
    return {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": request.model}


def _content(choice: Choice) -> list[dict[str, Any]]:
    answer = choice.answer
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": signature(answer.reasoning)})
    if answer.content:
        blocks.append({"type": "text", "text": answer.content})
    for call in answer.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": input_of(call.arguments)})
    return blocks


def _stop(choice: Choice) -> dict[str, Any]:
    if choice.stop_sequence is not None and choice.finish == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_sequence}
    return {"stop_reason": _STOP.get(choice.finish, "end_turn"), "stop_sequence": None}


def _usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    """Return the usage of a message: here a prompt's tokens are either read from a cache or input, never both."""
    return {
        "input_tokens": prompt_tokens - (cached_tokens or 0),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens or 0,
        "output_tokens": completion_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return encode_event(SseEvent(_encode({"type": kind, **fields}), kind))


def _error(error: ProtocolError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": None}


__all__ = ["AnthropicMessages", "MessageStream", "count_body", "parse_count", "signature"]
