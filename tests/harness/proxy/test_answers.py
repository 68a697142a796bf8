"""Answers parsed while they are sampled: every way to cut the ids gives the same answer, the one that is right."""

from __future__ import annotations

import json
from typing import Any

import pytest
from answers_kit import (
    CUTS,
    RELAXED,
    TOOLS,
    added,
    answers,
    json_blocks,
    parser,
    renderer,
    soup,
    streamed,
    vocabulary,
    xml_blocks,
)
from hypothesis import given
from hypothesis import strategies as st

from gyre_sdk.harness.proxy.answers import format_of
from gyre_sdk.harness.proxy.dialects.canonical import Answer, Part, ToolCall, ToolChoice, same_arguments

CALL = '<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls"}}\n</tool_call>'
JSON_ANSWERS, XML_ANSWERS = answers(json_blocks()), answers(xml_blocks())


@pytest.fixture(params=["small", "qwen3"])
def name(request: pytest.FixtureRequest) -> str:
    vocabulary(request.param)
    return request.param


def read(text: str, family: str = "qwen3", *, stop: str | None = None, every: bool = True, **options: Any) -> Answer:
    vocab = vocabulary("small")
    ids = vocab.encode(text)
    made = parser(vocab, family, **options)
    deltas = streamed(made, ids, range(len(ids)) if every else (), stop)
    assert added(deltas) == made.answer
    return made.answer


def calls(*arguments: str) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(f"call_c{place}", "bash", text) for place, text in enumerate(arguments))


@RELAXED
@given(case=st.data(), cuts=CUTS)
@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_a_stream_says_what_the_renderer_reads_in_the_whole(name: str, family: str, case: Any, cuts: list[int]) -> None:
    prompt, text = case.draw(XML_ANSWERS if family == "qwen3.5" else JSON_ANSWERS)
    vocab = vocabulary(name)
    ids = vocab.encode(text)
    made = parser(vocab, family, prompt=prompt)
    assert added(streamed(made, ids, cuts)) == made.answer
    whole = renderer(name, family).parse_response(ids, tools=TOOLS, prompt_ids=vocab.encode(prompt))
    assert made.answer.content == whole.content
    assert made.answer.reasoning == (whole.reasoning_content or "").strip()
    assert [call.name for call in made.answer.tool_calls] == [call.name for call in whole.tool_calls]
    for ours, theirs in zip(made.answer.tool_calls, whole.tool_calls, strict=True):
        plain = theirs.arguments if isinstance(theirs.arguments, str) else json.dumps(theirs.arguments)
        assert same_arguments(ours.arguments) == same_arguments(plain)
    assert [call.id for call in made.answer.tool_calls] == [f"call_c{at}" for at in range(len(whole.tool_calls))]


@RELAXED
@given(
    text=soup,
    cuts=CUTS,
    opened=st.booleans(),
    stops=st.lists(st.sampled_from(["STOP", "ls", "}}", "😀", "aab"]), max_size=2),
    stop=st.sampled_from([None, "STOP", "ls", "}}"]),
    choice=st.sampled_from(ToolChoice),
    parallel=st.booleans(),
)
@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_no_cut_changes_an_answer_however_broken(
    name: str, family: str, text: str, cuts: list[int], opened: bool, stop: str | None, stops: list[str], **more: Any
) -> None:
    vocab = vocabulary(name)
    ids = vocab.encode(text)
    options = {"prompt": "<|im_start|>assistant\n" + "<think>" * opened, "stops": stops, **more}
    at_once, cut = parser(vocab, family, **options), parser(vocab, family, **options)
    assert added(streamed(at_once, ids, (), stop)) == at_once.answer
    assert added(streamed(cut, ids, cuts, stop)) == cut.answer == at_once.answer
    assert cut.settled == at_once.settled
    if more["choice"] is ToolChoice.NONE:
        assert not cut.answer.tool_calls
    assert len(cut.answer.tool_calls) <= 1 or more["parallel"]


