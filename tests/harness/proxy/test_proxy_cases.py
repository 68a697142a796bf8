"""cases/proxy that speak chat completions, through the wire, with inputs of our own of the same kinds."""

from __future__ import annotations

import base64
import gzip
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from proxy_engine import Done, Error, Finish, Hangup, ScriptedEngine, Status, Step, Tokens, Wait, say
from proxy_kit import ProxyProcess, content_of, running, sse
from proxy_toy import toy_template
from test_fidelity_cases import case, check_path, scripted
from test_retries import wait_for

from gyre_sdk.records import CallStatus, VersionSpan

PIECES = {"Let me ": 331, "check": 333, " it.": 334, "I will ": 341, "run": 342, " the": 345, " tests": 346, "go": 304}
HELLO = [{"role": "user", "content": "go"}]
VERSIONS = {"v7": 7, "v8": 8}


# -- proxy-abort-stays-inside ---------------------------------------------------------------------------------------


def spans(reply: dict[str, Any]) -> list[tuple[Any, int, int]]:
    return [(span["version"], span["start"], span["end"]) for span in reply["weight_spans"]]


@pytest.mark.parametrize("stream", [False, True])
def test_abort_is_continued_where_exact(model: Path, tmp_path: Path, stream: bool) -> None:
    """proxy-abort-stays-inside, plain sampling: the second engine continues from the tokens of the first."""
    source = case("proxy-abort-stays-inside")["input"]
    first, second = source["first_engine_reply"], source["second_engine_reply"]
    pieces = {"go": 304, "I": 41, " will": 42, " r": 43, "un": 44, " the": 45, " tests": 46}
    plays: list[list[Step]] = [
        [Tokens(first["output_ids"]), Finish("abort", versions=spans(first))],
        [Tokens(second["output_ids"]), Finish("stop", versions=spans(second))],
    ]
    labels = {"version_labels": VERSIONS}
    with scripted(model, tmp_path, pieces, *plays, **labels) as (proxy, engine):
        access = proxy.run()
        answer = proxy.chat(access, {"messages": HELLO, "max_tokens": source["max_tokens"], "stream": stream})
        [call] = proxy.calls()
        with proxy.journal() as journal:
            attempts = journal.attempts(call.call)
    assert "abort" not in answer.text
    if stream:
        text = content_of(sse(answer.text))
    else:
        text = answer.json()["choices"][0]["message"]["content"]
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
    assert text == "I will run the tests"
    assert engine.log[1].prompt == call.prompt_ids + first["output_ids"]
    assert engine.log[1].request["sampling_params"]["max_tokens"] == 12
    assert call.sampled_ids == [*first["output_ids"], *second["output_ids"]]
    assert call.versions == [VersionSpan(7, 0, 4), VersionSpan(8, 4, 7)]
    assert [(a.tokens_from, a.tokens_to, a.end) for a in attempts] == [(0, 4, "aborted"), (4, 7, "finished")]
    assert attempts[0].request_id != attempts[1].request_id


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        {"stop": ["run the"]},
        {"repetition_penalty": 1.2},
        {"min_tokens": 6},
        {"seed": 7},
        {"presence_penalty": 0.5},
        {"response_format": {"type": "json_object"}},
    ],
    ids=lambda params: next(iter(params)),
)
def test_abort_restarts_where_a_continuation_would_not_be_exact(
    model: Path, tmp_path: Path, params: dict[str, Any], stream: bool
) -> None:
    """proxy-abort-stays-inside, the other variants: the first attempt's ids are kept as given up."""
    plays: list[list[Step]] = [
        [Tokens([341, 342]), Finish("abort")],
        [Tokens([341, 346, 260]), Finish()],
    ]
    with scripted(model, tmp_path, PIECES, *plays) as (proxy, engine):
        access = proxy.run()
        body = {"messages": HELLO, "max_tokens": 16, "stream": stream, **params}
        answer = proxy.chat(access, body)
        [call] = proxy.calls()
        with proxy.journal() as journal:
            attempts = journal.attempts(call.call)
    text = content_of(sse(answer.text)) if stream else answer.json()["choices"][0]["message"]["content"]
    assert text == "I will  tests"
    assert call.sampled_ids == [341, 346, 260]
    kept = len(engine.log[1].prompt) - len(call.prompt_ids)
    assert engine.log[1].request["sampling_params"]["max_tokens"] == 16 - kept
    assert kept == 0 or (stream and "stop" in params and kept == 1)
    assert [(a.tokens_to, a.end) for a in attempts] == [(2, "abandoned"), (3, "finished")]


