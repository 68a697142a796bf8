"""Any renderer streams: its parser for whole answers, run on ever longer ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from answers_kit import (
    CUTS,
    RELAXED,
    TOOLS,
    Vocabulary,
    added,
    answers,
    json_blocks,
    renderer,
    soup,
    streamed,
    vocabulary,
)
from hypothesis import given
from hypothesis import strategies as st
from proxy_toy import Toy

from gyre_sdk.harness.proxy.answers import Reparser
from gyre_sdk.harness.proxy.dialects.canonical import Answer, Part, ToolCall, same_arguments


class Whole:
    """Parses whole answers with a renderer, and counts the tokens it was given."""

    def __init__(self, vocab: Vocabulary, prompt: str = "") -> None:
        self.vocab, self.prompt, self.tokens = vocab, vocab.encode(prompt), 0

    def __call__(self, ids: Sequence[int], final: bool) -> Answer:
        self.tokens += len(ids)
        parsed = renderer("small", "qwen3").parse_response(list(ids), tools=TOOLS, prompt_ids=self.prompt)
        calls = [call for call in parsed.tool_calls if str(call.status) == "ok"] if final else []
        return Answer(
            parsed.content,
            (parsed.reasoning_content or "").strip(),
            tuple(ToolCall(f"call_{at}", call.name, same_arguments(call.raw)) for at, call in enumerate(calls)),
        )


@RELAXED
@given(case=answers(json_blocks()), cuts=CUTS)
def test_well_formed_answers_stream_as_they_parse(case: tuple[str, str], cuts: list[int]) -> None:
    prompt, text = case
    vocab = vocabulary("small")
    parse = Whole(vocab, prompt)
    ids = vocab.encode(text)
    made = Reparser(parse, vocab)
    assert added(streamed(made, ids, cuts)) == made.answer == parse(ids, True)


@RELAXED
@given(text=soup, cuts=CUTS, stop=st.sampled_from([None, "STOP", "ls"]))
def test_deltas_make_the_answer_however_broken(text: str, cuts: list[int], stop: str | None) -> None:
    vocab = vocabulary("small")
    ids = vocab.encode(text)
    made = Reparser(Whole(vocab), vocab, ["STOP", "ls"])
    assert added(streamed(made, ids, cuts, stop)) == made.answer


@pytest.mark.parametrize("text", ["word ", "日本", "<think>", "a <tool_call>"])
def test_work_is_linear(text: str) -> None:
    vocab = Vocabulary(vocabulary("small").tokenizer)
    ids = (vocab.encode(text) * 20_000)[:20_000]
    parse = Whole(vocab)
    streamed(Reparser(parse, vocab), ids, range(len(ids)))
    assert parse.tokens <= 20 * len(ids)


def test_text_comes_while_it_is_sampled() -> None:
    vocab = vocabulary("small")
    ids = vocab.encode("word " * 200)
    made = Reparser(Whole(vocab), vocab)
    shown = sum(len(delta.text) for token in ids for delta in made.feed([token]) if delta.part is Part.CONTENT)
    assert shown >= len(ids) * 15 // 17 - 2


def test_a_stop_string_is_cut_off_and_never_shown() -> None:
    vocab = vocabulary("small")
    for text in ("one STOP", "<think>one STOP"):
        made = Reparser(Whole(vocab), vocab, ["STOP"])
        ids = vocab.encode(text)
        before = [delta for token in ids for delta in made.feed([token])]
        assert "S" not in "".join(delta.text for delta in before)
        shown = added([*before, *made.finish("STOP")])
        assert shown.content + shown.reasoning.rstrip() in ("one ", "one")
        assert made.settled == len(ids) - len("STOP")


def test_the_toy_streams() -> None:
    toy = Toy({})

    def parse(ids: Sequence[int], final: bool) -> Answer:
        parsed = toy.parse_response(list(ids), tools=(), prompt_ids=[])
        calls = [ToolCall("call_0", call.name, str(call.arguments)) for call in parsed.tool_calls] if final else []
        return Answer(parsed.content, parsed.reasoning_content or "", tuple(calls))

    ids = toy.encode("<think>é</think>so<call>bash {}</call>")
    assert added(streamed(Reparser(parse, toy), ids, range(len(ids)))) == parse(ids, True)
