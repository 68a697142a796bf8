"""Forms in which agents send a conversation back, beside the plain one: the recorded path goes on, and none ends a run.

Each form is one that SDKs, frameworks or gateways write; what it is about is the history, not the protocol.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from protocols_kit import PATHS, body_of, read
from proxy_engine import Step
from sdk_kit import CHAT_TOOLS, THINK, Talk, talking

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects.canonical import same_arguments
from gyre_sdk.harness.proxy.dialects.chat_request import parse_chat
from gyre_sdk.harness.proxy.dialects.fields import decode_object
from gyre_sdk.records import CallRecord, ForkReason

LONG = 123456789012345678901234567890
CALLS = ['{"name": "bash", "arguments": {"command": "ls"}}', f'{{"name": "read", "arguments": {{"n": {LONG}}}}}']
ANSWER = THINK + "I look.\n" + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in CALLS)
ASK = {"role": "user", "content": "Run"}
GO = {"role": "user", "content": "go"}
ASSISTANT = "<|im_start|>assistant"
Wire = dict[str, Any]


@pytest.fixture(scope="module")
def talk(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talk]:
    """An engine that calls two tools at once, and is done after that."""
    with talking(model, tmp_path_factory.mktemp("forms"), ANSWER, "done", size=1000) as talk:
        play = talk.engine.play

        def begun(request: Wire, number: int) -> list[Step]:
            return play(request, 1 if talk.texts(request["token_ids"]).count(ASSISTANT) == 1 else 2)

        talk.engine.play = begun
        yield talk


def post(talk: Talk, access: Wire, protocol: str, body: Wire) -> httpx.Response:
    """Send a body as JSON of ASCII alone, as most clients write it."""
    headers = {"Authorization": f"Bearer {access['api_key']}", "Content-Type": "application/json"}
    answer = talk.proxy.http.post(PATHS[protocol], content=json.dumps(body).encode(), headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def begin(talk: Talk, protocol: str = "chat") -> tuple[Wire, Wire]:
    """Open a run and ask; give its access and the answer as a chat message."""
    access = talk.proxy.run()
    answer = post(talk, access, protocol, body_of(protocol, [ASK], tools=CHAT_TOOLS))
    said = read(protocol, answer).message()
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["bash", "read"]
    return access, said


def goes_on(talk: Talk, access: Wire) -> CallRecord:
    """Return the last call of a run, which continues the one before to its last token."""
    *_, above, last = talk.proxy.calls(access["run"])
    whole = above.prompt_ids + above.sampled_ids
    assert (last.parent, last.fork_reason) == (above.call, None)
    assert last.prompt_ids[: len(whole)] == whole
    return last


def results(said: Wire, *contents: Any) -> list[Wire]:
    ids = [call["id"] for call in said["tool_calls"]]
    shown = contents or ("r0", "r1")
    return [{"role": "tool", "tool_call_id": name, "content": text} for name, text in zip(ids, shown, strict=True)]


def divided(said: Wire, form: str) -> list[Wire]:
    """Return an answer and its results as several messages."""
    text = {key: said[key] for key in ("role", "content", "reasoning_content")}
    first, second = ({"role": "assistant", "tool_calls": [call]} for call in said["tool_calls"])
    one, two = results(said)
    return {
        "text, calls": [text, {"role": "assistant", "content": None, "tool_calls": said["tool_calls"]}, one, two],
        "each apart": [text, first, second, one, two],
        "results swapped": [text, first, second, two, one],
        "second call apart": [{**text, **first}, second, one, two],
        "each with its result": [{**text, **first}, one, second, two],
        "text, each with its result": [text, first, one, second, two],
        "thinking on each": [{**text, **first}, one, {**second, "reasoning_content": text["reasoning_content"]}, two],
    }[form]


FORMS = (
    "text, calls",
    "each apart",
    "results swapped",
    "second call apart",
    "each with its result",
    "text, each with its result",
    "thinking on each",
)


@pytest.mark.parametrize("protocol", PATHS)
def test_an_answer_in_several_messages(talk: Talk, protocol: str) -> None:
    """However its text, calls and results are divided, it is the recorded answer; so it is a turn later."""
    access, said = begin(talk, protocol)
    post(talk, access, protocol, body_of(protocol, [ASK, said, *results(said)], tools=CHAT_TOOLS))
    want = talk.texts(goes_on(talk, access).prompt_ids)
    for form in FORMS:
        access, said = begin(talk, protocol)
        messages = [ASK, *divided(said, form)]
        post(talk, access, protocol, body_of(protocol, messages, tools=CHAT_TOOLS))
        assert talk.texts(goes_on(talk, access).prompt_ids) == want, form
        messages += [{"role": "assistant", "content": "done"}, GO]
        post(talk, access, protocol, body_of(protocol, messages, tools=CHAT_TOOLS))
        goes_on(talk, access)


@pytest.mark.parametrize(
    "change", ["argument", "text", "call left out", "call of another", "order", "result of another"]
)
def test_pieces_that_are_another_answer_together(talk: Talk, change: str) -> None:
    """What the model did not say is the agent's own, in pieces too."""
    access, said = begin(talk)
    messages = divided(said, "each with its result")
    first, one, second, two = messages
    match change:
        case "argument":
            second["tool_calls"] = [json.loads(json.dumps(second["tool_calls"][0]).replace(str(LONG), "5"))]
        case "text":
            first["content"] += " Now."
        case "call left out":
            messages = [first, one]
        case "call of another":
            messages = [first, one, second, two, {"role": "assistant", "tool_calls": second["tool_calls"]}, two]
        case "order":
            messages = [
                {**first, "tool_calls": second["tool_calls"]},
                two,
                {**second, **divided(said, "each apart")[1]},
                one,
            ]
        case "result of another":
            one["tool_call_id"] = "call_of_nobody"
    post(talk, access, "chat", {"model": "p", "messages": [ASK, *messages], "tools": CHAT_TOOLS})
    last = talk.proxy.calls(access["run"])[-1]
    if change == "call of another":  # all of the answer, then something that it is not
        assert last.fork_reason is None and last.parent is not None
    else:
        assert last.fork_reason is ForkReason.CLIENT_EDIT


