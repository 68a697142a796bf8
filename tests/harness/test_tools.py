"""The ready tools: every protocol's form in and out, arguments checked for the model's sake, files edited exactly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import msgspec
import pytest
from anthropic.types import Message as AnthropicMessage
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from session_kit import a_task

import gyre_sdk as gyre
from gyre_sdk.errors import HookError, ProtocolError, SettingsError, WorkspaceUnavailable
from gyre_sdk.harness.tools.clip import clip

FORMS = ("chat", "responses", "anthropic")


@pytest.fixture(scope="module")
def agent(model: Path, tmp_path_factory: pytest.TempPathFactory, engine: Any) -> Iterator[Any]:
    """One session for all tests, each in a folder of its own."""
    from gyre_sdk.harness.proxy.routing import ReplicaSpec

    store = tmp_path_factory.mktemp("store") / "s.db"
    settings = gyre.ProxySettings(store=store, model=model, replicas=(ReplicaSpec(engine.url, 0),))
    with gyre.session(a_task(), proxy=settings, workspace="local") as agent:
        yield agent


def call(form: str, name: str, arguments: Any, id: str = "c1") -> dict[str, Any]:
    """Return a call as a protocol has it."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    if form == "chat":
        return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}
    if form == "responses":
        return {"type": "function_call", "call_id": id, "name": name, "arguments": text}
    return {"type": "tool_use", "id": id, "name": name, "input": arguments}


def text_of(result: dict[str, Any]) -> str:
    return result.get("output") or result["content"]


def run(agent: Any, name: str, **arguments: Any) -> tuple[str, bool]:
    """Run a tool as Anthropic's protocol calls it; return its text and whether it is an error."""
    result = agent.tools.run(call("anthropic", name, arguments))
    return result["content"], result.get("is_error", False)


# -- forms ---------------------------------------------------------------------------------------------------------------


def test_definitions_are_what_each_protocol_takes(agent: Any) -> None:
    chat, responses, anthropic = agent.tools.openai(), agent.tools.responses(), agent.tools.anthropic()
    assert [tool["function"]["name"] for tool in chat] == ["bash", "read", "write", "edit", "submit"]
    for one, two, three in zip(chat, responses, anthropic, strict=True):
        assert one["type"] == two["type"] == "function"
        schema = one["function"]["parameters"]
        assert schema == two["parameters"] == three["input_schema"]
        assert one["function"]["name"] == two["name"] == three["name"]
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["type"] == "object" and schema["additionalProperties"] is False
        assert all("description" in field for field in schema["properties"].values())


@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_answered_in_its_own_form(agent: Any, form: str) -> None:
    result = agent.tools.run(call(form, "bash", {"command": "echo hi"}))
    assert (
        result
        == {
            "chat": {"role": "tool", "tool_call_id": "c1", "content": "hi"},
            "responses": {"type": "function_call_output", "call_id": "c1", "output": "hi"},
            "anthropic": {"type": "tool_result", "tool_use_id": "c1", "content": "hi"},
        }[form]
    )
    wrong = agent.tools.run(call(form, "bash", {"command": "exit 3"}))
    assert text_of(wrong) == "[exit code 3]"
    assert wrong.get("is_error", form != "anthropic")


