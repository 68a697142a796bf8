"""How families of models write reasoning and tool calls, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any


class BodyKind(StrEnum):
    """How the body of a tool call block is written."""

    JSON = "json"
    """`{"name": ..., "arguments": {...}}`"""
    XML = "xml"
    """`<function=NAME><parameter=KEY>value</parameter></function>`"""
    KEYS = "keys"
    """`NAME<arg_key>KEY</arg_key><arg_value>value</arg_value>`"""
    INVOKE = "invoke"
    """`NAME"><parameter name="KEY">value</parameter>`: the opening tag ends inside a quoted name."""
    DSML = "dsml"
    """`NAME"><｜DSML｜parameter name="KEY" string="true">value</｜DSML｜parameter>`, after such a tag too."""
    TYPED = "typed"
    """`function<｜tool▁sep｜>NAME`, then the arguments in a fence; or `NAME<｜tool▁sep｜>{...}`."""
    NUMBERED = "numbered"
    """`functions.NAME:0<|tool_call_argument_begin|>{...}`"""
    OBJECTS = "objects"
    """JSON objects as with `JSON`, one after another; no tag closes them."""
    LISTED = "listed"
    """A list of such objects, or `NAME[ARGS]{...}`; no tag closes them."""
    CHANNELS = "channels"
    """A message of its own, whose header names the tool: the whole answer is written in such messages."""


class Thinking(StrEnum):
    """Where an answer begins."""

    OPEN = "open"
    """In thinking, which the prompt opened."""
    FREE = "free"
    """Before thinking: the model may think first."""
    OVER = "over"
    """After thinking, which the prompt closed, or which the model does not do."""


@dataclass(frozen=True, slots=True)
class Format:
    """What to look for in a model's answers. Tags are found by their text, be they one token or several."""

    stop_ids: frozenset[int]
    """The answer ends before the first of these tokens."""
    think: tuple[str, str] | None = ("<think>", "</think>")
    """Tags around reasoning, which is the first thing in an answer or was opened by the prompt."""
    call: tuple[str, str] = ("<tool_call>", "</tool_call>")
    """Tags around a tool call block; an empty closing tag where none is written."""
    wrap: tuple[str, ...] = ()
    """Tags around all blocks, opening and closing; no part of the answer's text."""
    bare: bool = False
    """Whether an answer that begins with a brace is a block without tags."""
    body: BodyKind = BodyKind.JSON
    argument_keys: tuple[str, ...] = ("arguments",)
    """With JSON objects: the keys that may hold the arguments."""
    turn: str = "<|im_start|>assistant"
    """Opens the model's turn in a prompt."""
    resumed: str = ""
    """Opens it behind the results of tools, where that is written another way."""


_NONE: frozenset[int] = frozenset()
_DEEPSEEK_WRAP = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
WAYS: dict[str, Format] = {
    "hermes": Format(_NONE),
    "xml": Format(_NONE, body=BodyKind.XML),
    "glm": Format(_NONE, body=BodyKind.KEYS, turn="<|assistant|>"),
    "deepseek": Format(
        _NONE,
        call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        wrap=_DEEPSEEK_WRAP,
        body=BodyKind.TYPED,
        turn="<｜Assistant｜>",
        resumed="<｜tool▁outputs▁end｜>",
    ),
    "dsml": Format(
        _NONE,
        call=('<｜DSML｜invoke name="', "</｜DSML｜invoke>"),
        wrap=("<｜DSML｜tool_calls>", "<｜DSML｜toolcalls>", "<｜DSML｜tool>", "</｜DSML｜tool_calls>"),
        body=BodyKind.DSML,
        turn="<｜Assistant｜>",
    ),
    "kimi": Format(
        _NONE,
        call=("<|tool_call_begin|>", "<|tool_call_end|>"),
        wrap=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        body=BodyKind.NUMBERED,
        turn="<|im_assistant|>assistant<|im_middle|>",
    ),
    "minimax": Format(
        _NONE,
        call=('<invoke name="', "</invoke>"),
        wrap=("<minimax:tool_call>", "</minimax:tool_call>"),
        body=BodyKind.INVOKE,
        turn="]~b]ai",
    ),
    "llama": Format(
        _NONE,
        think=None,
        call=("<|python_tag|>", ""),
        bare=True,
        body=BodyKind.OBJECTS,
        argument_keys=("parameters", "arguments"),
        turn="<|start_header_id|>assistant<|end_header_id|>",
    ),
    "harmony": Format(_NONE, think=None, call=("", ""), body=BodyKind.CHANNELS, turn="<|start|>assistant"),
    "mistral": Format(_NONE, think=None, call=("[TOOL_CALLS]", ""), body=BodyKind.LISTED, turn="[/INST]"),
}
"""Ways to write tool calls, by name, without the tokens that end an answer."""

_QWEN = ("<|im_end|>", "<|endoftext|>")
_GLM = ("<|user|>", "<|observation|>", "<|endoftext|>")
_DEEPSEEK = ("<｜end▁of▁sentence｜>",)
_KIMI = ("<|im_end|>", "[EOS]")
_FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(("qwen3", "qwen3-vl", "hermes"), ("hermes", _QWEN)),
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
        ("xml", _QWEN),
    ),
    **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"), ("glm", _GLM)),
    **dict.fromkeys(("deepseek-v3", "deepseek-r1"), ("deepseek", _DEEPSEEK)),
    "deepseek-v4": ("dsml", _DEEPSEEK),
    **dict.fromkeys(("kimi-k2", "kimi-k2.5"), ("kimi", _KIMI)),
    "minimax-m2": ("minimax", ("[e~[",)),
    "gpt-oss": ("harmony", ("<|return|>",)),
    "llama-3": ("llama", ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")),
}


def format_of(renderer_family: str, tokenizer: Any) -> Format | None:
    """Return the format of a family of the `renderers` package; None for one that is not known here."""
    found = _FAMILIES.get(renderer_family)
    if found is None:
        return None
    way, stops = found
    ids = [tokenizer.convert_tokens_to_ids(stop) for stop in stops]
    return replace(WAYS[way], stop_ids=frozenset(token for token in ids if isinstance(token, int)))
