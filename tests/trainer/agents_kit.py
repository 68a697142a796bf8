"""The agents' process with a recording service, without engine and trainer: what tests of it share."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training_kit import make_training

from gyre_sdk.errors import ServiceError
from gyre_sdk.harness.proxy.server import ProxyServer, ProxySettings
from gyre_sdk.harness.service import ServiceClient
from gyre_sdk.harness.task import Task
from gyre_sdk.journal import Journal
from gyre_sdk.records import RunRecord
from gyre_sdk.trainer.agents.client import Agents
from gyre_sdk.trainer.agents.outcome import Outcome
from gyre_sdk.trainer.agents.settings import AgentSettings
from gyre_sdk.trainer.agents.wire import KEY_FILE, READY, Order
from gyre_sdk.trainer.config import TrainerConfig, load_config
from gyre_sdk.trainer.keys import kept_key
from gyre_sdk.trainer.rollouts import cancel_runs_of
from gyre_sdk.trainer.tasks import load_tasks

AGENT = '''
"""An agent that does what its task says."""
import asyncio, os, sys, time
from pathlib import Path
from gyre_sdk.errors import LimitExceeded, WorkspaceError
from gyre_sdk.harness.task import Task

HERE = Path(__file__).parent
DOES = ("end", "raise", "leave", "limit", "workspace", "print", "hold", "die", "options", "async", "async raise", "async hold")

def scorer(workspace):
    return 0.0

def tasks():
    inner = Task(name="inner", instruction="unscored", scorer=lambda workspace: 0.75)
    return [*(Task(name=name, instruction=name, scorer=scorer) for name in DOES), inner]

def hold():
    (HERE / f"held-{os.getpid()}-{time.monotonic_ns()}").touch()
    while not (HERE / "go").exists():
        time.sleep(0.01)

async def later(agent):
    await asyncio.sleep(0)
    if agent.task.instruction == "async hold":
        await asyncio.to_thread(hold)
    if agent.task.instruction == "async raise":
        raise ValueError("not now")
    agent.score(0.25)

def agent(agent, held="", value=0.0):
    match agent.task.instruction:
        case "end":
            agent.workspace.exec("true")
            agent.score(0.5)
        case "options":
            agent.score(value)
        case "async" | "async raise" | "async hold":
            return later(agent)
        case "raise":
            raise ValueError("no idea")
        case "leave":
            sys.exit(3)
        case "limit":
            raise LimitExceeded("enough", limit="turns")
        case "workspace":
            raise WorkspaceError("the workspace is broken")
        case "print":
            agent.openai().models.list()
            print("hello from an agent", flush=True)
            agent.score(1.0)
        case "hold":
            hold()
            agent.score(0.25)
        case "die":
            os._exit(9)
'''

CONFIG = """
[policy]
model = "model"
[tasks]
loader = "doing_agent:tasks"
[agent]
function = "doing_agent:agent"
[rollout]
workspace = "local"
[store]
path = "out/store.db"
[output]
dir = "out"
"""
KEY = "key-of-the-service"


class Place:
    """A folder with a training's settings, its store and a service that records there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: TrainerConfig = load_config(make_training(folder, CONFIG))
        (folder / "doing_agent.py").write_text(AGENT)
        self.config.output.dir.mkdir()
        self.key = kept_key(self.config.output.dir / KEY_FILE).encode()
        self.settings = AgentSettings.of(self.config, folder)
        self.tasks = {task.name: task for task in load_tasks(self.config.tasks, folder)}
        self._proxy = ProxyServer(
            ProxySettings(store=self.config.store.path, model=self.config.policy.model, service_key=KEY)
        ).start_in_thread()
        self.url = self._proxy.url
        self.service = ServiceClient(self.url, KEY)
        self.journal = Journal(self.config.store.path)
        self.log = self.config.output.dir / "logs" / "agents.log"

    def close(self) -> None:
        self.journal.close()
        self.service.close()
        self._proxy.stop()

    def runs(self, group: str) -> list[RunRecord]:
        return self.journal.runs(group=group)

    def go(self) -> None:
        """Let agents that hold go on."""
        (self.folder / "go").touch()

    def held(self) -> int:
        """Return how often an agent has begun to hold."""
        return len(list(self.folder.glob("held-*")))

    def fresh(self) -> None:
        """Have agents hold again."""
        for path in [self.folder / "go", *self.folder.glob("held-*")]:
            path.unlink(missing_ok=True)


class Client:
    """A trainer, as far as the agents' process sees it."""

    def __init__(self, place: Place, address: Callable[[], str], **options: Any) -> None:
        self.place = place
        self.events: list[Any] = []
        self.outcomes: dict[Any, Outcome] = {}
        self.threads: set[str] = set()
        self.agents = Agents(
            address, place.key, place.settings, self.events.append, listed=list(place.tasks.values()), **options
        )
        self.agents.connect()
        self.agents.serve(
            place.url, KEY, lambda owner: cancel_runs_of(owner, place.journal, place.service, self.events.append)
        )

    def begin(self, task: str | Task, group: str, member: int = 0, split: str = "train", options: bytes = b"") -> None:
        """Ask for a run."""
        what = self.place.tasks[task] if isinstance(task, str) else task

        def done(outcome: Outcome) -> None:
            self.threads.add(threading.current_thread().name)
            assert (group, member) not in self.outcomes
            self.outcomes[group, member] = outcome

        self.agents.begin(what, Order(what.name, group, member, split, options), done)

    def outcome(self, group: str, member: int = 0) -> Outcome:
        """Wait for what comes of a run."""
        wait_for(lambda: (group, member) in self.outcomes)
        return self.outcomes[group, member]


def start_host(place: Place) -> tuple[subprocess.Popen[bytes], str]:
    """Start the process without a parent that cares; return it and its address."""
    place.log.parent.mkdir(exist_ok=True)
    with place.log.open("ab") as log:
        seen = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "gyre_sdk.trainer.agents.host", "--folder", str(place.config.output.dir)],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def address() -> str:
        said = place.log.read_bytes()[seen:].decode()
        return said.rpartition(READY)[2].split()[0] if f"{READY} " in said and said.endswith("\n") else ""

    wait_for(lambda: bool(address()) or process.poll() is not None)
    assert process.poll() is None, place.log.read_text()
    return process, address()


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait until something is so."""
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.01)


__all__ = ["KEY", "Client", "Place", "ServiceError", "start_host", "wait_for"]
