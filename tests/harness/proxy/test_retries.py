"""proxy-retry-or-resample: which request repeats an earlier one, over real connections."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from proxy_engine import Finish, ScriptedEngine, Status, Step, Tokens, Wait
from proxy_kit import Proxy, content_of, running, sse
from proxy_toy import toy_template

PIECES = {f"S{number}": 400 + number for number in range(1, 9)}
BODY = {
    "model": "policy",
    "messages": [{"role": "system", "content": "You fix bugs."}, {"role": "user", "content": "Summarise your notes."}],
    "temperature": 1.0,
    "max_tokens": 64,
}


class Stage:
    """An engine whose generations wait for their cue, a proxy before it, and raw connections."""

    def __init__(self, proxy: Proxy, engine: ScriptedEngine, cues: list[threading.Event]) -> None:
        self.proxy, self.engine, self.cues = proxy, engine, cues
        self.access = proxy.run()

    def request(self, *, stream: bool = False, count: str | None = None, key: str | None = None) -> socket.socket:
        """Open a connection and send; the answer is not read."""
        body = json.dumps({**BODY, "stream": stream}).encode()
        head = [
            "POST /v1/chat/completions HTTP/1.1",
            "Host: x",
            f"Authorization: Bearer {self.access['api_key']}",
            f"Content-Length: {len(body)}",
            "Connection: close",
            *([f"x-stainless-retry-count: {count}"] if count is not None else []),
            *([f"Idempotency-Key: {key}"] if key else []),
        ]
        connection = socket.create_connection(("127.0.0.1", int(self.proxy.url.rsplit(":", 1)[1])))
        connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        return connection

    def answer(self, connection: socket.socket) -> str:
        """Read to the end; give the text of the answer."""
        connection.settimeout(60)
        data = b""
        while piece := connection.recv(65536):
            data += piece
        connection.close()
        head, _, body = data.partition(b"\r\n\r\n")
        assert b" 200 " in head.split(b"\r\n")[0], data
        if b"chunked" in head:
            events = sse(dechunked(body).decode())
            assert events[-1] == "[DONE]" and events[0]["choices"][0]["delta"]["role"] == "assistant"
            return content_of(events)
        return str(json.loads(body)["choices"][0]["message"]["content"])

    def asked(self, number: int) -> None:
        """Wait until the engine was asked for so many generations."""
        wait_for(lambda: len(self.engine.log) >= number)

    def complete(self, number: int) -> None:
        """Wait until so many calls are complete."""
        wait_for(lambda: sum(call.finish_reason is not None for call in self.proxy.calls()) >= number)


def dechunked(body: bytes) -> bytes:
    """Undo the chunked transfer coding."""
    text = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        text, body = text + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return text


def lose(connection: socket.socket) -> None:
    """Close a connection; return when the other side has noticed, and has closed it too."""
    (_, near), (_, far) = connection.getsockname(), connection.getpeername()
    connection.close()
    ours = f":{far:04X} 0100007F:{near:04X} "
    open_states = (f"{ours}01 ", f"{ours}08 ")  # established, and closed by the client alone
    wait_for(lambda: not any(text in Path("/proc/net/tcp").read_text() for text in open_states))


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


@contextmanager
def stage(model: Path, tmp_path: Path) -> Iterator[Stage]:
    cues = [threading.Event() for _ in range(8)]

    def play(request: dict[str, Any], number: int) -> list[Step]:
        return [Tokens([400 + number]), Wait(cues[number - 1]), Tokens([260]), Finish()]

    with ScriptedEngine(play) as engine:
        with running(model, tmp_path / "s.db", engine.url, template=toy_template(PIECES)) as proxy:
            yield Stage(proxy, engine, cues)
            for cue in cues:
                cue.set()


def check(on: Stage, generations: int) -> None:
    """So many sampling events, siblings under one prompt, none changed."""
    calls = on.proxy.calls()
    assert len(on.engine.log) == generations == len(calls)
    # of calls that go on at once, the first to end may be the first on record
    assert sorted(call.sampled_ids for call in calls) == [[401 + number, 260] for number in range(generations)]
    assert len({tuple(call.prompt_ids) for call in calls}) == 1
    assert all(not generation.dropped for generation in on.engine.log)


@pytest.mark.parametrize("counts", [("0", "1"), (None, None)], ids=["header", "no header"])
def test_lost_while_generating(model: Path, tmp_path: Path, counts: tuple[str | None, str | None]) -> None:
    """Scenarios `lost while generating` and `no header, first connection closed before the answer`."""
    with stage(model, tmp_path) as on:
        first = on.request(count=counts[0])
        on.asked(1)
        lose(first)
        second = on.request(count=counts[1])
        time.sleep(0.1)
        on.cues[0].set()
        assert on.answer(second) == "S1"
        check(on, 1)


def test_a_client_that_closes_its_sending_side_counts_as_gone(model: Path, tmp_path: Path) -> None:
    """It cannot be told from one whose connection broke: its next request gets the answer."""
    with stage(model, tmp_path) as on:
        first = on.request()
        on.asked(1)
        first.settimeout(60)
        first.shutdown(socket.SHUT_WR)
        assert first.recv(1) == b""
        on.cues[0].set()
        assert on.answer(on.request()) == "S1"
        check(on, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_finished_but_never_delivered(model: Path, tmp_path: Path, stream: bool) -> None:
    """Scenarios `finished but never delivered` and `stream cut half way`: the whole answer from its first event."""
    with stage(model, tmp_path) as on:
        first = on.request(count="0", stream=stream)
        on.asked(1)
        if stream:
            first.settimeout(60)
            assert first.recv(10)
        first.close()
        on.cues[0].set()
        on.complete(1)
        assert on.answer(on.request(count="1", stream=stream)) == "S1"
        check(on, 1)


def test_delivered_and_the_client_says_retry(model: Path, tmp_path: Path) -> None:
    """Scenario `delivered in full, client says retry`."""
    with stage(model, tmp_path) as on:
        on.cues[0].set()
        assert on.answer(on.request(count="0")) == "S1"
        assert on.answer(on.request(count="1")) == "S1"
        check(on, 1)


@pytest.mark.parametrize("count", ["0", None])
def test_delivered_and_asked_again(model: Path, tmp_path: Path, count: str | None) -> None:
    """Scenarios `delivered in full, same body again with count 0` and `no header, first answer delivered in full`."""
    with stage(model, tmp_path) as on:
        for cue in on.cues:
            cue.set()
        assert [on.answer(on.request(count=count)) for _ in range(3)] == ["S1", "S2", "S3"]
        check(on, 3)


def test_two_at_once(model: Path, tmp_path: Path) -> None:
    """Scenario `two at once, both count 0, both connections open`."""
    with stage(model, tmp_path) as on:
        first = on.request(count="0")
        on.asked(1)
        second = on.request(count="0")
        on.asked(2)
        on.cues[0].set()
        on.cues[1].set()
        assert {on.answer(first), on.answer(second)} == {"S1", "S2"}
        check(on, 2)


def test_idempotency_key(model: Path, tmp_path: Path) -> None:
    """Scenario `no retry header but an equal Idempotency-Key, first answer delivered in full`."""
    with stage(model, tmp_path) as on:
        for cue in on.cues:
            cue.set()
        assert on.answer(on.request(key="k1")) == "S1"
        assert on.answer(on.request(key="k1")) == "S1"
        check(on, 1)
        assert on.answer(on.request(key="k2")) == "S2"
        check(on, 2)


@pytest.mark.parametrize("stream", [False, True])
def test_an_idempotency_key_outlives_the_proxy(model: Path, tmp_path: Path, stream: bool) -> None:
    """Delivered in full, the proxy starts again: the equal key is served the one answer, another key a new one."""
    body = {**BODY, "stream": stream}
    plays = [[Tokens([400 + number, 260]), Finish()] for number in range(1, 4)]

    def said(proxy: Proxy, access: dict[str, Any], key: str) -> str:
        answer = proxy.chat(access, body, **{"Idempotency-Key": key})
        assert answer.status_code == 200, answer.text
        return content_of(sse(answer.text)) if stream else answer.json()["choices"][0]["message"]["content"]

    with ScriptedEngine(lambda request, number: plays[number - 1]) as engine:
        store, template = tmp_path / "s.db", toy_template(PIECES)
        with running(model, store, engine.url, template=template) as proxy:
            access = proxy.run()
            assert [said(proxy, access, key) for key in ("k1", "k2", "k1")] == ["S1", "S2", "S1"]
        with running(model, store, engine.url, template=template) as proxy:
            assert [said(proxy, access, key) for key in ("k1", "k2", "k3", "k1")] == ["S1", "S2", "S3", "S1"]
            assert len(engine.log) == len(proxy.calls()) == 3


def test_first_attempt_failed_upstream(model: Path, tmp_path: Path) -> None:
    """Scenario `first attempt failed upstream`, with the real SDK doing the retry."""

    def play(request: dict[str, Any], number: int) -> list[Step]:
        return [Status(503)] if number == 1 else [Tokens([401, 260]), Finish()]

    with ScriptedEngine(play) as engine:
        with running(model, tmp_path / "s.db", engine.url, template=toy_template(PIECES)) as proxy:
            client = proxy.openai(proxy.run(), max_retries=2)
            said = client.chat.completions.create(model="policy", messages=BODY["messages"])  # type: ignore[call-overload]
            assert said.choices[0].message.content == "S1"
            assert [call.sampled_ids for call in proxy.calls()] == [[401, 260]]


def test_the_sdk_times_out_and_retries(model: Path, tmp_path: Path) -> None:
    """The real SDK gives up waiting, asks again and gets the one answer that was sampled."""
    with stage(model, tmp_path) as on:
        client = on.proxy.openai(on.access, max_retries=20, timeout=openai.Timeout(0.4))
        threading.Timer(0.8, on.cues[0].set).start()
        said = client.chat.completions.create(model="policy", messages=BODY["messages"])  # type: ignore[call-overload]
        assert said.choices[0].message.content == "S1"
        check(on, 1)


def test_an_agent_that_goes_away_cancels_nothing(model: Path, tmp_path: Path) -> None:
    """The call completes and is on record though nobody waits."""
    with stage(model, tmp_path) as on:
        on.request().close()
        on.asked(1)
        time.sleep(0.1)
        on.cues[0].set()
        on.complete(1)
        check(on, 1)
        assert on.proxy.calls()[0].status == "complete"
