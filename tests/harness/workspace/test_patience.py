"""Failures of an engine that pass: tried again where that does no harm, told at once where they do not pass. The engine is scripted."""

from __future__ import annotations

import json
import re
import shutil
import socket
import socketserver
import tempfile
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import ClassVar

import pytest
from docker.errors import DockerException, ImageNotFound

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import Isolation, LocalWorkspace, patience, reaper
from gyre_sdk.harness.workspace.container import Container
from gyre_sdk.harness.workspace.engine import connect
from gyre_sdk.harness.workspace.images import Image
from gyre_sdk.harness.workspace.patience import EngineGone, EngineSilent
from gyre_sdk.harness.workspace.supervisor import Supervisor, SupervisorLost

BUSY = "driver failed to remove root filesystem: unlinkat /var/lib/merged: device or resource busy"
LATE = "OCI runtime create failed: context deadline exceeded: unknown"
BAD = 'exec: "timeout": executable file not found in $PATH: unknown'


class ScriptedEngine(socketserver.ThreadingUnixStreamServer):
    """Answers each kind of request with what is left of its script, then with success.

    A step is (status, message), or `reset` (hang up) or `silent` (never answer).
    """

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        self.script: dict[str, list[tuple[int, str] | str]] = {}
        self.asked: Counter[str] = Counter()
        super().__init__(str(path), _Answers)


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedEngine

    def address_string(self) -> str:
        return "a client"

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = re.sub(r"^/v[\d.]+", "", self.path.partition("?")[0])
        kind = f"{self.command} {re.sub(r'(?<=/containers/)(?!create)[^/]+', 'ID', path)}"
        self.server.asked[kind] += 1
        steps = self.server.script.get(kind, [])
        step = steps.pop(0) if steps else (200, "")
        if step == "silent":
            threading.Event().wait(20)
        if isinstance(step, str):
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        said = {"ApiVersion": "1.41", "message": step[1], "Id": "c0ffee", "State": {"Running": True}}
        body = json.dumps(said).encode()
        self.send_response(step[0])
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


for verb in ("GET", "HEAD", "POST", "PUT", "DELETE"):
    setattr(_Answers, f"do_{verb}", _Answers._answer)


@pytest.fixture
def engine():
    folder = Path(tempfile.mkdtemp())  # short: a socket's address is
    with ScriptedEngine(folder / "s") as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()
    reaper._engines.discard(f"unix://{folder}/s")
    shutil.rmtree(folder)


@pytest.fixture
def client(engine):
    return connect(f"unix://{engine.server_address}")


CREATE, START, REMOVE = "POST /containers/create", "POST /containers/ID/start", "DELETE /containers/ID"
INSPECT, COMMIT, PAUSE = "GET /containers/ID/json", "POST /commit", "POST /containers/ID/pause"
ARCHIVE = "PUT /containers/ID/archive"
CALLS = {
    CREATE: lambda api: api.create_container("image", name="x"),
    START: lambda api: api.start("x"),
    REMOVE: lambda api: api.remove_container("x", force=True),
    INSPECT: lambda api: api.inspect_container("x"),
    COMMIT: lambda api: api.commit("x"),
    PAUSE: lambda api: api.pause("x"),
    ARCHIVE: lambda api: api.put_archive("x", "/", b"tar"),
}


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        (REMOVE, [(500, BUSY), (409, "removal of container x is already in progress")]),
        (REMOVE, ["reset"]),
        (INSPECT, ["reset", (500, "connection error: desc = transport is closing")]),
        (ARCHIVE, ["reset", (500, BUSY)]),
        (CREATE, [(500, LATE)]),
        (COMMIT, [(500, LATE)]),
        (PAUSE, [(500, "runc did not terminate successfully: exit status 1: unable to freeze: unknown")]),
    ],
)
def test_what_passes_is_tried_again_where_that_does_no_harm(engine, client, kind, steps):
    engine.script[kind] = list(steps)
    CALLS[kind](client.api)
    assert engine.asked[kind] == len(steps) + 1


@pytest.mark.parametrize(
    ("kind", "step", "error"),
    [
        (CREATE, (404, "No such image: image"), ImageNotFound),
        (CREATE, (500, BAD), DockerException),
        (REMOVE, (409, "You cannot remove it: it is somebody's"), DockerException),
        (CREATE, "reset", EngineGone),  # it may have been done
        (COMMIT, "reset", EngineGone),
        (START, (500, LATE), DockerException),  # the engine has removed the container
    ],
)
def test_what_does_not_pass_is_told_at_once_as_an_error_of_the_workspace(engine, client, kind, step, error):
    engine.script[kind] = [step]
    with pytest.raises(WorkspaceError) as told:
        CALLS[kind](client.api)
    assert isinstance(told.value, error) and engine.asked[kind] == 1


