"""How families of models write reasoning and tool calls, as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class BodyKind(StrEnum):
    """How the body of a tool call block is written."""

    JSON = "json"
    """`{"name": ..., "arguments": {...}}`"""
    XML = "xml"
    """`<function=NAME><parameter=KEY>value</parameter></function>`"""


class Thinking(StrEnum):
    """Where an answer begins."""

    OPEN = "open"
    """In thinking, which the prompt opened."""
    FREE = "free"
    """Before thinking: the model may think first."""
    OVER = "over"
    """After thinking, which the prompt closed."""


@dataclass(frozen=True, slots=True)
class Format:
    """What to look for in a model's answers. Tags are found by their text, be they one token or several."""

    stop_ids: frozenset[int]
    """The answer ends before the first of these tokens."""
    think: tuple[str, str] = ("<think>", "</think>")
    """Tags around reasoning, which is the first thing in an answer or was opened by the prompt."""
    call: tuple[str, str] = ("<tool_call>", "</tool_call>")
    """Tags around a tool call block."""
    body: BodyKind = BodyKind.JSON
    argument_keys: tuple[str, ...] = ("arguments",)
    """With `JSON`: the keys that may hold the arguments."""
    turn: str = "<|im_start|>assistant"
    """Opens the model's turn in a prompt."""


_FAMILIES: dict[str, tuple[BodyKind, tuple[str, ...]]] = {
    **dict.fromkeys(("qwen3", "qwen3-vl", "hermes"), (BodyKind.JSON, ("<|im_end|>", "<|endoftext|>"))),
    **dict.fromkeys(
        (
            "qwen3.5",
            "qwen3.6",
            "qwen3.8",
            "prime-qwen3",
            "qwen3-coder",
            "nemotron-3",
            "nemotron-3-ultra",
            "nemotron-3.5",
        ),
        (BodyKind.XML, ("<|im_end|>", "<|endoftext|>")),
    ),
}


def format_of(renderer_family: str, tokenizer: Any) -> Format | None:
    """Return the format of a family of the `renderers` package; None for one that is not known here."""
    found = _FAMILIES.get(renderer_family)
    if found is None:
        return None
    body, stops = found
    ids = [tokenizer.convert_tokens_to_ids(stop) for stop in stops]
    return Format(frozenset(token for token in ids if isinstance(token, int)), body=body)
