"""Hosted models: any agent's protocol in, one provider request out; recorded, replayed, counted, never trained."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as Value
from typing import Any

import anthropic
import hosted_kit
import httpx
import msgspec
import openai
import pytest
from proxy_engine import ScriptedEngine, say
from proxy_kit import Proxy, running, sse

from gyre_sdk.credit import trajectories
from gyre_sdk.errors import ProtocolError, SettingsError
from gyre_sdk.harness.proxy.dialects.canonical import Message
from gyre_sdk.harness.proxy.server import ProxyServer, ProxySettings
from gyre_sdk.harness.proxy.server.hosted import spent_by
from gyre_sdk.harness.proxy.server.provider import Reading, without_secrets
from gyre_sdk.records import CallStatus
from gyre_sdk.tree import RunTree

pytest.importorskip("litellm", reason="hosted models need litellm: pip install 'gyre-sdk[providers]'")
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
MODEL = "openai/gpt-4o-mini"
SECRET = "provider-key-Zq7f3a9c1b0123456789"  # of no form that loggers know as a key's
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ASK: dict[str, Any] = {"model": "anything", "messages": [{"role": "user", "content": "hi"}]}
CALLING = {
    "deltas": [
        {"reasoning_content": "Let me look."},
        {
            "tool_calls": [
                {"index": 0, "id": "call_a", "type": "function", "function": {"name": "look", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"at":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"x"}'}}]},
        {
            "tool_calls": [
                {"index": 1, "id": "call_b", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            ]
        },
    ],
    "finish": "tool_calls",
}


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Iterator[hosted_kit.Scripted]:
    with hosted_kit.provider() as scripted:
        monkeypatch.setenv("OPENAI_API_BASE", scripted.url)
        monkeypatch.setenv("OPENAI_API_KEY", SECRET)
        yield scripted


@pytest.fixture
def proxy(upstream: hosted_kit.Scripted, tmp_path: Path) -> Iterator[Proxy]:
    with hosted(tmp_path / "gyre.db") as running_proxy:
        yield running_proxy


def hosted(store: Path, **more: Any) -> Any:
    return running(None, store, hosted=(MODEL,), **more)


def answer_of(proxy: Proxy, call: str) -> Message:
    with proxy.journal() as journal:
        found = journal.exchange(call)
    assert found is not None and found.answer is not None
    return msgspec.convert(found.answer, Message)


def test_every_protocol_gets_its_own_form_of_the_answer(proxy: Proxy, upstream: hosted_kit.Scripted) -> None:
    access = proxy.run()
    client = proxy.openai(access)
    said = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "one"}])
    assert said.choices[0].message.content == "Hello." and said.usage is not None
    assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (10, 5)
    assert said.usage.prompt_tokens_details is not None and said.usage.prompt_tokens_details.cached_tokens == 4
    assert client.responses.create(model=MODEL, input="two").output_text == "Hello."
    assert client.completions.create(model=MODEL, prompt="three").choices[0].text == "Hello."
    root = access["base_url"].removesuffix("/v1")
    other = anthropic.Anthropic(base_url=root, api_key=access["api_key"], max_retries=0)
    message = other.messages.create(model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "four"}])
    assert message.content[0].text == "Hello." and message.usage.output_tokens == 5
    assert [sent["messages"][-1]["content"] for sent in upstream.requests] == ["one", "two", "three", "four"]
    assert upstream.requests[3]["max_tokens"] == 9 and "temperature" not in upstream.requests[0]
    calls = proxy.calls(access["run"])
    assert len(calls) == 4
    for call in calls:
        assert (call.prompt_ids, call.sampled_ids, call.logprobs, call.versions) == ([], [], [], [])


def test_a_prefill_is_passed_on(proxy: Proxy, upstream: hosted_kit.Scripted) -> None:
    """As the assistant's last message; the record and the next request hold it with the answer, the agent gets the rest."""
    upstream.plays += [{"deltas": [{"content": " world"}]}, {"deltas": [{"content": "yes"}]}]
    access = proxy.run()
    headers = {"Authorization": f"Bearer {access['api_key']}"}
    asked = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}]
    body = {"model": MODEL, "max_tokens": 9, "messages": asked}
    for retry in ("0", "1"):
        sent = proxy.http.post("/v1/messages", json=body, headers={**headers, "x-stainless-retry-count": retry})
        assert sent.json()["content"] == [{"type": "text", "text": " world"}]
    more = [asked[0], {"role": "assistant", "content": "Hello world"}, {"role": "user", "content": "go"}]
    assert proxy.http.post("/v1/messages", json={**body, "messages": more}, headers=headers).status_code == 200
    first, second = proxy.calls(access["run"])
    assert upstream.requests[0]["messages"] == asked
    assert answer_of(proxy, first.call).content == "Hello world" and second.parent == first.call


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_streams_are_live_before_the_provider_ends(proxy: Proxy, upstream: hosted_kit.Scripted, path: str) -> None:
    upstream.plays.append({"deltas": [{"content": "first"}, {"content": " second"}], "hold": True})
    access = proxy.run()
    body = {"model": MODEL, "max_tokens": 50, "stream": True}
    body |= {"input": "hi"} if path == "responses" else {"messages": ASK["messages"]}
    headers = {"Authorization": f"Bearer {access['api_key']}"}
    with proxy.http.stream("POST", f"/v1/{path}", json=body, headers=headers) as response:
        got = ""
        for text in response.iter_text():
            got += text
            if "first" in got and not upstream.go_on.is_set():
                assert "second" not in got
                upstream.go_on.set()
        assert "second" in got


