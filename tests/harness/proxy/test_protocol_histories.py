"""Histories through the server in every protocol: what extends, what forks, and that all protocols mean the same.

Also the requests of real captures: each is answered in its protocol's own form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from protocols_kit import PATHS, read, say, send
from proxy_engine import Finish, ScriptedEngine, Step, Tokens
from proxy_kit import SHARED, Proxy, running
from proxy_toy import toy_template

from gyre_sdk.records import ForkReason

WIRE = SHARED / "data" / "wire"
TOOLS = [
    {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {"a": {}}}}},
    {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {"a": {}}}}},
]
WORD = st.text(st.sampled_from("abz é北🙂"), min_size=1, max_size=6).map(lambda text: text.strip() or "x")
ARGUMENTS = st.dictionaries(st.sampled_from("ab"), st.integers(-9, 9) | st.booleans() | WORD, max_size=2)


@dataclass
class Stage:
    """A proxy, and an engine that says what is in `said`, in turn."""

    proxy: Proxy
    engine: ScriptedEngine
    said: list[str]


@pytest.fixture(scope="module")
def stage(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    said: list[str] = []

    def play(request: dict[str, Any], number: int) -> list[Step]:
        text = said.pop(0) if said else "ok"
        return [*(Tokens([byte]) for byte in text.encode()), Tokens([260]), Finish()]

    with ScriptedEngine(play) as engine:
        store = tmp_path_factory.mktemp("histories") / "s.db"
        with running(model, store, engine.url, template=toy_template({})) as proxy:
            yield Stage(proxy, engine, said)


def written(value: dict[str, Any]) -> str:
    """Return arguments as an agent's SDK writes an object: once the path is left, that is what the model sees."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


@dataclass
class Turn:
    """What the user says, what the model says, and what the agent does to the answer before it sends it back."""

    user: str
    thinking: str
    text: str
    calls: list[tuple[str, dict[str, Any]]]
    change: str
    stream: bool

    @property
    def said(self) -> str:
        thought = f"<think>{self.thinking}</think>" if self.thinking else ""
        return thought + self.text + "".join(f"<call>{name} {written(given)}</call>" for name, given in self.calls)


TURNS = st.lists(
    st.builds(
        Turn,
        WORD,
        st.just("") | WORD,
        WORD,
        st.lists(st.tuples(st.sampled_from(["run", "read"]), ARGUMENTS), max_size=2),
        st.sampled_from(["none", "none", "none", "thinking dropped", "text edited"]),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TURNS, st.sampled_from(["", "Be brief."]))
def test_all_protocols_tell_the_same_history(stage: Stage, turns: list[Turn], system: str) -> None:
    """Turn by turn: an answer sent back extends its path, an edited one forks; prompts do not depend on the protocol."""
    prompts = []
    for protocol in PATHS:
        access, start = stage.proxy.run(), len(stage.engine.log)
        history: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        for turn in turns:
            stage.said[:] = [turn.said]
            history.append({"role": "user", "content": turn.user})
            seen = say(stage.proxy, access, protocol, history, tools=TOOLS, stream=turn.stream)
            assert (seen.reasoning, seen.text) == (turn.thinking, turn.text)
            assert [(call["name"], json.loads(call["arguments"])) for call in seen.calls] == turn.calls
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in seen.calls]
            if turn.change == "thinking dropped":
                seen.reasoning = ""
            elif turn.change == "text edited":
                seen.text += "!"
            history += [seen.message(), *results]
        calls = stage.proxy.calls(access["run"])
        assert [(call.prompt_ids, call.sampled_ids) for call in calls] == [
            (item.prompt, item.sampled) for item in stage.engine.log[start:]
        ]
        for turn, above, call in zip(turns, calls, calls[1:], strict=False):
            whole = above.prompt_ids + above.sampled_ids
            if turn.change == "text edited":
                assert call.fork_reason is ForkReason.CLIENT_EDIT
            elif call.fork_reason is None:
                assert (call.parent, call.prompt_ids[: len(whole)]) == (above.call, whole)
            else:
                assert any(earlier.change == "text edited" for earlier in turns[: calls.index(call)])
        prompts.append([call.prompt_ids for call in calls])
    assert prompts[0] == prompts[1] == prompts[2]


def captured() -> list[tuple[str, str, dict[str, Any]]]:
    """Return (name, protocol, body) of every request in the captures that is one of ours."""
    found = []
    for file in sorted([*WIRE.glob("llm/*.yaml"), *WIRE.glob("pydantic-ai/*.yaml")]):
        for place, item in enumerate(yaml.safe_load(file.read_text())["interactions"]):
            request = item["request"]
            path = request["uri"].split("?")[0].split("/v1", 1)[-1]
            protocol = next((name for name, known in PATHS.items() if known == f"/v1{path}"), None)
            body = request.get("parsed_body") or request.get("body")
            body = json.loads(body) if isinstance(body, str) else body
            if request["method"] == "POST" and protocol and isinstance(body, dict):
                found.append((f"{file.stem}-{place}", protocol, body))
    return found


def test_requests_of_real_captures(stage: Stage) -> None:
    """Each is answered in its protocol's form, streamed or not as it asks, or refused by name; never a 500."""
    requests = captured()
    if not requests:
        pytest.skip(f"{WIRE} is missing: wire captures of real programs")
    answered = refused = 0
    for name, protocol, body in requests:
        stage.said[:] = []
        access = stage.proxy.run()
        answer = send(stage.proxy, access, protocol, body)
        if answer.status_code == 200:
            seen = read(protocol, answer)
            assert (seen.text, seen.finish) == ("ok", "stop"), name
            [call] = stage.proxy.calls(access["run"])
            assert call.prompt_ids == stage.engine.log[-1].prompt
            answered += 1
        else:
            assert answer.status_code == 400, (name, answer.text)
            assert answer.json()["error"]["message"], name
            refused += 1
    assert answered > 4 * refused, (answered, refused)
