"""Grammars of forced tools and structured output: whatever they allow, the parser reads as what was asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from answers_kit import CUTS, RELAXED
from hypothesis import given
from hypothesis import strategies as st

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.answers import WAYS, BodyKind, Format, Thinking, make_parser
from gyre_sdk.harness.proxy.dialects.canonical import Answer, ModelRequest, ToolChoice
from gyre_sdk.harness.proxy.render.grammar import constraint, field_refused
from gyre_sdk.records import Sampling
from gyre_sdk.trainer.units import reproducible

SCHEMA = {
    "type": "object",
    "properties": {"word": {"enum": ["red", "<tool_call>", 'a "b" {']}, "n": {"enum": [0, -7]}},
    "required": ["word", "n"],
}
TOOLS = (
    {"type": "function", "function": {"name": "pick", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "leave"}},
)
STOP = 0x110000
PARAMETERS = {
    "qwen_xml": "<parameter={key}>\n{item}\n</parameter>",
    "glm_xml": "<arg_key>{key}</arg_key>\n<arg_value>{item}</arg_value>",
    "minimax_xml": '<parameter name="{key}">{item}</parameter>',
    "deepseek_xml": '<｜DSML｜parameter name="{key}" string="{text}">{item}</｜DSML｜parameter>',
}
WAY_OF = {form.body: form for form in WAYS.values()}
FORCED = [body for body in BodyKind if body not in (BodyKind.TYPED, BodyKind.LISTED, BodyKind.CHANNELS)]


class Letters:
    """A vocabulary with one token per character, and one that stops."""

    def decode(self, ids: list[int]) -> str:
        return "".join("" if token == STOP else chr(token) for token in ids)


@st.composite
def written(draw: st.DrawFn, tag: dict[str, Any]) -> str:
    """Return a text that a structural tag allows."""

    def write(tag: dict[str, Any]) -> str:
        match tag["type"]:
            case "const_string":
                return str(tag["value"])
            case "any_text":
                text = draw(st.text(st.sampled_from('ab <>/{}\n"'), max_size=9) | st.just("<tool_call>{}</tool_call>"))
                return "" if any(bad in text for bad in tag["excludes"]) else text
            case "regex":
                if tag["pattern"] == "[0-9]{1,3}":
                    return str(draw(st.integers(0, 999)))
                assert tag["pattern"] == r"\n{0,2}"
                return draw(st.sampled_from(["", "\n", "\n\n"]))
            case "tag":
                return tag["begin"] + write(tag["content"]) + tag["end"]
            case "sequence":
                return "".join(write(element) for element in tag["elements"])
            case "or":
                return write(draw(st.sampled_from(tag["elements"])))
            case "optional":
                return write(tag["content"]) if draw(st.booleans()) else ""
            case "tags_with_separator":
                assert tag["at_least_one"]
                most = 1 if tag["stop_after_first"] else 3
                tags = draw(st.lists(st.sampled_from(tag["tags"]), min_size=1, max_size=most))
                return tag["separator"].join(write(item) for item in tags)
            case "json_schema":
                return value(tag)
        raise AssertionError(tag)

    def value(tag: dict[str, Any]) -> str:
        kinds = tag["json_schema"].get("properties", {})
        found = {key: draw(st.sampled_from(kind["enum"])) for key, kind in kinds.items()}
        style = tag.get("style")
        if style is None:
            return json.dumps(found, indent=draw(st.sampled_from([None, 2])))
        kinds_ = {key: "true" if isinstance(item, str) else "false" for key, item in found.items()}
        return "\n".join(PARAMETERS[style].format(key=key, item=item, text=kinds_[key]) for key, item in found.items())

    return write(tag)


def asked(**more: Any) -> ModelRequest:
    return ModelRequest("chat", "policy", (), TOOLS, Sampling(), {}, **more)


def form_of(body: BodyKind) -> Format:
    return replace(WAY_OF[body], stop_ids=frozenset({STOP}))


def grammar(request: ModelRequest, form: Format, thinking: Thinking) -> dict[str, Any]:
    made = constraint(request, form, thinking, 64)
    assert made is not None and made.keys() == {"structural_tag"}
    tag: dict[str, Any] = json.loads(made["structural_tag"])
    assert tag["type"] == "structural_tag"
    return dict(tag["format"])


def parse(text: str, request: ModelRequest, form: Format, thinking: Thinking, cuts: Any) -> Answer:
    prompt = (
        form.turn
        + {Thinking.OPEN: "\n<think>\n", Thinking.FREE: "\n", Thinking.OVER: "\n<think>\n\n</think>\n\n"}[thinking]
    )
    parser = make_parser(
        Letters(),
        format=form,
        prompt_tail=[ord(char) for char in prompt],
        tools=request.tools,
        name="x",
        stops=(),
        choice=request.tool_choice,
        parallel=request.parallel_tool_calls,
    )
    ids = [*map(ord, text), STOP]
    places = [0, *sorted({min(cut, len(ids)) for cut in cuts}), len(ids)]
    for start, end in pairwise(places):
        parser.feed(ids[start:end])
    parser.finish()
    return parser.answer


def fits(call: Any) -> bool:
    arguments = json.loads(call.arguments)
    if call.name == "leave":
        return arguments == {}
    kinds = SCHEMA["properties"]
    return arguments.keys() == kinds.keys() and all(arguments[key] in kinds[key]["enum"] for key in kinds)  # type: ignore[index]


@RELAXED
@given(
    st.data(),
    st.sampled_from(FORCED),
    st.sampled_from(list(Thinking)),
    st.sampled_from([(ToolChoice.REQUIRED, True), (ToolChoice.REQUIRED, False), (ToolChoice.NAMED, True)]),
    CUTS,
)
def test_a_forced_answer_is_calls(
    data: st.DataObject, body: BodyKind, thinking: Thinking, choice: tuple[ToolChoice, bool], cuts: Any
) -> None:
    """At least one call of an allowed tool that fits its schema, and no text; one call where one was asked for."""
    form, forced = form_of(body), "pick" if choice[0] is ToolChoice.NAMED else ""
    request = asked(tool_choice=choice[0], parallel_tool_calls=choice[1], forced_tool=forced)
    text = data.draw(written(grammar(request, form, thinking)))
    answer = parse(text, request, form, thinking, cuts)
    assert answer.tool_calls and all(fits(call) for call in answer.tool_calls)
    assert not answer.content.strip()
    assert len(answer.tool_calls) == 1 or (choice[1] and not forced)
    assert not forced or {call.name for call in answer.tool_calls} == {forced}


@RELAXED
@given(st.data(), st.sampled_from(FORCED), st.sampled_from(list(Thinking)), st.booleans(), CUTS)
def test_an_answer_by_a_schema(data: st.DataObject, body: BodyKind, thinking: Thinking, tools: bool, cuts: Any) -> None:
    """After thinking comes what the schema allows, or a call where tools may be called as well."""
    form = form_of(body)
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    choice = ToolChoice.AUTO if tools else ToolChoice.NONE
    request = asked(structured={"json": schema}, tool_choice=choice)
    text = data.draw(written(grammar(request, form, thinking)))
    answer = parse(text, request, form, thinking, cuts)
    if answer.tool_calls:
        assert tools and all(fits(call) for call in answer.tool_calls)
    else:
        assert json.loads(answer.content)["a"] in ("x", "y")


def test_thinking_leaves_room_for_the_answer() -> None:
    form = form_of(BodyKind.JSON)
    request = asked(tool_choice=ToolChoice.REQUIRED)
    for longest, room in ((1, 1), (64, 32), (4096, 2048)):
        made = constraint(request, form, Thinking.OPEN, longest)
        assert made is not None and f'"max_tokens":{room}' in made["structural_tag"]
    over = constraint(request, form, Thinking.OVER, 64)
    assert over is not None and "think" not in over["structural_tag"]


def test_what_cannot_be_forced_is_refused() -> None:
    for request, form in (
        (asked(tool_choice=ToolChoice.REQUIRED), None),
        (ModelRequest("chat", "m", (), (), Sampling(), {}, tool_choice=ToolChoice.REQUIRED), form_of(BodyKind.JSON)),
        (asked(tool_choice=ToolChoice.REQUIRED), form_of(BodyKind.TYPED)),
        (asked(tool_choice=ToolChoice.REQUIRED), form_of(BodyKind.LISTED)),
        (asked(tool_choice=ToolChoice.REQUIRED), form_of(BodyKind.CHANNELS)),
    ):
        with pytest.raises(ProtocolError, match="tool_choice") as refused:
            constraint(request, form, Thinking.FREE, 64)
        assert (refused.value.status, refused.value.param) == (400, "tool_choice")


def test_what_is_not_known_here_goes_to_the_engine_as_it_is() -> None:
    for given_ in ({"json": {"type": "object"}}, {"grammar": "root ::= 'x'"}, {"json": {}, "whitespace_pattern": " "}):
        assert constraint(asked(structured=given_), None, Thinking.FREE, 64) == given_
    for given_ in ({"grammar": "root ::= 'x'"}, {"json": {}, "whitespace_pattern": " "}):
        assert constraint(asked(structured=given_), form_of(BodyKind.JSON), Thinking.FREE, 64) == given_
    assert constraint(asked(), form_of(BodyKind.JSON), Thinking.FREE, 64) is None


def test_only_refusals_of_the_constraint_name_its_field() -> None:
    forced = asked(tool_choice=ToolChoice.REQUIRED)
    assert field_refused(forced, "Invalid structural tag specification.") == "tool_choice"
    assert field_refused(forced, "temperature must be in [0, 2]") is None
    assert field_refused(asked(), "structured_outputs is not supported") is None
    given_ = ModelRequest("chat", "m", (), (), Sampling(), {"response_format": {}, "text": 1}, structured={"json": {}})
    assert field_refused(given_, "sampling_params.structured_outputs is not supported") == "text"


def test_a_constrained_call_is_not_trained() -> None:
    """The engine samples from the grammar's distribution, which the trainer cannot compute."""
    made = constraint(asked(tool_choice=ToolChoice.REQUIRED), form_of(BodyKind.JSON), Thinking.FREE, 64)
    assert not reproducible(Sampling(extra={"structured_outputs": made}))


@pytest.mark.parametrize("body", [BodyKind.TYPED, BodyKind.LISTED])
def test_a_schema_beside_tools_that_no_grammar_can_hold_is_refused_by_its_own_field(body: BodyKind) -> None:
    tools = [{"type": "function", "function": {"name": "leave"}}]
    wanted = ModelRequest(
        "chat",
        "m",
        (),
        tuple(tools),
        Sampling(),
        {"response_format": {"type": "json_object"}},
        structured={"json": SCHEMA},
    )
    with pytest.raises(ProtocolError, match="set tool_choice to none") as refused:
        constraint(wanted, form_of(body), Thinking.FREE, 64)
    assert (refused.value.status, refused.value.param) == (400, "response_format")
    assert constraint(replace(wanted, tool_choice=ToolChoice.NONE), form_of(body), Thinking.FREE, 64) is not None