@RELAXED
@given(text=soup, opened=st.booleans())
def test_without_calls_all_text_is_kept(text: str, opened: bool) -> None:
    """Nothing but white space at the ends and the tags of thinking is left out."""
    vocab = vocabulary("small")
    made = parser(vocab, choice=ToolChoice.NONE, prompt="<|im_start|>assistant\n" + "<think>" * opened)
    streamed(made, vocab.encode(text), ())
    shown = vocab.decode(vocab.encode(text))
    head, closed, tail = shown.partition("</think>")
    if not opened and not head.lstrip().startswith("<think>"):
        expected = Answer(shown.strip(), "")
    else:
        head = head if opened else head.lstrip()
        expected = Answer(tail.strip() if closed else "", head.replace("<think>", "").strip())
    assert made.answer == expected


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ("Run command mkdir -p test/{test1,test2", "Run command mkdir -p test/{test1,test2", ()),
        (f"one\n{CALL}\n{CALL}\ntwo\n", "one\ntwo", ('{"cmd": "ls"}', '{"cmd": "ls"}')),
        ('<tool_call>{"name":"bash"}</tool_call>', "", ("",)),
        ('<tool_call>{"name":"bash","arguments":""}</tool_call>', "", ("",)),
        ('<tool_call>{"name":"bash","arguments":null}</tool_call>', "", ("null",)),
        ('<tool_call>{"name":"bash","arguments":{"a" : 1.0 }}</tool_call>', "", ('{"a" : 1.0 }',)),
        (r'<tool_call>{"name":"bash","arguments":"{\"a\":\"\u00e9\ud83d\ude00\"}"}</tool_call>', "", ('{"a":"é😀"}',)),
        (r'<tool_call>{"name":"bash","arguments":"\ud83d"}</tool_call>', "", ("\ufffd",)),
        (r'<tool_call>{"name":"bash","arguments":{"a":"\"}"}}</tool_call>', "", (r'{"a":"\"}"}',)),
        (r'<tool_call>{"name":"bash","arguments":{"a":"\\"}}</tool_call>', "", (r'{"a":"\\"}',)),
        ('<tool_call>{"arguments":{"a":1},"name":"bash"}</tool_call>', "", ('{"a":1}',)),
        ('<tool_call>{"name":"bash","arguments":{"a":}}</tool_call>', "", ('{"a":}',)),
        ('<tool_call>{"name":"bash","arguments":{"a":"b" c"}}</tool_call>', "", ('{"a":"b" c"}}',)),
        ('<tool_call>{"name":"bash","arguments":{"a":1}</tool_call>', "", ('{"a":1}',)),
        ('<tool_call>{"name":"bash","arguments":{"a":1}}}</tool_call>', "", ('{"a":1}',)),
        ('<tool_call>{"name":"bash","arguments":{"a":1},"b"]}</tool_call>', "", ('{"a":1},"b"]}',)),
        ('<tool_call>{"name":"bash","arguments":{"a":"be', "", ('{"a":"be',)),
        ('<tool_call>{"name":"bash","arguments":{"a":"be<|im_end|>', "", ('{"a":"be',)),
        ('<tool_call>{"name":"bash", "argu', '<tool_call>{"name":"bash", "argu', ()),
        ('<tool_call>{"name":""}</tool_call>', '<tool_call>{"name":""}</tool_call>', ()),
        ('<tool_call>{"arguments":{}}</tool_call>', '<tool_call>{"arguments":{}}</tool_call>', ()),
        ("<tool_call>[1]</tool_call> x", "<tool_call>[1]</tool_call> x", ()),
        (f"a <tool_call>ls</tool_call> b {CALL}", "a <tool_call>ls</tool_call> b", ('{"cmd": "ls"}',)),
        (f"<tool_call>no {CALL}", "<tool_call>no", ('{"cmd": "ls"}',)),
        ("a</tool_call>b</think>", "a</tool_call>b</think>", ()),
    ],
)
def test_what_is_a_call_and_what_is_text(text: str, content: str, arguments: tuple[str, ...]) -> None:
    assert read(text) == read(text, every=False) == Answer(content, "", calls(*arguments))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>a<tool_call>b</tool_call></think>c", Answer("c", "a<tool_call>b</tool_call>")),
        (f"<think>a\n{CALL}", Answer("", "a", calls('{"cmd": "ls"}'))),
        ("<think>a<tool_call>b", Answer("<tool_call>b", "a")),
        ("\n<think>a<think>b</think>c<think>d</think>", Answer("c<think>d</think>", "ab")),
        ("x<think>a</think>", Answer("x<think>a</think>", "")),
        ("<think>\n a \n", Answer("", "a")),
        ("<thi", Answer("<thi", "")),
    ],
)
def test_where_reasoning_ends(text: str, answer: Answer) -> None:
    assert read(text) == read(text, every=False) == answer


