"""Sampled ids to deltas of an answer, while they are sampled; pure."""

from gyre_sdk.harness.proxy.answers.formats import BodyKind, Format, format_of
from gyre_sdk.harness.proxy.answers.parser import AnswerParser, make_parser
from gyre_sdk.harness.proxy.answers.reparse import Reparser

__all__ = ["AnswerParser", "BodyKind", "Format", "Reparser", "format_of", "make_parser"]
