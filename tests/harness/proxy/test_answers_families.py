"""Every family's tool calls stream: as its renderer reads the whole answer, and the same however the ids are cut."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from answers_kit import (
    CUTS,
    TAGS,
    TOOLS,
    Vocabulary,
    added,
    arguments,
    parser,
    plain,
    renderer,
    streamed,
    vocabulary,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from renderers.parsing import parse_gpt_oss

from gyre_sdk.harness.proxy.answers import format_of, make_parser, thinking_after
from gyre_sdk.harness.proxy.answers.formats import WAYS, Format, Thinking
from gyre_sdk.harness.proxy.dialects.canonical import Answer, Part, ToolCall, ToolChoice, same_arguments
from gyre_sdk.harness.proxy.render.formats import AnswerFormat

SOME = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
FAMILIES = {
    "glm-4.5": "glm",
    "glm-5": "glm",
    "deepseek-v3": "deepseek",
    "deepseek-r1": "deepseek",
    "deepseek-v4": "dsml",
    "kimi-k2": "kimi",
    "kimi-k2.5": "kimi",
    "minimax-m2": "minimax",
    "llama-3": "llama",
}
WRAPS = {
    "deepseek": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "dsml": ("\n\n<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>"),
    "kimi": ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "minimax": ("\n<minimax:tool_call>\n", "\n</minimax:tool_call>"),
}
MARKS = ("<", "｜", "[", "]", "`", *TAGS)


def keyed(way: str, name: str, value: dict[str, Any]) -> str:
    """A call whose parameters stand in tags of their own."""
    shown = {key: item if isinstance(item, str) else json.dumps(item) for key, item in value.items()}
    if way == "glm":
        return (
            f"<tool_call>{name}\n"
            + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in shown.items())
            + "</tool_call>"
        )
    if way == "minimax":
        inner = "".join(f'<parameter name="{key}">{text}</parameter>\n' for key, text in shown.items())
        return f'<invoke name="{name}">\n{inner}</invoke>'
    kinds = {key: "true" if isinstance(item, str) else "false" for key, item in value.items()}
    inner = "\n".join(
        f'<｜DSML｜parameter name="{key}" string="{kinds[key]}">{text}</｜DSML｜parameter>'
        for key, text in shown.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{inner}\n</｜DSML｜invoke>'


def written(way: str, name: str, value: dict[str, Any], at: int, **style: Any) -> str:
    """A call as a family writes it."""
    text = json.dumps(value, **style)
    match way:
        case "glm" | "minimax" | "dsml":
            return keyed(way, name, value)
        case "deepseek":
            return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>"
        case "kimi":
            head = f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>"
            return f"{head}{text}<|tool_call_end|>"
        case "llama":
            return json.dumps({"name": name, "parameters": value}, **style)
        case "mistral":
            return f"[TOOL_CALLS]{name}[ARGS]{text}"
    raise AssertionError(way)


@st.composite
def answers(draw: Any, way: str, opened: bool | None = None) -> tuple[bool, str]:
    """Whether the prompt opened thinking, and a well-formed answer."""
    clean = plain.filter(lambda text: not any(mark in text for mark in (*MARKS, "{")))
    thinks = WAYS[way].think is not None
    opened = (draw(st.booleans()) if opened is None else opened) and thinks
    text = f"{'' if opened else '<think>'}{draw(clean)}</think>" if thinks else ""
    values = arguments.filter(lambda value: not any(mark in json.dumps(value) for mark in MARKS[:-4]))
    calls = [draw(values) for _ in range(draw(st.integers(0, 1 if way == "llama" else 3)))]
    style = {"ensure_ascii": draw(st.booleans()), "indent": draw(st.sampled_from([None, 1]))}
    blocks = [written(way, "bash", value, at, **style) for at, value in enumerate(calls)]
    if way != "llama" or not calls:
        text += draw(clean)
    if blocks:
        before, after = WRAPS.get(way, ("", ""))
        text += before + "\n".join(blocks) + after
    return opened, text


def prompt_of(form: Format, opened: bool) -> str:
    return form.turn + "\n" * (form.turn == "]~b]ai") + "<think>\n" * opened


@SOME
@given(case=st.data(), cuts=CUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stream_says_what_the_renderer_reads_in_the_whole(family: str, case: Any, cuts: list[int]) -> None:
    vocab = vocabulary("every")
    form = format_of(family, vocab)
    assert form is not None and form.stop_ids
    opened, text = case.draw(answers(FAMILIES[family], True if family == "deepseek-v4" else None))
    ids = [*vocab.encode(text), *case.draw(st.sampled_from([[], [min(form.stop_ids)]]))]
    prompt = prompt_of(form, opened)
    made = parser(vocab, family, prompt=prompt)
    assert added(streamed(made, ids, cuts)) == made.answer
    whole = renderer("every", family).parse_response(ids, tools=TOOLS, prompt_ids=vocab.encode(prompt))
    assert made.answer.content == whole.content.strip()
    assert made.answer.reasoning == (whole.reasoning_content or "").strip()
    theirs = [call for call in whole.tool_calls if str(call.status) in ("ok", "invalid_json")]
    assert [call.name for call in made.answer.tool_calls] == [call.name for call in theirs]
    for ours, call in zip(made.answer.tool_calls, theirs, strict=True):
        value = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)
        assert same_arguments(ours.arguments) == same_arguments(value)


@SOME
@given(case=st.data(), cuts=CUTS)
@pytest.mark.parametrize("way", ["deepseek", "mistral", "llama"])
def test_a_stream_says_what_the_own_template_reads_in_the_whole(way: str, case: Any, cuts: list[int]) -> None:
    vocab = vocabulary("every")
    opened, text = case.draw(answers(way))
    made = way_parser(vocab, way, prompt=prompt_of(WAYS[way], opened))
    assert added(streamed(made, vocab.encode(text), cuts)) == made.answer
    whole = AnswerFormat(WAYS[way].think, way).read(text, TOOLS, thinking=opened)
    assert made.answer.content == whole.content.strip()
    assert made.answer.reasoning == (whole.reasoning_content or "").strip()
    assert [(call.name, call.arguments) for call in made.answer.tool_calls] == [
        (call.name, call.arguments) for call in whole.tool_calls
    ]


def way_parser(vocab: Vocabulary, way: str, *, prompt: str = "", **options: Any) -> Any:
    given_ = {"tools": TOOLS, "name": "c", "stops": (), "choice": ToolChoice.AUTO, "parallel": True, **options}
    return make_parser(vocab, format=WAYS[way], prompt_tail=vocab.encode(prompt), **given_)


PIECES = {
    "glm": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "deepseek": (*WRAPS["deepseek"], "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "function", "```", "```json\n"),
    "dsml": (*WRAPS["dsml"], '<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>", '<｜DSML｜parameter name="', '" string="true">', '" string="false">', "</｜DSML｜parameter>"),
    "kimi": (*WRAPS["kimi"], "<|tool_call_begin|>", "<|tool_call_end|>", "functions.", ":0", "<|tool_call_argument_begin|>"),
    "minimax": (*WRAPS["minimax"], '<invoke name="', '">', "</invoke>", '<parameter name="', "</parameter>"),
    "llama": ("<|python_tag|>", '{"name": "bash"', ', "parameters": ', ";", ","),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", '{"name": "bash"', ', "arguments": ', ","),
}  # fmt: skip
LETTERS = [
    "bash",
    "cmd",
    '{"cmd": "ls"}',
    '"a"',
    "{",
    "}",
    "\n",
    " ",
    "x",
    "12",
    "STOP",
    "ST",
    "<",
    "é",
    "`",
    "[",
    "</",
]


@SOME
@given(data=st.data(), cuts=CUTS, choice=st.sampled_from(ToolChoice), parallel=st.booleans(), tooled=st.booleans())
@pytest.mark.parametrize("way", PIECES)
def test_no_cut_changes_an_answer_however_broken(
    way: str, data: Any, cuts: list[int], choice: ToolChoice, parallel: bool, tooled: bool
) -> None:
    vocab = vocabulary("every")
    whole = [written(way, "bash", {"cmd": "ls"}, 0)]
    text = "".join(data.draw(st.lists(st.sampled_from([*PIECES[way], *TAGS[:2], *LETTERS, *whole]), max_size=14)))
    stop = data.draw(st.sampled_from([None, "STOP"]))
    options = {
        "prompt": prompt_of(WAYS[way], data.draw(st.booleans())),
        "stops": data.draw(st.sampled_from([(), ("STOP",)])),
        "choice": choice,
        "parallel": parallel,
        "tools": TOOLS if tooled else (),
    }
    ids = vocab.encode(text)
    at_once, cut = way_parser(vocab, way, **options), way_parser(vocab, way, **options)
    assert added(streamed(at_once, ids, (), stop)) == at_once.answer
    assert added(streamed(cut, ids, cuts, stop)) == cut.answer == at_once.answer
    one_by_one = way_parser(vocab, way, **options)
    assert added(streamed(one_by_one, ids, range(len(ids)), stop)) == at_once.answer
    if choice is ToolChoice.NONE:
        assert not cut.answer.tool_calls
    assert len(cut.answer.tool_calls) <= 1 or parallel


@pytest.mark.parametrize("way", [*PIECES, "hermes", "xml"])
def test_arguments_arrive_while_they_are_sampled(way: str) -> None:
    """The id and the name come first and once; no part of the arguments waits for the call's end."""
    vocab = vocabulary("every")
    if way in ("hermes", "xml"):
        text = {
            "hermes": '<tool_call>{"name": "bash", "arguments": {"cmd": "date -u',
            "xml": "<tool_call><function=bash><parameter=cmd>date -u",
        }[way]
    else:
        text = WRAPS.get(way, ("",))[0] + written(way, "bash", {"cmd": "date -u"}, 0)
    ids = vocab.encode(text[: text.index("date") + 4])
    made = way_parser(vocab, way)
    deltas = [delta for token in ids for delta in made.feed([token])]
    assert deltas[0].part is Part.CALL and deltas[0].call == ToolCall("call_c0", "bash")
    assert len(deltas) > 3
    assert added(deltas).tool_calls[0].arguments == '{"cmd": "date'