def test_tool_calls_thinking_and_results_go_both_ways(proxy: Proxy, upstream: hosted_kit.Scripted) -> None:
    upstream.plays.append(CALLING)
    client, ask = proxy.openai(proxy.run()), [{"role": "user", "content": "look"}]
    stream = client.chat.completions.create(
        model=MODEL, messages=ask, tools=[TOOL], tool_choice="required", stream=True
    )
    calls: list[dict[str, str]] = []
    finish = None
    for chunk in stream:
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            for part in choice.delta.tool_calls or ():
                if part.id:
                    calls.append({"id": part.id, "arguments": ""})
                calls[-1]["arguments"] += part.function.arguments or ""
    assert finish == "tool_calls"
    assert calls == [{"id": "call_a", "arguments": '{"at":"x"}'}, {"id": "call_b", "arguments": "{}"}]
    assert upstream.requests[0]["tool_choice"] == "required" and upstream.requests[0]["tools"] == [TOOL]
    wire = [
        {"id": call["id"], "type": "function", "function": {"name": "look", "arguments": call["arguments"]}}
        for call in calls
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"saw {call['id']}"} for call in calls]
    again = [*ask, {"role": "assistant", "content": None, "tool_calls": wire}, *results]
    client.chat.completions.create(model=MODEL, messages=again, tools=[TOOL])
    sent = upstream.requests[1]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool"]
    assert sent[1]["tool_calls"] == wire and sent[3]["tool_call_id"] == "call_b"
    first, second = proxy.calls()
    assert second.parent == first.call and second.fork_reason is None
    assert answer_of(proxy, first.call).reasoning == "Let me look."


def test_the_provider_is_asked_when_the_intent_is_durable(proxy: Proxy, upstream: hosted_kit.Scripted) -> None:
    seen: list[list[CallStatus]] = []
    upstream.on_request = lambda: seen.append([call.status for call in proxy.calls()])
    assert proxy.chat(proxy.run(), ASK).status_code == 200
    assert seen == [[CallStatus.RECEIVED]]


def test_record_holds_model_parameters_usage_and_cost(proxy: Proxy) -> None:
    assert proxy.chat(proxy.run(), {**ASK, "temperature": 0, "seed": 3}).status_code == 200
    [call] = proxy.calls()
    with proxy.journal() as journal:
        found = journal.exchange(call.call)
    assert found is not None and found.hosted
    asked = found.request["provider"]
    assert asked == {"model": MODEL, "parameters": {"temperature": 0.0, "seed": 3}}
    said = answer_of(proxy, call.call)
    prompt, sampled, cost = spent_by(said)
    assert (prompt, sampled) == (10, 5) and cost is not None and 0 < cost < 1e-3
    assert said.extra["provider"]["choices"][0]["message"]["content"] == "Hello."
    with proxy.journal() as journal:
        assert not [finding for finding in journal.audit() if finding.level == "error"]


def test_a_retry_is_replayed_and_a_resend_is_a_new_call(proxy: Proxy, upstream: hosted_kit.Scripted) -> None:
    access = proxy.run()
    first = proxy.chat(access, ASK).json()
    retried = proxy.chat(access, ASK, **{"x-stainless-retry-count": "1"}).json()
    assert retried["id"] == first["id"] and len(upstream.requests) == 1
    assert proxy.chat(access, ASK).json()["id"] != first["id"] and len(upstream.requests) == 2


