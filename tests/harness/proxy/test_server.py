"""The server as agents, SDKs and the trainer see it: the real openai SDK, the control API, limits, errors."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from proxy_engine import Finish, ScriptedEngine, Step, Tokens, Wait, say
from proxy_kit import Proxy, running, sse
from proxy_toy import toy_template
from test_fidelity_cases import ask, check_all, scripted
from test_render import TOOL, write
from test_retries import wait_for

from gyre_sdk.errors import ServiceError
from gyre_sdk.harness.proxy.render import load_template
from gyre_sdk.harness.proxy.server import ProxyServer, ProxySettings
from gyre_sdk.harness.proxy.server.connections import origin
from gyre_sdk.records import CallStatus, RunStatus

USER: dict[str, Any] = {"role": "user", "content": "hi"}
PIECES = {"hi": 300, "ok": 301, "go": 304}
CALL = 'Look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'


@pytest.fixture
def agent_engine(model: Path) -> Any:
    """Plays an agent: a tool call first, an answer after its result."""
    template = load_template(model)
    first, last = write(template, CALL), write(template, "All is well.<|im_end|>")

    def play(request: dict[str, Any], number: int) -> list[Step]:
        ids = last if "<tool_response>\na.py" in template.text(request["token_ids"]) else first
        return [*[Tokens([token]) for token in ids], Finish()]

    return play


def check_loop(said: Any, done: Any) -> None:
    assert said.choices[0].finish_reason == "tool_calls"
    assert said.choices[0].message.content == "Look."
    assert done.choices[0].message.content == "All is well."
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens


def test_the_sdk_loop(model: Path, tmp_path: Path, agent_engine: Any) -> None:
    """openai SDK: tools, then an answer; the second prompt holds the first one's ids."""
    with ScriptedEngine(agent_engine) as engine, running(model, tmp_path / "s.db", engine.url) as proxy:
        client = proxy.openai(proxy.run())
        messages: list[Any] = [USER]
        said = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL], logprobs=True)  # type: ignore[list-item]
        call = said.choices[0].message.tool_calls[0]  # type: ignore[index]
        assert json.loads(call.function.arguments) == {"command": "ls"}  # type: ignore[union-attr]
        assert said.choices[0].logprobs is not None
        assert len(said.choices[0].logprobs.content or ()) == said.usage.completion_tokens  # type: ignore[union-attr]
        messages += [said.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "a.py"}]
        done = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])  # type: ignore[list-item]
        check_loop(said, done)
        check_all(proxy, engine)
        first, second = proxy.calls()
        assert (second.parent, second.fork_reason) == (first.call, None)
        assert second.prompt_ids[: second.shared] == first.prompt_ids + first.sampled_ids
        assert [item.id for item in client.models.list()] == ["policy"]


async def test_the_async_sdk_streams(model: Path, tmp_path: Path, agent_engine: Any) -> None:
    """Async SDK, its stream helper, tools and usage; the message it accumulates continues the path."""
    with ScriptedEngine(agent_engine) as engine, running(model, tmp_path / "s.db", engine.url) as proxy:
        access = proxy.run()
        async with openai.AsyncOpenAI(base_url=access["base_url"], api_key=access["api_key"]) as client:
            messages: list[Any] = [USER]
            finals = []
            for _ in range(2):
                async with client.chat.completions.stream(
                    model="policy",
                    messages=messages,
                    tools=[TOOL],
                    stream_options={"include_usage": True},  # type: ignore[list-item]
                ) as stream:
                    kinds = [event.type async for event in stream]
                    final = await stream.get_final_completion()
                finals.append(final)
                messages.append(final.choices[0].message)
                for call in final.choices[0].message.tool_calls or ():
                    assert "tool_calls.function.arguments.done" in kinds
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "a.py"})
        check_loop(*finals)
        check_all(proxy, engine)
        assert [call.fork_reason for call in proxy.calls()] == [None, None]


