"""Everything that runs around training and evaluation: store, ledger, engine, proxy, and the agents' process.

One `Stack` serves `train` and `evaluate`, one after the other, with the same processes. Entering it takes up where an
earlier one was killed: runs that go on in the agents' process are waited for, others that it left are ended as cancelled,
and the policy of the newest whole checkpoint is served, under a version number that was never used before.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from gyre_sdk.errors import SettingsError, TrainerError
from gyre_sdk.harness.hooks import Fanout, unobserved
from gyre_sdk.harness.ports import Observer
from gyre_sdk.harness.service import ServiceClient
from gyre_sdk.harness.task import Task
from gyre_sdk.journal import Journal, store_file
from gyre_sdk.records import RunResult
from gyre_sdk.trainer.agents.client import Agents, packed
from gyre_sdk.trainer.agents.settings import AgentSettings
from gyre_sdk.trainer.agents.wire import KEY_FILE, Order
from gyre_sdk.trainer.cellfeed import CellRecorder
from gyre_sdk.trainer.cells.launch import CellSpec, Launched, Launcher, make_launcher
from gyre_sdk.trainer.cells.switch import parking_of
from gyre_sdk.trainer.checkpoints import whole
from gyre_sdk.trainer.children import (
    agents_spec,
    cell_names,
    engine_options,
    process_names,
    proxy_spec,
    replica_spec,
    standalone_names,
    worker_spec,
)
from gyre_sdk.trainer.config import TrainerConfig, save_config
from gyre_sdk.trainer.engines import kv_files, vllm
from gyre_sdk.trainer.feed import CallFeed
from gyre_sdk.trainer.identity import check_policy, cluster_name, training_id
from gyre_sdk.trainer.keys import kept_key
from gyre_sdk.trainer.ledger import Ledger, VersionPublished
from gyre_sdk.trainer.lingering import Linger
from gyre_sdk.trainer.loading import load
from gyre_sdk.trainer.processes import Child, ChildSpec
from gyre_sdk.trainer.publish import PATIENCE, Publisher
from gyre_sdk.trainer.recovery import Recovery, recover
from gyre_sdk.trainer.returning import listen_again, rouse, tell_again
from gyre_sdk.trainer.rollouts import cancel_orphans, cancel_runs_of
from gyre_sdk.trainer.tasks import load_tasks
from gyre_sdk.trainer.terms import Mandate
from gyre_sdk.trainer.transports import Transport, choose, make
from gyre_sdk.trainer.weights import PolicyFiles, WeightFolder

if TYPE_CHECKING:
    from gyre_sdk.trainer.sharing.core import Core

_log = logging.getLogger("gyre.trainer")
_SWITCH_INTERVAL = 0.0005
"""Seconds of Python after which a thread that waits for the interpreter gets it: torch comes back to it after every op."""


class Stack:
    """Context manager over all of it.

    Args:
        config: the settings.
        observer: learns what happens.
        base: folder of the config file, where modules named in it may lie.
        trains: it is to train too: what that takes is loaded while the processes start.

    Raises:
        SettingsError: the config names something that is not there, or another trainer uses its output folder.
        TrainerError: a process did not start.
    """

    def __init__(
        self,
        config: TrainerConfig,
        observer: Observer = unobserved,
        *,
        base: Path | None = None,
        trains: bool = True,
    ) -> None:
        self.config = config
        self._trains = trains
        self.observer: Observer = Fanout(observer)
        self.base = (base or Path.cwd()).resolve()
        self.checkpoints = config.output.dir / "checkpoints"
        self._cleanup = ExitStack()
        self._children: list[Child | Launched] = []
        self._checks: list[Callable[[], None]] = []
        self.core: Core | None = None
        self.cells: list[Launched] = []
        self.on_moved: Callable[[str, str], None] = lambda old, new: self.publisher.returned(new, known=False)
        self.on_end: Callable[[], None] = lambda: None
        """Called before the cells' processes are ended."""
        self.replicas = []
        self._linger = Linger(config.output.dir / "run", config.output.linger_s)
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
    agents: Agents
    tasks: list[Task]
    replicas: list[str]
    """Where they listen; of cells, in their order, and then those beside them."""
    _launcher: Launcher

    def check(self) -> None:
        """Raise when a process was given up.

        Raises:
            TrainerError: naming it, with the end of its log.
        """
        for check in [*(child.check for child in self._children), *self._checks]:
            check()

    def pids(self) -> dict[str, int]:
        """Return the process ids of agents, proxy, replicas and workers, by name."""
        return {name: pid for child in self._children for name, pid in child.pids().items()}

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
            RuntimeError: the agent raised something; the run has ended and is recorded.
            GyreError: what else kept it from its end.
        """
        return self.agents.run(task, Order(task.name, group, member, split, packed(options or {})))

    # -- start -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        config = self.config
        size = _weights_size(config.policy.model)
        self.tasks = load_tasks(config.tasks, self.base)
        self._hold(config.output.dir / "lock", "output.dir", config.output.dir)
        store = store_file(config.store.path)
        self._hold(store.with_name(f"{store.name}.lock"), "store.path", config.store.path)
        mandate = Mandate.take(config.output.dir, training_id(config.output.dir))
        self._checks.append(mandate.check)
        self._linger.hold(process_names(config))  # all that follows may take longer than they would wait
        self._cleanup.callback(self._linger.let_go)
        agents_key = kept_key(config.output.dir / KEY_FILE)
        settings = AgentSettings.of(config, self.base)
        agents = self._child(agents_spec(config, self.base, settings.digest(), self._linger))
        self.journal = self._cleanup.enter_context(Journal(config.store.path))
        if config.cells is not None:
            self.observer = recorder = CellRecorder(self.journal, self.observer)
            recorder.start()
            self._cleanup.callback(recorder.stop)
            self._launcher = make_launcher(
                config.cells,
                self.observer,
                training=cluster_name(config.output.dir),
                cells=[*cell_names(config.cells), *standalone_names(config.cells)],
                linger=self._linger,
                logs=config.output.dir / "logs",
            )
            self._cleanup.callback(self._launcher.close)
        self.ledger = Ledger(self.journal)
        check_policy(config.output.dir, config.policy.model, fresh=not self.ledger.state.groups)
        self.recovery = recover(self.ledger.state, whole(self.ledger.state))
        alone = config.cells is None or config.cells.ray_address is None
        folder = WeightFolder(config.policy.model, config.output.dir, size, memory=alone)
        self._cleanup.callback(folder.remove)
        transport = make(choose(config), folder, config.policy.model, training_id(config.output.dir))
        start = self._starting_policy(transport)
        self.publisher = Publisher(
            self.ledger,
            folder,
            start,
            observer=self.observer,
            transport=transport,
            check=self.check,  # one that gyre restarts is waited for until its supervisor gives up
            patience=vllm.PATIENCE if config.engine.kind == "vllm" and config.engine.url is None else PATIENCE,
            mandate=mandate,
        )
        self._cleanup.callback(self.publisher.close)
        key_file = config.output.dir / "service.key"
        key = kept_key(key_file)
        started = self._replicas(transport.name)
        proxy = self._child(proxy_spec(config, key_file, self._linger, lambda url: tell_again(self.publisher)))
        self._meet(agents, agents_key.encode(), settings)
        if config.engine.publish:  # loads torch, and trl, while the processes start
            load("gyre_sdk.trainer.trainer" if self._trains else "gyre_sdk.trainer.engines.fingerprint")
        for one in started:
            one.wait()  # all of them first: one may move to another place while the others start
        self.replicas = [one.wait() for one in started] or [str(config.engine.url)]
        self.service = self._cleanup.enter_context(ServiceClient(proxy.wait(), key, headers=mandate.headers))
        self.agents.serve(
            self.service.url, key, lambda owner: cancel_runs_of(owner, self.journal, self.service, self.observer)
        )
        served = self.service if proxy.adopted else None
        orphans = cancel_orphans(self.journal, alive=self.agents.owner, service=served)
        if orphans:
            _log.info("%d runs of an earlier process are ended as cancelled", orphans)
        self._cleanup.callback(self.agents.close)  # once more: first of all, while runs' ends can still be recorded
        self.publisher.connect(self.replicas, self.service, watch=not started and config.engine.publish)
        if config.engine.publish:
            rouse(self.publisher, self.replicas if started else (), parking_of(engine_options(config), transport.name))
            self.publisher.start()
        else:
            self.publisher.assume()
        feed = CallFeed(self.journal, self.observer)
        feed.start()
        self._cleanup.callback(feed.stop)
        if start.version:
            self.ledger.add(VersionPublished(start.version, start.digest), at=time.time())

    def _meet(self, child: Child, key: bytes, settings: AgentSettings) -> None:
        """Connect to the agents' process."""
        child.wait()
        self.agents = Agents(
            lambda: child.url,
            key,
            settings,
            self.observer,
            listed=self.tasks,
            check=self.check,
        )
        self._cleanup.callback(self.agents.close)
        self._checks.append(self.agents.check)
        self.agents.connect()

    def _hold(self, lock: Path, setting: str, value: Path) -> None:
        """Let no second trainer use what a setting names; the lock ends with the process, however it ends."""
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            file: IO[str] = self._cleanup.enter_context(lock.open("a"))
        except OSError as error:
            raise SettingsError(
                f"{setting} = {str(value)!r} cannot be written to: {error.strerror}; give a place that can"
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SettingsError(
                f"{setting} = {str(value)!r} is in use by another trainer; stop it, or give another place"
            ) from None

    def _starting_policy(self, transport: Transport) -> PolicyFiles:
        version = self.recovery.version
        if version is None:
            version = self.ledger.allocate_version(self.recovery.step, at=time.time())
            return transport.write(version, transport.collect(self.model()))
        if len(self.ledger.state.versions) > 1:
            # a replica that lingers may serve a later one, and takes none before it
            version = self.ledger.allocate_version(0, at=time.time())
        return PolicyFiles(version, self.config.policy.model, "")

    def _replicas(self, transport: str) -> list[Child] | list[Launched]:
        """Begin what serves: cells, or one engine; nothing where one was given."""
        self._keys = self._keys_folder()
        if self.config.cells is not None:
            launcher = self._launcher
            self._cleanup.callback(launcher.close)  # before what they use
            self.cells = [launcher.launch(spec, self._moved) for spec in self._cells(transport, launcher.host)]
            self._children += self.cells
            self._cleanup.callback(lambda: self.on_end())
            return self.cells
        if self.config.engine.url is not None:
            return []
        port = self.config.engine.port
        return [
            self._child(
                replica_spec(self.config, self.publisher, transport, self._linger, port=port, shared=self._keys)
            )
        ]

    def _keys_folder(self) -> Path | None:
        """Return where replicas share keys and values; None where they do not."""
        kv, output = self.config.engine.kv, self.config.output.dir
        if kv is None:
            return None
        parent = kv.folder or output / "kv"
        kv_files.clear(parent)
        found = kv_files.training_folder(
            parent,
            output / "kv.name",
            store=store_file(self.config.store.path),
            fresh=len(self.ledger.state.versions) <= 1,
        )
        self._cleanup.callback(shutil.rmtree, found, ignore_errors=True)
        return found

    def _moved(self, old: str, new: str) -> None:
        """Forget a replica that came back elsewhere, and bring it where it is."""
        self.replicas = [new if url == old else url for url in self.replicas]
        self.publisher.forget(old)
        self.on_moved(old, new)

    def _child(self, spec: ChildSpec) -> Child:
        child = Child(spec, self.observer)
        self._children.append(child)
        self._cleanup.callback(child.stop)
        child.begin()
        return child

    def _cells(self, transport: str, host: str) -> list[CellSpec]:
        """Return what the cells are made of, and what is beside them: the core's worker is this process, reached at `host`."""
        from gyre_sdk.trainer.sharing.core import Core

        config, cells = self.config, self.config.cells
        assert cells is not None
        saved, key_file = config.output.dir / "settings.json", config.output.dir / "cells.key"
        saved.touch(mode=0o600)  # what the user keeps in [agent] and [proxy] is nobody else's
        save_config(config, saved)
        shared = config.output.dir / "shared"
        shutil.rmtree(shared, ignore_errors=True)  # of a process that was killed
        key = kept_key(key_file)

        def core(port: int) -> Core:
            return Core(
                key=key.encode(),
                host=host,
                port=port,
                lease_s=cells.lease_s,
                stuck_s=cells.stuck_s,
                link="gloo" if (cells.link, cells.launcher) == ("auto", "local") else cells.link,  # they share a GPU
                folder=shared,
                observer=self.observer,
            )

        self.core = listen_again(core, self._linger.folder / "core.port", self._cleanup)
        address, waiting = self.core.address, self.core.waiting

        def spec(name: str, worker: ChildSpec | None = None, *, standalone: bool = False) -> CellSpec:
            replica = replica_spec(
                config, self.publisher, transport, self._linger, name=f"{name}-replica", shared=self._keys
            )
            return CellSpec(name, replica, worker, cells.resources or None, standalone)

        core_cell, *satellites = cell_names(cells)
        workers = [worker_spec(config, saved, address, key_file, cell, self._linger, waiting) for cell in satellites]
        return [
            spec(core_cell),
            *(spec(cell, worker) for cell, worker in zip(satellites, workers, strict=True)),
            *(spec(name, standalone=True) for name in standalone_names(cells)),
        ]


def _weights_size(folder: Path) -> int:
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if not size:
        raise TrainerError(f"policy.model {folder} has no .safetensors file; save the model with save_pretrained")
    return size