def test_a_retry_in_flight_is_coalesced(proxy: Proxy, upstream: hosted_kit.Scripted) -> None:
    upstream.plays.append({"deltas": [{"content": "slow"}], "hold": True})
    asked = threading.Event()
    upstream.on_request = asked.set
    access, answers = proxy.run(), []

    def ask(count: str) -> None:
        answers.append(proxy.chat(access, ASK, **{"x-stainless-retry-count": count}).json()["id"])

    threads = [threading.Thread(target=ask, args=(count,)) for count in "01"]
    threads[0].start()
    assert asked.wait(30)
    threads[1].start()
    while proxy.http.get("/metrics").text.find('gyre_retries_total{how="coalesced"} 1') < 0:
        pass
    upstream.go_on.set()
    for thread in threads:
        thread.join(30)
    assert len(set(answers)) == 1 and len(answers) == 2 and len(upstream.requests) == 1


def test_another_process_replays_what_is_recorded(upstream: hosted_kit.Scripted, tmp_path: Path) -> None:
    with hosted(tmp_path / "gyre.db") as proxy:
        access = proxy.run()
        first = proxy.chat(access, ASK).json()
    with hosted(tmp_path / "gyre.db") as proxy:
        again = proxy.chat(access, ASK, **{"x-stainless-retry-count": "1"}).json()
        usage = proxy.control.get(f"/runs/{access['run']}").json()["usage"]
    assert (again["id"], again["choices"], again["usage"]) == (first["id"], first["choices"], first["usage"])
    assert len(upstream.requests) == 1
    assert (usage["calls"], usage["prompt_tokens"], usage["sampled_tokens"]) == (1, 10, 5) and usage["cost"] > 0


def test_a_call_that_was_cut_by_a_stop_is_asked_again(upstream: hosted_kit.Scripted, tmp_path: Path) -> None:
    upstream.plays.append({"deltas": [{"content": "lost"}], "hold": True})
    asked = threading.Event()
    upstream.on_request = asked.set
    with hosted(tmp_path / "gyre.db", grace=0.0) as proxy:
        access = proxy.run()

        def ask() -> None:
            try:
                proxy.chat(access, ASK)
            except httpx.TransportError:
                pass

        thread = threading.Thread(target=ask)
        thread.start()
        assert asked.wait(30)
    thread.join(30)
    with hosted(tmp_path / "gyre.db") as proxy:
        answer = proxy.chat(access, ASK, **{"x-stainless-retry-count": "1"}).json()
        [call] = proxy.calls()
    assert answer["choices"][0]["message"]["content"] == "Hello." and answer["id"].endswith(call.call[2:])
    assert call.status in (CallStatus.COMPLETE, CallStatus.DELIVERED)


@pytest.mark.parametrize(("status", "retryable"), [(400, "false"), (401, "false"), (429, "true"), (500, "true")])
def test_errors_carry_the_providers_status_in_the_agents_format(
    proxy: Proxy, upstream: hosted_kit.Scripted, status: int, retryable: str
) -> None:
    play = {"status": status, "message": f"no, {SECRET} it is", "code": "because"}
    upstream.plays += [play, play]
    access = proxy.run()
    answer = proxy.chat(access, ASK)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (status, retryable)
    assert "no, " in answer.json()["error"]["message"] and SECRET not in answer.text
    headers = {"x-api-key": access["api_key"], "anthropic-version": "2023-06-01"}
    answer = proxy.http.post("/v1/messages", json={**ASK, "max_tokens": 9}, headers=headers)
    assert answer.status_code == status and answer.json()["type"] == "error"
    assert {call.status for call in proxy.calls()} == {CallStatus.FAILED}
    assert all(SECRET not in (call.error or "") for call in proxy.calls())
    assert len(upstream.requests) == 2, "one request each: retries are the agent's"
    counted = proxy.http.get("/metrics").text
    assert f'gyre_refusals_total{{status="{status}",code="provider_error"}} 2' in counted, "not by the provider's codes"


