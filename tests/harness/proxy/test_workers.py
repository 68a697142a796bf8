"""`gyre serve --workers N`: one address, each run with one worker, and a worker's death loses nothing."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy_engine import Finish, ScriptedEngine, Tokens, Wait, say
from proxy_kit import Proxy, ProxyProcess
from test_retries import lose, wait_for
from tokenizers import AddedToken, Tokenizer

from gyre_sdk.harness.proxy.routing import ReplicaSpec
from gyre_sdk.harness.proxy.server import HistoryPolicy, ProxySettings
from gyre_sdk.harness.proxy.server.shards import merged, merged_metrics, shard_of
from gyre_sdk.harness.proxy.server.worker import decode_settings, encode_settings
from gyre_sdk.harness.proxy.server.workers import Workers
from gyre_sdk.records import CallStatus
from gyre_sdk.steering import HEADER, Term
from gyre_sdk.steering import text as of

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
WORKERS = 3
HELD, LET_GO = 7, threading.Event()


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(lambda request, number: say(70, 71, 72)) as scripted:
        yield scripted


@pytest.fixture(scope="module")
def replica() -> Iterator[ScriptedEngine]:
    """The engine of `service`. An answer of `HELD` tokens at most waits for `LET_GO`."""

    def play(request: dict[str, Any], number: int) -> Any:
        held = [Wait(LET_GO)] if request["sampling_params"]["max_tokens"] == HELD else []
        return [*held, *say(70, 71, 72)]

    with ScriptedEngine(play) as scripted:
        yield scripted


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory, replica: ScriptedEngine) -> Iterator[ProxyProcess]:
    """A service that several tests use; at its end its store is sound."""
    store = tmp_path_factory.mktemp("service") / "s.db"
    with ProxyProcess(model, store, replica.url, workers=str(WORKERS)) as process:
        yield process
        assert process.terminate() == 0
        with process.proxy.journal() as journal:
            assert not [finding for finding in journal.audit() if finding.level == "error"]


def worker_pids(service: ProxyProcess) -> list[int]:
    text = Path(f"/proc/{service.process.pid}/task/{service.process.pid}/children").read_text()
    return [int(pid) for pid in text.split()]


def through_parent(service: ProxyProcess, access: dict[str, Any]) -> dict[str, Any]:
    """Give a run's access by the service's own address."""
    return {**access, "base_url": f"{service.proxy.url}/v1"}


def at_its_worker(service: ProxyProcess, access: dict[str, Any]) -> Proxy:
    return Proxy(access["base_url"].removesuffix("/v1"), "the-service-key", service.proxy.store)


def test_thirty_runs_are_recorded_once_each_by_their_worker(service: ProxyProcess) -> None:
    runs = [service.proxy.run() for _ in range(30)]
    assert {shard_of(access["run"], WORKERS) for access in runs} == set(range(WORKERS))
    assert len({access["base_url"] for access in runs}) == WORKERS
    assert service.proxy.url not in {access["base_url"].removesuffix("/v1") for access in runs}

    def work(access: dict[str, Any]) -> None:
        for by_parent in (False, True, True):
            client = service.proxy.openai(through_parent(service, access) if by_parent else access)
            stream = client.chat.completions.create(model="policy", messages=ASK["messages"], stream=by_parent)
            if by_parent:
                assert [chunk.choices[0].finish_reason for chunk in stream if chunk.choices][-1] == "stop"
        ended = service.proxy.control.post(f"/runs/{access['run']}/finish", json={"reward": 1.0})
        assert ended.status_code == 200 and ended.json()["calls"] == 3, ended.text

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, runs))
    for access in runs:
        assert [call.sampled_ids for call in service.proxy.calls(access["run"])] == [[70, 71, 72]] * 3


def test_a_worker_that_is_killed_loses_nothing(model: Path, tmp_path: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()
    lengths: list[int] = []

    def play(request: dict[str, Any], number: int) -> Any:
        """Cut the first attempt of the longer prompt; go on from where a later attempt is."""
        length = len(request["token_ids"])
        lengths.append(length)
        if length == lengths[0]:
            return say(70, 71, 72)
        if not reached.is_set():
            reached.set()
            return [Tokens([70]), Wait(go_on), Tokens([71, 72]), Finish()]
        return say(*[70, 71, 72][length - longer() :])

    def longer() -> int:
        return min(length for length in lengths if length > lengths[0])

    with (
        ScriptedEngine(play) as engine,
        ProxyProcess(model, tmp_path / "s.db", engine.url, workers=str(WORKERS)) as service,
    ):
        runs = [service.proxy.run() for _ in range(WORKERS)]
        for access in runs:
            assert service.proxy.chat(access, ASK).status_code == 200
        client = service.proxy.openai(through_parent(service, runs[0]), max_retries=8)
        texts: list[str | None] = []

        def ask() -> None:
            again = [*ASK["messages"], {"role": "user", "content": "again"}]
            answer = client.chat.completions.create(model="policy", messages=again, max_tokens=8)
            texts.append(answer.choices[0].message.content)

        thread = threading.Thread(target=ask)
        thread.start()
        assert reached.wait(30)
        port = int(runs[0]["base_url"].removesuffix("/v1").rsplit(":", 1)[1])
        [killed] = [pid for pid in worker_pids(service) if _listens(pid, port)]
        os.kill(killed, signal.SIGKILL)
        go_on.set()
        thread.join(120)
        assert len(texts) == 1
        assert {call.run for call in service.proxy.calls()} == {access["run"] for access in runs}
        for access in runs:
            assert at_its_worker(service, access).chat(access, ASK).status_code == 200, "same port as before"
        assert service.terminate() == 0
        calls = service.proxy.calls()
        assert len(calls) == 2 * WORKERS + 1
        assert all(call.sampled_ids == [70, 71, 72] for call in calls)
        assert all(call.status in (CallStatus.COMPLETE, CallStatus.DELIVERED) for call in calls)


def _listens(pid: int, port: int) -> bool:
    inodes = {
        line.split()[9]
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and int(line.split()[1].rpartition(":")[2], 16) == port
    }
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
    return any(f"socket:[{inode}]" in links for inode in inodes)


def test_a_restarted_worker_knows_the_replicas_of_now(model: Path, tmp_path: Path, engine: ScriptedEngine) -> None:
    """And the trainer that may say so: an older one is refused, before and after."""
    with ProxyProcess(model, tmp_path / "s.db", workers="2") as service:
        control = service.proxy.control
        row = {"url": engine.url, "version": 7, "model": "adapter-v7"}

        def announce(rows: list[dict[str, Any]], term: int) -> httpx.Response:
            return control.put("/replicas", json={"replicas": rows}, headers={HEADER: of(Term("one", term))})

        def check_older() -> None:
            older = announce([], 4)
            assert (older.status_code, older.json()["error"]["code"]) == (409, "old_term")

        put = announce([row], 5)
        assert put.status_code == 200 and put.json() == {"version": 7}
        check_older()
        for pid in worker_pids(service):
            os.kill(pid, signal.SIGKILL)
        runs = [_patiently(service.proxy) for _ in range(4)]
        for access in runs:
            assert service.proxy.chat(access, ASK).status_code == 200
        assert {access["version"] for access in runs} == {7}
        assert {item.request.get("model") for item in engine.log} == {"adapter-v7"}, (
            "what their requests must name, too"
        )
        check_older()


def _patiently(proxy: Proxy) -> dict[str, Any]:
    while (answer := proxy.control.post("/runs", json={"task": "t"})).status_code == 503:
        pass
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_control_status_metrics_and_health_are_of_all(service: ProxyProcess, replica: ScriptedEngine) -> None:
    proxy = service.proxy

    def counts() -> list[int]:
        """Return open runs, calls on two pages, and calls that were timed."""
        page = proxy.http.get("/metrics").text
        assert page.count("# TYPE gyre_calls_total counter") == 1
        assert f'gyre_replica_state{{replica="{replica.url}",state="serving"}} 1' in page
        values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        named = ('gyre_calls_total{dialect="chat",status="complete"}', "gyre_call_seconds_count")
        listed = len(proxy.control.get("/calls").json()["calls"])
        return [
            proxy.control.get("/status").json()["runs_open"],
            listed,
            *(int(values.get(name, "0")) for name in named),
        ]

    before = counts()
    for access in [proxy.run() for _ in range(6)]:
        assert proxy.chat(access, ASK).status_code == 200
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [6] * 4
    assert [item["url"] for item in proxy.control.get("/status").json()["replicas"]] == [replica.url]
    health = proxy.http.get("/healthz")
    assert health.status_code == 200 and health.json()["workers"] == WORKERS
    drained = proxy.control.post("/replicas/drain", json={"url": replica.url, "seconds": 0})
    assert drained.json() == {"finished": 0, "moved": 0}
    table = proxy.control.get("/replicas").json()["replicas"]
    assert [item["state"] for item in table] == ["draining"]
    assert proxy.control.put("/replicas", json={"replicas": [{"url": replica.url}]}).status_code == 200


def test_what_no_key_places_is_refused_in_the_protocols_form(service: ProxyProcess) -> None:
    answer = service.proxy.chat({"api_key": "gy-unknown"}, ASK)
    assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    answer = service.proxy.http.post("/v1/messages", json={**ASK, "model": "m"}, headers={"anthropic-version": "1"})
    assert answer.status_code == 401 and answer.json()["type"] == "error"
    wrong = httpx.post(f"{service.proxy.url}/gyre/v1/runs", json={"task": "t"}, headers={"Authorization": "Bearer no"})
    assert wrong.status_code == 401
    host, port = service.proxy.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 30) as whole:  # as clients write to what they take for a proxy
        whole.sendall(b"GET http://elsewhere:1/v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert whole.makefile("rb").readline().startswith(b"HTTP/1.1 401")
    assert service.proxy.control.get("/runs/r-none").status_code == 404


def test_another_workers_run_is_not_touched(service: ProxyProcess) -> None:
    first, second = service.proxy.run(), service.proxy.run()
    assert first["base_url"] != second["base_url"]
    answer = at_its_worker(service, first).chat(second, ASK)
    assert answer.status_code == 421 and answer.json()["error"]["code"] == "wrong_worker"


def test_one_connection_carries_the_keys_of_runs_with_different_workers(service: ProxyProcess) -> None:
    """A pooled client's connection belongs to no run: each request goes to the worker of its own key.

    A header in another encoding than UTF-8 keeps no request from its worker.
    """
    runs = [service.proxy.run() for _ in range(WORKERS)]
    assert len({access["base_url"] for access in runs}) == WORKERS
    host, port = "127.0.0.1", service.port
    with socket.create_connection((host, port), timeout=60) as connection:
        for _ in range(2):
            for access in runs:
                connection.sendall(request_bytes(access["api_key"], b"X-Name: J\xfcrgen\r\n"))
                assert status_of(connection) == 200
    assert all(service.proxy.calls(access["run"]) for access in runs)


def test_a_head_in_two_pieces_finds_its_worker(service: ProxyProcess) -> None:
    """The key comes in a later segment than the rest of the head; others are served in between."""
    runs = [service.proxy.run() for _ in range(WORKERS)]
    for access in runs:
        whole = request_bytes(access["api_key"])
        cut = whole.index(access["api_key"].encode()) + 3
        with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
            connection.sendall(whole[:cut])
            assert service.proxy.http.get("/healthz").status_code == 200
            connection.sendall(whole[cut:])
            assert status_of(connection) == 200
    assert all(service.proxy.calls(access["run"]) for access in runs)


def test_an_answer_that_nobody_got_is_given_to_the_next_equal_request(
    service: ProxyProcess, replica: ScriptedEngine
) -> None:
    """The worker learns that the agent has gone, though it talks to the service's own process."""
    access, asked = service.proxy.run(), len(replica.log)
    first = socket.create_connection(("127.0.0.1", service.port), timeout=60)
    first.sendall(request_bytes(access["api_key"], max_tokens=HELD))
    wait_for(lambda: len(replica.log) > asked)
    lose(first)
    for _ in range(2):  # who asks the workers after that is answered after they have learnt of it
        assert service.proxy.http.get("/healthz").status_code == 200
    LET_GO.set()
    wait_for(lambda: [call.finish_reason for call in service.proxy.calls(access["run"])] == ["stop"])
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as second:
        second.sendall(request_bytes(access["api_key"], max_tokens=HELD))
        assert status_of(second) == 200
    assert len(service.proxy.calls(access["run"])) == 1