def test_text_arrives_while_it_is_sampled_and_durable_first(model: Path, tmp_path: Path) -> None:
    """The agent sees text before the end; whatever it has seen is in the store already."""
    gate = threading.Event()
    steps: list[Step] = [Tokens([111, 107]), Wait(gate), Tokens([301, 260]), Finish()]
    with scripted(model, tmp_path, PIECES, steps) as (proxy, _):
        client = proxy.openai(proxy.run())
        seen = ""
        for chunk in client.chat.completions.create(model="policy", messages=[USER], stream=True):  # type: ignore[list-item]
            seen += chunk.choices[0].delta.content or ""
            if seen == "ok" and not gate.is_set():
                [call] = proxy.calls()
                assert (call.status, call.sampled_ids) == (CallStatus.STREAMING, [111, 107])
                gate.set()
        assert seen == "okok"


def test_heartbeats_and_a_replica_that_comes_late(model: Path, tmp_path: Path) -> None:
    """Without a replica a stream gets comments and waits; the call is served as soon as one is announced."""
    with running(model, tmp_path / "s.db", template=toy_template(PIECES), heartbeat=0.1) as proxy:
        with ScriptedEngine(lambda request, number: say(301, 260)) as engine:
            later = {"replicas": [{"url": engine.url, "version": 3}]}
            threading.Timer(0.5, lambda: proxy.control.put("/replicas", json=later)).start()
            answer = proxy.chat(proxy.run(), {"messages": [USER], "stream": True})
            assert answer.text.count(": ping\n\n") >= 2
            assert sse(answer.text)[-1] == "[DONE]"
            assert proxy.calls()[0].versions[0].version == 0
            assert engine.log[0].request["cache_salt"] == "3"
            assert proxy.control.get("/status").json()["version"] == 3


def test_no_replica_is_a_retryable_error(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path / "s.db", template=toy_template(PIECES), patience=0.2, heartbeat=0.05) as proxy:
        client = proxy.openai(proxy.run())
        with pytest.raises(openai.InternalServerError, match="no replica was serving"):
            client.chat.completions.create(model="policy", messages=[USER])  # type: ignore[list-item]
        with pytest.raises(openai.APIError, match="no replica was serving"):
            list(client.chat.completions.create(model="policy", messages=[USER], stream=True))  # type: ignore[list-item]


# -- keys, runs, lanes ----------------------------------------------------------------------------------------------


def test_unknown_keys_open_nothing(model: Path, tmp_path: Path) -> None:
    with scripted(model, tmp_path, PIECES, say(301, 260)) as (proxy, engine):
        for key in ("gy-unknown", "x", "x" * 5_000):
            answer = proxy.chat({"api_key": key}, {"messages": [USER]})
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert proxy.http.post("/v1/chat/completions", json={}).status_code == 401
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="no", max_retries=0).models.list()
        assert proxy.control.get("/status", headers={"Authorization": "Bearer no"}).status_code == 401
        assert (proxy.calls(), engine.log) == ([], [])