def test_patience_ends(engine, client, monkeypatch):
    monkeypatch.setattr(patience, "PATIENCE", 0.3)
    engine.script[REMOVE] = [(500, BUSY)] * 100
    with pytest.raises(WorkspaceError, match="device or resource busy"):
        client.api.remove_container("x")
    assert 1 < engine.asked[REMOVE] < 100
    engine.script[REMOVE] = [(500, BUSY)] * 100
    assert reaper.remove(client, "x") is False  # the next sweep's


def test_silence_is_told(engine, client):
    client.api.timeout = 0.2
    engine.script[INSPECT] = ["silent"]
    with pytest.raises(
        EngineSilent, match=r"did not answer GET /containers/x/json within 0.2 s; it, or its disk, is overloaded"
    ):
        client.api.inspect_container("x")
    assert engine.asked[INSPECT] == 1


def test_a_queue_of_connections_that_is_full_is_waited_for(engine, client):
    """A socket whose server does not get to take connections refuses the next one for a moment."""
    path = Path(engine.server_address).with_name("full")
    with socket.socket(socket.AF_UNIX) as full:
        full.bind(str(path))
        full.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(str(path))
        taking = threading.Timer(0.3, _pass_on, (full, engine.server_address))
        taking.daemon = True
        taking.start()
        client.api.get_adapter("http+docker://localhost").socket_path = str(path)
        client.api.get_adapter("http+docker://localhost").pools.clear()
        assert client.api.inspect_container("x")["Id"] == "c0ffee"
        for one in waiting:
            one.close()


def _pass_on(listening: socket.socket, to: str) -> None:
    """Take connections and carry them to the engine."""
    while listening.fileno() >= 0:
        try:
            here = listening.accept()[0]
        except OSError:  # closed
            return
        there = socket.socket(socket.AF_UNIX)
        there.connect(to)
        for source, target in ((here, there), (there, here)):
            threading.Thread(target=_copy, args=(source, target), daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)


def _container(client) -> Container:
    image = Image("image", "sha256:1", "0:0", "/")
    return Container(client, image, {}, run="r", workdir="/", ttl_s=60, prepare=lambda id: None)


def test_a_container_that_a_busy_engine_does_not_start_is_made_anew(engine, client):
    engine.script[START] = [(500, LATE), (500, "failed to start shim: ttrpc: closed: unknown")]
    assert _container(client).id == "c0ffee"
    assert (engine.asked[CREATE], engine.asked[START], engine.asked[REMOVE]) == (3, 3, 2)


def test_a_container_that_cannot_start_is_told_at_once(engine, client):
    engine.script[START] = [(400, BAD)]
    with pytest.raises(WorkspaceError, match=r"does not start.*executable file not found"):
        _container(client)
    assert (engine.asked[CREATE], engine.asked[REMOVE]) == (1, 1)
    engine.script[CREATE] = ["reset"]
    with pytest.raises(WorkspaceError, match=r"does not start.*cannot be asked"):
        _container(client)
    assert engine.asked[REMOVE] == 2  # by its name: it may have been made


def test_a_container_that_a_busy_engine_cannot_look_at_is_not_called_dead(engine, client):
    container = _container(client)
    client.api.timeout = 0.2
    engine.script[INSPECT] = ["silent"]
    with pytest.raises(WorkspaceError, match=r"cannot be looked at.*did not answer"):
        container.post_mortem("")
    assert container.post_mortem("") is None


class BusyAtFirst(LocalWorkspace):
    said: ClassVar = ["OCI runtime exec failed: exec failed: ttrpc: closed: unknown"]

    def _start_supervisor(self, user: str, keep: str) -> Supervisor:
        if self.said:
            raise SupervisorLost(self.said.pop())
        return super()._start_supervisor(user, keep)


def test_a_supervisor_that_a_busy_runtime_does_not_start_is_started_again():
    with BusyAtFirst(Task(instruction="x"), isolation=Isolation.NONE) as workspace:
        assert workspace.exec("echo on").stdout == "on\n"
        assert BusyAtFirst.said == []
