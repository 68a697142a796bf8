"""The systems that are compared: how each is started, how its lanes are opened, what it keeps."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy.children import Child, ChildError
from proxy.load import Lane
from proxy.model import Model

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent / "peers"
CACHE = Path.home() / ".cache" / "gyre" / "bench"
OURS, BARE = "gyre", "passthrough"
WORKERS = "gyre, 2 workers"
"""Our proxy again, as two processes over one store; each run's agents are given their worker's address."""
BOTH = (OURS, WORKERS)
_SERVICE_KEY = "the-service-key-of-the-benchmark"
SERVICE = {"Authorization": f"Bearer {_SERVICE_KEY}"}
"""Headers of the control API of our proxy."""


@dataclass(frozen=True)
class Peer:
    """A package that is compared with, in an environment of its own."""

    script: str
    """In `benchmarks/peers`."""
    requirements: tuple[str, ...]
    """Pinned; the first one is the peer itself."""
    aim: float
    """How many times its calls per second ours should reach."""


PEER_TABLE = {
    "agentlightning": Peer(
        "agentlightning_proxy.py",
        ("agentlightning==0.3.0", "litellm==1.108.7", "fastapi==0.165.0", "uvicorn==0.54.0", "aiohttp==3.14.5"),
        5.0,
    ),
    "verifiers": Peer("verifiers_relay.py", ("verifiers==0.4.0", "aiohttp==3.14.5", "httpx==0.28.1"), 5.0),
    "rllm-model-gateway": Peer(
        "rllm_gateway.py", ("rllm-model-gateway==0.1.0", "fastapi==0.165.0", "uvicorn==0.54.0", "httpx==0.28.1"), 10.0
    ),
}


class System:
    """One running proxy, or the engine itself.

    Args:
        name: in the results.
        child: its process.
        opener: opens that many lanes.
        stored: counts the calls that its disk holds; works when the process is dead.
    """

    def __init__(
        self, name: str, child: Child, opener: Callable[[int], list[Lane]], stored: Callable[[], int] = lambda: 0
    ) -> None:
        self.name, self.child, self.open_lanes, self.stored = name, child, opener, stored

    def recorded(self) -> int | None:
        """Return how many calls it holds in memory; None for systems that do not tell."""
        return int(self.child.ask("recorded")) if self.name in ("agentlightning", "verifiers") else None


@contextmanager
def running(
    names: list[str], model: Model, engine: str, folder: Path, problems: dict[str, str]
) -> Iterator[list[System]]:
    """Start systems over one engine; stop them at the end. One that does not start is named in `problems`."""
    with ExitStack() as stack:
        systems = []
        for name in names:
            home = folder / name
            home.mkdir(parents=True)
            try:
                system = _start(name, model, engine, home)
            except (ChildError, OSError, subprocess.CalledProcessError) as error:
                problems[name] = str(error)
                continue
            stack.callback(system.child.kill)
            systems.append(system)
        yield systems


@contextmanager
def stub(model: Model, chunk: int = 8) -> Iterator[str]:
    """Run the stub engine; give its address."""
    child = start_stub(model, chunk)
    try:
        yield child.greeting["url"]
    finally:
        child.kill()


def start_stub(model: Model, chunk: int = 8) -> Child:
    """Start a stub engine; its greeting has its `url`."""
    command = [sys.executable, "-m", "proxy.stub", "--chunk", str(chunk)]
    ids, pieces = json.dumps(model.ids), json.dumps(model.pieces)
    return Child([*command, "--ids", ids, "--pieces", pieces], HERE.parent)


def gyre(model: Model, engine: str, home: Path, *options: str, name: str = OURS) -> System:
    """Start `gyre serve` with its store in `home`."""
    store = home / "store.db"
    code = "import sys; from gyre_sdk.harness.proxy.server import main; sys.exit(main(sys.argv[1:]))"
    arguments = [
        "--store",
        str(store),
        "--model",
        str(model.folder),
        "--replica",
        engine,
        "--renderer",
        "qwen3",
        *options,
    ]
    child = Child([sys.executable, "-c", code, *arguments], home, {"GYRE_SERVICE_KEY": _SERVICE_KEY}, silent=True)
    url = next(word for word in child.line().split() if word.startswith("http://"))

    def lanes(count: int) -> list[Lane]:
        opened = [_control(f"{url}/gyre/v1/runs", {"task": "bench"}) for _ in range(count)]
        return [Lane(access["base_url"], access["api_key"], access["run"]) for access in opened]

    return System(name, child, lanes, lambda: _stored_by_gyre(store))


def end_runs(lanes: list[Lane]) -> None:
    """End the runs of lanes at our proxy, as a trainer would."""
    for lane in lanes:
        _control(f"{lane.base_url.removesuffix('/v1')}/gyre/v1/runs/{lane.run}/end", {"status": "completed"})


def checkpointed_bytes(home: Path) -> int:
    """Return the bytes of a stopped proxy's store, its write-ahead log folded in."""
    for path in home.rglob("*.db"):
        with sqlite3.connect(path) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        database.close()
    return sum(path.stat().st_size for path in home.rglob("*") if path.is_file())


def install(peer: str) -> Path:
    """Return the python of a peer's environment, made when it is missing or pinned otherwise.

    Raises:
        CalledProcessError: pip failed.
    """
    home, pins = CACHE / peer, "\n".join(PEER_TABLE[peer].requirements)
    python, mark = home / "bin" / "python", home / "pins.txt"
    if not (mark.is_file() and mark.read_text() == pins):
        sys.stderr.write(f"installing {peer} into {home}\n")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, *PEER_TABLE[peer].requirements], check=True, stdout=subprocess.DEVNULL)
        mark.write_text(pins)
    return python


def _start(name: str, model: Model, engine: str, home: Path) -> System:
    if name in BOTH:
        return gyre(model, engine, home, *(("--workers", "2") if name == WORKERS else ()), name=name)
    if name == BARE:
        child = Child([sys.executable, str(HERE / "passthrough.py"), engine], home)
    else:
        python = install(name)
        child = Child([str(python), str(PEERS / PEER_TABLE[name].script), engine, str(home)], home)

    def lanes(count: int) -> list[Lane]:
        return [Lane(**lane) for lane in child.ask(f"lanes {count}")]

    return System(name, child, lanes, lambda: _stored_by_peer(home))


def _stored_by_gyre(store: Path) -> int:
    from gyre_sdk.journal import Journal
    from gyre_sdk.records import CallStatus

    with Journal(store, "r") as journal:
        calls = [call for call in journal.calls() if call.status in (CallStatus.COMPLETE, CallStatus.DELIVERED)]
    assert all(call.sampled_ids and call.prompt_ids for call in calls), "a call without its tokens"
    return len(calls)


def _stored_by_peer(home: Path) -> int:
    """Count the traces in a peer's folder, which is also its working directory."""
    count = 0
    for path in home.rglob("*.db"):
        with sqlite3.connect(path) as database:
            count += int(database.execute("SELECT count(*) FROM traces").fetchone()[0])
        database.close()
    return count


def _control(url: str, body: dict[str, Any]) -> Any:
    headers = {**SERVICE, "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def raise_file_limit() -> None:
    """Allow as many open files as the system lets this process have; children inherit it."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < 4096:
        sys.stderr.write(f"only {hard} open files are allowed: 1,000 agents need about 2,100 per process\n")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