def chat_forms(said: Wire) -> dict[str, list[Wire]]:
    text, thought, calls = said["content"], said["reasoning_content"], said["tool_calls"]

    def parts(*kinds: Wire) -> Wire:
        return {"role": "assistant", "content": [*kinds, {"type": "text", "text": text}], "tool_calls": calls}

    def renamed(name: str) -> list[Wire]:
        new = [{**call, "id": name.format(place)} for place, call in enumerate(calls)]
        shown = [{**item, "tool_call_id": call["id"]} for item, call in zip(results(said), new, strict=True)]
        return [{**said, "tool_calls": new}, *shown]

    bare = [{"function": call["function"]} for call in calls]
    objects = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in calls
    ]
    return {
        "a part of thinking": [parts({"type": "thinking", "thinking": thought}), *results(said)],
        "a part of parts": [parts({"type": "thinking", "thinking": [{"type": "text", "text": thought}]}), *results(said)],
        "a part of reasoning": [parts({"type": "reasoning", "text": thought}), *results(said)],
        "a part without text": [parts({"type": "text", "text": None}), *results(said)],
        "reasoning that is no text": [{**said, "reasoning": {"id": "rs_1"}}, *results(said)],
        "thinking in tags": [{**parts(), "content": f"<think>{thought}</think>\n\n{text}"}, *results(said)],
        "other ids": renamed("call_{}|fc_1"),
        "one id for both": renamed("call_1"),
        "no ids": [{**said, "tool_calls": bare}, {"role": "tool", "content": "r0"}, {"role": "tool", "content": "r1"}],
        "arguments as objects": [{**said, "tool_calls": objects}, *results(said)],
        "one result twice": [said, *results(said), results(said)[1]],
        "one result missing": [said, results(said)[0]],
    }  # fmt: skip