BREAKS: list[dict[str, Any]] = [
    {"die": True},
    {"report": {"message": "the server had an error", "type": "server_error", "code": None}},
    {"finish": None},
]
"""What happens after the deltas: the connection is closed, the provider tells of an error, the answer has no end."""


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses", "completions"])
def test_a_provider_that_breaks_off(proxy: Proxy, upstream: hosted_kit.Scripted, path: str) -> None:
    """502 where nothing was sent; else the stream ends with the protocol's error event. On record it is a failure."""
    access = proxy.run()
    headers = {"Authorization": f"Bearer {access['api_key']}"}
    body = {"model": MODEL, "max_tokens": 9, "messages": ASK["messages"], "input": "hi", "prompt": "hi"}
    fields = {"responses": ("input",), "completions": ("prompt", "max_tokens")}.get(path, ("messages", "max_tokens"))
    number = 0
    for end in BREAKS:
        for deltas, stream in (([], True), ([{"content": "half"}], False), ([{"content": "half"}], True)):
            upstream.plays.append({"deltas": deltas, **end})
            number += 1
            asked = {"model": MODEL, **{name: body[name] for name in fields}, "user": str(number), "stream": stream}
            answer = proxy.http.post(f"/v1/{path}", json=asked, headers=headers)
            if deltas and stream:
                assert answer.status_code == 200 and "half" in answer.text
                last = sse(answer.text)[-1]
                assert path != "responses" or last["type"] == "response.failed"
                told = last["response"]["error"] if path == "responses" else last["error"]
            else:
                assert answer.status_code == 502 and answer.headers["x-should-retry"] == "true"
                told = answer.json()["error"]
            assert "broke off in the middle of its answer" in told["message"]
            kinds = {"messages": ("api_error", None), "responses": (None, "server_error")}
            assert (
                deltas == []
                or not stream
                or (told.get("type"), told.get("code")) == kinds.get(path, ("server_error", "provider_error"))
            )
    calls = proxy.calls()
    assert len(calls) == number == len(upstream.requests)
    assert {(call.status, call.finish_reason) for call in calls} == {(CallStatus.FAILED, None)}
    assert all("broke off in the middle of its answer" in (call.error or "") for call in calls)


