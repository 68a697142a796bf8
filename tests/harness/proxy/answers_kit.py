"""Vocabularies, renderers and answers for the tests of the answer parsers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import renderers
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from renderers.base import create_renderer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gyre_sdk.harness.proxy.answers import AnswerParser, format_of, make_parser
from gyre_sdk.harness.proxy.dialects.canonical import Answer, Delta, Part, ToolCall, ToolChoice

SHARED = Path(__file__).resolve().parents[4] / "shared"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "parameters": {
                "type": "object",
                "properties": {
                    "cmd": {"type": "string"},
                    "n": {"type": "integer"},
                    "any": {},
                    "maybe": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                },
            },
        },
    }
]
CUTS = st.lists(st.integers(0, 400), max_size=12) | st.just(range(400))
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_PLAIN = (*TAGS, "<tool_response>", "</tool_response>")
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


class Vocabulary:
    """A tokenizer as renderers and parsers ask for it. Counts what it decodes."""

    unk_token_id = None
    name_or_path = "test"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.decoded = 0
        self.eos_token_id = tokenizer.token_to_id("<|im_end|>")

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [ids] if isinstance(ids, int) else list(ids)
        text = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        self.decoded += len(ids) + len(text)
        return text

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        one = self.tokenizer.token_to_id
        return one(tokens) if isinstance(tokens, str) else [one(token) for token in tokens]


_MORE = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    *("<｜tool▁sep｜>", "｜DSML｜", "<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>"),
    *("<｜read_url｜>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "[EOS]", "[BOS]"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
    *("]~!b[", "]~b]", "[e~[", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|end_of_text|>", "<|eom_id|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"),
    *("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>", "<|constrain|>"),
)
_MORE_PLAIN = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>")


@cache
def small(every: bool = False) -> Vocabulary:
    """Bytes, and the control tokens of Qwen's families; or of every family."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (*_SPECIAL, *_VISION, *_MORE * every)])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in (*_PLAIN, *_MORE_PLAIN * every)])
    return Vocabulary(tokenizer)


@cache
def _real() -> Vocabulary | None:
    file = SHARED / "data" / "tokenizers" / "qwen3" / "tokenizer.json.gz"
    return Vocabulary(Tokenizer.from_str(gzip.decompress(file.read_bytes()).decode())) if file.is_file() else None


def vocabulary(name: str) -> Vocabulary:
    """Return a vocabulary by name, `small`, `every` or `qwen3`; skips where the real one is missing."""
    found = small(name == "every") if name != "qwen3" else _real()
    if found is None:
        pytest.skip(f"{SHARED}/data/tokenizers/qwen3/tokenizer.json.gz is missing: the real Qwen3 vocabulary")
    return found


@cache
def renderer(vocabulary_name: str, family: str) -> Any:
    """Return a renderer of the `renderers` package."""
    import pydantic

    config = pydantic.TypeAdapter(renderers.RendererConfig).validate_python({"name": family})
    return create_renderer(vocabulary(vocabulary_name), config)


def parser(vocab: Vocabulary, family: str = "qwen3", *, prompt: str = "", **options: Any) -> AnswerParser:
    """Return a parser; the options are those of `make_parser`."""
    format = format_of(family, vocab)
    assert format is not None
    given = {"tools": TOOLS, "name": "c", "stops": (), "choice": ToolChoice.AUTO, "parallel": True, **options}
    return make_parser(vocab, format=format, prompt_tail=vocab.encode(prompt), **given)


def streamed(parser: AnswerParser, ids: Sequence[int], cuts: Sequence[int], stop: str | None = None) -> list[Delta]:
    """Feed ids, cut at the places given; give all deltas."""
    places = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    deltas = [delta for start, end in pairwise(places) for delta in parser.feed(ids[start:end])]
    return deltas + parser.finish(stop)


def added(deltas: Sequence[Delta]) -> Answer:
    """Add deltas up as a client does."""
    texts = {Part.REASONING: "", Part.CONTENT: ""}
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.part is Part.CALL:
            assert delta.call is not None and delta.call.name and not delta.call.arguments and not delta.text
            calls.append(delta.call)
        elif delta.part is Part.ARGUMENTS:
            calls[-1] = ToolCall(calls[-1].id, calls[-1].name, calls[-1].arguments + delta.text)
        else:
            texts[delta.part] += delta.text
        assert delta.call or delta.text, "a delta says something"
    return Answer(texts[Part.CONTENT], texts[Part.REASONING], tuple(calls))