XML = "<tool_call>\n<function=bash>\n{}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        (XML.format(""), "", ("{}",)),
        (XML.format("<parameter=cmd>\n 5\n</parameter>\n<parameter=n>5</parameter>"), "", ('{"cmd": "5", "n": 5}',)),
        (XML.format("<parameter=n>NaN</parameter><parameter=any>[1]</parameter>"), "", ('{"n": "NaN", "any": [1]}',)),
        ("<tool_call><function=bash><parameter=cmd>\nls <a\n", "", ('{"cmd": "ls <a',)),
        ("<tool_call><function=bash><parameter=cmd>\nls</tool_call>", "", ('{"cmd": "ls',)),
        ("<tool_call><function=bash><parameter=n>12", "", ('{"n": 12',)),
        ("<tool_call><function=bash>\n<parameter=cmd>ls</parameter></tool_call>", "", ('{"cmd": "ls"}',)),
        ("<tool_call><function=bash>\n<para", "<tool_call><function=bash>\n<para", ()),
        ("<tool_call>\n<func>x</tool_call>", "<tool_call>\n<func>x</tool_call>", ()),
    ],
)
def test_calls_written_in_tags(text: str, content: str, arguments: tuple[str, ...]) -> None:
    assert read(text, "qwen3.5") == read(text, "qwen3.5", every=False) == Answer(content, "", calls(*arguments))


def test_arguments_arrive_while_they_are_sampled() -> None:
    """The id and the name come first and once; no part of the arguments waits for the call's end."""
    vocab = vocabulary("small")
    for family, text in (("qwen3", CALL), ("qwen3.5", XML.format("<parameter=cmd>\nls -la\n</parameter>\n"))):
        made = parser(vocab, family)
        ids = vocab.encode(text[: text.index("ls") + 2])
        deltas = [delta for token in ids for delta in made.feed([token])]
        assert [delta.part for delta in deltas].index(Part.CALL) == 0
        assert deltas[0].call == ToolCall("call_c0", "bash")
        assert added(deltas).tool_calls[0].arguments == '{"cmd": "ls'


def test_an_abort_keeps_what_was_sampled() -> None:
    """vllm#47933, #22197: an answer cut off anywhere shows all that is known of it."""
    vocab = vocabulary("small")
    ids = vocab.encode("<think>so</think>now " + CALL)
    for end in range(len(ids)):
        made = parser(vocab)
        shown = added(streamed(made, ids[:end], range(end)))
        assert shown == made.answer
        if end >= len(vocab.encode("<think>so</think>now")):
            assert (shown.reasoning, shown.content[:3]) == ("so", "now")


@pytest.mark.parametrize("interval", [1, 2, 3, 7])
def test_the_last_reasoning_tokens_come_with_any_interval(interval: int) -> None:
    """vllm#41691: reasoning tokens that share a chunk with the closing tag."""
    vocab = vocabulary("small")
    ids = vocab.encode("<think>abcdefgh</think>done")
    made = parser(vocab)
    deltas = streamed(made, ids, range(0, len(ids), interval))
    assert added(deltas) == Answer("done", "abcdefgh")


def test_later_calls_are_left_out_when_not_parallel() -> None:
    assert read(f"{CALL}\n{CALL}\nend", parallel=False) == Answer("end", "", calls('{"cmd": "ls"}'))
    assert read(CALL, choice=ToolChoice.NONE) == Answer(CALL, "")


def test_tags_made_of_plain_tokens_are_found() -> None:
    vocab = vocabulary("small")
    ids = [token for letter in f"<think>a</think>b{CALL}" for token in vocab.encode(letter)]
    made = parser(vocab)
    assert added(streamed(made, ids, range(len(ids)))) == Answer("b", "a", calls('{"cmd": "ls"}'))


@pytest.mark.parametrize(
    ("prompt", "thinking"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\n<think>" + "x" * 300 + "<|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n" + "y" * 300, True),
        ("<think>", True),
        ("", False),
    ],
)
def test_the_prompt_opens_thinking(prompt: str, thinking: bool) -> None:
    assert read("a</think>b", prompt=prompt) == (Answer("b", "a") if thinking else Answer("a</think>b", ""))


def test_families_without_a_grammar_have_no_format() -> None:
    assert format_of("gemma4", vocabulary("small")) is None
