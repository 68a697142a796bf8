"""The protocols that agents speak, each as pure functions from and to canonical values.

A dialect parses a request body into a `ModelRequest`, and turns answers, streams and errors into its own bytes. It
opens no socket, reads no clock and knows nothing of tokens' ids. `history` matches requests against what is recorded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects.canonical import Answer, ModelRequest


@dataclass(frozen=True, slots=True)
class TokenText:
    """A sampled token as agents may ask to see it."""

    text: str
    raw: bytes
    logprob: float | None
    """Nats; None where the engine gave none."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer of a request."""

    answer: Answer
    finish: str
    """`stop`, `length` or `tool_calls`."""
    completion_tokens: int
    tokens: tuple[TokenText, ...] | None = None
    """None unless the request asked for log-probs."""


class AnswerStream(ABC):
    """The bytes of one streamed answer, in order. Deltas are derived from ever longer partial answers."""

    @abstractmethod
    def start(self) -> bytes:
        """Return what opens the stream."""

    @abstractmethod
    def update(self, index: int, partial: Answer, tokens: Sequence[TokenText] = ()) -> bytes:
        """Return what is new in choice `index`; empty when nothing can be shown yet."""

    @abstractmethod
    def finish(self, index: int, choice: Choice, tokens: Sequence[TokenText] = ()) -> bytes:
        """Return the rest of choice `index` and its finish reason."""

    @abstractmethod
    def end(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """Return what ends the stream well."""

    @abstractmethod
    def error(self, error: ProtocolError) -> bytes:
        """Return what ends the stream badly: an error event and no end marker."""


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


__all__ = ["Answer", "AnswerStream", "Choice", "Dialect", "ModelRequest", "TokenText"]
