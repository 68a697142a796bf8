"""Cells for tests: a training side that trains nothing, toy replicas, and a fleet of real engines behind a real proxy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import gyre_sdk as gyre
from gyre_sdk.events import CellMoved, Event, SwitchMeasured
from gyre_sdk.harness.service import ServiceClient
from gyre_sdk.journal import Journal
from gyre_sdk.trainer.cells.capacity import Counters
from gyre_sdk.trainer.cells.launch import CellSpec, Launched
from gyre_sdk.trainer.cells.launch.local import LocalLauncher
from gyre_sdk.trainer.cells.manager import Cell, Manager
from gyre_sdk.trainer.cells.plan import Action, Move, Policy
from gyre_sdk.trainer.cells.state import TRANSITIONS, CellState
from gyre_sdk.trainer.ledger import Ledger
from gyre_sdk.trainer.processes import Child, ChildSpec
from gyre_sdk.trainer.publish import Publisher
from gyre_sdk.trainer.sharing.core import Hung
from gyre_sdk.trainer.transports import Replica
from gyre_sdk.trainer.transports.file import FileTransport
from gyre_sdk.trainer.weights import PolicyFiles, WeightFolder, full_weights

WORKER = """
import sys, time
print("toy-worker ready on http://127.0.0.1:1", flush=True)
time.sleep(600)
"""


def until(condition: Callable[[], Any], what: str, seconds: float = 180.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@dataclass(frozen=True)
class Batch:
    """What a training side says of its batch."""

    step: int = 1
    ready_units: int = 0
    ready_tokens: int = 0
    leased_tokens: int = 0
    done_tokens: int = 0
    sealed_all: bool = False
    tokens_per_second: dict[str, float] = field(default_factory=dict)
    pull_s: float = 0.0
    push_s: float = 0.0


class Hand:
    """A training side with nothing to train: satellites join at once, unless they are slow, and go, unless they are stuck."""

    def __init__(self, *workers: str) -> None:
        self.workers = set(workers)
        self.joined: set[str] = set()
        self.slow: set[str] = set()
        self.stuck: set[str] = set()
        self.gate = False
        self.gone: dict[str, Hung] = {}
        """Workers that hang."""
        self.batch = Batch()

    def open_gate(self) -> None:
        self.gate = True

    def close_gate(self, seconds: float) -> bool:
        if "cell-0" in self.stuck:
            return False
        self.gate = False
        return True

    def admit(self, cell: str) -> None:
        if cell not in self.slow:
            self.joined.add(cell)

    def join_wait(self, cell: str, seconds: float) -> bool:
        return cell in self.joined

    def dismiss(self, cell: str, seconds: float) -> bool:
        if cell in self.stuck:
            return False
        self.joined.discard(cell)
        return True

    def waiting(self) -> set[str]:
        return set(self.workers)

    def hung(self, cell: str) -> Hung | None:
        return self.gone.get(cell)

    def progress(self) -> Batch:
        return self.batch

    def trains(self, cell: str) -> bool:
        """Tell whether a cell's devices are the training side's."""
        return cell in self.joined or (cell == "cell-0" and self.gate)


def counted(dispatched: int = 0, finished: int = 0) -> Counters:
    """Return counters of runs that all have begun."""
    live = dispatched - finished
    return Counters(dispatched, dispatched, finished, [1.0] * live, [5.0] * finished, live, 100.0)


class ToyReplica:
    """Speaks the part of vLLM's interface that switching needs, and notes each request that changes something."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.broken: set[str] = set()
        """Routes that answer 500."""
        self.paused = False
        self.asleep: set[str] = set()
        self.version = "0"
        self.go_on = threading.Event()
        """While it is not set, weights do not arrive."""
        self.go_on.set()
        toy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(*toy.get(self.path))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                self.answer(*toy.post(self.path, json.loads(body) if body else {}))

            def answer(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        if path == "/health":
            return (503 if "health" in self.broken else 200), {}
        return 200, {"is_paused": self.paused, "is_sleeping": self.paused or bool(self.asleep)}

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        route = path.strip("/").partition("?")[0]
        if route in self.broken:
            return 500, {"error": "broken"}
        self.asked.append(path)
        if route == "pause":
            self.paused = True
        elif route == "resume":
            self.paused = False
        elif route == "sleep":
            self.paused, self.asleep = True, {"weights", "kv_cache"}
        elif route == "wake_up":
            self.asleep.discard(path.rpartition("=")[2])
            self.paused = bool(self.asleep)
        elif route == "finish_weight_update":
            self.go_on.wait(30)
            if "weights" in self.asleep:
                return 500, {"error": "no memory to load into"}
            self.version = body["weight_version"]
        return 200, {}

    def restart(self) -> None:
        """Be as one that was started anew."""
        self.paused, self.asleep = False, set()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class ToyTransport:
    """Publishes a version's number."""

    name = "toy"
    keep = 1

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self, model: Any) -> Any:
        return model

    def write(self, version: int, weights: Any) -> PolicyFiles:
        return PolicyFiles(version, self._folder, "")

    def bring(self, replica: Replica, files: PolicyFiles) -> dict[str, float]:
        replica.finish(str(files.version))
        return {"load": 0.0}

    def request_name(self, files: PolicyFiles) -> str | None:
        return None