def calls(*given_: str) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(f"call_c{place}", "bash", text) for place, text in enumerate(given_))


SEP, BEGIN, END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
KIMI, ARGUMENTS, KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


@pytest.mark.parametrize(
    ("way", "text", "content", "arguments"),
    [
        ("glm", "so<tool_call>bash</tool_call>", "so", ("{}",)),
        ("glm", "<tool_call>bash\n<arg_key>n</arg_key><arg_value>5</arg_value></tool_call>x", "x", ('{"n": 5}',)),
        ("glm", "<tool_call>ba sh</tool_call>", "<tool_call>ba sh</tool_call>", ()),
        ("glm", "<tool_call>bash\n<arg_key>cmd</arg_key><arg_value>ls", "", ('{"cmd": "ls',)),
        ("glm", "<tool_call>bash", "<tool_call>bash", ()),
        ("deepseek", f"{BEGIN}bash{SEP}{{}}{END}{BEGIN}bash{SEP}{{\n}}{END}", "", ("{}", "{\n}")),
        ("deepseek", f"{BEGIN}function{SEP}bash\n```json\n{{}}\n```{END}", "", ("{}",)),
        ("deepseek", f"{BEGIN}function{SEP}bash\n{{}}{END} end", "end", ("{}",)),
        ("deepseek", f"{BEGIN}function{SEP}bash{END}", "", ("",)),
        ("deepseek", f'{BEGIN}function{SEP}bash\n```json\n{{"a": "``` b', "", ('{"a": "``` b',)),
        ("deepseek", f"{BEGIN}function{END}", f"{BEGIN}function{END}", ()),
        ("kimi", f"{KIMI}functions.bash:3{ARGUMENTS}{{}}{KIMI_END}", "", ("{}",)),
        ("kimi", f"{KIMI}bash{ARGUMENTS}{{{KIMI_END}", "", ("{",)),
        ("kimi", f"{KIMI}{ARGUMENTS}{{}}{KIMI_END}", f"{KIMI}{ARGUMENTS}{{}}{KIMI_END}", ()),
        ("minimax", '<invoke name="bash"></invoke>', "", ("{}",)),
        ("dsml", '<｜DSML｜invoke name="bash"><｜DSML｜parameter name="cmd" string="true"> 5\n</｜DSML｜parameter></｜DSML｜invoke>', "", ('{"cmd": " 5\\n"}',)),
        ("llama", '{"name": "bash", "parameters": {}}', "", ("{}",)),
        ("llama", '{"name": "bash"}', "", ("",)),
        ("llama", '{"name": "bash", "parameters": {}}; {"name": "bash", "parameters": {"a": 1}}', "", ("{}", '{"a": 1}')),
        ("llama", '{"name": "bash", "parameters": {}} and so on', "and so on", ("{}",)),
        ("llama", '<|python_tag|>{"name": "bash", "parameters": {}}', "", ("{}",)),
        ("llama", "<|python_tag|>print(1)", "<|python_tag|>print(1)", ()),
        ("llama", '{"city": "Rome"}', '{"city": "Rome"}', ()),
        ("llama", 'so {"name": "bash", "parameters": {}}', 'so {"name": "bash", "parameters": {}}', ()),
        ("llama", '{"name": "bash", "parameters": {"a": "be', "", ('{"a": "be',)),
        ("mistral", '[TOOL_CALLS][{"name": "bash", "arguments": {}}, {"name": "bash", "arguments": {"a": 1}}]', "", ("{}", '{"a": 1}')),
        ("mistral", 'so[TOOL_CALLS] [{"name": "bash", "arguments": {}}] end', "so\nend", ("{}",)),
        ("mistral", "[TOOL_CALLS]bash[ARGS]{}[TOOL_CALLS]bash[CALL_ID]a1[ARGS]{\"a\": 1} end", "end", ("{}", '{"a": 1}')),
        ("mistral", "[TOOL_CALLS]no call", "[TOOL_CALLS]no call", ()),
        ("mistral", "[TOOL_CALLS][1]", "[TOOL_CALLS][1]", ()),
    ],
)  # fmt: skip
def test_what_is_a_call_and_what_is_text(way: str, text: str, content: str, arguments: tuple[str, ...]) -> None:
    vocab = vocabulary("every")
    ids = vocab.encode(text)
    for cuts in ((), range(len(ids))):
        made = way_parser(vocab, way)
        assert added(streamed(made, ids, cuts)) == made.answer == Answer(content, "", calls(*arguments))


