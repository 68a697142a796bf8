"""Sampled ids to deltas of an answer, while they are sampled; pure."""

from gyre_sdk.harness.proxy.answers.detokenize import pieces_of
from gyre_sdk.harness.proxy.answers.formats import WAYS, BodyKind, Format, Thinking, format_of
from gyre_sdk.harness.proxy.answers.named_body import NUMBERED_SEPARATOR
from gyre_sdk.harness.proxy.answers.parser import (
    AnswerParser,
    TextFlow,
    make_parser,
    read_text,
    thinking_after,
    thinking_tokens,
)
from gyre_sdk.harness.proxy.answers.plain import PlainParser
from gyre_sdk.harness.proxy.answers.reparse import Reparser

__all__ = [
    "NUMBERED_SEPARATOR",
    "WAYS",
    "AnswerParser",
    "BodyKind",
    "Format",
    "PlainParser",
    "Reparser",
    "TextFlow",
    "Thinking",
    "format_of",
    "make_parser",
    "pieces_of",
    "read_text",
    "thinking_after",
    "thinking_tokens",
]
