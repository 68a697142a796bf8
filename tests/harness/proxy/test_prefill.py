"""Answers that continue a text: what the model is shown, what the agent gets, and what the next request continues."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from protocols_kit import read, send
from proxy_engine import Finish, ScriptedEngine, Tokens, say
from proxy_kit import running
from proxy_toy import toy_template
from test_fidelity_cases import check_path, scripted
from vocabulary_kit import vocabulary

from gyre_sdk.errors import ProtocolError, RenderError
from gyre_sdk.harness.proxy.answers import WAYS, make_parser
from gyre_sdk.harness.proxy.dialects.canonical import Answer, Message, ToolCall, ToolChoice
from gyre_sdk.harness.proxy.dialects.chat import ChatCompletions
from gyre_sdk.harness.proxy.dialects.messages import AnthropicMessages, parse_count
from gyre_sdk.harness.proxy.render import Template, load_template
from gyre_sdk.records import ForkReason

PIECES = {"hi": 300, "wa": 301, "ter": 302, "water": 303, "go": 304, "fall": 305}
USER, GO = {"role": "user", "content": "hi"}, {"role": "user", "content": "go"}
WA, WATER = {"role": "assistant", "content": "wa"}, {"role": "assistant", "content": "water"}
TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}
CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}
ASKED = [257, 300, 260, 10, 258]
"""`hi` and the opening of the model's turn."""
BOTH = pytest.mark.parametrize("protocol", ["messages", "chat"])
STREAMS = pytest.mark.parametrize("stream", [False, True])