@contextmanager
def limited(model: Path, store: Path, engine: ScriptedEngine, **limits: float) -> Iterator[Proxy]:
    """Run a service of two workers with limits that the command line does not offer."""
    settings = ProxySettings(
        store=store, model=model, replicas=(ReplicaSpec(engine.url),), service_key="the-service-key", **limits
    )
    workers, ready = Workers(settings, 2), threading.Event()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(workers.serve(lambda url: ready.set())))
    thread.start()
    try:
        assert ready.wait(120)
        yield Proxy(workers.url, settings.service_key, store)
    finally:
        loop.call_soon_threadsafe(workers.stop)
        thread.join(120)
        loop.close()


def test_a_head_that_never_ends_is_cut_off(model: Path, tmp_path: Path, engine: ScriptedEngine) -> None:
    with limited(model, tmp_path / "s.db", engine, head_patience=0.3) as proxy:
        for begun in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nAuthor"):
            with socket.create_connection(("127.0.0.1", port_of(proxy)), timeout=60) as connection:
                connection.sendall(begun)
                assert connection.recv(100) == b"", "closed, and nothing said"
        assert proxy.http.get("/healthz").status_code == 200


def test_an_answer_that_is_not_read_is_cut_off(model: Path, tmp_path: Path) -> None:
    """At the service's own address too; what was got is no whole answer, the call stays on record, others are served."""
    text, count = "x" * (1 << 16), 200
    folder, token = with_token(model, tmp_path / "long", text)
    long = [Tokens([token] * count), Finish()]
    with (
        ScriptedEngine(lambda request, number: long if number <= 2 else say(70, 71, 72)) as engine,
        limited(folder, tmp_path / "s.db", engine, client_patience=0.5) as proxy,
    ):
        access = proxy.run()
        for stream in (False, True):
            size, last = unread(proxy, request_bytes(access["api_key"], stream=stream))
            assert 0 < size < count * len(text) and b"[DONE]" not in last
        again = proxy.chat(access, {**ASK, "messages": [{"role": "user", "content": "again"}]})
        assert again.status_code == 200
        calls = [call for call in proxy.calls() if call.sampled_ids == [token] * count]
        assert [call.status in (CallStatus.COMPLETE, CallStatus.DELIVERED) for call in calls] == [True, True]