def answers(form: str) -> tuple[Any, Any]:
    """Return a model's whole answer with two calls: as an SDK's object, and as JSON."""
    calls = [call(form, "bash", {"command": f"echo {word}"}, word) for word in ("one", "two")]
    if form == "chat":
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
        body = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return ChatCompletion.model_validate(body), message
    if form == "responses":
        thought = {"type": "reasoning", "id": "r", "summary": []}
        body = {"id": "x", "object": "response", "created_at": 0, "model": "m", "output": [thought, *calls]}
        body |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        return Response.model_validate(body), body["output"]
    content = [{"type": "text", "text": "I look."}, *calls]
    body = {"id": "x", "type": "message", "role": "assistant", "model": "m", "content": content, "stop_reason": None}
    body |= {"stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1}}
    return AnthropicMessage.model_validate(body), content


@pytest.mark.parametrize("form", FORMS)
def test_a_whole_answer_gives_what_is_appended_to_the_conversation(agent: Any, form: str) -> None:
    from_sdk, from_json = (agent.tools.answer(answer) for answer in answers(form))
    assert from_sdk == from_json == asyncio.run(agent.tools.aanswer(answers(form)[0]))
    if form == "anthropic":
        (message,) = from_sdk
        assert message["role"] == "user"
        from_sdk = message["content"]
    assert [text_of(item) for item in from_sdk] == ["one", "two"]


def test_answers_without_calls_give_nothing_and_other_things_are_refused(agent: Any) -> None:
    for quiet in (
        {"role": "assistant", "content": "done"},
        {"output": []},
        {"content": [{"type": "text", "text": "x"}]},
    ):
        assert agent.tools.answer(quiet) == []
    for wrong in ("text", {"role": "user", "content": "x"}, None, 3):
        with pytest.raises(ProtocolError, match="is not a model's answer"):
            agent.tools.answer(wrong)
    with pytest.raises(ProtocolError, match="is not a tool call"):
        agent.tools.run({"name": "bash"})


# -- wrong arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("bosh", {"command": "ls"}, "there is no tool 'bosh'; the tools are: bash, read, write, edit, submit"),
        (
            "bash",
            '{"command": "ls"',
            "bash: the arguments are not JSON (Input data was truncated); send one JSON object; its parameters are: command, timeout_s",
        ),
        ("bash", "[1]", "bash: the arguments are [1]; send one JSON object; its parameters are: command, timeout_s"),
        ("bash", {}, "bash: object missing required field command; its parameters are: command, timeout_s"),
        ("bash", {"command": 3}, "bash: command: expected str, got int; its parameters are: command, timeout_s"),
        ("bash", {"cmd": "ls"}, "bash: object contains unknown field cmd; its parameters are: command, timeout_s"),
        ("bash", {"command": ""}, "bash: command: expected str of length >= 1; its parameters are: command, timeout_s"),
        (
            "bash",
            {"command": "ls", "timeout_s": 9999},
            "bash: timeout_s: expected float <= 600.0; its parameters are: command, timeout_s",
        ),
        (
            "edit",
            {"path": "f", "old_string": "", "new_string": "b"},
            "edit: old_string: expected str of length >= 1; its parameters are: path, old_string, new_string",
        ),
    ],
)
def test_wrong_arguments_are_told_to_the_model(agent: Any, name: str, arguments: Any, said: str) -> None:
    for form in ("chat", "responses") if isinstance(arguments, str) else FORMS:
        assert text_of(agent.tools.run(call(form, name, arguments))) == said


@given(st.text() | st.binary().map(lambda data: data.decode("latin-1")))
def test_any_arguments_at_all_are_an_answer(agent: Any, text: str) -> None:
    result = agent.tools.only("submit").run(call("chat", "submit", text))
    assert result["role"] == "tool" and result["content"]


# -- the tools -----------------------------------------------------------------------------------------------------------


def test_bash_shows_both_outputs_and_how_it_ended(agent: Any) -> None:
    assert run(agent, "bash", command="echo out; echo err >&2; exit 2") == ("out\n[stderr]\nerr\n[exit code 2]", True)
    assert run(agent, "bash", command="true") == ("[no output, exit code 0]", False)
    text, wrong = run(agent, "bash", command="echo begun; sleep 60", timeout_s=0.5)
    assert (text, wrong) == ("begun\n[killed after 0.5 s, its time limit]", True)


def test_long_outputs_keep_both_ends_and_count_what_is_left_out(agent: Any) -> None:
    text, _ = run(agent, "bash", command="seq 20000")
    assert text.startswith("1\n2\n") and text.endswith("\n19999\n20000") and len(text) < 30_200
    assert "characters left out ...]" in text
    shown = agent.tools.showing(100).run(call("chat", "bash", {"command": "seq 1000"}))["content"]
    assert "[... 3,792 of 3,892 characters left out ...]" in shown and len(shown) < 160