def test_an_answer_in_json_is_text_where_there_are_no_tools() -> None:
    vocab = vocabulary("every")
    text = '{"name": "bash", "parameters": {}}'
    made = way_parser(vocab, "llama", tools=())
    ids = vocab.encode(text)
    assert added([delta for token in ids for delta in made.feed([token])]) == Answer(text)


@pytest.mark.parametrize(
    ("family", "prompt", "thinking"),
    [
        ("deepseek-r1", "<｜Assistant｜><think>\n", Thinking.OPEN),
        ("deepseek-r1", "<｜Assistant｜>so<｜tool▁outputs▁end｜><think>\n", Thinking.OPEN),
        ("deepseek-v3", "<｜Assistant｜>so<｜tool▁outputs▁end｜>", Thinking.FREE),
        ("deepseek-v4", "<｜Assistant｜></think>", Thinking.OVER),
        ("glm-5", "<|assistant|><think>", Thinking.OPEN),
        ("glm-4.5", "<|assistant|>\n<think></think>", Thinking.OVER),
        ("llama-3", "<|start_header_id|>assistant<|end_header_id|>\n\n", Thinking.OVER),
    ],
)
def test_the_prompt_tells_where_an_answer_begins(family: str, prompt: str, thinking: Thinking) -> None:
    vocab = vocabulary("every")
    form = format_of(family, vocab)
    assert form is not None
    assert thinking_after(vocab, form, vocab.encode(prompt)) is thinking