def test_a_grammar_reaches_the_engine_and_is_on_record(model: Path, tmp_path: Path) -> None:
    """proxy-abort-stays-inside, grammar: the engine is told; whether it can is for the engine to say."""
    with scripted(model, tmp_path, PIECES, say(260)) as (proxy, engine):
        answer = proxy.chat(proxy.run(), {"messages": HELLO, "response_format": {"type": "json_object"}})
        [call] = proxy.calls()
    assert answer.status_code == 200
    assert engine.log[0].request["sampling_params"]["structured_outputs"] == {"json_object": True}
    assert call.sampling.extra["structured_outputs"] == {"json_object": True}


# -- proxy-done-without-finish --------------------------------------------------------------------------------------

BREAKS: list[list[Step]] = [[Error(), Done()], [Done()], [Hangup()]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ending", BREAKS, ids=["error", "done", "hangup"])
def test_a_broken_stream_is_continued_on_another_replica(
    model: Path, tmp_path: Path, ending: list[Step], stream: bool
) -> None:
    """proxy-done-without-finish, with engine b."""
    there = threading.Event()
    first: list[Step] = [Tokens([331, 32]), Tokens([333]), Wait(there), *ending]
    second: list[Step] = [Tokens([334, 35]), Tokens([260]), Finish()]
    with ScriptedEngine(lambda request, number: first, 1) as a, ScriptedEngine(lambda request, number: second, 1) as b:
        with running(model, tmp_path / "s.db", a.url, template=toy_template(PIECES)) as proxy:
            access = proxy.run()
            answers: list[httpx.Response] = []
            body = {"messages": HELLO, "max_tokens": 20, "stream": stream}
            asking = threading.Thread(target=lambda: answers.append(proxy.chat(access, body)))
            asking.start()
            while not a.log:
                time.sleep(0.005)
            a.healthy = False
            proxy.control.put("/replicas", json={"replicas": [{"url": b.url, "version": 1}]})
            there.set()
            asking.join()
            [call] = proxy.calls()
            with proxy.journal() as journal:
                attempts = journal.attempts(call.call)
    text = content_of(sse(answers[0].text)) if stream else answers[0].json()["choices"][0]["message"]["content"]
    assert text == "Let me  check it.#"
    if stream:
        events = sse(answers[0].text)
        assert events.count("[DONE]") == 1
        assert sum(bool(e != "[DONE]" and e["choices"][0]["finish_reason"]) for e in events) == 1
    assert b.log[0].prompt == [*call.prompt_ids, 331, 32, 333]
    assert b.log[0].request["sampling_params"]["max_tokens"] == 17
    assert call.sampled_ids == [331, 32, 333, 334, 35, 260]
    assert len(call.logprobs) == 6
    assert [(x.replica, x.tokens_from, x.tokens_to) for x in attempts] == [(a.url, 0, 3), (b.url, 3, 6)]


@pytest.mark.parametrize("stream", [False, True])
def test_without_another_replica_the_agent_gets_an_error(model: Path, tmp_path: Path, stream: bool) -> None:
    """proxy-done-without-finish, without engine b: an error and no end marker; the ids stay on record."""
    fell = threading.Event()

    def play(request: dict[str, Any], number: int) -> list[Step]:
        return [Tokens([331, 32, 333]), Wait(fell), Error(), Done()] if number == 1 else [Status(503)]

    with ScriptedEngine(play) as engine:
        with running(model, tmp_path / "s.db", engine.url, template=toy_template(PIECES), patience=0.4) as proxy:
            access = proxy.run()

            def fall() -> None:
                wait_for(lambda: any(len(call.sampled_ids) == 3 for call in proxy.calls()))
                engine.healthy = False
                fell.set()

            falling = threading.Thread(target=fall)
            falling.start()
            answer = proxy.chat(access, {"messages": HELLO, "max_tokens": 20, "stream": stream})
            falling.join()
            [call] = proxy.calls()
    if stream:
        events = sse(answer.text)
        assert events[-1]["error"]["code"] == "no_replica"
        assert "[DONE]" not in events
    else:
        assert answer.status_code == 503
        assert 0 < int(answer.headers["retry-after"]) <= 60
        assert answer.json()["error"]["type"] == "server_error"
    assert (call.status, call.sampled_ids, call.finish_reason) == (CallStatus.FAILED, [331, 32, 333], None)


# -- proxy-parallel-tool-call-deltas --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("stream", [False, True])
def test_parallel_tool_call_deltas(model: Path, tmp_path: Path, size: int, stream: bool) -> None:
    """proxy-parallel-tool-call-deltas: the same calls, ids and arguments for every cut, streamed or not."""
    given = case("proxy-parallel-tool-call-deltas")
    want, ids = given["expected"], [*given["input"]["model_text"].encode(), 260]
    steps: list[Step] = [Tokens(ids[at : at + size]) for at in range(0, len(ids), size)]
    with scripted(model, tmp_path, {"go": 304}, [*steps, Finish()]) as (proxy, _engine):
        access = proxy.run()
        answer = proxy.chat(access, {"messages": HELLO, "stream": stream})
        with proxy.journal() as journal:
            [exchange] = journal.exchanges(access["run"])
    if not stream:
        choice = answer.json()["choices"][0]
        content, calls, finish = choice["message"]["content"], choice["message"]["tool_calls"], choice["finish_reason"]
    else:
        content, calls, finish = content_of(sse(answer.text)), [], None
        for event in sse(answer.text)[:-1]:
            choice = event["choices"][0]
            finish = choice["finish_reason"] or finish
            for delta in choice["delta"].get("tool_calls", ()):
                if "id" in delta:
                    assert delta["index"] == len(calls)
                    calls.append({"id": delta["id"], "function": dict(delta["function"])})
                else:
                    assert "name" not in delta["function"]
                    calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    assert content == want["content"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [c["arguments"] for c in want["calls"]]
    assert [call["function"]["arguments"] for call in calls] == want["argument_concatenation"]
    assert [call["function"]["name"] for call in calls] == [c["name"] for c in want["calls"]]
    assert exchange.answer is not None
    assert [call["id"] for call in calls] == [call["id"] for call in exchange.answer["tool_calls"]]
    assert len({call["id"] for call in calls}) == 2
    assert finish == want["finish"]["chat"]


# -- proxy-developer-role-and-unknown-fields ------------------------------------------------------------------------


def test_developer_role_and_unknown_fields(model: Path, tmp_path: Path) -> None:
    """proxy-developer-role-and-unknown-fields: unknown fields pass, are recorded and decide nothing."""
    given = case("proxy-developer-role-and-unknown-fields")
    base, want = given["input"]["base"], given["expected"]
    with scripted(model, tmp_path, {"hi": 300}, say(300, 260)) as (proxy, engine):

        def send(body: dict[str, Any]) -> tuple[Any, Any]:
            access = proxy.run()
            answer = proxy.chat(access, body)
            assert answer.status_code == 200, answer.text
            with proxy.journal() as journal:
                return proxy.calls(access["run"])[0], journal.exchanges(access["run"])[0]

        plain, _ = send(base)
        for variant in given["input"]["variants"]:
            if "body" in variant:
                continue  # an Anthropic body
            body = {**base, **variant.get("replace", {}), **variant.get("add", {})}
            for name in variant.get("remove", ()):
                del body[name]
            call, exchange = send(body)
            assert call.sampling.max_tokens == want["max_tokens_on_record"]
            assert exchange.request["body"].items() >= variant.get("add", {}).items()
            if variant["name"] in want["prompt_equal_to_base"] or variant["name"] == "unknown inside message":
                assert call.prompt_ids == plain.prompt_ids, variant["name"]
            if variant["name"] == "sampling field":
                assert call.sampling.extra == variant["add"]
                assert engine.log[-1].request["sampling_params"].items() >= variant["add"].items()
        extras = [
            {"zz_new": None},
            {"zz_new": [1, {"a": 2}]},
            {"metadata": {"a": "b"}},
            {"user": "u"},
            {"service_tier": "auto"},
        ]
        for extra in extras:
            call, exchange = send({**base, **extra})
            assert call.prompt_ids == plain.prompt_ids
            assert exchange.request["body"].items() >= extra.items()


# -- proxy-compressed-and-large-bodies ------------------------------------------------------------------------------


def test_compressed_bodies(model: Path, tmp_path: Path) -> None:
    """proxy-compressed-and-large-bodies: codings, corrupt and unknown ones, a bomb."""
    source = case("proxy-compressed-and-large-bodies")["input"]
    plain = source["plain_body_utf8"].encode()
    packed = base64.b64decode(source["gzip_b64"])
    with scripted(model, tmp_path, {}, say(104, 260), max_body=1 << 20) as (proxy, _engine):

        def send(coding: str | None, body: bytes) -> httpx.Response:
            headers = {"Content-Encoding": coding} if coding else {}
            return proxy.chat(proxy.run(), body, **headers)

        good = [(None, plain), ("gzip", packed), ("identity", plain), ("gzip, gzip", gzip.compress(packed))]
        for coding, body in good:
            assert send(coding, body).status_code == 200, coding
        prompts = [call.prompt_ids for call in proxy.calls()]
        assert prompts == [prompts[0]] * len(good)
        with proxy.journal() as journal:
            digests = {
                journal.exchanges(run.run)[0].request["digest"] for run in journal.runs() if any(journal.calls(run.run))
            }
        assert len(digests) == 1
        zstd = send("zstd", base64.b64decode(source["zstd_b64"]))
        try:
            import backports.zstd  # type: ignore[import-not-found]  # noqa: F401

            assert zstd.status_code == 200
        except ImportError:
            assert (zstd.status_code, zstd.json()["error"]["code"]) == (415, "unsupported_encoding")
        for cut in (6, 1, len(packed) - 2):
            assert send("gzip", packed[:-cut]).status_code == 400
        assert send("gzip", b"\x00" * 40).json()["error"]["type"] == "invalid_request_error"
        assert send("snappy", plain).status_code == 415
        bomb = gzip.compress(b'{"model":"policy","messages":[{"role":"user","content":"' + b"a" * (1 << 24) + b'"}]}')
        assert send("gzip", bomb).status_code == 413
        assert send(None, b"a" * (1 << 21)).status_code == 413


def test_a_large_body_does_not_stall_small_streams(model: Path, tmp_path: Path) -> None:
    """proxy-compressed-and-large-bodies, 30 MB while others run."""
    chunks: list[Step] = []
    for _ in range(25):
        chunks += [Tokens([97]), Wait(0.1)]

    def play(request: dict[str, Any], number: int) -> list[Step]:
        return say(98, 260) if len(request["token_ids"]) > 10000 else [*chunks, Tokens([260]), Finish()]

    roles = ["user", "assistant"]
    messages = [{"role": roles[at % 2], "content": (f"line {at} " * 1200)[:5000]} for at in range(600)]
    messages.append(HELLO[0])
    with (
        ScriptedEngine(play) as engine,
        ProxyProcess(model, tmp_path / "s.db", engine.url, context="16777216") as server,
    ):
        proxy = server.proxy
        gaps: list[float] = []

        def follow() -> None:
            access = proxy.run()
            body = json.dumps({"messages": HELLO, "stream": True})
            headers = {"Authorization": f"Bearer {access['api_key']}"}
            with httpx.stream(
                "POST", f"{proxy.url}/v1/chat/completions", content=body, headers=headers, timeout=60
            ) as answer:
                last = time.monotonic()
                for _ in answer.iter_lines():
                    gaps.append(time.monotonic() - last)
                    last = time.monotonic()

        threads = [threading.Thread(target=follow) for _ in range(8)]
        follow()
        alone = max(gaps)
        gaps.clear()
        for thread in threads:
            thread.start()
        access = proxy.run()
        began = time.monotonic()
        answer = proxy.chat(access, {"messages": messages, "max_tokens": 8})
        took = time.monotonic() - began
        for thread in threads:
            thread.join()
        [call] = proxy.calls(access["run"])
    assert answer.status_code == 200, answer.text
    assert len(call.prompt_ids) > 1_000_000
    assert call.prompt_ids in [generation.prompt for generation in engine.log]
    assert max(gaps) < max(took / 2, 5 * alone)


# -- proxy-n-choices-are-siblings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_are_siblings(model: Path, tmp_path: Path, stream: bool) -> None:
    """proxy-n-choices-are-siblings: each choice is a sampling event of its own."""
    given = case("proxy-n-choices-are-siblings")
    source, want = given["input"], given["expected"]
    gates = [threading.Event() for _ in range(3)]

    def play(request: dict[str, Any], number: int) -> list[Step]:
        if number > 3:
            return say(*(source["sampled_2"] if number == 4 else [303, 260]))
        ids = source["sampled"][str(int(request["request_id"].split("-")[1][21:] or 0))]
        return [Tokens(ids[:1]), Wait(gates[number - 1]), Tokens(ids[1:]), Finish()]

    with ScriptedEngine(play) as engine:
        with running(model, tmp_path / "s.db", engine.url, template=toy_template(source["toy"]["pieces"])) as proxy:
            access = proxy.run()
            threading.Timer(0.1, lambda: [gate.set() for gate in (gates[1], gates[0], gates[2])]).start()
            answer = proxy.chat(access, {**source["request_1"], "stream": stream})
            if stream:
                texts = [content_of(sse(answer.text), index) for index in range(3)]
            else:
                texts = [choice["message"]["content"] for choice in answer.json()["choices"]]
                assert answer.json()["usage"]["completion_tokens"] == 6
            assert texts == ["A", "B", "A"]
            proxy.chat(access, source["request_2"])
            third = json.loads(json.dumps(source["request_2"]))
            third["messages"][1]["content"] = "A"
            proxy.chat(access, third)
            calls = proxy.calls()
            for name in ("best_of", "use_beam_search", "prompt_logprobs"):
                refused = proxy.chat(access, {"messages": HELLO, name: 2})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    assert [call.prompt_ids for call in calls] == [want["prompt_1"]] * 3 + [want["prompt_2"], want["prompt_3"]]
    assert sum(len(call.sampled_ids) for call in calls) == want["trainable_tokens"]["after_request_3"]
    assert calls[3].parent == calls[1].call
    assert calls[4].parent in (calls[0].call, calls[2].call)
    assert len({call.call for call in calls}) == want["sampling_events"]["after_request_3"]


# -- proxy-sse-any-byte-split, the agent's side ---------------------------------------------------------------------


def test_usage_is_sent_only_when_asked_for(model: Path, tmp_path: Path) -> None:
    """proxy-sse-any-byte-split, client_variants."""
    with scripted(model, tmp_path, {}, [Tokens([*"naïve 🙂 北\u2028x".encode()[:9]]), Tokens([*"naïve 🙂 北\u2028x".encode()[9:], 260]), Finish()]) as (proxy, engine):  # fmt: skip
        for extra, want in (({"stream_options": {"include_usage": True}}, True), ({}, False)):
            events = sse(proxy.chat(proxy.run(), {"messages": HELLO, "stream": True, **extra}).text)
            usage = [event["usage"] for event in events if event != "[DONE]" and not event["choices"]]
            assert bool(usage) is want
            assert content_of(events) == "naïve 🙂 北\u2028x"
            assert "\ufffd" not in json.dumps(events, ensure_ascii=False)
        whole = proxy.chat(proxy.run(), {"messages": HELLO}).json()
        assert whole["usage"] == {"prompt_tokens": 6, "completion_tokens": 20, "total_tokens": 26}
        check_path(proxy.calls(), engine)


def test_engine_that_is_busy_is_asked_again(model: Path, tmp_path: Path) -> None:
    """A 503 of the engine is not shown: the call goes on where it can."""
    plays: list[list[Step]] = [[Status(503)], [Status(503)], say(300, 260)]
    with scripted(model, tmp_path, {"ok": 300, "go": 304}, *plays) as (proxy, _engine):
        answer = proxy.chat(proxy.run(), {"messages": HELLO})
        assert answer.json()["choices"][0]["message"]["content"] == "ok"
        with proxy.journal() as journal:
            [call] = journal.calls()
            assert [item.end for item in journal.attempts(call.call)] == ["broken", "broken", "finished"]


def test_engine_that_refuses_is_believed(model: Path, tmp_path: Path) -> None:
    """A 400 of the engine reaches the agent as one that is not worth a retry."""
    plays: list[list[Step]] = [[Status(400, "prompt too long")]]
    with scripted(model, tmp_path, {"go": 304}, *plays) as (proxy, engine):
        answer = proxy.chat(proxy.run(), {"messages": HELLO})
        assert answer.status_code == 400
        assert "prompt too long" in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"
        assert proxy.calls()[0].status is CallStatus.FAILED
    assert len(engine.log) == 1
