"""Replicas that die, fall silent, pause, come and go: agents wait at most, and calls go on where that is exact."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from proxy_engine import Error, ScriptedEngine, Step, Tokens, Wait, say
from proxy_kit import Proxy, content_of, running, sse
from proxy_toy import END, toy_template

from gyre_sdk.harness.proxy.routing import Health, ReplicaSpec
from gyre_sdk.harness.proxy.server.fleet import Fleet
from gyre_sdk.harness.proxy.upstream import Upstream

WHOLE = [65, 66, 67, 68, END]
"""What every call samples, greedily: the text ABCD."""
USER = {"role": "user", "content": "hi"}
BODY = {"messages": [USER], "temperature": 0}


def rest(request: dict[str, Any]) -> list[int]:
    """Return what comes after the sampled tokens that a request brings along."""
    ids = request["token_ids"]
    for count in range(len(WHOLE) - 1, -1, -1):
        if ids[len(ids) - count :] == WHOLE[:count]:
            return WHOLE[count:]
    raise AssertionError(ids)


def complete(request: dict[str, Any], number: int) -> list[Step]:
    return say(*rest(request))


def halting(gate: threading.Event) -> Callable[[dict[str, Any], int], list[Step]]:
    """Sample two tokens, then stop until the gate opens."""
    return lambda request, number: [Tokens(rest(request)[:2]), Wait(gate), *say(*rest(request)[2:])]


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def replicas(proxy: Proxy) -> dict[str, dict[str, Any]]:
    answer = proxy.control.get("/replicas")
    assert answer.status_code == 200, answer.text
    return {item["url"]: item for item in answer.json()["replicas"]}


def state(proxy: Proxy, engine: ScriptedEngine) -> str:
    return str(replicas(proxy)[engine.url]["state"])


@contextmanager
def proxy_of(model: Path, tmp_path: Path, *engines: ScriptedEngine, **more: Any) -> Iterator[Proxy]:
    urls = [engine.url for engine in engines]
    with running(model, tmp_path / "s.db", *urls, template=toy_template(), **more) as proxy:
        yield proxy


@contextmanager
def in_flight(proxy: Proxy, engine: ScriptedEngine, count: int) -> Iterator[list[Any]]:
    """Have `count` calls halt on an engine, every second one streamed; give futures of their texts."""
    with ThreadPoolExecutor(count) as pool:

        def ask(number: int) -> str:
            said = proxy.chat(proxy.run(), {**BODY, "stream": bool(number % 2)})
            assert said.status_code == 200, said.text
            if not number % 2:
                return str(said.json()["choices"][0]["message"]["content"])
            events = sse(said.text)
            assert events[-1] == "[DONE]"
            return content_of(events)

        futures = [pool.submit(ask, number) for number in range(count)]
        until(lambda: sum(len(item.sampled) == 2 for item in engine.log) == count, "calls did not reach the engine")
        until(lambda: all(len(call.sampled_ids) == 2 for call in proxy.calls()), "tokens were not recorded")
        yield futures


def check_moved(proxy: Proxy, engine: ScriptedEngine, ends: list[str]) -> None:
    for call in proxy.calls():
        assert call.sampled_ids == WHOLE
        with proxy.journal() as journal:
            attempts = journal.attempts(call.call)
        assert [item.end for item in attempts] == ends
        assert [item.tokens_from for item in attempts] == [0, 2]
        assert attempts[1].replica == engine.url


@pytest.mark.parametrize("how", ["refused", "not well", "silent"])
def test_every_call_on_a_replica_that_dies_goes_on_elsewhere(model: Path, tmp_path: Path, how: str) -> None:
    gate = threading.Event()
    with ScriptedEngine(halting(gate)) as first, ScriptedEngine(complete) as second:
        with proxy_of(model, tmp_path, first, flush=0.0, gather=1) as proxy:
            with in_flight(proxy, first, 4) as futures:
                proxy.control.post("/replicas", json={"url": second.url})
                if how == "refused":
                    first.stop()
                elif how == "not well":
                    first.healthy = False
                else:
                    first.mute.set()
                assert [future.result(30) for future in futures] == ["ABCD"] * 4
                assert state(proxy, first) == "gone"
                first.mute.clear()
                gate.set()
            check_moved(proxy, second, ["broken", "finished"])
            assert len(second.log) == 4
            first.healthy = True
            if how != "refused":
                until(lambda: state(proxy, first) == "serving", "a replica that is well again serves again")


def test_a_silent_replica_that_is_alive_keeps_its_calls(model: Path, tmp_path: Path) -> None:
    """A long prefill is silent for many checks."""
    gate = threading.Event()
    with ScriptedEngine(halting(gate)) as first, ScriptedEngine(complete) as second:
        with proxy_of(model, tmp_path, first, second, flush=0.0) as proxy:
            with ThreadPoolExecutor(1) as pool:
                said = pool.submit(proxy.chat, proxy.run(), BODY)
                until(lambda: first.log, "the call did not reach the engine")
                checks = first.checks
                until(lambda: first.checks >= checks + 8, "the replica is asked again and again")
                gate.set()
                assert said.result(30).json()["choices"][0]["message"]["content"] == "ABCD"
        assert (len(first.log), len(second.log)) == (1, 0)


def test_the_only_replica_may_be_too_busy_to_answer(model: Path, tmp_path: Path) -> None:
    """Reading a huge prompt can hold an engine up. There is nowhere else to go, so its calls wait with it."""
    gate = threading.Event()
    with ScriptedEngine(halting(gate)) as engine, proxy_of(model, tmp_path, engine, flush=0.0) as proxy:
        with ThreadPoolExecutor(1) as pool:
            said = pool.submit(proxy.chat, proxy.run(), BODY)
            until(lambda: engine.log, "the call did not reach the engine")
            engine.mute.set()
            checks = engine.checks
            until(lambda: engine.checks >= checks + 6, "the replica is asked again and again")
            engine.mute.clear()
            gate.set()
            assert said.result(30).json()["choices"][0]["message"]["content"] == "ABCD"
        assert len(engine.log) == 1
        assert state(proxy, engine) == "serving"


def test_a_paused_replica_gets_nothing_new(model: Path, tmp_path: Path) -> None:
    """It would queue without a word. What it has already waits with it."""
    gate = threading.Event()
    with ScriptedEngine(halting(gate)) as first, ScriptedEngine(complete) as second:
        with proxy_of(model, tmp_path, first, flush=0.0, gather=1) as proxy:
            with in_flight(proxy, first, 2) as futures:
                first.paused = True
                until(lambda: state(proxy, first) == "paused", "the pause is seen")
                proxy.control.post("/replicas", json={"url": second.url})
                for _ in range(4):
                    assert proxy.chat(proxy.run(), BODY).status_code == 200
                first.paused = False
                gate.set()
                assert [future.result(30) for future in futures] == ["ABCD"] * 2
            assert (len(first.log), len(second.log)) == (2, 4)
            until(lambda: state(proxy, first) == "serving", "it serves when it is resumed")


def test_a_call_waits_for_a_paused_fleet(model: Path, tmp_path: Path) -> None:
    with ScriptedEngine(complete) as engine, proxy_of(model, tmp_path, engine) as proxy:
        engine.paused = True
        until(lambda: state(proxy, engine) == "paused", "the pause is seen")
        with ThreadPoolExecutor(1) as pool:
            said = pool.submit(proxy.chat, proxy.run(), BODY)
            until(lambda: proxy.calls(), "the call is recorded")
            assert not engine.log
            engine.paused = False
            assert said.result(30).status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_without_a_replica_calls_wait_then_may_be_retried(model: Path, tmp_path: Path, stream: bool) -> None:
    with proxy_of(model, tmp_path, patience=0.5, heartbeat=0.05) as proxy:
        said = proxy.chat(proxy.run(), {**BODY, "stream": stream})
        if stream:
            assert said.status_code == 200
            assert said.text.count(": ") >= 2, "heartbeats while it waits"
            events = sse(said.text)
            assert "[DONE]" not in events
            assert not any(choice.get("finish_reason") for event in events for choice in event.get("choices", ()))
            assert events[-1]["error"]["code"] == "no_replica"
        else:
            assert said.status_code == 503
            assert said.json()["error"]["code"] == "no_replica"
            assert said.headers["x-should-retry"] == "true"
            assert 0 < int(said.headers["Retry-After"]) <= 60
        [call] = proxy.calls()
        assert (call.status, call.sampled_ids) == ("failed", [])


def test_a_replica_that_refuses_connections_is_told_of_and_waited_for(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before any call goes there: in `/healthz`, in the log, in the error of a call that waited in vain."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    waiting = {"status": "waiting", "replicas_serving": 0, "replicas": {"gone": 1}}
    with running(model, tmp_path / "store.db", url, template=toy_template(), patience=0.3) as proxy:
        until(lambda: proxy.http.get("/healthz").json() == waiting, "it is noticed")
        assert not proxy.calls() and f"replica {url} refuses connections" in caplog.text
        said = proxy.chat(proxy.run(), BODY).json()["error"]
        assert (said["code"], said["message"].partition(": ")[2]) == ("no_replica", f"{url} refuses connections")
        with ScriptedEngine(complete) as engine:
            engine.healthy = False
            proxy.control.put("/replicas", json={"replicas": [{"url": engine.url}]})
            until(lambda: proxy.http.get("/healthz").json() == waiting, "the new one is asked at once")
            assert f"replica {engine.url} answers that it is not well" in caplog.text
            engine.healthy = True
            until(lambda: state(proxy, engine) == "serving", "it serves once it is well")
            assert proxy.chat(proxy.run(), BODY).status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_calls_that_wait_are_served_by_the_first_that_comes(model: Path, tmp_path: Path, stream: bool) -> None:
    with ScriptedEngine(complete) as engine, proxy_of(model, tmp_path, heartbeat=0.05) as proxy:
        with ThreadPoolExecutor(8) as pool:
            said = [pool.submit(proxy.chat, proxy.run(), {**BODY, "stream": stream}) for _ in range(8)]
            until(lambda: len(proxy.calls()) == 8, "the calls are recorded")
            assert proxy.control.post("/replicas", json={"url": engine.url, "version": 3}).json() == {"version": 3}
            assert all(future.result(30).status_code == 200 for future in said)
        assert all(call.sampled_ids == WHOLE for call in proxy.calls())


# -- drain and the control API ------------------------------------------------------------------------------------


def test_drain_lets_calls_end_within_the_bound(model: Path, tmp_path: Path) -> None:
    gate = threading.Event()
    with ScriptedEngine(halting(gate)) as first, ScriptedEngine(complete) as second:
        with proxy_of(model, tmp_path, first, flush=0.0, gather=1) as proxy:
            with in_flight(proxy, first, 4) as futures, ThreadPoolExecutor(1) as pool:
                proxy.control.post("/replicas", json={"url": second.url})
                drained = pool.submit(proxy.control.post, "/replicas/drain", json={"url": first.url, "seconds": 25})
                until(lambda: state(proxy, first) == "draining", "it drains")
                assert proxy.chat(proxy.run(), BODY).status_code == 200
                assert not drained.done()
                gate.set()
                assert drained.result(30).json() == {"finished": 4, "moved": 0}
                assert [future.result(30) for future in futures] == ["ABCD"] * 4
            assert (len(first.log), len(second.log), first.aborts) == (4, 1, [])
            assert replicas(proxy)[first.url] == {
                "url": first.url, "version": 0, "state": "draining", "calls": 0, "tokens": 0,
            }  # fmt: skip


@pytest.mark.parametrize("how", ["ends there", "is cut", "stays"])
def test_room_is_kept_before_a_drain_where_calls_will_go_on(model: Path, tmp_path: Path, how: str) -> None:
    """Counted at the others as long as it lasts, one call at each, so that what is new reckons with it."""
    gate = threading.Event()
    with ScriptedEngine(halting(gate)) as first, ScriptedEngine(complete) as second, ScriptedEngine(complete) as third:
        with proxy_of(model, tmp_path, first, flush=0.0, gather=1) as proxy:

            def kept() -> list[tuple[int, bool]]:
                found = replicas(proxy)
                return [(found[engine.url]["calls"], found[engine.url]["tokens"] > 0) for engine in (second, third)]

            with in_flight(proxy, first, 2) as futures, ThreadPoolExecutor(1) as pool:
                for engine in (second, third):
                    proxy.control.post("/replicas", json={"url": engine.url})
                assert kept() == [(0, False), (0, False)]
                seconds = 0.3 if how == "is cut" else 25
                drained = pool.submit(
                    proxy.control.post, "/replicas/drain", json={"url": first.url, "seconds": seconds}
                )
                if how != "is cut":
                    until(lambda: kept() == [(0, True), (0, True)], "room is kept at both")
                if how == "stays":
                    proxy.control.post("/replicas", json={"url": first.url})
                    assert drained.result(30).json() == {"finished": 0, "moved": 0}
                if how != "is cut":
                    gate.set()
                assert [future.result(30) for future in futures] == ["ABCD"] * 2
                drained.result(30)
                assert (len(second.log), len(third.log)) == ((1, 1) if how == "is cut" else (0, 0))
                assert kept() == [(0, False), (0, False)]
                gate.set()


def test_drain_moves_what_is_left_after_the_bound(model: Path, tmp_path: Path) -> None:
    """Asked to abort by the engine's own ids; an engine that does not comply is left alone."""
    gate = threading.Event()
    with ScriptedEngine(halting(gate)) as first, ScriptedEngine(complete) as second:
        with proxy_of(model, tmp_path, first, flush=0.0, gather=1) as proxy:
            with in_flight(proxy, first, 4) as futures:
                proxy.control.post("/replicas", json={"url": second.url})
                drained = proxy.control.post("/replicas/drain", json={"url": first.url, "seconds": 0.05})
                assert drained.json() == {"finished": 0, "moved": 4}
                assert replicas(proxy)[first.url]["calls"] == 0
                assert [future.result(30) for future in futures] == ["ABCD"] * 4
                gate.set()
            asked = {f"generate-tokens-{item.request['request_id']}" for item in first.log}
            assert set(first.aborts) == asked
            check_moved(proxy, second, ["broken", "finished"])


