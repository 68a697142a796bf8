"""OpenAI chat completions: answers, streams and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects import AnswerStream, Choice, Dialect, TokenText
from gyre_sdk.harness.proxy.dialects.canonical import Delta, ModelRequest, Part
from gyre_sdk.harness.proxy.dialects.chat_request import parse_chat
from gyre_sdk.harness.proxy.sse import encode_data

_encode = msgspec.json.Encoder().encode
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class ChatCompletions(Dialect):
    """`POST /v1/chat/completions`."""

    name = "chat"

    def parse(self, body: bytes) -> ModelRequest:
        """See `Dialect.parse`."""
        return parse_chat(body)

    def body(self, request: ModelRequest, name: str, at: float, choices: Sequence[Choice], prompt_tokens: int) -> bytes:
        """See `Dialect.body`."""
        sampled = sum(choice.completion_tokens for choice in choices)
        return _encode(
            {
                "id": f"chatcmpl-{name}",
                "object": "chat.completion",
                "created": int(at),
                "model": request.model,
                "choices": [_choice(index, choice) for index, choice in enumerate(choices)],
                "usage": _usage(
                    prompt_tokens,
                    sampled,
                    sum(choice.reasoning_tokens for choice in choices),
                    choices[0].cached_tokens,
                ),
                "system_fingerprint": None,
            }
        )

    def stream(self, request: ModelRequest, name: str, at: float) -> AnswerStream:
        """See `Dialect.stream`."""
        return ChatStream(request, name, at)

    def error(self, error: ProtocolError) -> bytes:
        """See `Dialect.error`."""
        return _encode(_error(error))


class ChatStream(AnswerStream):
    """Chunks of a streamed chat completion."""

    def __init__(self, request: ModelRequest, name: str, at: float) -> None:
        self._head = {"id": f"chatcmpl-{name}", "object": "chat.completion.chunk", "created": int(at)}
        self._model = request.model
        self._usage = request.include_usage
        self._choices = request.n
        self._calls = [-1] * request.n
        self._reasoning_tokens = 0
        self._cached_tokens: int | None = None

    def start(self, prompt_tokens: int) -> bytes:
        """See `AnswerStream.start`."""
        return b"".join(
            self._chunk(index, {"role": "assistant", "content": ""}, None) for index in range(self._choices)
        )

    def deltas(self, index: int, deltas: Sequence[Delta], tokens: Sequence[TokenText] = ()) -> bytes:
        """See `AnswerStream.deltas`."""
        out: list[bytes] = []
        for delta in deltas:
            out.append(self._chunk(index, self._delta(index, delta), None, tokens))
            tokens = ()
        if tokens:
            out.append(self._chunk(index, {}, None, tokens))
        return b"".join(out)

    def finish(self, index: int, choice: Choice, tokens: Sequence[TokenText] = ()) -> bytes:
        """See `AnswerStream.finish`."""
        self._reasoning_tokens += choice.reasoning_tokens
        self._cached_tokens = choice.cached_tokens if index == 0 else self._cached_tokens
        return self._chunk(index, {}, choice.finish, tokens)

    def end(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """See `AnswerStream.end`."""
        usage = b""
        if self._usage:
            chunk = {
                **self._head,
                "model": self._model,
                "choices": [],
                "usage": _usage(prompt_tokens, completion_tokens, self._reasoning_tokens, self._cached_tokens),
            }
            usage = encode_data(_encode(chunk))
        return usage + encode_data(b"[DONE]")

    def error(self, error: ProtocolError) -> bytes:
        """See `AnswerStream.error`."""
        return encode_data(_encode(_error(error)))

    def _delta(self, index: int, delta: Delta) -> dict[str, Any]:
        if delta.part is Part.REASONING:
            return {"reasoning_content": delta.text}
        if delta.part is Part.CONTENT:
            return {"content": delta.text}
        if delta.call is None:
            return {"tool_calls": [{"index": self._calls[index], "function": {"arguments": delta.text}}]}
        self._calls[index] += 1
        function = {"name": delta.call.name, "arguments": delta.call.arguments}
        call = {"index": self._calls[index], "id": delta.call.id, "type": "function", "function": function}
        return {"tool_calls": [call]}

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None, tokens: Sequence[TokenText] = ()) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": finish}
        if tokens:
            choice["logprobs"] = {"content": [_token(token) for token in tokens], "refusal": None}
        return encode_data(_encode({**self._head, "model": self._model, "choices": [choice]}))


def _choice(index: int, choice: Choice) -> dict[str, Any]:
    answer = choice.answer
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.content if answer.content or not answer.tool_calls else None,
        "refusal": None,
    }
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.tool_calls
        ]
    logprobs = {"content": [_token(token) for token in choice.tokens], "refusal": None} if choice.tokens else None
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}


def _token(token: TokenText) -> dict[str, Any]:
    return {
        "token": token.label,
        "logprob": -9999.0 if token.logprob is None else token.logprob,
        "bytes": list(token.raw),
        "top_logprobs": [
            {"token": other.label, "logprob": other.logprob, "bytes": list(other.raw)} for other in token.top
        ],
    }


def _usage(
    prompt_tokens: int, completion_tokens: int, reasoning_tokens: int, cached_tokens: int | None
) -> dict[str, Any]:
    details: dict[str, Any] = {}
    if cached_tokens is not None:
        details["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    if reasoning_tokens:
        details["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        **details,
    }


def _error(error: ProtocolError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}