@given(st.text(max_size=200), st.integers(1, 100))
def test_what_is_clipped_and_what_is_kept_add_up(text: str, most: int) -> None:
    shown = clip(text, most)
    if len(text) <= most:
        assert shown == text
        return
    begin, end = text[: most // 3], text[len(text) - (most - most // 3) :]
    assert shown == f"{begin}\n[... {len(text) - most:,} of {len(text):,} characters left out ...]\n{end}"


def test_files_are_written_and_read(agent: Any) -> None:
    assert run(agent, "write", path="deep/in/a.txt", content="one\ntwo\nthrée\n") == (
        "wrote 15 bytes to deep/in/a.txt",
        False,
    )
    assert run(agent, "read", path="deep/in/a.txt") == ("one\ntwo\nthrée\n", False)
    assert run(agent, "read", path="deep/in/a.txt", offset=2, limit=1) == ("two\n\n[lines 2 to 2 of 3]", False)
    assert run(agent, "read", path="deep/in/a.txt", offset=9) == (
        "deep/in/a.txt ends with line 3; there is no line 9",
        True,
    )
    run(agent, "write", path="empty", content="")
    assert run(agent, "read", path="empty") == ("[empty is empty]", False)
    run(agent, "write", path="run.sh", content="#!/bin/sh\necho ran\n")
    assert run(agent, "bash", command="./run.sh") == ("ran", False)
    agent.workspace.write("blob", b"\x00\x01" * 50)
    assert run(agent, "read", path="blob") == ("blob is not text (100 bytes)", True)
    agent.workspace.exec("truncate -s 5000000 huge")
    text, wrong = run(agent, "read", path="huge")
    assert wrong and text.startswith("huge is too large to read (5,000,000 bytes); look at parts of it with bash")
    for path in ("missing", "deep", "it's; rm -rf ."):
        text, wrong = run(agent, "read", path=path)
        assert wrong and text.startswith(f"{path} cannot be read: ")


def test_an_edit_replaces_what_is_there_exactly_once(agent: Any) -> None:
    agent.workspace.write("f.py", "a = 1\nb = 1\naaaa\n# \u00e9nd\r\n", mode=0o755)
    assert run(agent, "edit", path="f.py", old_string="b = 1", new_string="b = \\1 & 2") == (
        "edited f.py at line 2",
        False,
    )
    assert run(agent, "edit", path="f.py", old_string="\u00e9nd\r\n", new_string="end\n") == (
        "edited f.py at line 4",
        False,
    )
    assert agent.workspace.read("f.py") == b"a = 1\nb = \\1 & 2\naaaa\n# end\n"
    assert agent.workspace.exec("test -x f.py").exit_code == 0
    for old, said in (
        ("zzz", "f.py does not hold old_string; read the file and give it exactly, spaces and line ends too"),
        ("a", "f.py holds old_string 5 times; give more of what is around it, so that it is there once"),
        ("aa", "f.py holds old_string 3 times; give more of what is around it, so that it is there once"),
        ("aaaa", "old_string and new_string are the same: nothing to do"),
    ):
        assert run(agent, "edit", path="f.py", old_string=old, new_string="aaaa") == (said, True)
    assert agent.workspace.read("f.py") == b"a = 1\nb = \\1 & 2\naaaa\n# end\n"
    text, wrong = run(agent, "edit", path="missing", old_string="a", new_string="b")
    assert wrong and "no such file" in text.lower()


def test_submit_hands_in(agent: Any) -> None:
    tools = agent.tools.only("bash", "submit")
    assert tools.names == ["bash", "submit"] and tools.submitted is None
    assert tools.run(call("chat", "submit", {"answer": "42"}))["content"] == "handed in"
    assert tools.submitted == "42" and agent.tools.only("submit").submitted is None
    with pytest.raises(SettingsError, match="no tool 'bosh'; the tools are: bash, read"):
        agent.tools.only("bosh")


# -- tools of one's own --------------------------------------------------------------------------------------------------


class Look(msgspec.Struct, forbid_unknown_fields=True):
    """Input of the test's tool."""

    class Where(msgspec.Struct, forbid_unknown_fields=True):
        """A nested object."""

        folder: str = "."

    where: Annotated[Where, msgspec.Meta(description="where to look")]


def test_a_tool_of_ones_own_sync_and_async(agent: Any) -> None:
    async def look(workspace: Any, given: Look) -> str:
        await asyncio.sleep(0)
        return workspace.exec(f"cd {given.where.folder} && pwd").stdout.strip()

    tools = agent.tools.plus(gyre.Tool("look", "Look.", Look, look))
    schema = tools.openai()[-1]["function"]["parameters"]
    jsonschema.validate({"where": {"folder": "/"}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"where": {"path": "/"}}, schema)
    asked = call("chat", "look", {"where": {"folder": "/"}})
    assert tools.run(asked)["content"] == asyncio.run(tools.arun(asked))["content"] == "/"
    assert "expected str, got int" in tools.run(call("chat", "look", {"where": {"folder": 1}}))["content"]
    with pytest.raises(TypeError, match="forbid_unknown_fields"):
        gyre.Tool("look", "Look.", gyre.RunResult, look)


def test_what_a_tool_of_ones_own_raises_is_raised_and_a_dead_workspace_is_no_tool_result(agent: Any) -> None:
    def raising(error: Exception) -> Any:
        def run(workspace: Any, given: Any) -> str:
            raise error

        return agent.tools.plus(gyre.Tool("look", "Look.", Look, run))

    for error in (ValueError("bug"), WorkspaceUnavailable("it died")):
        with pytest.raises(type(error)):
            raising(error).run(call("chat", "look", {"where": {}}))


def test_an_edit_by_a_hook_that_does_not_fit_the_tool_is_the_hooks_fault(service: Any) -> None:
    hooks = gyre.Hooks(PreToolUse=lambda use: gyre.Edit(input={"cmd": "ls", "what": 1}))
    with gyre.session(a_task(), service=service, workspace="local", hooks=hooks) as agent:
        with pytest.raises(HookError, match=r"edited the input of bash .* unknown field cmd"):
            agent.tools.run(call("chat", "bash", {"command": "ls"}))
        with pytest.raises(HookError, match="edited the input of exec"):
            agent.workspace.exec("ls")
