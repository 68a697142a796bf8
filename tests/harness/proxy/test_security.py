"""Keys reach their own run only and are kept nowhere; engines are out of reach; slow and crooked clients are cut off."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from proxy_engine import Finish, ScriptedEngine, Tokens, Wait, say
from proxy_kit import Proxy, running
from proxy_toy import toy_template
from test_fidelity_cases import scripted
from test_retries import wait_for
from wire_kit import exchange, request

from gyre_sdk.harness.proxy.server import ProxySettings
from gyre_sdk.harness.proxy.server.settings import new_key

HELLO = {"messages": [{"role": "user", "content": "x"}]}


def as_(access: dict[str, Any]) -> dict[str, str]:
    return {"Authorization": f"Bearer {access['api_key']}"}


def respond(proxy: Proxy, access: dict[str, Any], **body: Any) -> Any:
    return proxy.http.post("/v1/responses", json={"input": "x", **body}, headers=as_(access))


def test_keys_have_256_random_bits() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"gy-[\w-]{43}", key) for key in keys)


def test_the_proxy_listens_on_loopback_unless_told_otherwise(model: Path, tmp_path: Path) -> None:
    assert ProxySettings(store=tmp_path, model=model).host == "127.0.0.1"
    with scripted(model, tmp_path, {}, say(104, 260)) as (proxy, _):
        assert proxy.url.startswith("http://127.0.0.1:")


def test_a_key_reaches_its_own_run_only(model: Path, tmp_path: Path) -> None:
    """Answers, their items and their cancellation: nothing of another run, by any name."""
    gate = threading.Event()
    first, second = say(104, 260), [Tokens([104]), Wait(gate), Tokens([260]), Finish()]
    with scripted(model, tmp_path, {}, first, second, first) as (proxy, engine):
        mine, theirs = proxy.run(), proxy.run()
        done = respond(proxy, theirs).json()
        running_ = respond(proxy, theirs, input="y", background=True).json()
        item = done["output"][0]["id"]
        for name in (done["id"], running_["id"]):
            assert proxy.http.get(f"/v1/responses/{name}", headers=as_(mine)).status_code == 404
            assert proxy.http.post(f"/v1/responses/{name}/cancel", headers=as_(mine)).status_code == 404
            assert respond(proxy, mine, previous_response_id=name).status_code == 400
        assert respond(proxy, mine, input=[{"type": "item_reference", "id": item}]).status_code == 400
        assert proxy.calls(mine["run"]) == []
        unknown = respond(proxy, mine, previous_response_id="resp_0000000000000000").json()["error"]
        other = respond(proxy, mine, previous_response_id=done["id"]).json()["error"]
        assert unknown["code"] == other["code"]
        gate.set()
        shown = proxy.http.get(f"/v1/responses/{done['id']}", headers=as_(theirs))
        assert shown.json()["status"] == "completed"
        assert respond(proxy, theirs, previous_response_id=done["id"]).status_code == 200
        assert [generation.dropped for generation in engine.log] == [False] * 3


def test_a_lane_key_opens_no_control_api(model: Path, tmp_path: Path) -> None:
    with scripted(model, tmp_path, {}, say(104, 260)) as (proxy, _):
        access = proxy.run()
        for path in ("status", "calls", "replicas", f"runs/{access['run']}"):
            assert proxy.http.get(f"/gyre/v1/{path}", headers=as_(access)).status_code == 401
        assert proxy.chat({"api_key": proxy.service_key}, HELLO).status_code == 401


@pytest.mark.parametrize("name", ["Authorization", "x-api-key", "api-key"])
def test_bytes_that_are_no_text_are_no_key(model: Path, tmp_path: Path, name: str) -> None:
    with scripted(model, tmp_path, {}, say(104, 260)) as (proxy, _):
        start = b"Bearer " if name == "Authorization" else b""
        for key in (b"\xff\xfe", b"\xc3(", proxy.run()["api_key"].encode() + b"\x80"):
            for method, path, body in (
                ("GET", "/v1/models", None),
                ("POST", "/v1/chat/completions", json.dumps(HELLO).encode()),
                ("POST", "/v1/messages", json.dumps(HELLO).encode()),
                ("GET", "/gyre/v1/status", None),
            ):
                reply = exchange(proxy.url, request(method, path, body, {name: start + key}))
                assert reply is not None and reply.status == 401, reply
                assert reply.json["error"]["message"]


def test_a_revoked_key_opens_nothing_for_good(model: Path, tmp_path: Path) -> None:
    """Also after a restart; other lanes of the run go on; a second time changes nothing."""
    with scripted(model, tmp_path, {}, say(104, 260)) as (proxy, _):
        access = proxy.run()
        other = proxy.lane(access["run"])
        assert proxy.chat(access, HELLO).status_code == 200
        for _ in range(2):
            assert proxy.control.post(f"/runs/{access['run']}/lanes/{access['lane']}/revoke").status_code == 200
        assert proxy.chat(access, HELLO).status_code == 401
        assert proxy.chat(other, HELLO).status_code == 200
        assert proxy.control.post(f"/runs/{access['run']}/lanes/l-x/revoke").status_code == 404
    with scripted(model, tmp_path, {}, say(104, 260)) as (proxy, _):
        assert proxy.chat(access, HELLO).status_code == 401
        assert proxy.chat(other, HELLO).status_code == 200


def test_keys_end_with_their_run(model: Path, tmp_path: Path) -> None:
    with scripted(model, tmp_path, {}, say(104, 260)) as (proxy, _):
        access = proxy.run()
        assert proxy.control.post(f"/runs/{access['run']}/finish", json={}).status_code == 200
        assert proxy.chat(access, HELLO).status_code == 403
        assert proxy.http.get("/v1/models", headers=as_(access)).status_code == 403


def test_no_key_is_logged_or_stored(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Keys in every place where clients put them, at the lowest log level, in good requests and in broken ones."""
    caplog.set_level(logging.DEBUG)
    secret = "sk-of-another-provider-" + "7f3a" * 8
    with ScriptedEngine(lambda body, number: say(104, 260)) as engine:
        options: dict[str, Any] = {"template": toy_template({}), "replica_token": secret + "-engine"}
        with running(model, tmp_path / "store.db", engine.url, **options) as proxy:
            access = proxy.run()
            key = access["api_key"]
            for headers in (
                {"Authorization": f"Bearer {key}"},
                {"x-api-key": key},
                {"api-key": key},
                {"Authorization": f"Bearer {key}", "Idempotency-Key": key, "Cookie": f"session={key}; other={secret}"},
                {"Authorization": f"Bearer {key}", "x-api-key": secret, "Proxy-Authorization": f"Basic {secret}"},
                {"Authorization": f"Bearer {key}", "x-goog-api-key": secret, "OpenAI-Organization": "o"},
            ):
                for path in ("/v1/chat/completions", "/v1/messages"):
                    target = f"{path}?key={key}&api-key={secret}"
                    body = {**HELLO, "max_tokens": 4}
                    assert proxy.http.post(target, json=body, headers=headers).status_code == 200, headers
            assert proxy.chat({"api_key": secret}, HELLO).status_code == 401
            assert proxy.http.get(f"/v1/nothing?key={secret}", headers=as_(access)).status_code == 404
            for broken in (
                request("POST", "/v1/models", b"{", {"Authorization": f"Bearer {key}\x00"}),
                request("GET", "/v1/models", None, {"Authorization": f"Bearer {key}", f"{secret} x": "y"}),
                request("GET", "/v1/models", None, {"x-api-key": key + "k" * 20_000}),
                f"GET /v1/models?key={secret} HTTP/9\r\nAuthorization: Bearer {key}\r\n\r\n".encode(),
            ):
                exchange(proxy.url, broken)
            kept = [path.read_bytes() for path in tmp_path.glob("store.db*")]
            service_key = proxy.service_key
    kept += [path.read_bytes() for path in tmp_path.glob("store.db*")]
    logged = "\n".join([caplog.text, *(repr(record.__dict__) for record in caplog.records)])
    assert sum(len(data) for data in kept) > 10_000
    for value in (key, key.removeprefix("gy-"), secret, service_key):
        assert all(value.encode() not in data for data in kept), value
        own = [line for line in logged.split("\n") if value in line and "httpx" not in line and "httpcore" not in line]
        assert own == [], value