def test_a_provider_that_cannot_be_reached(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_BASE", "http://127.0.0.1:9/v1")
    answer = proxy.chat(proxy.run(), ASK)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (502, "true")
    [call] = proxy.calls()
    assert call.status is CallStatus.FAILED


def test_no_key_crosses(upstream: hosted_kit.Scripted, tmp_path: Path) -> None:
    """Not to the provider, not into the store, and not into what the service writes when it logs all, errors included."""
    upstream.plays += [{"deltas": [{"content": "one"}]}, {"deltas": [{"content": "half"}], "die": True}]
    upstream.plays += [{"status": status, "message": f"no, {SECRET} it is"} for status in (400, 401, 429, 500)]
    with hosted_kit.logged(tmp_path / "gyre.db", MODEL, tmp_path / "output") as proxy:
        access = proxy.run()
        asked = [{**ASK, "messages": [{"role": "user", "content": f"case {number}"}]} for number in range(6)]
        answers = [proxy.chat(access, body) for body in asked]
    assert [answer.status_code for answer in answers] == [200, 502, 400, 401, 429, 500]
    assert access["api_key"] not in repr(upstream.headers) + repr(upstream.requests)
    assert {sent["authorization"] for sent in upstream.headers} == {f"Bearer {SECRET}"}
    written = (tmp_path / "output").read_text()
    assert all(f"case {number}" in written for number in range(6)), "the log is as full as it can be"
    kept = [file.read_text(errors="replace") for file in tmp_path.glob("gyre.db*")]
    for text in (written, *kept, *(answer.text for answer in answers)):
        assert SECRET not in text and access["api_key"] not in text


@pytest.mark.parametrize(
    "body", [{"logprobs": True}, {"structured_outputs": {"regex": "a"}}, {"min_p": 0.1}, {"stop_token_ids": [3]}]
)
def test_what_hosted_models_do_not_have_is_refused(
    proxy: Proxy, upstream: hosted_kit.Scripted, body: dict[str, Any]
) -> None:
    answer = proxy.chat(proxy.run(), {**ASK, **body})
    assert answer.status_code == 400 and not upstream.requests and not proxy.calls()


def test_budgets_bind_hosted_calls(proxy: Proxy) -> None:
    access = proxy.run(limits={"cost": 1e-9})
    assert proxy.chat(access, ASK).status_code == 200
    refused = proxy.chat(access, {**ASK, "user": "again"})
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "limit_exceeded"
    access = proxy.run(limits={"tokens": 20})
    assert proxy.chat(access, ASK).status_code == 200
    assert proxy.chat(access, {**ASK, "user": "again"}).status_code == 200
    assert proxy.chat(access, {**ASK, "user": "thrice"}).status_code == 403


def test_a_lanes_dollars_are_those_of_the_hosted_model(upstream: hosted_kit.Scripted, tmp_path: Path) -> None:
    """At litellm's prices, of the lane and those below it; the run goes on, in the next process too."""
    with hosted(tmp_path / "gyre.db") as proxy:
        access = proxy.run()
        lane = proxy.lane(access["run"], name="helper", parent=access["lane"], limits={"cost": 1e-9})
        below = proxy.lane(access["run"], name="below", parent=lane["lane"])
        assert proxy.chat(below, ASK).status_code == 200
    with hosted(tmp_path / "gyre.db") as proxy:
        refused = proxy.chat(lane, ASK)
        assert refused.status_code == 403 and "the lane 'helper' has spent its budget of 1e-09 US" in refused.text
        assert proxy.chat(access, ASK).status_code == 200


def test_closing_a_run_ends_its_hosted_calls(proxy: Proxy, upstream: hosted_kit.Scripted) -> None:
    upstream.plays.append({"deltas": [{"content": "slow"}], "hold": True})
    asked = threading.Event()
    upstream.on_request = asked.set
    access, answers = proxy.run(), []
    thread = threading.Thread(target=lambda: answers.append(proxy.chat(access, ASK)))
    thread.start()
    assert asked.wait(30)
    assert proxy.control.post(f"/runs/{access['run']}/close", json={}).status_code == 200
    thread.join(30)
    assert answers[0].status_code == 403 and answers[0].json()["error"]["code"] == "run_closed"
    [call] = proxy.calls()
    assert call.status is CallStatus.ABORTED


def test_beside_a_policy_the_name_decides(upstream: hosted_kit.Scripted, tmp_path: Path, model: Path) -> None:
    play = say(300, 301)
    with (
        ScriptedEngine(lambda request, number: play) as engine,
        running(model, tmp_path / "gyre.db", engine.url, hosted=(MODEL,)) as proxy,
    ):
        access = proxy.run()
        client = proxy.openai(access)
        assert [item.id for item in client.models.list()] == ["policy", MODEL]
        for name in (MODEL, "policy", MODEL, "gpt-4o-mini"):
            client.chat.completions.create(model=name, messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    calls = proxy.calls()
    assert [bool(call.prompt_ids) for call in calls] == [False, True, False, True] and len(upstream.requests) == 2
    tree = RunTree.from_calls(calls)
    assert tree.untrained_counts() == {"hosted": 2}
    both = trajectories(access["run"], calls, j_max=None, seed=0, advantage=1.0)
    own = [call for call in calls if call.prompt_ids]
    alone = trajectories(access["run"], own, j_max=None, seed=0, advantage=1.0)
    assert both and [row.record() for row in both] == [row.record() for row in alone]


def test_a_service_without_litellm_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install 'gyre-sdk\[providers\]'"):
        ProxyServer(ProxySettings(store=tmp_path / "gyre.db", hosted=(MODEL,)))


def test_secrets_are_cut_by_the_names_of_their_variables() -> None:
    environment = {"A_API_KEY": "12345678", "SHORT_KEY": "abc", "PATH": "12345678x"}
    assert without_secrets("12345678 abc", environment) == "[A_API_KEY] abc"


def test_mixed_arguments_of_parallel_calls_are_an_error() -> None:
    def chunk(index: int) -> Any:
        call = Value(index=index, id="i", function=Value(name="f", arguments="{}"))
        return Value(choices=[Value(delta=Value(content="", tool_calls=[call]), finish_reason=None)])

    reading = Reading()
    reading.take(chunk(0))
    reading.take(chunk(1))
    with pytest.raises(ProtocolError):
        reading.take(chunk(0))


def test_openai_client_sees_the_provider_error_class(proxy: Proxy, upstream: hosted_kit.Scripted) -> None:
    upstream.plays.append({"status": 429, "message": "slow down", "code": "rate_limit_exceeded"})
    with pytest.raises(openai.RateLimitError):
        proxy.openai(proxy.run()).chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