def test_forms_of_a_chat_message(talk: Talk) -> None:
    for form in chat_forms(begin(talk)[1]):
        access, said = begin(talk)
        post(talk, access, "chat", {"model": "p", "messages": [ASK, *chat_forms(said)[form]], "tools": CHAT_TOOLS})
        assert talk.texts(goes_on(talk, access).prompt_ids).count(ANSWER) == 1, form


@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_nothing_new_behind_an_answer(talk: Talk, protocol: str) -> None:
    """An agent asks again: the model begins another turn behind the one that it ended, as that was sampled."""
    access, said = begin(talk, protocol)
    messages = [ASK, said, *results(said)]
    post(talk, access, protocol, body_of(protocol, messages, tools=CHAT_TOOLS))
    messages += [{"role": "assistant", "content": "done"}]
    post(talk, access, protocol, body_of(protocol, messages, tools=CHAT_TOOLS))
    assert talk.texts(goes_on(talk, access).prompt_ids).endswith(f"done<|im_end|>\n{ASSISTANT}\n")


def test_forms_of_chat_tools(talk: Talk) -> None:
    """Cache marks, keys that hold nothing and a type that is left out are not shown, and change no conversation."""
    bash, file = CHAT_TOOLS
    for tools in (
        [bash, {**file, "cache_control": {"type": "ephemeral"}}],
        [{**bash, "function": {**bash["function"], "cache_control": {"type": "ephemeral"}}}, file],
        [{"function": {**tool["function"], "strict": None}} for tool in CHAT_TOOLS],
    ):
        access, said = begin(talk)
        post(talk, access, "chat", {"model": "p", "messages": [ASK, said, *results(said)], "tools": tools})
        goes_on(talk, access)
        fresh = talk.proxy.run()
        post(talk, fresh, "chat", {"model": "p", "messages": [ASK], "tools": tools})
        assert talk.proxy.calls(fresh["run"])[0].prompt_ids == talk.proxy.calls(access["run"])[0].prompt_ids


def test_tools_that_may_be_called() -> None:
    """The others are not shown: the model cannot be kept from calling what it sees."""
    body: Wire = {"messages": [ASK], "tools": CHAT_TOOLS}
    named = {"type": "function", "function": {"name": "read"}}
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
        request = parse_chat(json.dumps({**body, "tool_choice": choice}).encode())
        assert (request.tool_choice, request.tools) == (mode, tuple(CHAT_TOOLS[1:]))
    for wrong in (
        {"mode": "auto", "tools": []},
        {"mode": "none", "tools": [named]},
        {"mode": "auto", "tools": ["read"]},
    ):
        with pytest.raises(ProtocolError) as refused:
            parse_chat(json.dumps({**body, "tool_choice": {"type": "allowed_tools", "allowed_tools": wrong}}).encode())
        assert refused.value.param == "tool_choice"