def test_a_replica_announced_again_keeps_what_it_has(model: Path, tmp_path: Path) -> None:
    gate = threading.Event()
    with ScriptedEngine(halting(gate)) as engine, proxy_of(model, tmp_path, engine, flush=0.0, gather=1) as proxy:
        with in_flight(proxy, engine, 2) as futures, ThreadPoolExecutor(1) as pool:
            drained = pool.submit(proxy.control.post, "/replicas/drain", json={"url": engine.url, "seconds": 25})
            until(lambda: state(proxy, engine) == "draining", "it drains")
            proxy.control.put("/replicas", json={"replicas": [{"url": engine.url, "version": 1}]})
            assert drained.result(30).json() == {"finished": 0, "moved": 0}
            gate.set()
            assert [future.result(30) for future in futures] == ["ABCD"] * 2
        assert engine.aborts == []


def test_removing_a_replica_moves_its_calls(model: Path, tmp_path: Path) -> None:
    gate = threading.Event()
    with ScriptedEngine(halting(gate)) as first, ScriptedEngine(complete) as second:
        with proxy_of(model, tmp_path, first, second, flush=0.0, gather=1) as proxy:
            with ThreadPoolExecutor(1) as pool:
                said = pool.submit(proxy.chat, proxy.run(), BODY)
                until(lambda: first.log and first.log[0].sampled, "the call did not reach the engine")
                removed = proxy.control.delete("/replicas", params={"url": first.url})
                assert removed.json() == {"finished": 0, "moved": 1}
                assert said.result(30).json()["choices"][0]["message"]["content"] == "ABCD"
            assert list(replicas(proxy)) == [second.url]
            gate.set()


