"""The protocols that agents speak, each as pure functions from and to canonical values.

A dialect parses a request body into a `ModelRequest`, and turns answers, streams and errors into its own bytes. It
opens no socket, reads no clock and knows nothing of tokens' ids. `history` matches requests against what is recorded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects.canonical import Answer, Delta, ModelRequest, Part
from gyre_sdk.harness.proxy.sse import encode_comment


@dataclass(frozen=True, slots=True)
class TokenText:
    """A sampled token as agents may ask to see it."""

    text: str
    raw: bytes
    logprob: float | None
    """Nats; None where the engine gave none."""
    top: tuple[TokenText, ...] = ()
    """The likeliest tokens here, the first one first, where they were asked for and the engine told them."""
    name: str = ""
    """`token_id:N`, where the request asks for that in place of its text."""

    @property
    def label(self) -> str:
        """What it is called."""
        return self.name or self.text


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer of a request."""

    answer: Answer
    finish: str
    """`stop`, `length` or `tool_calls`."""
    completion_tokens: int
    tokens: tuple[TokenText, ...] | None = None
    """None unless the request asked for log-probs."""
    stop_sequence: str | None = None
    """The stop string that ended sampling, or None."""
    reasoning_tokens: int = 0
    """Of `completion_tokens`: those up to the end of the thinking, its closing tag included."""
    cached_tokens: int | None = None
    """Tokens of the prompt that the engine took from its cache; None where it does not tell."""


class AnswerStream(ABC):
    """The bytes of one streamed answer, in order: `start`, then `deltas` and `finish` of every choice, then `end`.

    `error` may take the place of anything that has not been said yet; `heartbeat` may come anywhere after `start`.
    """

    @abstractmethod
    def start(self, prompt_tokens: int) -> bytes:
        """Return what opens the stream."""

    @abstractmethod
    def deltas(self, index: int, deltas: Sequence[Delta], tokens: Sequence[TokenText] = ()) -> bytes:
        """Return what is new in choice `index`; `tokens` are the sampled tokens behind it, where they were asked for."""

    @abstractmethod
    def finish(self, index: int, choice: Choice, tokens: Sequence[TokenText] = ()) -> bytes:
        """Return the finish of choice `index`, all of whose deltas have been given."""

    @abstractmethod
    def end(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """Return what ends the stream well."""

    @abstractmethod
    def error(self, error: ProtocolError) -> bytes:
        """Return what ends the stream badly: an error event and no end marker."""

    def heartbeat(self) -> bytes:
        """Return what keeps the connection alive while nothing is sampled: a comment, unless the protocol has more."""
        return _PING


class Dialect(ABC):
    """One protocol."""

    name: str

    @abstractmethod
    def parse(self, body: bytes) -> ModelRequest:
        """Return the canonical request.

        Raises:
            ProtocolError: the body is malformed or asks for something that cannot be honoured.
        """

    @abstractmethod
    def body(self, request: ModelRequest, name: str, at: float, choices: Sequence[Choice], prompt_tokens: int) -> bytes:
        """Return the whole answer of a request that is not streamed."""

    @abstractmethod
    def stream(self, request: ModelRequest, name: str, at: float) -> AnswerStream:
        """Return a builder for a streamed answer."""

    @abstractmethod
    def error(self, error: ProtocolError) -> bytes:
        """Return the body of an error answer."""

    def status(self, error: ProtocolError) -> int:
        """Return the HTTP status of an error answer."""
        return error.status


_PING = encode_comment("ping")

__all__ = ["Answer", "AnswerStream", "Choice", "Delta", "Dialect", "ModelRequest", "Part", "TokenText"]