class ManualClock:
    """Time that stands still until it is turned."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


class Pages(BaseHTTPRequestHandler):
    """Answers what a replica says of itself: `page` of its path."""

    def page(self, path: str) -> str:
        raise NotImplementedError

    def do_GET(self) -> None:
        body = self.page(self.path).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def answering(pages: type[Pages]) -> Iterator[str]:
    """Serve pages; give the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), pages)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


class Toys:
    """Toy replicas, and a real publisher to them."""

    def __init__(self, folder: Path, count: int) -> None:
        self.replicas = [ToyReplica() for _ in range(count)]
        self.events: list[Event] = []
        self.journal = Journal(folder / "store.db")
        self.folder = WeightFolder(folder, folder / "out", 10)
        self.publisher = Publisher(
            Ledger(self.journal),
            self.folder,
            PolicyFiles(0, folder, ""),
            observer=self.events.append,
            transport=ToyTransport(folder),
            patience=0.0,
        )
        self.publisher.connect([toy.url for toy in self.replicas], None)
        self.publisher.start()

    def close(self) -> None:
        for toy in self.replicas:
            toy.close()
        self.folder.remove()
        self.journal.close()


def moves(events: Sequence[Event], cell: str) -> list[tuple[str, str]]:
    """Return what a cell became, with the reason; fails where the table does not allow it."""
    found = [event for event in events if isinstance(event, CellMoved) and event.cell == cell]
    state = "serving"
    for event in found:
        assert event.before == state and event.seconds >= 0
        assert event.state in TRANSITIONS[CellState(state)].values()
        state = event.state
    return [(event.state, event.reason) for event in found]


class Forced:
    """A `decide` that sends cells to and fro, whatever there is to train. `count` is of switches that it asked for."""

    def __init__(self, rounds: Sequence[int], *, live: Callable[[], bool] = lambda: True) -> None:
        """`rounds`: cells to move, negative ones back; over and over again."""
        self._rounds = list(rounds)
        self._live = live
        self.count = 0

    def __call__(self, seen: Any, policy: Policy) -> tuple[Action, ...]:
        if not self._live():
            return ()
        cells = self._rounds[self.count % len(self._rounds)]
        self.count += 1
        return (Action(Move.TO_TRAINING if cells > 0 else Move.TO_SERVING, abs(cells), "the test wants it"),)


