"""Requests made from the OpenAPI document, right, nearly right and wrong: no 500, no hang, every error explained."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proxy_engine import ScriptedEngine, say
from proxy_kit import Proxy, running
from proxy_toy import toy_template
from test_openapi import operations
from test_retries import wait_for
from wire_kit import Reply, exchange, request

from gyre_sdk.journal import Journal

HUGE: list[Any] = [10**400, -(10**30), 2**63, 2**64, -(2**63) - 1, 1e308, -0.0, 1e-320, 0, -1, 17]
URLS = [
    "",
    "x",
    "ftp://127.0.0.1",
    "http://",
    "http://[::1",
    "http://127.0.0.1:9",
    "http://127.0.0.1:99999",
    "http://\x00",
]
PATHS = [
    "/", "//", "/v1", "/v1/", "/v1//chat/completions", "/v1/%2e%2e/metrics", "/../v1/models", "/v1/models/%00",
    "/v1/models/a%2Fb", "/v1/models/%ff%fe", "/v1/models/" + "a" * 3000, "/v1/models/" + "a" * 20_000, "/v1/responses/%2e",
    "/v1/responses/resp_%ED%A0%80", "/v1/responses/" + "9" * 2000, "/v1/messages/x", "/gyre/v1/runs/%00",
    "/gyre/v1/runs/..%2f..", "/gyre/v1/calls?after=%C2%B2", "/gyre/v1/calls?after=" + "9" * 30,
    "/gyre/v1/calls?after=" + "9" * 5000, "/gyre/v1/calls?after=-1", "/gyre/v1/calls?run=%ff&run=2", "/v1/models?%zz=%",
    "/v1/models#x", "*", "http://elsewhere/v1/models", "http://[/", "/v1/chat/completions;x", "/%76%31/models",
    "/v1/models/\u00e9", "/v1/models/\x7f",
]  # fmt: skip
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "BREW", "get"]
HEADERS: list[dict[str, str | bytes]] = [
    {},
    {"Authorization": "Bearer"},
    {"Authorization": b"\xff\xfe"},
    {"Authorization": "Bearer " + "k" * 5000},
    {"Authorization": "Bearer " + "k" * 20_000},
    {"x-api-key": "\u00fc"},
    {"x-api-key": b"\x00"},
    {"Content-Encoding": "gzip"},
    {"Content-Encoding": "gzip," * 50},
    {"Content-Encoding": b"\xff"},
    {"Content-Type": "text/plain; charset=utf-99"},
    {"Expect": "100-continue"},
    {"Expect": "the-unexpected"},
    {"Idempotency-Key": b"\xed\xa0\x80"},
    {"Idempotency-Key": "x" * 5000},
    {"x-stainless-retry-count": "many"},
    {"anthropic-version": "2023-06-01"},
    {"anthropic-version": b"\xff"},
    {"Upgrade": "websocket", "Connection": "Upgrade"},
    {"Range": "bytes=5-1"},
    {"Cookie": "a=\x01"},
    {"Content-Length": "-1"},
    {"Content-Length": "9" * 40},
    {"Transfer-Encoding": "chunked, gzip"},
    {"bad header": "x"},
]


class World:
    """A proxy, the keys that open it, and names that exist in it."""

    def __init__(self, proxy: Proxy, engine: ScriptedEngine) -> None:
        self.proxy, self.engine = proxy, engine
        self.document: dict[str, Any] = proxy.http.get("/openapi.json").json()
        self.names: dict[str, list[str]] = {}
        self.open()

    def keys(self, path: str) -> str:
        return self.proxy.service_key if path.startswith("/gyre") else self.access["api_key"]

    def open(self) -> None:
        self.access = self.proxy.run()
        self.names["run"], self.names["lane"] = [self.access["run"]], [self.access["lane"]]

    def restore(self) -> None:
        """Give the proxy its one replica back."""
        self.proxy.control.put("/replicas", json={"replicas": [{"url": self.engine.url}]})

    def lives(self) -> None:
        """Check that a normal call is served, whatever came before; it waits for the replica to be found well again."""
        self.restore()
        self.open()
        body = {"messages": [{"role": "user", "content": "x"}]}
        wait_for(lambda: self.proxy.chat(self.access, body).status_code != 503)
        answer = self.proxy.chat(self.access, body)
        assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def world(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    store = tmp_path_factory.mktemp("fuzz") / "s.db"
    bounds: dict[str, Any] = {"patience": 0.5, "head_patience": 0.5, "body_patience": 0.5, "max_body": 1 << 20}
    with ScriptedEngine(lambda body, number: say(104, 105, 260)) as engine:
        with running(model, store, engine.url, template=toy_template({}), **bounds) as proxy:
            world = World(proxy, engine)
            yield world
            world.lives()
    with Journal(store, "r") as journal:
        assert [finding for finding in journal.audit() if finding.level.name == "ERROR"] == []


def check(reply: Reply | None, path: str, headers: dict[str, Any], method: str = "POST") -> None:
    """Hold what every answer must be."""
    if reply is None:
        return
    assert 100 <= reply.status < 600 and reply.status != 500, reply.raw[:2000]
    assert b"internal" not in reply.raw.lower(), reply.raw[:2000]
    if reply.status < 400 or method == "HEAD":
        return
    error = reply.json["error"]
    assert isinstance(error["message"], str) and error["message"], reply.raw[:2000]
    if error.get("code") == "bad_http" or method == "CONNECT":
        return  # no path could be read: in the form that most agents know
    if path.startswith("/v1/messages"):
        assert reply.json["type"] == "error" and error["type"], reply.raw[:2000]
    elif path.startswith("/v1/") and "anthropic-version" not in headers:
        assert {"message", "type", "code", "param"} <= set(error), reply.raw[:2000]


DEEP = ["@deep 30", "@deep 180", "@deep 500", "@deep 900", "@deep 20000"]
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=()), max_size=8),
    st.sampled_from(["", "\x00", "\ud800", "\U0001f642", "http://127.0.0.1:9", "resp_1", "a" * 3000, "%s{}"]),
)
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(HUGE),
    TEXTS,
    st.lists(st.one_of(st.none(), st.integers(), TEXTS), max_size=2),
    st.dictionaries(TEXTS, st.one_of(st.none(), st.integers(), TEXTS), max_size=2),
    st.sampled_from([[], {}, [[[]]], {"type": 3}, {"type": "function"}, {"type": "text"}]).map(deepcopy),
)


@st.composite
def values(draw: st.DrawFn, world: World, schema: dict[str, Any], depth: int = 0) -> Any:
    """Draw a value that a schema allows, more or less."""
    if depth > 7:
        return draw(JUNK)
    again = depth + 1
    if "$ref" in schema:
        return draw(values(world, world.document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]], again))
    if "allOf" in schema:
        merged: dict[str, Any] = {}
        for part in schema["allOf"]:
            merged |= draw(values(world, part, again))
        return merged
    if "anyOf" in schema:
        return draw(values(world, draw(st.sampled_from(schema["anyOf"])), again))
    if "enum" in schema:
        return draw(st.sampled_from(schema["enum"]))
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type")
    kind = draw(st.sampled_from(kind)) if isinstance(kind, list) else kind
    low, high = schema.get("minimum", 0), schema.get("maximum", 100)
    if kind == "object":
        given = {}
        for name, inner in schema.get("properties", {}).items():
            if name in schema.get("required", ()) or draw(st.integers(0, 3)) == 0:
                given[name] = draw(st.sampled_from(URLS)) if name == "url" else draw(values(world, inner, again))
        return given
    if kind == "array":
        size = draw(st.integers(schema.get("minItems", 0), max(schema.get("minItems", 0), 3)))
        return [draw(values(world, schema["items"], again)) for _ in range(size)]
    plain = {
        "string": TEXTS,
        "integer": st.integers(low, min(high, low + 40)),
        "number": st.floats(low, high),
        "boolean": st.booleans(),
        "null": st.none(),
    }
    return draw(plain.get(kind, JUNK))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the containers and keys of everything in a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from places(inner)


@st.composite
def bodies(draw: st.DrawFn, world: World, schema: dict[str, Any]) -> bytes:
    """Draw the bytes of a body: right, with something in it replaced, or not even JSON."""
    value = draw(values(world, schema))
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2]))):
        spots = list(places(value))
        if spots:
            holder, key = draw(st.sampled_from(spots))
            holder[key] = draw(st.sampled_from(DEEP)) if draw(st.integers(0, 15)) == 0 else draw(JUNK)
    text = encoded(value)
    damage = draw(st.integers(0, 11))
    if damage == 0:
        return text[: draw(st.integers(0, len(text)))]
    if damage == 1:
        at = draw(st.integers(0, len(text)))
        return text[:at] + draw(st.binary(min_size=1, max_size=3)) + text[at:]
    if damage == 2 and text.startswith(b"{") and text != b"{}":
        return text[:-1] + b"," + text[1:]
    return text


def encoded(value: Any) -> bytes:
    """Return JSON, with nesting in the place of the words that stand for it."""
    text = json.dumps(value).encode()
    for word in DEEP:
        depth = int(word.split()[1])
        nest = b'{"a":[' * (depth // 2) + b"0" + b"]}" * (depth // 2)
        text = text.replace(json.dumps(word).encode(), nest)
    return text


QUICK = settings(
    max_examples=700, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True
)


@QUICK
@given(data=st.data())
def test_bodies(world: World, data: st.DataObject) -> None:
    """Bodies from the document, and from what is near it."""
    described = operations(world.document)
    method, path = data.draw(st.sampled_from(sorted(key for key in described if "requestBody" in described[key])))
    schema = described[(method, path)]["requestBody"]["content"]["application/json"]["schema"]
    body = data.draw(bodies(world, schema))
    target = path
    for name, known in world.names.items():
        target = target.replace(f"{{{name}}}", known[0])
    headers: dict[str, str | bytes] = {"Authorization": f"Bearer {world.keys(path)}"}
    if data.draw(st.integers(0, 9)) == 0:
        headers |= data.draw(st.sampled_from(HEADERS[7:20]))
    check(exchange(world.proxy.url, request(method, target, body, headers)), path, headers)
    if path.endswith(("/close", "/end", "/finish")) or "/lanes" in path:
        world.open()
    if "/replicas" in path:
        world.restore()


@settings(parent=QUICK, max_examples=500)
@given(
    method=st.sampled_from(METHODS),
    path=st.one_of(st.sampled_from(PATHS), st.sampled_from(["/v1/chat/completions", "/v1/messages", "/gyre/v1/runs"])),
    headers=st.sampled_from(HEADERS),
    body=st.one_of(
        st.none(), st.binary(max_size=20), st.just(b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1}')
    ),
    keyed=st.booleans(),
)
def test_heads(
    world: World, method: str, path: str, headers: dict[str, str | bytes], body: bytes | None, keyed: bool
) -> None:
    """Methods, paths and headers that nobody should send."""
    if keyed and "Authorization" not in headers:
        headers = {**headers, "Authorization": f"Bearer {world.keys(path)}"}
    check(exchange(world.proxy.url, request(method, path, body, headers)), path, headers, method)


GOOD = b'{"messages":[{"role":"user","content":"x"}]}'
CHUNK = b"%x\r\n%s\r\n" % (len(GOOD), GOOD)
ODD: list[tuple[bytes, bytes]] = [
    (b"Transfer-Encoding: chunked", CHUNK[:20]),
    (b"Transfer-Encoding: chunked", CHUNK),
    (b"Transfer-Encoding: chunked", CHUNK + b"zz\r\n"),
    (b"Transfer-Encoding: chunked", b"-5\r\nabcde\r\n0\r\n\r\n"),
    (b"Transfer-Encoding: chunked", b"ffffffffffffffffff\r\nabc"),
    (b"Transfer-Encoding: chunked", b"5;" + b"x" * 20_000 + b"\r\nabcde\r\n0\r\n\r\n"),
    (b"Transfer-Encoding: chunked", b"5\nabcde\n0\n\n"),
    (b"Transfer-Encoding: xchunked", CHUNK + b"0\r\n\r\n"),
    (b"Transfer-Encoding: chunked\r\nContent-Length: 5", CHUNK + b"0\r\n\r\n"),
    (b"Content-Length: 5\r\nContent-Length: 6", GOOD),
    (b"Content-Length: 5, 5", GOOD),
    (b"Content-Length: +5", GOOD),
    (b"Content-Length: 0x5", GOOD),
    (b"Content-Length: 100000", GOOD),
    (b"Content-Length: 5", GOOD),
    (b"Content-Length: 99999999999", GOOD),
    (b"Content-Length: 44\r\nContent-Encoding: br", GOOD),
    (b"Content-Length : 44", GOOD),
    (b" Content-Length: 44", GOOD),
    (b"X: " + b"y" * 100_000, b""),
    (b"\r\n".join(b"X-%d: y" % at for at in range(400)), b""),
    (b"X: y\x00", b""),
    (b"Host: a\r\nHost: b", b""),
]


TAILS = [b"", b"\x16\x03\x01\x02", b"GET / HTTP/9.9\r\n\r\n", b"GARBAGE\r\n\r\n", b"\r\n" * 50]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/gyre/v1/runs"])
def test_framing(world: World, path: str) -> None:
    """Bodies that end too early or too late, lengths that disagree, and rubbish behind: many wait for more, side by side."""
    raw = b"POST %s HTTP/1.1\r\nHost: g\r\nConnection: close\r\nAuthorization: Bearer %s\r\n%s\r\n\r\n%s%s"

    def send(head: bytes, body: bytes, tail: bytes) -> None:
        reply = exchange(world.proxy.url, raw % (path.encode(), world.keys(path).encode(), head, body, tail))
        check(reply, path, {})

    with ThreadPoolExecutor(32) as clients:
        for sent in [clients.submit(send, *odd, tail) for odd in ODD for tail in TAILS]:
            sent.result()


@pytest.mark.parametrize(
    "raw", [b"\x16\x03\x01\x00\xa5\x01", b"\x00" * 100, b"GET", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\n\n\n"]
)
def test_what_is_no_http_is_answered_or_closed(world: World, raw: bytes) -> None:
    check(exchange(world.proxy.url, raw), "", {})


def test_the_proxy_lives_on(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """After everything above (or nothing), calls are served and nothing is logged as failed."""
    with caplog.at_level(logging.ERROR):
        world.lives()
    assert caplog.records == []