def test_a_password_in_a_replicas_address_is_not_shown(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither to the agent, nor in a log, nor with the numbers, nor is it on record."""
    with ScriptedEngine(lambda request, number: [Error()]) as first:
        secret = "pass-Zq7f3a9c1b"
        url = first.url.replace("//", f"//user:{secret}@")
        with running(model, tmp_path / "store.db", url, retry_pause=0.0) as proxy:
            broken = proxy.chat(proxy.run(), BODY)
            shown = [broken.text, proxy.http.get("/metrics").text, caplog.text]
        assert "engine dead" in broken.text and "replica http://127.0.0.1:" in broken.text
        assert all(secret not in text for text in shown)
        kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        assert b"http://127.0.0.1:" in kept and secret.encode() not in kept


def test_the_control_api_says_what_is_wrong(model: Path, tmp_path: Path) -> None:
    with proxy_of(model, tmp_path) as proxy:
        control = proxy.control
        assert control.delete("/replicas", params={"url": "http://x"}).status_code == 404
        assert control.post("/replicas/drain", json={"url": "http://x"}).status_code == 404
        for wrong in ("x", "http://", "http://x:99999", "http://x:port", "http://x /", "http://[x"):
            assert control.post("/replicas", json={"url": wrong}).status_code == 400
        assert control.post("/replicas", json={"url": "http://x", "colour": 1}).status_code == 400
        assert control.put("/replicas", json={"replicas": [{"url": "ftp://x"}]}).status_code == 400
        bad = control.post("/replicas/drain", json={"url": "http://x", "seconds": -1})
        assert bad.status_code == 400 and bad.json()["error"]["param"] == "seconds"
        for method, path in (("GET", ""), ("PUT", ""), ("POST", ""), ("DELETE", ""), ("POST", "/drain")):
            assert proxy.http.request(method, f"/gyre/v1/replicas{path}", json={}).status_code == 401


async def test_a_check_that_was_held_up_here_says_nothing() -> None:
    """This process's own delay is not the replica's silence."""
    with ScriptedEngine(complete) as engine:
        engine.mute.set()
        upstream = Upstream(versions={})
        await upstream.open()
        fleet = Fleet(upstream, [ReplicaSpec(engine.url)])
        check = asyncio.create_task(fleet.health(engine.url, 0.2))
        await asyncio.sleep(0.05)
        time.sleep(1.0)  # noqa: ASYNC251  this process is held up
        assert await check is None
        assert await fleet.health(engine.url, 0.2) is Health.GONE
        engine.mute.clear()
        assert await fleet.health(engine.url, 20.0) is Health.LIVE
        await fleet.close()
        await upstream.close()


async def test_a_process_without_free_descriptors_says_nothing_of_its_replicas() -> None:
    """What runs there goes on: only new connections are not to be had."""
    with ScriptedEngine(complete) as engine:
        upstream = Upstream(versions={})
        await upstream.open()
        fleet = Fleet(upstream, [ReplicaSpec(engine.url)])
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            assert await fleet.health(engine.url, 20.0) is None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert await fleet.health(engine.url, 20.0) is Health.LIVE
        await fleet.close()
        await upstream.close()
