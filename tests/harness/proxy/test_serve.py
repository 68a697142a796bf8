"""`gyre serve` as a first-time user starts it: what it prints, which models it finds, which key it takes."""

from __future__ import annotations

import os
import resource
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from proxy_engine import ScriptedEngine, say
from proxy_kit import Proxy, ProxyProcess

from gyre_sdk.errors import SettingsError
from gyre_sdk.harness.proxy.server import HistoryPolicy
from gyre_sdk.harness.proxy.server.main import main, read_histories
from gyre_sdk.harness.proxy.server.specs import read_specs
from gyre_sdk.journal import Journal

ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


class Served:
    """`gyre serve` with these arguments, its standard error kept."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if name != "GYRE_SERVICE_KEY"}
        self.errors = folder / "stderr"
        with self.errors.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gyre_sdk.cli", "serve", *arguments],
                env={**inherited, **environment},
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()

    @property
    def url(self) -> str:
        assert self.line.startswith("ready http://"), self.errors.read_text()
        return self.line.split()[1]

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def play(request: dict[str, Any], number: int) -> Any:
    return say(70, 71)


def test_the_first_start_makes_a_key_and_says_where(model: Path, tmp_path: Path) -> None:
    store = tmp_path / "runs"
    with ScriptedEngine(play) as engine:
        arguments = ["--model", engine.url, "--tokenizer", str(model), "--store", str(store)]
        keys = []
        for _ in range(2):
            with Served(tmp_path, *arguments) as served:
                key = (store / "service-key").read_text().strip()
                proxy = Proxy(served.url, key, store / "gyre.db")
                assert proxy.chat(proxy.run(), ASK).status_code == 200
                served.process.terminate()
                assert served.process.wait(30) == 0
                assert served.process.stdout is not None and served.process.stdout.read() == ""
                said = served.errors.read_text()
            assert str(store / "service-key") in said and key not in said and key not in served.line
            keys.append(key)
    assert keys[0] == keys[1] and len(keys[0]) > 40
    assert stat.S_IMODE((store / "service-key").stat().st_mode) == 0o600
    assert len(proxy.calls()) == 2


@pytest.fixture(scope="module")
def given(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service on all addresses, whose key the environment gives."""
    folder = tmp_path_factory.mktemp("given")
    arguments = ["--model", str(model), "--store", str(folder), "--host", "0.0.0.0"]
    with Served(folder, *arguments, GYRE_SERVICE_KEY="given") as served:
        yield served


def test_the_environment_goes_before_a_made_key(given: Served) -> None:
    status = httpx.get(f"{given.url}/gyre/v1/status", headers={"Authorization": "Bearer given"})
    assert status.status_code == 200 and not given.errors.with_name("service-key").exists()


def test_sigterm_lets_calls_in_flight_end(model: Path, tmp_path: Path) -> None:
    import threading

    from proxy_engine import Finish, Tokens, Wait

    reached, go_on = threading.Event(), threading.Event()

    def slow(request: dict[str, Any], number: int) -> Any:
        return [Tokens([70]), Wait(go_on), Tokens([71]), Finish()]

    with ScriptedEngine(slow) as engine, ProxyProcess(model, tmp_path / "s.db", engine.url) as running:
        access, answers = running.proxy.run(), []

        def ask() -> None:
            with running.proxy.http.stream(
                "POST",
                "/v1/chat/completions",
                json={**ASK, "model": "policy", "stream": True},
                headers={"Authorization": f"Bearer {access['api_key']}"},
            ) as response:
                for text in response.iter_text():
                    answers.append(text)
                    reached.set()

        thread = threading.Thread(target=ask)
        thread.start()
        assert reached.wait(30)
        running.process.terminate()
        go_on.set()
        assert running.process.wait(30) == 0
        thread.join(30)
        assert "[DONE]" in "".join(answers)
        [call] = running.proxy.calls()
        assert call.sampled_ids == [70, 71]


def test_other_addresses_than_loopback_are_warned_of(given: Served) -> None:
    assert given.url.startswith("http://0.0.0.0:")
    assert "listening on 0.0.0.0" in given.errors.read_text()


def test_specs_are_told_apart(model: Path, tmp_path: Path) -> None:
    found = read_specs(["http://a:1/", "https://b", "litellm:openai/gpt-4o-mini"], ["http://c"], model)
    assert found.folder == model and found.replicas == ("http://c", "http://a:1", "https://b")
    assert found.hosted == ("openai/gpt-4o-mini",) and not found.local
    assert read_specs([str(model)], [], None).folder == model
    assert read_specs(["litellm:a/b", "litellm:a/b"], [], None).hosted == ("a/b",)
    local = read_specs([f"local:{model}"], [], None)
    assert local.local and local.folder == model