PICTURE: dict[str, Wire] = {
    "chat": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
    "responses": {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
}


@pytest.mark.parametrize("protocol", PATHS)
def test_whatever_a_tool_gives(talk: Talk, protocol: str) -> None:
    """A model reads a picture, or a tool gives what is no text: the run goes on, and the model is told."""
    kind = PICTURE[protocol]["type"]
    text = {"type": "input_text" if protocol == "responses" else "text", "text": "so"}
    for given, shown in (
        (None, ""),
        ([], ""),
        ([text, {**text, "text": None}], "so"),
        ({"a": [1]}, '{"a":[1]}'),
        ({"content": "so", "success": True}, "so"),
        (7, "7"),
        ([text, PICTURE[protocol]], f"so\n[{kind}: left out, the model reads text only]"),
        ("cut \ud83d", "cut \ufffd"),
        ("\udc4d \U0001f642 \\ud83d", "\ufffd \U0001f642 \\ud83d"),
    ):
        access, said = begin(talk, protocol)
        messages = [ASK, said, *results(said, given, "r1")]
        post(talk, access, protocol, body_of(protocol, messages, tools=CHAT_TOOLS))
        prompt = talk.texts(goes_on(talk, access).prompt_ids)
        assert f"<tool_response>\n{shown}\n</tool_response>\n<tool_response>\nr1\n" in prompt, given
        messages += [{"role": "assistant", "content": "done"}, GO]
        post(talk, access, protocol, body_of(protocol, messages, tools=CHAT_TOOLS))
        goes_on(talk, access)


def test_an_input_that_is_a_text(talk: Talk) -> None:
    """An agent that keeps the arguments as they were streamed sends them as text."""
    access, said = begin(talk, "messages")
    body = body_of("messages", [ASK, said, *results(said)], tools=CHAT_TOOLS)
    for block in body["messages"][1]["content"]:
        if block["type"] == "tool_use":
            block["input"] = json.dumps(block["input"])
    post(talk, access, "messages", body)
    goes_on(talk, access)


def test_whole_numbers_written_as_floats(talk: Talk) -> None:
    """Some languages have one kind of number: `42.0` is 42, on record too."""
    access = talk.proxy.run()
    numbers = {"seed": 42.0, "stop_token_ids": [5.0], "max_tokens": 2.0**53, "n": 1.0}
    post(talk, access, "chat", {"model": "p", "messages": [ASK], **numbers})
    [call] = talk.proxy.calls(access["run"])
    assert (call.sampling.seed, 5 in call.sampling.stop_token_ids) == (42, True)
    assert all(type(number) is int for number in (call.sampling.seed, *call.sampling.stop_token_ids))


@pytest.mark.parametrize(
    "fields", [{"seed": 2**63}, {"seed": 1e300}, {"stop_token_ids": [-1]}, {"stop_token_ids": [1e300]}]
)
def test_numbers_that_nothing_can_hold(fields: Wire) -> None:
    with pytest.raises(ProtocolError) as refused:
        parse_chat(json.dumps({"messages": [ASK], **fields}).encode())
    assert refused.value.param == next(iter(fields))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r'{"a": "x\ud83d"}', "x\ufffd"),
        (r'{"a": "\ude42x"}', "\ufffdx"),
        (r'{"a": "\ude42\ud83d"}', "\ufffd\ufffd"),
        (r'{"a": "\ud83d\ud83d\ude42\ude42"}', "\ufffd\U0001f642\ufffd"),
        (r'{"a": "\ud83d\n\\ude42"}', "\ufffd\n\\ude42"),
        (r'{"a": "\\\ud83d\u00e9"}', "\\\ufffd\u00e9"),
        (f'{{"a": {1 << 64}}}', float(1 << 64)),
        (f'{{"a": [{(1 << 64) - 1}, {-(1 << 63)}, {-(1 << 63) - 1}]}}', [(1 << 64) - 1, -(1 << 63), -float(1 << 63)]),
        ('\ufeff{"a": 1}', 1),
    ],
)
def test_bodies_that_strict_readers_refuse(text: str, value: Any) -> None:
    """Halves of surrogate pairs, integers beyond 64 bits, a byte order mark."""
    assert decode_object(text.encode()) == {"a": value}


@pytest.mark.parametrize("text", [r'{"a": "\ud83d"', r'{"a": "\ud8"}', f'{{"a": 1{"0" * 400}}}', '{"a": 1}\ufeff', ""])
def test_bodies_that_are_no_json(text: str) -> None:
    with pytest.raises(ProtocolError):
        decode_object(text.encode())


def test_numbers_of_arguments_are_doubles() -> None:
    """An agent in JavaScript sends back the double that is nearest: it has not changed the call."""
    assert same_arguments(f'{{"n": {LONG}}}') == same_arguments(f'{{"n": {float(LONG)!r}}}')
    assert same_arguments('{"n": 9007199254740993}') == same_arguments('{"n": 9007199254740992}')
    assert same_arguments('{"n": 9007199254740991}') != same_arguments('{"n": 9007199254740992}')
    assert same_arguments(f'{{"n": 1{"0" * 400}}}') != same_arguments(f'{{"n": 1{"0" * 401}}}')