OUT_OF_REACH = [
    b"POST /collective_rpc HTTP/1.1", b"POST /pause HTTP/1.1", b"POST /sleep?level=2 HTTP/1.1",
    b"POST /update_weights HTTP/1.1", b"POST /inference/v1/generate HTTP/1.1", b"POST /v1/../inference/v1/generate HTTP/1.1",
    b"POST /v1/%2e%2e/inference/v1/generate HTTP/1.1", b"POST //inference/v1/generate HTTP/1.1",
    b"POST /v1//inference/v1/generate HTTP/1.1", b"POST /inference%2fv1%2fgenerate HTTP/1.1",
    b"POST /v1/models/..%2f..%2fpause HTTP/1.1", b"POST /v1/load_lora_adapter HTTP/1.1", b"POST /tokenize HTTP/1.1",
    b"POST /reset_prefix_cache HTTP/1.1", b"GET /server_info HTTP/1.1", b"GET /is_paused HTTP/1.1",
    b"POST %(engine)s/pause HTTP/1.1", b"GET %(engine)s/is_paused HTTP/1.1", b"POST %(engine)s/inference/v1/generate HTTP/1.1",
    b"CONNECT %(host)s HTTP/1.1", b"OPTIONS * HTTP/1.1", b"GET @%(host)s/is_paused HTTP/1.1",
    b"GET /\\%(host)s/is_paused HTTP/1.1", b"TRACE / HTTP/1.1",
]  # fmt: skip