@pytest.mark.parametrize(
    ("specs", "what"),
    [
        (["local:/nowhere"], "not a model folder"),
        (["gpt-4o"], "not a model folder"),
        (["litellm:gpt-4o"], "PROVIDER/MODEL"),
        (["http://127.0.0.1:9"], "does not tell its model"),
    ],
)
def test_wrong_specs_say_what_is_right(specs: list[str], what: str) -> None:
    with pytest.raises(SettingsError, match=what):
        read_specs(specs, [], None)


def test_history_policies_are_given_by_role() -> None:
    given = read_histories(["main-summary=as_template", "bridge", "side=bridge", "side=as_template"])
    assert given == {
        "": HistoryPolicy.BRIDGE,
        "main-summary": HistoryPolicy.AS_TEMPLATE,
        "side": HistoryPolicy.AS_TEMPLATE,
    }
    assert read_histories([]) == {}
    for wrong in ("template", "side=", "as_template=side", ""):
        with pytest.raises(SettingsError, match="must be bridge or as_template"):
            read_histories([wrong])


def test_two_policies_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="one policy"):
        read_specs([str(model), str(tmp_path)], [], None)


def test_a_replica_tells_its_folder(model: Path, tmp_path: Path) -> None:
    with _models({"data": [{"id": "m", "root": str(model)}]}) as url:
        assert read_specs([url], [], None).folder == model
    with _models({"data": [{"id": "m", "root": "Qwen/Qwen3-8B"}]}) as url, pytest.raises(SettingsError) as caught:
        read_specs([url], [], None)
    assert "Qwen/Qwen3-8B" in str(caught.value) and "--tokenizer" in str(caught.value)


def test_the_engine_needs_its_extra(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install 'gyre-sdk\[train\]'"):
        read_specs([f"local:{model}"], [], None)


def test_errors_are_one_line_and_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "nowhere", "--store", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("gyre serve: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--port", "99999", "port of the service is 99999; give 0 to 65535"),
        ("--max-tokens", "0", "max_tokens of the service is 0; give 1 or more"),
        ("--context", "1", "context of the service is 1; give 2 or more"),
        ("--patience", "nan", "patience of the service is nan; give 0 or more"),
        ("--price-prompt", "-1", "price of the prompt of the service is -1.0; give 0 or more"),
        ("--replica", "localhost:8000", "replica 'localhost:8000' is no address; write http://HOST:PORT"),
        ("--public-url", "here", "public_url 'here' is no address; write http://HOST:PORT"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(
    option: str, value: str, said: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(model), "--store", str(tmp_path), option, value]) == 1
    assert capsys.readouterr().err == f"gyre serve: {said}\n"
    assert not list(tmp_path.iterdir()), "nothing is written"


@pytest.mark.parametrize(
    ("pragma", "said"), [("application_id=7", "not a gyre store"), ("user_version=999", "has format 999")]
)
def test_beside_a_store_that_is_refused_no_key_is_written(
    pragma: str,
    said: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("GYRE_SERVICE_KEY", raising=False)
    Journal(tmp_path / "gyre.db").close()
    with closing(sqlite3.connect(tmp_path / "gyre.db")) as store:
        store.execute(f"PRAGMA {pragma}")
    assert main(["--model", str(model), "--store", str(tmp_path)]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "service-key").exists()


def test_a_disk_without_room_is_told_of_until_there_is_some(given: Served) -> None:
    def open_run() -> httpx.Response:
        headers = {"Authorization": "Bearer given"}
        return httpx.post(f"{given.url}/gyre/v1/runs", headers=headers, json={"task": "t"}, timeout=60)

    assert open_run().status_code == 200
    plenty = resource.prlimit(given.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(given.process.pid, resource.RLIMIT_FSIZE, (0, plenty[1]))
    try:
        refused = open_run()
    finally:
        resource.prlimit(given.process.pid, resource.RLIMIT_FSIZE, plenty)
    problem = refused.json()["error"]
    assert (refused.status_code, problem["code"]) == (500, "store_failed")
    assert "the store could not be written" in problem["message"] and "free space" in problem["message"]
    assert open_run().status_code == 200


def test_a_taken_port_is_an_error_that_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import socket

    store = tmp_path / "runs"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for key in ("given", ""):
            monkeypatch.setenv("GYRE_SERVICE_KEY", key)
            for more in ([], ["--workers", "2"]):
                assert main(["--model", str(model), "--store", str(store), "--port", port, *more]) == 1
                assert "choose another port" in capsys.readouterr().err
    assert not store.exists()


def _models(body: dict[str, Any]) -> Any:
    import json
    import threading
    from contextlib import contextmanager
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    @contextmanager
    def serve() -> Any:
        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()

    return serve()