class Fleet:
    """Real engines with toy workers, started by the local launcher, and a real `gyre serve` in front of them."""

    def __init__(
        self, folder: Path, model: Path, count: int, replica: Callable[[Fleet, int], ChildSpec] | None
    ) -> None:
        self.model = model
        self.store = folder / "store.db"
        self.events: list[Event] = []
        (folder / "toy_worker.py").write_text(WORKER)
        self.journal = Journal(self.store)
        self.folder = WeightFolder(model, folder / "out", 1_000_000)
        self.ledger = Ledger(self.journal)
        self.publisher = Publisher(
            self.ledger,
            self.folder,
            PolicyFiles(0, model, ""),
            observer=self.events.append,
            transport=FileTransport(self.folder, "test"),
        )
        self.launcher = LocalLauncher(self.events.append)
        self.launched: list[Launched] = []
        for number in range(count):
            name = f"cell-{number}"
            spec = replica(self, number) if replica is not None else self._embedded(name, folder)
            worker = ChildSpec(
                f"{name}-worker", lambda port: ["toy_worker"], "toy-worker ready on", folder / f"{name}-worker.log"
            )
            self.launched.append(self.launcher.launch(CellSpec(name, spec, worker if number else None)))
        key = "the key of this test"
        (folder / "key").write_text(key)
        command = ["gyre_sdk.cli", "serve", "--store", str(self.store), "--model", str(model), "--renderer", "qwen3"]
        self.proxy = Child(
            ChildSpec(
                "proxy",
                lambda port: [*command, "--port", str(port), "--service-key-file", str(folder / "key")],
                "ready",
                folder / "proxy.log",
                on_ready=lambda url: self.publisher.route(),
            ),
            self.events.append,
        )
        self.proxy.begin()
        self.urls = [launched.wait() for launched in self.launched]
        self.service = ServiceClient(self.proxy.wait(), key)
        self.publisher.connect(self.urls, self.service)
        self.publisher.start()

    def _embedded(self, name: str, folder: Path) -> ChildSpec:
        def command(port: int) -> list[str]:
            files = self.publisher.current
            arguments = ["gyre_sdk.trainer.engines.embedded", "--model", str(files.folder)]
            return [*arguments, "--version", str(files.version), "--port", str(port), "--threads", "1"]

        return ChildSpec(
            f"{name}-replica",
            command,
            "gyre-engine ready on",
            folder / f"{name}.log",
            on_death=self.publisher.lost,
            on_ready=self.publisher.returned,
        )

    def cells(self) -> list[Cell]:
        return [
            Cell(f"cell-{number}", url, launched=launched)
            for number, (url, launched) in enumerate(zip(self.urls, self.launched, strict=True))
        ]

    @contextmanager
    def manager(self, cells: Sequence[Cell], hand: Hand, **more: Any) -> Iterator[Manager]:
        """Manage these cells; at the end all serve, and nothing is wrong."""
        given = {"counters": lambda: counted(1), "drain_s": 0.05, "runs_per_cell": 8, "period_s": 0.05, **more}
        manager = Manager(
            cells,
            training=hand,
            publisher=self.publisher,
            policy=Policy(),
            observer=self.events.append,
            **given,
        )
        manager.start()
        try:
            yield manager
            manager.check()
        finally:
            manager.stop()
        assert set(manager.states().values()) == {"serving"}

    def states(self) -> dict[str, str]:
        """Return what the proxy says of the replicas in its table."""
        return {row["url"]: row["state"] for row in self.service.status()["replicas"]}

    def switches(self) -> int:
        return sum(isinstance(event, SwitchMeasured) for event in self.events)

    def close(self) -> None:
        self.publisher.close()
        self.service.close()
        self.proxy.stop()
        self.launcher.close()
        self.folder.remove()
        self.journal.close()


@contextmanager
def fleet(
    folder: Path, model: Path, count: int, replica: Callable[[Fleet, int], ChildSpec] | None = None
) -> Iterator[Fleet]:
    """Run a fleet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)  # where the toy worker lies
        patch.setenv("OMP_NUM_THREADS", "1")
        found = Fleet(folder, model, count, replica)
        try:
            yield found
        finally:
            found.close()


def converse(
    service: ServiceClient, run: int, calls: int, tokens: int, before: Callable[[int], None] = lambda call: None
) -> tuple[str, list[str]]:
    """Be an agent: greedy calls over a growing conversation; return the run's id and the answers."""
    task = gyre.Task(name=f"count-{run}", instruction=f"Say {run}.", scorer=lambda workspace: 1.0)
    said = []
    with gyre.session(task, service=service, workspace="local") as agent:
        client = agent.openai()
        messages: list[Any] = [{"role": "user", "content": task.instruction}]
        for call in range(calls):
            before(call)
            answer = client.chat.completions.create(
                model="policy",
                messages=messages[-5:],  # the tiny model's context is short
                max_tokens=tokens,
                temperature=0.0,
                extra_body={"ignore_eos": True},
            )
            said.append(answer.choices[0].message.content or "")
            messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": f"More, {call}."}]
    return agent.result.run, said


def converse_all(
    service: ServiceClient, runs: int, calls: int, tokens: int, before: Callable[[int], None] = lambda call: None
) -> list[tuple[str, list[str]]]:
    """Be many agents at a time."""
    with ThreadPoolExecutor(runs) as pool:
        return list(pool.map(lambda run: converse(service, run, calls, tokens, before), range(runs)))


def weights(served: Fleet) -> dict[str, Any]:
    """Return the policy's weights as the trainer would publish them."""
    from transformers import AutoModelForCausalLM

    return dict(full_weights(AutoModelForCausalLM.from_pretrained(served.model)))


def check_calls(store: Path, runs: list[str], calls: int, tokens: int, versions: set[int]) -> int:
    """Every call is whole: each token once, under a version that was published. Return how often calls moved."""
    moved = 0
    with Journal(store, "r") as journal:
        for run in runs:
            found = list(journal.calls(run))
            assert len(found) == calls
            for call in found:
                assert len(call.sampled_ids) == len(call.logprobs) == tokens
                assert [span.start for span in call.versions] == [0, *(span.end for span in call.versions[:-1])]
                assert call.versions[-1].end == tokens and {span.version for span in call.versions} <= versions
                attempts = journal.attempts(call.call)
                assert [item.tokens_from for item in attempts[1:]] == [item.tokens_to for item in attempts[:-1]]
                moved += len(attempts) - 1
    checked = subprocess.run([sys.executable, "-m", "gyre_sdk.cli", "fsck", str(store)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    return moved