def test_engines_are_out_of_reach(model: Path, tmp_path: Path) -> None:
    """No path, no form of a target and no Host header leads to an engine's own endpoints."""
    with scripted(model, tmp_path, {}, say(104, 260)) as (proxy, engine):
        access = proxy.run()
        place = {b"engine": engine.url.encode(), b"host": engine.url.removeprefix("http://").encode()}
        for line in OUT_OF_REACH:
            for host in (b"gyre", place[b"host"], b"localhost\r\nX-Forwarded-Host: " + place[b"host"]):
                for key in (access["api_key"], proxy.service_key):
                    head = b"%s\r\nHost: %s\r\nConnection: close\r\nAuthorization: Bearer %s\r\nContent-Length: 2\r\n\r\n{}"
                    reply = exchange(proxy.url, head % (line % place if b"%(" in line else line, host, key.encode()))
                    assert reply is not None and reply.status in (400, 404, 405), (line, reply)
                    assert reply.json["error"]["message"]
        assert (engine.log, engine.aborts) == ([], [])
        own = proxy.http.get("/metrics").text
        assert "gyre_calls_total" in own and "vllm" not in own


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 4",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        b"Transfer-Encoding: identity, chunked, identity",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding : chunked",
        b"Content-Length: 4\r\nContent-Length: 70",
        b"Content-Length: +4",
        b"Content-Length: 4_4",
        b"Content-Length: 4\n Transfer-Encoding: chunked",
    ],
)
def test_a_request_cannot_hide_behind_another(model: Path, tmp_path: Path, framing: bytes) -> None:
    """Two lengths, or one that is not a number: refused and closed, and what follows is not served."""
    with scripted(model, tmp_path, {}, say(104, 260)) as (proxy, engine):
        key = proxy.run()["api_key"].encode()
        hidden = b'{"messages":[{"role":"user","content":"x"}]}'
        inner = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s"
        )
        outer = b"POST /v1/messages HTTP/1.1\r\nHost: g\r\n%s\r\n\r\n0\r\n\r\n"
        reply = exchange(proxy.url, outer % framing + inner % (key, len(hidden), hidden))
        assert reply is None or (reply.status == 400 and reply.raw.count(b"HTTP/1.") == 1), reply
        assert engine.log == []


