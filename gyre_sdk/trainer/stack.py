"""Everything that runs around training and evaluation: store, ledger, engine, proxy, workspaces, and sessions on them.

One `Stack` serves `train` and `evaluate`, one after the other, with the same processes. Entering it takes up where an
earlier one was killed: runs that it left running are ended as cancelled, and the policy of the newest whole checkpoint
is served, under a version number that was never used before.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import logging
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from gyre_sdk.errors import SettingsError, TrainerError
from gyre_sdk.harness.hooks import Fanout, unobserved
from gyre_sdk.harness.limits import Limits
from gyre_sdk.harness.ports import Observer
from gyre_sdk.harness.service import ServiceClient
from gyre_sdk.harness.session import Session
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import WorkspacePool
from gyre_sdk.journal import Journal
from gyre_sdk.records import RunResult
from gyre_sdk.trainer.checkpoints import whole
from gyre_sdk.trainer.config import TrainerConfig
from gyre_sdk.trainer.engines import vllm
from gyre_sdk.trainer.feed import CallFeed
from gyre_sdk.trainer.ledger import Ledger, Recovery, VersionPublished, recover
from gyre_sdk.trainer.processes import Child, ChildSpec
from gyre_sdk.trainer.publish import PATIENCE, Publisher
from gyre_sdk.trainer.rollouts import cancel_orphans
from gyre_sdk.trainer.tasks import load_agent, load_tasks
from gyre_sdk.trainer.transports import Transport, choose, make
from gyre_sdk.trainer.weights import PolicyFiles, WeightFolder

_log = logging.getLogger("gyre.trainer")
_SWITCH_INTERVAL = 0.0005
"""Seconds of Python after which a thread that waits for the interpreter gets it: torch comes back to it after every op."""


class Stack:
    """Context manager over all of it.

    Args:
        config: the settings.
        observer: learns what happens.
        base: folder of the config file, where modules named in it may lie.

    Raises:
        SettingsError: the config names something that is not there, or another trainer uses its output folder.
        TrainerError: a process did not start.
    """

    def __init__(self, config: TrainerConfig, observer: Observer = unobserved, *, base: Path | None = None) -> None:
        self.config = config
        self.observer: Observer = Fanout(observer)
        self.base = (base or Path.cwd()).resolve()
        self.checkpoints = config.output.dir / "checkpoints"
        self._cleanup = ExitStack()
        self._children: list[Child] = []
        self._model: Any = None

    def __enter__(self) -> Self:
        sys.setswitchinterval(_SWITCH_INTERVAL)
        with ExitStack() as failing:
            failing.callback(self._cleanup.close)
            self._start()
            failing.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    # -- what it holds -----------------------------------------------------------------------------------------------

    journal: Journal
    ledger: Ledger
    recovery: Recovery
    """Where this process took up."""
    publisher: Publisher
    service: ServiceClient
    pool: WorkspacePool
    tasks: list[Task]
    agent: Callable[..., Any]

    def check(self) -> None:
        """Raise when a process was given up.

        Raises:
            TrainerError: naming it, with the end of its log.
        """
        for child in self._children:
            child.check()

    def pids(self) -> dict[str, int]:
        """Return the process ids of engine and proxy."""
        return {child.spec.name: child.pid for child in self._children}

    def model(self) -> Any:
        """Return the policy as it was taken up, to train it."""
        if self._model is None:
            from gyre_sdk.trainer.policy import load_policy

            checkpoint = self.recovery.checkpoint
            self._model = load_policy(self.config.policy, Path(checkpoint.path) if checkpoint else None)
        return self._model

    def run_session(
        self,
        task: Task,
        *,
        group: str | None = None,
        member: int = 0,
        split: str = "train",
        options: dict[str, Any] | None = None,
    ) -> RunResult:
        """Run the agent once on a task, from the run's record to its end; return what came of it.

        Raises:
            ServiceError: the service could not be reached.
            Exception: what the agent raised; the run has ended and is recorded.
        """
        rollout = self.config.rollout
        with Session(
            task,
            service=self.service,
            workspace=self.pool,
            group=group,
            member=member,
            split=split,
            limits=Limits(tokens=rollout.tokens, turns=rollout.turns, wall_s=rollout.timeout_s),
            classifier=self.config.agent.classifier,
            observer=self.observer,
        ) as agent:
            self.agent(agent, **{**self.config.agent.options, **(options or {})})
        return agent.result

    # -- start -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        config = self.config
        self.tasks = load_tasks(config.tasks, self.base)
        self.agent = load_agent(config.agent, self.base)
        config.output.dir.mkdir(parents=True, exist_ok=True)
        self._lock(config.output.dir / "lock")
        self.journal = self._cleanup.enter_context(Journal(config.store.path))
        orphans = cancel_orphans(self.journal)
        if orphans:
            _log.info("%d runs of an earlier process are ended as cancelled", orphans)
        self.ledger = Ledger(self.journal)
        self.recovery = recover(self.ledger.state, whole(self.ledger.state))
        self.pool = self._cleanup.enter_context(WorkspacePool(config.rollout.workspace, recycle=config.rollout.recycle))
        folder = WeightFolder(config.policy.model, config.output.dir, _weights_size(config.policy.model))
        self._cleanup.callback(folder.remove)
        transport = make(choose(config), folder, config.policy.model, _identity(config.output.dir))
        start = self._starting_policy(transport)
        self.publisher = Publisher(
            self.ledger,
            folder,
            start,
            observer=self.observer,
            transport=transport,
            check=self.check,  # one that gyre restarts is waited for until its supervisor gives up
            patience=vllm.PATIENCE if config.engine.kind == "vllm" and config.engine.url is None else PATIENCE,
        )
        self._cleanup.callback(self.publisher.close)
        engine = self._child(self._engine(transport.name)) if config.engine.url is None else None
        key = secrets.token_urlsafe(32)
        proxy = self._child(self._proxy(key))
        if config.engine.publish:
            importlib.import_module("gyre_sdk.trainer.trainer")  # loads torch and trl while the processes start
        replica = engine.wait() if engine is not None else str(config.engine.url)
        self.service = self._cleanup.enter_context(ServiceClient(proxy.wait(), key))
        self.publisher.connect([replica], self.service, watch=engine is None and config.engine.publish)
        if config.engine.publish:
            self.publisher.start()
        else:
            self.publisher.assume()
        feed = CallFeed(self.journal, self.observer)
        feed.start()
        self._cleanup.callback(feed.stop)
        if start.version:
            self.ledger.add(VersionPublished(start.version, start.digest), at=time.time())

    def _lock(self, path: Path) -> None:
        """Let no second trainer use the folder; the lock ends with the process, however it ends."""
        file: IO[str] = self._cleanup.enter_context(path.open("a"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SettingsError(
                f"output.dir = {str(path.parent)!r} is in use by another trainer; stop it, or give another folder"
            ) from None

    def _starting_policy(self, transport: Transport) -> PolicyFiles:
        version = self.recovery.version
        if version is None:
            version = self.ledger.allocate_version(self.recovery.step, at=time.time())
            return transport.write(version, transport.collect(self.model()))
        return PolicyFiles(version, self.config.policy.model, "")

    def _child(self, spec: ChildSpec) -> Child:
        child = Child(spec, self.observer)
        self._children.append(child)
        self._cleanup.callback(child.stop)
        child.begin()
        return child

    def _engine(self, transport: str) -> ChildSpec:
        config = self.config.engine
        hooks: dict[str, Any] = {}
        if config.publish:
            hooks = {"on_ready": self.publisher.returned, "on_death": self.publisher.lost}
        log = self.config.output.dir / "logs" / "engine.log"
        if config.kind == "vllm":
            lora = self.config.policy.lora
            return ChildSpec(
                "engine",
                lambda port: vllm.command(
                    config, self.publisher.current, port, transport=transport, rank=lora.r if lora else 0
                ),
                "/health",
                log,
                config.port,
                python=config.python,
                environment=vllm.ENVIRONMENT,
                patience=vllm.PATIENCE,
                **hooks,
            )

        def command(port: int) -> list[str]:
            files = self.publisher.current
            arguments = [
                "gyre_sdk.trainer.engines.embedded",
                "--model",
                str(files.folder),
                "--version",
                str(files.version),
            ]
            arguments += ["--port", str(port), "--max-batch", str(config.max_batch), "--served-model-name", "policy"]
            arguments += ["--threads", str(config.threads)] if config.threads else []
            arguments += ["--request-log", str(config.request_log)] if config.request_log else []
            return [*arguments, *config.options]

        return ChildSpec("engine", command, "gyre-engine ready on", log, port=config.port, **hooks)

    def _proxy(self, key: str) -> ChildSpec:
        config = self.config
        key_file = config.output.dir / "service.key"
        key_file.touch(mode=0o600)
        key_file.write_text(key)

        def command(port: int) -> list[str]:
            arguments = [
                "gyre_sdk.cli",
                "serve",
                "--store",
                str(config.store.path),
                "--model",
                str(config.policy.model),
            ]
            arguments += ["--port", str(port), "--service-key-file", str(key_file)]
            arguments += ["--sampling", config.proxy.sampling]
            if config.proxy.renderer != "auto":
                arguments += ["--renderer", config.proxy.renderer]
            for name, value in config.proxy.renderer_options.items():
                arguments += ["--renderer-option", f"{name}={json.dumps(value)}"]
            return [*arguments, *config.proxy.options]

        log = config.output.dir / "logs" / "proxy.log"
        return ChildSpec("proxy", command, "ready", log, config.proxy.port, on_ready=lambda url: self.publisher.route())


def _identity(folder: Path) -> str:
    """Return what tells this training from others that publish to the same replica; it outlives the process."""
    path = folder / "training.id"
    if not path.is_file():
        path.write_text(f"gyre-{secrets.token_hex(6)}")
    return path.read_text().strip()


def _weights_size(folder: Path) -> int:
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if not size:
        raise TrainerError(f"policy.model {folder} has no .safetensors file; save the model with save_pretrained")
    return size