@pytest.mark.parametrize("way", PIECES)
def test_work_is_linear(way: str) -> None:
    vocab = Vocabulary(vocabulary("every").tokenizer)
    for text in (WRAPS.get(way, ("",))[0] + written(way, "bash", {"cmd": "ls"}, 0), PIECES[way][-1] + " "):
        ids = (vocab.encode(text) * 4_000)[:4_000]
        made = way_parser(vocab, way)
        vocab.decoded = 0
        deltas = streamed(made, ids, range(len(ids)))
        assert vocab.decoded <= 24 * len(ids)
        assert added(deltas) == made.answer


# -- channels ----------------------------------------------------------------------------------------------------------

HARMONY = ("return", "call", "start", "end", "channel", "message", "constrain")
CHANNELS = (
    "<|start|>",
    "assistant",
    "<|channel|>",
    "analysis",
    "final",
    "commentary",
    "<|message|>",
    "<|end|>",
    "<|call|>",
)


@st.composite
def channels(draw: Any) -> str:
    """A well-formed answer in channels, without what the prompt holds of it."""
    clean = plain.filter(lambda text: not any(mark in text for mark in MARKS))
    said = [f"<|channel|>analysis<|message|>{draw(clean)}<|end|>"] if draw(st.booleans()) else []
    for value in draw(st.lists(arguments, max_size=2)):
        style = {"ensure_ascii": True, "indent": draw(st.sampled_from([None, 1]))}
        head = "<|channel|>commentary to=functions.bash <|constrain|>json<|message|>"
        said.append(f"{head}{json.dumps(value, **style)}<|call|>")
    if draw(st.booleans()) or not said:
        said.append(f"<|channel|>final<|message|>{draw(clean)}")
    return "<|start|>assistant".join(said)