SLOW: list[list[bytes]] = [
    [],
    [b"POST /v1/chat"],
    [b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nX: "],
    [b"GET /health HTTP/1.1\r\nHost: g\r\n\r\n", b"GET /hea"],
]


@pytest.mark.parametrize("pieces", SLOW)
def test_heads_have_a_time_limit(model: Path, tmp_path: Path, pieces: list[bytes]) -> None:
    """A connection is closed whose next request's head does not come, also after an earlier request."""
    with scripted(model, tmp_path, {}, say(104, 260), head_patience=0.3) as (proxy, _):
        reply = exchange(proxy.url, *pieces, pause=0.05)
        assert (reply.status if reply else None) == (200 if len(pieces) == 2 else None)


def test_a_dripping_head_is_cut_off_and_a_served_connection_is_not(model: Path, tmp_path: Path) -> None:
    gate = threading.Event()
    play = [Tokens([104]), Wait(gate), Tokens([260]), Finish()]
    with scripted(model, tmp_path, {}, play, head_patience=0.3) as (proxy, _):
        access, answers = proxy.run(), []
        waiting = threading.Thread(target=lambda: answers.append(proxy.chat(access, HELLO)))
        waiting.start()
        place = proxy.url.removeprefix("http://").split(":")
        with socket.create_connection((place[0], int(place[1])), timeout=20) as connection:
            connection.settimeout(0.05)
            connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
            closed = False
            for _ in range(200):
                try:
                    connection.sendall(b"y")
                    closed = connection.recv(1) == b""
                except TimeoutError:
                    continue
                except ConnectionError:
                    closed = True
                if closed:
                    break
            assert closed
        gate.set()
        waiting.join()
        assert answers[0].status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/gyre/v1/runs"])
def test_a_body_that_stops_is_refused_in_the_protocols_format(model: Path, tmp_path: Path, path: str) -> None:
    with scripted(model, tmp_path, {}, say(104, 260), body_patience=0.3) as (proxy, engine):
        key = proxy.service_key if path.startswith("/gyre") else proxy.run()["api_key"]
        head = f"POST {path} HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {key}\r\n"
        for framing in ("Content-Length: 100\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n5\r\n{    \r\n"):
            reply = exchange(proxy.url, (head + framing).encode())
            assert reply is not None and reply.status == 408
            assert reply.json["error"]["message"].startswith("the body stopped at byte ")
            assert (reply.json.get("type") == "error") == (path == "/v1/messages")
        assert engine.log == []


def test_a_body_that_drips_is_refused(model: Path, tmp_path: Path) -> None:
    with scripted(model, tmp_path, {}, say(104, 260), body_patience=5.0, client_patience=0.5) as (proxy, _):
        key = proxy.run()["api_key"]
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {key}\r\nContent-Length: 1000\r\n\r\n"
        )
        reply = exchange(proxy.url, head.encode(), *[b" "] * 20, pause=0.05)
        assert reply is not None and reply.status == 408


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_not_read_is_cut_off(model: Path, tmp_path: Path, stream: bool) -> None:
    """The connection is closed with an answer that is no whole one; the call stays on record, and others are served."""
    piece, count = "x" * (1 << 16), 200
    long = [Tokens([300] * count), Finish()]
    with scripted(model, tmp_path, {piece: 300}, long, say(104, 260), client_patience=0.5) as (proxy, _):
        access, port = proxy.run(), int(proxy.url.rsplit(":", 1)[1])
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", port))
            body = json.dumps({**HELLO, "stream": stream}).encode()
            connection.sendall(request("POST", "/v1/chat/completions", body, as_(access)))
            ends = f":{port:04X} 0100007F:{connection.getsockname()[1]:04X} 01 "
            wait_for(lambda: proxy.calls() and ends not in Path("/proc/net/tcp").read_text(), 60)
            connection.settimeout(20)
            size, last = 0, b""
            while data := connection.recv(1 << 20):
                size, last = size + len(data), data
        assert 0 < size < count << 16
        assert b"[DONE]" not in last
        [call] = proxy.calls()
        assert (call.status, call.sampled_ids) == ("complete", [300] * count)
        assert proxy.chat(access, {"messages": [{"role": "user", "content": "y"}]}).status_code == 200