def body_of(protocol: str, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    begun = CONTINUE if protocol == "chat" and messages[-1]["role"] == "assistant" else {}
    return {"model": "policy", "max_tokens": 16, "messages": list(messages), **begun, **more}


@STREAMS
@BOTH
def test_an_answer_continues_the_text(model: Path, tmp_path: Path, protocol: str, stream: bool) -> None:
    """The text is prompt, the answer the rest; sent back as one message, they are the recorded answer."""
    with scripted(model, tmp_path, PIECES, say(302, 260), say(305, 260)) as (proxy, engine):
        access = proxy.run()
        seen = read(protocol, send(proxy, access, protocol, body_of(protocol, USER, WA, stream=stream)))
        assert (seen.text, seen.finish, seen.error) == ("ter", "stop", None)
        send(proxy, access, protocol, body_of(protocol, USER, WATER, GO)).raise_for_status()
        calls = proxy.calls()
        with proxy.journal() as journal:
            exchanges = list(journal.exchanges(access["run"]))
    check_path(calls, engine)
    assert calls[0].prompt_ids == [*ASKED, 301] and calls[0].sampled_ids == [302, 260]
    assert calls[1].prompt_ids == [*ASKED, 301, 302, 260, 10, 257, 304, 260, 10, 258]
    assert (calls[1].parent, calls[1].fork_reason) == (calls[0].call, None)
    assert exchanges[0].answer is not None and exchanges[0].answer["content"] == "water"
    assert [item["role"] for item in exchanges[0].messages] == ["user"]
    if not stream:
        assert seen.prompt_tokens == len(calls[0].prompt_ids)


BLOCKS: list[list[dict[str, Any]]] = [
    [WA, {"role": "assistant", "content": [{"type": "text", "text": "ter"}]}],
    [{"role": "assistant", "content": [{"type": "text", "text": part} for part in ("wa", "ter")]}],
]


@pytest.mark.parametrize("sent", BLOCKS)
def test_blocks_are_the_same_answer(model: Path, tmp_path: Path, sent: list[dict[str, Any]]) -> None:
    """An agent that adds the answer behind its own text, as a block or a message, continues it too; also later on."""
    with ScriptedEngine(lambda request, number: say(302, 260)) as engine:
        for restarted in (False, True):
            with running(model, tmp_path / "store.db", engine.url, template=toy_template(PIECES)) as proxy:
                access = access if restarted else proxy.run()  # noqa: F821
                if not restarted:
                    send(proxy, access, "messages", body_of("messages", USER, WA)).raise_for_status()
                send(proxy, access, "messages", body_of("messages", USER, *sent, GO)).raise_for_status()
                calls = proxy.calls()
        assert [call.parent for call in calls] == [None, calls[0].call, calls[0].call]
        assert [call.fork_reason for call in calls] == [None, None, None]


@BOTH
def test_stop_strings_and_retries(model: Path, tmp_path: Path, protocol: str) -> None:
    """The text before a stop string is the answer; a repeated request gets it again, also from the store."""
    stops = {"messages": "stop_sequences", "chat": "stop"}[protocol]
    body = body_of(protocol, USER, WA, **{stops: ["fall"]})
    play = [Tokens([302, 305]), Finish("stop", "fall")]
    retry = {"x-stainless-retry-count": "1"}
    with ScriptedEngine(lambda request, number: play) as engine:
        with running(model, tmp_path / "store.db", engine.url, template=toy_template(PIECES)) as proxy:
            access = proxy.run()
            assert read(protocol, send(proxy, access, protocol, body)).text == "ter"
            assert read(protocol, send(proxy, access, protocol, body, **retry)).text == "ter"
        with running(model, tmp_path / "store.db", engine.url, template=toy_template(PIECES)) as proxy:
            again = send(proxy, access, protocol, body, **retry)
            assert read(protocol, again).text == "ter"
        assert len(engine.log) == 1
    if protocol == "messages":
        assert again.json()["usage"]["input_tokens"] == len(ASKED) + 1


@BOTH
def test_an_answer_that_was_cut_off_goes_on(model: Path, tmp_path: Path, protocol: str) -> None:
    """Where the prefill is all that a call said, its ids are continued; where the model had ended, that is a fork."""
    script = [[Tokens([301, 302]), Finish("length")], say(305, 260), say(304, 260)]
    with scripted(model, tmp_path, PIECES, *script) as (proxy, engine):
        access = proxy.run()
        first = read(protocol, send(proxy, access, protocol, body_of(protocol, USER)))
        assert (first.text, first.finish) == ("water", "length")
        assert read(protocol, send(proxy, access, protocol, body_of(protocol, USER, WATER))).text == "fall"
        more = {"role": "assistant", "content": "waterfall"}
        assert read(protocol, send(proxy, access, protocol, body_of(protocol, USER, more))).text == "go"
        whole = {"role": "assistant", "content": "waterfallgo"}
        send(proxy, access, protocol, body_of(protocol, USER, whole, GO)).raise_for_status()
        calls = proxy.calls()
    check_path(calls, engine)
    assert [call.prompt_ids for call in calls[:3]] == [ASKED, [*ASKED, 301, 302], [*ASKED, 301, 302, 305]]
    assert [call.parent for call in calls] == [None, *(call.call for call in calls[:3])]
    assert [call.fork_reason for call in calls] == [None, None, ForkReason.CLIENT_EDIT, None]


def test_after_results_and_counted(model: Path, tmp_path: Path) -> None:
    """A prefill follows tool results too, and a count of tokens counts it."""
    call = {"type": "tool_use", "id": "t", "name": "run", "input": {}}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "go"}]}
    talk = [USER, {"role": "assistant", "content": [call]}, result, WA]
    tools = [{"name": "run", "input_schema": {"type": "object"}}]
    with scripted(model, tmp_path, PIECES, say(302, 260)) as (proxy, engine):
        access = proxy.run()
        body = body_of("messages", *talk, tools=tools)
        answer = send(proxy, access, "messages", body).json()
        key = {"x-api-key": access["api_key"]}
        counted = proxy.http.post("/v1/messages/count_tokens", json=body, headers=key).json()
        assert answer["content"] == [{"type": "text", "text": "ter"}]
        assert counted["input_tokens"] == answer["usage"]["input_tokens"] == len(engine.log[0].prompt)
        assert engine.log[0].prompt[-6:] == [259, 304, 260, 10, 258, 301]