@SOME
@given(text=channels().filter(lambda text: "<|" not in re.sub(r"<[|][a-z]+[|]>", "", text)), cuts=CUTS)
def test_channels_say_what_the_renderer_reads_in_the_whole(text: str, cuts: list[int]) -> None:
    vocab = vocabulary("every")
    ids, prompt = vocab.encode(text), "<|start|>assistant"
    made = parser(vocab, "gpt-oss", prompt=prompt)
    assert added(streamed(made, ids, cuts)) == made.answer
    marks = {f"{mark}_id": vocab.encode(f"<|{mark}|>")[0] for mark in HARMONY}
    whole = parse_gpt_oss(vocab, [*vocab.encode(prompt), *ids], **marks)
    assert made.answer.content == whole.content.strip()
    assert made.answer.reasoning == (whole.reasoning_content or "").strip()
    theirs = [call for call in whole.tool_calls if str(call.status) == "ok"]
    assert [(call.name, same_arguments(call.arguments)) for call in made.answer.tool_calls] == [
        (call.name, same_arguments(json.dumps(call.arguments))) for call in theirs
    ]


@SOME
@given(
    text=st.lists(st.sampled_from([*CHANNELS, *CHANNELS, " to=functions.bash", *LETTERS]), max_size=14).map("".join),
    cuts=CUTS,
    choice=st.sampled_from(ToolChoice),
    parallel=st.booleans(),
)
def test_no_cut_changes_channels_however_broken(text: str, cuts: list[int], choice: ToolChoice, parallel: bool) -> None:
    vocab = vocabulary("every")
    ids = vocab.encode(text)
    made = [way_parser(vocab, "harmony", choice=choice, parallel=parallel) for _ in range(3)]
    for one, places in zip(made, ((), cuts, range(len(ids))), strict=True):
        assert added(streamed(one, ids, places)) == one.answer == made[0].answer
    assert len(made[0].answer.tool_calls) <= 1 or parallel
    assert not made[0].answer.tool_calls or choice is not ToolChoice.NONE


def test_channels_arrive_while_they_are_sampled() -> None:
    vocab = vocabulary("every")
    made = way_parser(vocab, "harmony")
    text = "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>commentary to=functions.bash<|message|>"
    deltas = [delta for token in vocab.encode(text + '{"cmd": "da') for delta in made.feed([token])]
    assert added(deltas) == Answer("", "so", (ToolCall("call_c0", "bash", '{"cmd": "da'),))
    free = way_parser(vocab, "harmony")
    assert added([delta for token in vocab.encode("no channel") for delta in free.feed([token])]) == Answer(
        "no channel"
    )