def test_keys_are_not_stored_or_logged(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with scripted(model, tmp_path, PIECES, say(301, 260)) as (proxy, _):
        access = proxy.run()
        ask(proxy, access, USER)
        with proxy.journal() as journal:
            dump = b"".join(path.read_bytes() for path in tmp_path.iterdir())
            assert journal.lane_of_key(access["api_key"]) is None
        for secret in (access["api_key"], proxy.service_key):
            assert secret.encode() not in dump
            assert secret not in caplog.text


def test_a_run_from_open_to_end(model: Path, tmp_path: Path) -> None:
    with scripted(model, tmp_path, PIECES, say(301, 260)) as (proxy, _):
        body = {"task": "fix", "group": "g", "member": 2, "split": "held-out", "metadata": {"a": 1}, "owner": "h:1:2"}
        access = proxy.run(**body, dispatch_version=5, limits={"turns": 9})
        with proxy.journal() as journal:
            run = journal.run(access["run"])
        assert run is not None
        assert (run.task, run.group, run.member, run.owner, run.dispatch_version) == ("fix", "g", 2, "h:1:2", 5)
        assert run.metadata == {"a": 1, "split": "held-out", "limits": {"turns": 9}}
        lane = proxy.lane(access["run"], role="subagent", name="reviewer", parent=access["lane"])
        ask(proxy, access, USER)
        ask(proxy, lane, USER)
        path = f"/runs/{access['run']}"
        assert proxy.control.post(f"{path}/close", json={"seconds": 1}).json() == {"calls": 2, "sampled_tokens": 4}
        refused = proxy.chat(access, {"messages": [USER]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "run_closed")
        end = {"status": "completed", "reward": 0.5, "parts": {"tests": 0.5}}
        assert proxy.control.post(f"{path}/end", json=end).json() == {"status": "completed"}
        assert proxy.control.post(f"{path}/end", json=end).status_code == 200
        assert proxy.control.post(f"{path}/end", json={"status": "cancelled"}).status_code == 409
        assert proxy.control.post(f"{path}/lanes", json={}).status_code == 409
        late = proxy.chat(lane, {"messages": [USER]})
        assert (late.status_code, late.json()["error"]["code"]) == (403, "run_ended")
        assert late.headers["x-should-retry"] == "false"
        with proxy.journal() as journal:
            run = journal.run(access["run"])
        assert run is not None
        assert (run.status, run.reward, run.parts) == (RunStatus.COMPLETED, 0.5, {"tests": 0.5})
        assert proxy.control.get("/status").json()["runs_open"] == 0
        calls = proxy.control.get("/calls", params={"after": 1}).json()["calls"]
        assert [(call["seq"], call["role"], call["sampled_tokens"]) for call in calls] == [(2, "subagent", 2)]


def test_close_waits_then_aborts(model: Path, tmp_path: Path) -> None:
    """A call in flight gets its time; then the engine is told to stop and the call ends as aborted."""
    gate = threading.Event()
    steps: list[Step] = [Tokens([301]), Wait(gate), Tokens([260]), Finish()]
    with scripted(model, tmp_path, PIECES, steps) as (proxy, engine):
        for patient in (False, True):
            gate.clear()
            access = proxy.run()
            answers: list[Any] = []
            thread = threading.Thread(
                target=lambda to=access, out=answers: out.append(proxy.chat(to, {"messages": [USER]}))
            )
            thread.start()
            while not proxy.calls(access["run"]) or proxy.calls(access["run"])[0].status == "received":
                time.sleep(0.01)
            if patient:
                threading.Timer(0.2, gate.set).start()
            proxy.control.post(f"/runs/{access['run']}/close", json={"seconds": 60 if patient else 0.1})
            thread.join()
            [call] = proxy.calls(access["run"])
            if patient:
                assert (answers[0].status_code, call.sampled_ids) == (200, [301, 260])
            else:
                assert (answers[0].status_code, call.status) == (403, CallStatus.ABORTED)
                assert call.finish_reason is None
                wait_for(lambda: engine.aborts)
                with proxy.journal() as journal:
                    [attempt] = journal.attempts(call.call)
                assert attempt.end == "aborted"
                assert engine.aborts == [f"generate-tokens-{attempt.request_id}"]


def test_a_lane_that_takes_over(model: Path, tmp_path: Path) -> None:
    """Calls with the parent's key go to the summary lane until it is released."""
    with scripted(model, tmp_path, PIECES, say(301, 260)) as (proxy, _):
        access = proxy.run()
        ask(proxy, access, USER)
        lane = proxy.lane(access["run"], role="main-summary", parent=access["lane"], takes_over=True)
        ask(proxy, access, USER, {"role": "assistant", "content": "ok"}, USER)
        assert proxy.control.post(f"/runs/{access['run']}/lanes/{lane['lane']}/release").status_code == 200
        ask(proxy, access, {"role": "user", "content": "go"})
        assert [call.role for call in proxy.calls()] == ["main", "main-summary", "main"]
        bad = proxy.control.post(f"/runs/{access['run']}/lanes", json={"parent": "l-nobody"})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "parent")


@pytest.mark.parametrize(
    ("limits", "allowed"), [({"turns": 2}, 2), ({"tokens": 19}, 2), ({"seconds": 0.0}, 0), ({"tokens": 4}, 0)]
)
def test_limits(model: Path, tmp_path: Path, limits: dict[str, Any], allowed: int) -> None:
    """A spent budget is an error that no SDK retries; `max_tokens` is cut to what is left."""
    with scripted(model, tmp_path, PIECES, say(301, 260)) as (proxy, engine):
        client = proxy.openai(proxy.run(limits=limits), max_retries=3)
        for _ in range(allowed):
            client.chat.completions.create(model="policy", messages=[USER])  # type: ignore[list-item]
        with pytest.raises(openai.PermissionDeniedError) as caught:
            client.chat.completions.create(model="policy", messages=[USER])  # type: ignore[list-item]
        assert caught.value.code == "limit_exceeded"
        assert len(engine.log) == allowed
        if limits.get("tokens") == 19:
            assert [item.request["sampling_params"]["max_tokens"] for item in engine.log] == [14, 7]


# -- errors ---------------------------------------------------------------------------------------------------------

WRONG: list[tuple[bytes, str | None]] = [
    (b"", None),
    (b"{", None),
    (b"[]", None),
    (b"\xff", None),
    (b'{"messages": "\\ud800"}', "messages"),
    (b"[" * 100_000, None),
    (b"{}", "messages"),
    (b'{"messages": []}', "messages"),
    (b'{"messages": [1]}', "messages[0]"),
    (b'{"messages": [{"role": "bot", "content": "x"}]}', "messages[0].role"),
    (b'{"messages": [{"role": ["user"], "content": "x"}]}', "messages[0].role"),
    (b'{"messages": [{"role": "user", "content": 5}]}', "messages[0].content"),
    (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "messages[0].content[0]"),
    (b'{"messages": [{"role": "assistant", "tool_calls": [{}]}]}', "messages[0].tool_calls[0]"),
    *[
        (json.dumps({"messages": [USER], name: value}).encode(), name)
        for name, value in {
            "temperature": -1, "top_p": "x", "top_k": 1.5, "max_tokens": 0, "n": 0, "stop": 5, "stop_token_ids": ["a"], "seed": 1.5,
            "stream": "yes", "stream_options": 5, "tools": [{}], "tool_choice": "required", "top_logprobs": 3,
            "response_format": {"type": "json_schema"}, "best_of": 2, "logprobs": 1, "model": 7, "modalities": ["audio"],
        }.items()
        if name != "tools"
    ],
    (json.dumps({"messages": [USER], "tools": [{}]}).encode(), "tools[0]"),
]  # fmt: skip


def test_wrong_requests_are_named(model: Path, tmp_path: Path) -> None:
    with scripted(model, tmp_path, PIECES, say(301, 260)) as (proxy, engine):
        access = proxy.run()
        for body, param in WRONG:
            answer = proxy.chat(access, body)
            assert answer.status_code == 400, (body[:80], answer.text)
            error = answer.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", param), (body[:80], error)
            assert answer.headers["x-should-retry"] == "false"
        for method, path, status in (
            ("GET", "/v1/chat/completions", 405),
            ("POST", "/v1/nothing", 404),
            ("GET", "/", 405),
        ):
            answer = proxy.http.request(method, path)
            assert (answer.status_code, "error" in answer.json()) == (status, True)
        assert proxy.http.post("/abort_requests").status_code == 404
        assert proxy.http.post("/inference/v1/generate").status_code == 404
        assert (proxy.calls(), engine.log) == ([], [])
        ask(proxy, access, USER)


def test_wrong_control_requests_are_named(model: Path, tmp_path: Path) -> None:
    with scripted(model, tmp_path, PIECES, say(301, 260)) as (proxy, _):
        for path, body in (("/runs", {}), ("/runs", {"task": 1}), ("/runs", {"task": "t", "taks": 1})):
            answer = proxy.control.post(path, json=body)
            assert answer.status_code == 400, answer.text
            assert "/gyre/v1/runs" in answer.json()["error"]["message"]
        assert proxy.control.post("/runs/r-nobody/close", json={}).status_code == 404
        assert proxy.control.post("/runs/r-nobody/end", json={"status": "completed"}).status_code == 404
        assert proxy.control.post("/runs/r-nobody/end", json={"status": "running"}).status_code == 400
        assert proxy.control.get("/calls", params={"after": "x"}).status_code == 400


def test_prompt_beyond_the_context(model: Path, tmp_path: Path) -> None:
    with scripted(model, tmp_path, PIECES, say(301, 260)) as (proxy, engine):
        pass
    with ScriptedEngine(lambda request, number: say(301, 260)) as engine:
        with running(model, tmp_path / "t.db", engine.url, context=4096) as proxy:
            answer = proxy.chat(proxy.run(), {"messages": [{"role": "user", "content": "\U0001f642" * 5000}]})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
            ask(proxy, proxy.run(), USER, max_tokens=100_000)
            sent = engine.log[0].request
            assert sent["sampling_params"]["max_tokens"] == 4096 - len(sent["token_ids"])


def test_a_port_that_is_taken(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path / "s.db") as proxy:
        port = int(proxy.url.rsplit(":", 1)[1])
        with pytest.raises(ServiceError, match="choose another port"):
            ProxyServer(ProxySettings(store=tmp_path / "new" / "t.db", model=model, port=port)).start_in_thread()
    assert not (tmp_path / "new").exists()


# -- many at once ---------------------------------------------------------------------------------------------------


async def test_many_runs_at_once(model: Path, tmp_path: Path) -> None:
    """32 runs of 5 turns each, streaming and not, in parallel: every path is exact, every run its own."""

    def play(request: dict[str, Any], number: int) -> list[Step]:
        ids = request["token_ids"]
        return [Tokens([300 + (sum(ids) + len(ids)) % 4]), Tokens([301]), Wait(0.01), Tokens([260]), Finish()]

    pieces = {"hi": 300, "ok": 301, "no": 302, "so": 303}
    with (
        ScriptedEngine(play) as engine,
        running(model, tmp_path / "s.db", engine.url, template=toy_template(pieces)) as proxy,
    ):
        await asyncio.gather(*[_run(proxy, index) for index in range(32)])
        check_all(proxy, engine)
        calls = proxy.calls()
        assert len(calls) == 160
        whole = {call.call: call.prompt_ids + call.sampled_ids for call in calls}
        for call in calls:
            assert call.fork_reason is None
            if call.parent is not None:
                assert call.prompt_ids[: call.shared] == whole[call.parent]
        assert sum(call.parent is None for call in calls) == 32
        # nobody waits for the mark of the delivery
        await asyncio.to_thread(wait_for, lambda: {call.status for call in proxy.calls()} == {CallStatus.DELIVERED})


async def _run(proxy: Proxy, index: int) -> None:
    access = await asyncio.to_thread(proxy.run)
    async with openai.AsyncOpenAI(base_url=access["base_url"], api_key=access["api_key"], max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": f"hi {index}"}]
        for _ in range(5):
            if index % 2:
                async with client.chat.completions.stream(model="policy", messages=messages) as stream:
                    said = (await stream.get_final_completion()).choices[0].message.content
            else:
                said = (
                    (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message.content
                )
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "ok"}]


def test_the_address_of_an_ipv6_host_is_one_that_clients_take() -> None:
    assert httpx.URL(f"{origin('::1', 8700)}/v1").port == 8700 and httpx.URL(origin("::1", 8700)).host == "::1"
    assert origin("127.0.0.1", 8700) == "http://127.0.0.1:8700" and origin("here", 1) == "http://here:1"