def unread(proxy: Proxy, request: bytes) -> tuple[int, bytes]:
    """Ask, read nothing until the service has closed the connection; return what came: its size and its end."""
    port = port_of(proxy)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        connection.sendall(request)
        established = f":{port:04X} 0100007F:{connection.getsockname()[1]:04X} 01 "
        wait_for(lambda: established not in Path("/proc/net/tcp").read_text(), 60)
        connection.settimeout(60)
        size, last = 0, b""
        while data := connection.recv(1 << 20):
            size, last = size + len(data), data
        return size, last


def with_token(model: Path, folder: Path, text: str) -> tuple[Path, int]:
    """Return a copy of a model folder in which one more token stands for a text, and that token."""
    shutil.copytree(model, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder, tokenizer.token_to_id(text)


def port_of(proxy: Proxy) -> int:
    return int(proxy.url.rsplit(":", 1)[1])


def request_bytes(key: str, more: bytes = b"", **fields: Any) -> bytes:
    """Return a chat request as it goes over a connection, with more headers or fields."""
    body = json.dumps({"model": "policy", **ASK, **fields}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode().removesuffix(b"\r\n") + more + b"\r\n" + body


def status_of(connection: socket.socket) -> int:
    """Read one answer with a known length off a connection; return its status."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    assert json.loads(answer.read())
    return answer.status


def test_workers_end_with_a_service_that_is_killed(model: Path, tmp_path: Path) -> None:
    import select

    with ProxyProcess(model, tmp_path / "s.db", workers="2") as killed:
        pids = worker_pids(killed)
        assert len(pids) == 2
        handles = [os.pidfd_open(pid) for pid in pids]
        killed.kill()
    waiting = set(handles)
    while waiting:
        ended, _, _ = select.select(list(waiting), [], [], 60)
        assert ended, "a worker outlived its service"
        waiting -= set(ended)
    for handle in handles:
        os.close(handle)


@given(st.text(), st.integers(1, 9))
def test_a_run_has_one_worker(run: str, workers: int) -> None:
    assert 0 <= shard_of(run, workers) < workers and shard_of(run, 1) == 0


def test_settings_cross_the_pipe_whole(tmp_path: Path) -> None:
    settings = ProxySettings(
        store=tmp_path / "s.db", model=tmp_path, hosted=("a/b",), history=HistoryPolicy.AS_TEMPLATE,
        replicas=(ReplicaSpec("http://a", 3),), renderer_options={"enable_thinking": False}, service_key="k", shard=1, shards=2,
    )  # fmt: skip
    assert decode_settings(encode_settings(settings)) == settings
    assert decode_settings(encode_settings(ProxySettings(store=tmp_path))).model is None


def test_answers_add_up() -> None:
    one = {"version": 3, "runs_open": 2, "replicas": [{"url": "a", "state": "serving", "calls": 1, "tokens": 10}]}
    two = {"version": 3, "runs_open": 5, "replicas": [{"url": "a", "state": "serving", "calls": 2, "tokens": 7}]}
    assert merged([one, two]) == {
        "version": 3,
        "runs_open": 7,
        "replicas": [{"url": "a", "state": "serving", "calls": 3, "tokens": 17}],
    }
    head = "# HELP x_seconds t\n# TYPE x_seconds histogram\n"
    pages = [
        f'{head}x_seconds_bucket{{le="1"}} 1\nx_seconds_sum 0.5\nx_seconds_count 1\n',
        head + "x_seconds_sum 0.25\n",
    ]
    assert merged_metrics(pages) == head + 'x_seconds_bucket{le="1"} 1\nx_seconds_sum 0.75\nx_seconds_count 1\n'