def test_what_cannot_be_continued_is_counted_all_the_same(model: Path, tmp_path: Path) -> None:
    """A count is of a conversation that may be over; only an answer to it would have to go on."""
    with ScriptedEngine(lambda request, number: say(5)) as engine:
        with running(model, tmp_path / "store.db", engine.url) as proxy:
            access = proxy.run()
            key, found = {"x-api-key": access["api_key"]}, []
            for text in ("Sure", "\n\nSure"):
                body = body_of("messages", USER, {"role": "assistant", "content": text})
                found.append(proxy.http.post("/v1/messages/count_tokens", json=body, headers=key).json())
            refused = send(proxy, access, "messages", body)
    assert refused.status_code == 400 and "white space" in refused.json()["error"]["message"]
    assert 0 < found[0]["input_tokens"] < found[1]["input_tokens"]


THINKING = {"type": "enabled", "budget_tokens": 1024}
RUN = {"type": "tool_use", "id": "t", "name": "run", "input": {}}
THOUGHT = {"type": "thinking", "thinking": "x", "signature": "s"}


@pytest.mark.parametrize(
    ("last", "more", "named"),
    [
        ("Sure ", {}, "messages"),
        ([RUN], {}, "messages"),
        ([THOUGHT, {"type": "text", "text": "x"}], {}, "messages"),
        ([{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "x"}], {}, "messages"),
        ("Sure", {"thinking": THINKING}, "thinking"),
        ("Sure", {"thinking": {"type": "adaptive"}}, "thinking"),
        ("{", {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
        (
            "{",
            {"tool_choice": {"type": "any"}, "tools": [{"name": "run", "input_schema": {}}]},
            "tool_choice",
        ),
    ],
)
def test_refused_messages(last: Any, more: dict[str, Any], named: str) -> None:
    """What cannot be continued is refused by name, with what to send instead."""
    body = {"max_tokens": 8, "messages": [USER, {"role": "assistant", "content": last}], **more}
    with pytest.raises(ProtocolError) as caught:
        AnthropicMessages().parse(json.dumps(body).encode())
    assert (caught.value.status, caught.value.param) == (400, named) and named in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "more", "named"),
    [
        ([USER, WA], {"add_generation_prompt": True}, "add_generation_prompt"),
        ([USER, WA], {"add_generation_prompt": None}, "add_generation_prompt"),
        ([USER], {}, "continue_final_message"),
        ([USER, {"role": "assistant", "content": ""}], {}, "continue_final_message"),
        ([WA], {}, "messages"),
        ([USER, {**WA, "reasoning_content": "x"}], {}, "messages"),
        ([USER, WA], {"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
        ([USER, WA], {"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ([USER, WA], {"continue_final_message": "yes"}, "continue_final_message"),
    ],
)
def test_refused_chats(messages: list[Any], more: dict[str, Any], named: str) -> None:
    """What cannot be continued is refused by name."""
    with pytest.raises(ProtocolError) as caught:
        ChatCompletions().parse(json.dumps({"messages": messages, **CONTINUE, **more}).encode())
    assert (caught.value.status, caught.value.param) == (400, named)


def test_what_is_no_prefill() -> None:
    """A chat that does not ask for it ends with a turn of the assistant's; an empty last message begins nothing."""
    chat = ChatCompletions().parse(json.dumps({"messages": [USER, WA], "add_generation_prompt": False}).encode())
    assert ([item.role for item in chat.messages], chat.prefill) == (["user", "assistant"], "")
    empty = {"max_tokens": 8, "messages": [USER, {"role": "assistant", "content": ""}], "thinking": THINKING}
    request = AnthropicMessages().parse(json.dumps(empty).encode())
    assert ([item.role for item in request.messages], request.prefill) == (["user"], "")
    called = {"messages": [USER, {"role": "assistant", "content": [RUN]}]}
    assert [item.role for item in parse_count(json.dumps(called).encode()).messages] == ["user", "assistant"]


# -- real vocabularies -----------------------------------------------------------------------------------------------


@functools.cache
def loaded(name: str, renderer: str = "auto", **options: Any) -> Template:
    return load_template(vocabulary(name), renderer, options)


def begun(template: Template, text: str, *, tools: Any = ()) -> tuple[list[int], list[int]]:
    prompt = np.asarray(template.render([Message("user", "hi")], tools), np.int32)
    return prompt.tolist(), template.begin(prompt, text, tools, after_tool=False).tolist()


@pytest.mark.parametrize(
    ("name", "renderer"),
    [
        ("qwen3", "auto"),
        ("qwen3", "template"),
        ("deepseek_v3", "template"),
        ("mistral_nemo", "template"),
        ("llama3_1", "template"),
    ],
)
def test_ids_are_those_of_the_template(name: str, renderer: str) -> None:
    """A begun turn is what the template writes of that answer, up to its close; text stays text."""
    template = loaded(name, renderer)
    kits = [(), (TOOL,)] if name == "qwen3" else [()]
    for text, tools in itertools.product(["Sure, {", "<|im_end|>", "北京"], kits):
        _, ids = begun(template, text, tools=tools)
        talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
        closed = template.renderer.render_ids(talk, tools=list(tools) or None, add_generation_prompt=False)
        assert closed[: len(ids)] == ids and template.text(ids).endswith(text)
        assert closed[len(ids)] in template.stop_ids


@pytest.mark.parametrize("thinking", [True, False])
def test_thinking_is_closed_as_the_template_closes_it(model: Path, thinking: bool) -> None:
    """Qwen3 writes an empty block of thinking before the text of a last answer, whatever its prompts open with."""
    template = load_template(model, "qwen3", {"enable_thinking": thinking})
    _, ids = begun(template, "Sure")
    assert template.text(ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nSure")
    for text in ("<think>\nSo", "<tool_call>"):
        with pytest.raises(RenderError, match="only text can be continued"):
            begun(template, text)
    with pytest.raises(RenderError, match="white space"):
        begun(template, "\n\nSure")


@pytest.mark.parametrize("opens", ["<think>\\n", "<think>\\n\\n</think>\\n\\n"])
def test_a_template_that_opens_thinking(model: Path, tmp_path: Path, opens: str) -> None:
    """Where prompts open thinking and recorded answers show none, an answer cannot be begun; where they close it, it can."""
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (BLOCK if m.role == 'assistant' else '')"
        " + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + '" + opens + "' }}{% endif %}"
    )
    shown = "'" + opens + "'" if "</think>" in opens else "''"
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((model / file).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(source.replace("BLOCK", shown))
    template = load_template(tmp_path, "template")
    if "</think>" not in opens:
        with pytest.raises(RenderError, match="turn thinking off"):
            begun(template, "Sure")
    else:
        prompt, ids = begun(template, "Sure")
        assert template.text(ids) == template.text(prompt) + "Sure"


@pytest.mark.parametrize("text", [" world {", '{"name": "run"}', "<think>"])
@pytest.mark.parametrize("way", ["hermes", "llama", "harmony", "glm"])
def test_the_rest_is_content_from_its_start(model: Path, way: str, text: str) -> None:
    """The agent puts the two texts together: white space between them is the answer's, and nothing else begins there."""
    template = load_template(model, "qwen3")
    ids = template.tokenizer.encode(text)
    parser = make_parser(
        template.tokenizer, format=WAYS[way], prompt_tail=[], tools=[TOOL], name="n", stops=(),
        choice=ToolChoice.AUTO, parallel=True, begun=True,
    )  # fmt: skip
    assert "".join(delta.text for delta in (*parser.feed(ids), *parser.finish())) == text
    assert parser.answer == Answer(text)


def test_tool_calls_follow_the_text(model: Path) -> None:
    """A call behind the rest of the text is a call."""
    template = load_template(model, "qwen3")
    ids = template.tokenizer.encode(' it.\n<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>')
    parser = make_parser(
        template.tokenizer, format=WAYS["hermes"], prompt_tail=[], tools=[TOOL], name="n", stops=(),
        choice=ToolChoice.AUTO, parallel=True, begun=True,
    )  # fmt: skip
    parser.feed(ids), parser.finish()
    assert parser.answer == Answer(" it.", "", (ToolCall("call_n0", "run", "{}"),))