_WORDS = st.sampled_from(
    [
        "mkdir -p test/{a,b}",
        "a < b",
        "<tool",
        "</think",
        "<thi",
        "{}",
        '"quoted"',
        '"',
        '"}',
        '{\\"',
        "é",
        "😀",
        "日本",
        "\u200d",
        "�",
        " ",
        "\n",
        "\n\n",
        "  ",
        "\t",
        "word",
        "<parameter",
        "</func",
        "\\",
        "\\n",
        "`x`",
        "<",
        ">",
        "}",
    ]
)
plain = st.lists(_WORDS | st.text(max_size=6).filter(lambda text: max(text, default="a") < "\ud800"), max_size=8).map(
    "".join
)
_KEYS = st.sampled_from(["cmd", "n", "any", "maybe", "other", "ключ"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=5,
)
arguments = st.dictionaries(_KEYS, _VALUES, max_size=4)
names = st.sampled_from(["bash", "read_file", "mcp.x-1"])


@st.composite
def json_blocks(draw: Any) -> str:
    """A well-formed block in JSON."""
    value: Any = draw(arguments)
    style = {"ensure_ascii": draw(st.booleans()), "indent": draw(st.sampled_from([None, 1]))}
    if draw(st.integers(0, 4)) == 0:
        value = json.dumps(value, **style)
    items = [("name", draw(names)), ("arguments", value)]
    if draw(st.integers(0, 4)) == 0:
        items.reverse()
    if draw(st.integers(0, 4)) == 0:
        items.insert(draw(st.integers(0, 2)), ("id", draw(_VALUES)))
    if draw(st.integers(0, 9)) == 0:
        items = [item for item in items if item[0] != "arguments"]
    return json.dumps(dict(items), **style)


@st.composite
def xml_blocks(draw: Any) -> str:
    """A well-formed block in tags."""
    value = draw(arguments)
    shown = {key: item if isinstance(item, str) else json.dumps(item) for key, item in value.items()}
    parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in shown.items())
    return f"<function={draw(names)}>\n{parameters}</function>"


def clean(text: str) -> bool:
    """Tell whether a text holds no tag of its own."""
    return not any(tag in text for tag in (*TAGS, "<parameter=", "</parameter>", "</function>"))


@st.composite
def answers(draw: Any, blocks: st.SearchStrategy[str]) -> tuple[str, str]:
    """A well-formed answer, and the prompt it follows."""
    opened = draw(st.booleans())
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" + "<think>\n" * opened
    text = draw(st.sampled_from(["", "\n"])) + "<think>" if not opened and draw(st.booleans()) else ""
    if opened or text:
        text += draw(plain.filter(clean)) + "</think>"
    text += draw(plain.filter(lambda text: clean(text) and not text.lstrip().startswith("<think")))
    for block in draw(st.lists(blocks.filter(lambda block: not any(tag in block for tag in TAGS)), max_size=3)):
        space = draw(st.sampled_from(["", "\n"]))
        text += f"<tool_call>{space}{block}{space}</tool_call>\n"
    return prompt, text + draw(st.sampled_from(["", "<|im_end|>", "<|im_end|>\n<|im_start|>user"]))


soup = st.lists(
    st.sampled_from(
        [
            *TAGS,
            '{"name": "bash"',
            ', "arguments": ',
            '"arguments"',
            '"name"',
            ": ",
            '{"cmd": "ls"}',
            "}",
            "{",
            '"',
            ",",
            "<function=bash>",
            "<parameter=cmd>",
            "<parameter=n>",
            "</parameter>",
            "</function>",
            "\n",
            "12",
            "\\",
            "x",
            "\\u00e9",
            "\\ud83d",
            "\\ude00",
            '"{\\"a\\"',
            "<|im_start|>",
            "😀",
            "STOP",
            "ST",
            " ",
            "<",
            "</tool",
        ]
    )
    | plain,
    max_size=14,
).map("".join)
